"""The journal of a job: which rows went to the engine, so that crashes are counted per row.

What a job keeps, and where:

    OUT             the records. A row is done if, and only if, it has a record here.
    OUT.job.json    the settings (`manifest.py`): one object, replaced as a whole
    OUT.job.runs    the journal: appended to, removed when the job is complete

        run 4711 1500     process 4711 began, and 1,500 rows were done
        12                row 12 goes to the engine
        ...
        Fatal Python error: Segmentation fault      written by faulthandler in a crash

What holds whenever the process is killed:

- The settings are on the disk before the first record is written.
- The line of a row is written before the row goes to the engine. It is not synced: a power cut is
  no crash of a row.
- Only whole lines count: `run` is written with a line break of its own before it, which does not
  make a whole line of a torn one.
- A process that ends by itself cuts its rows off again, which needs no space on the disk.

A process that crashed did so under one of the rows that it had not finished, so each of them is
counted. One that was killed counts only if it had finished none: kills come from outside as well,
and must not make a row *poison*. `work.py` runs rows that were counted apart from others.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nanoengine.jobs.log import O_BINARY, writing

RUN = re.compile(rb"(?:^|\n)run (\d{1,18}) (\d{1,18})\n")
ROW = re.compile(rb"^(\d{1,18})\n", re.MULTILINE)
CRASH = re.compile(rb"^Fatal Python error", re.MULTILINE)


class Journal:
    """The journal of this process and of those before it.

    Args:
        num_done, is_done: the rows that have a record.

    Attributes:
        counts: by row without a record: crashes under it.

    Raises:
        OutputLostError: the file can't be written; by `note` as well.
    """

    def __init__(self, path: Path, num_done: int, is_done: Callable[[int], bool]) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY | getattr(os, "O_NOFOLLOW", 0)
        with writing(path):
            self._fd = os.open(path, flags, 0o666)
            try:
                self.counts = _crashes(path.read_bytes(), num_done, is_done)
                os.write(self._fd, f"\nrun {os.getpid()} {num_done}\n".encode())
            except OSError:
                os.close(self._fd)
                raise
        self._begin = os.fstat(self._fd).st_size
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self._fd)

    def note(self, row: int) -> None:
        """A row is about to run."""
        with writing(self.path):
            os.write(self._fd, b"%d\n" % row)

    def close(self, *, is_complete: bool) -> None:
        """The process ends by itself; nothing is left of a job that is complete."""
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        try:
            os.ftruncate(self._fd, self._begin)
        finally:
            os.close(self._fd)
        if is_complete:
            self.path.unlink(missing_ok=True)


def last_process(path: Path) -> str:
    """The process that began last, for a message; empty if there is no such line."""
    try:
        runs = RUN.findall(path.read_bytes())
    except OSError:
        return ""
    return f", pid {runs[-1][0].decode()}" if runs else ""


def _crashes(text: bytes, num_done: int, is_done: Callable[[int], bool]) -> Counter[int]:
    """Crashes by row, of the processes in a journal; the one after the last begins now."""
    _, *runs = RUN.split(text)  # per process: its pid, the rows that were done, what follows
    done = [*map(int, runs[1::3]), num_done]
    counts: Counter[int] = Counter()
    for before, after, lines in zip(done, done[1:], runs[2::3], strict=False):
        if after <= before or CRASH.search(lines):
            begun = {*map(int, ROW.findall(lines))}  # once, also a row of several turns
            counts.update(row for row in begun if not is_done(row))
    return counts
