"""The journal of a job: which rows were sent to the engine, so that crashes are counted per row.

The files of a job:

    OUT             the records. A row is done if, and only if, it has a record here.
    OUT.job.json    the settings (`manifest.py`): one object, replaced as a whole
    OUT.job.runs    the journal: appended to, removed when the job is complete

        run 4711 1500     process 4711 started; 1,500 rows were done
        12                row 12 was sent to the engine
        ...
        Fatal Python error: Segmentation fault      written by faulthandler in a crash

Invariants, whenever the process is killed:

- The settings are on the disk before the first record is written.
- The line of a row is written before the row is sent to the engine. It is not synced: a power
  failure does not count as a crash of a row.
- Only complete lines count. `run` begins with its own line break, which does not complete a torn
  line.
- A process that exits normally truncates its lines, which also works on a full disk.

One of the unfinished rows caused a crash, so the crash counts for each of them. A kill counts only
if the process had finished no row: the kill may have had another cause, and must not make a row
*poison*. `work.py` runs rows with crashes apart from others.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from nanoengine.jobs.record_log import O_BINARY, as_output_lost

RUN = re.compile(rb"(?:^|\n)run (\d{1,18}) (\d{1,18})\n")
ROW = re.compile(rb"^(\d{1,18})\n", re.MULTILINE)
CRASH = re.compile(rb"^Fatal Python error", re.MULTILINE)


class Journal:
    """The journal of this process and the earlier ones.

    Args:
        num_done, is_done: the rows that have a record.

    Attributes:
        crashes: row without a record -> crashes while it ran.

    Raises:
        OutputLostError: the file can't be written; also raised by `record_start`.
    """

    def __init__(self, path: Path, num_done: int, is_done: Callable[[int], bool]) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY | getattr(os, "O_NOFOLLOW", 0)
        with as_output_lost(path):
            self._fd = os.open(path, flags, 0o666)
            try:
                self.crashes = _count_crashes(path.read_bytes(), num_done, is_done)
                os.write(self._fd, f"\nrun {os.getpid()} {num_done}\n".encode())
            except OSError:
                os.close(self._fd)
                raise
        self._size_at_start = os.fstat(self._fd).st_size
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self._fd)

    def record_start(self, row: int) -> None:
        """Records that a row is about to run."""
        with as_output_lost(self.path):
            os.write(self._fd, b"%d\n" % row)

    def close(self, *, is_complete: bool) -> None:
        """Records a normal exit; removes the journal of a complete job."""
        faulthandler.disable()
        if self._was_enabled and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        try:
            os.ftruncate(self._fd, self._size_at_start)
        finally:
            os.close(self._fd)
        if is_complete:
            self.path.unlink(missing_ok=True)


def last_process(path: Path) -> str:
    """ ", pid N" of the process that started last, for a message; empty if there is none."""
    try:
        runs = RUN.findall(path.read_bytes())
    except OSError:
        return ""
    return f", pid {runs[-1][0].decode()}" if runs else ""


def _count_crashes(text: bytes, num_done: int, is_done: Callable[[int], bool]) -> Counter[int]:
    """Crashes per row in the earlier processes of a journal; `num_done` rows are done now."""
    _, *runs = RUN.split(text)  # per process: pid, number of rows done at its start, its lines
    done = [*map(int, runs[1::3]), num_done]
    crashes: Counter[int] = Counter()
    for before, after, lines in zip(done, done[1:], runs[2::3], strict=False):
        if after <= before or CRASH.search(lines):
            started = {*map(int, ROW.findall(lines))}  # a set: one line per turn of a conversation
            crashes.update(row for row in started if not is_done(row))
    return crashes
