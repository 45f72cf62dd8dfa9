"""Rows under which processes die: written down before they run, counted by who comes next.

    run 4711 1500      a process began, with 1,500 records there
    12                 row 12 went to the engine
    ...
    Fatal Python error: Segmentation fault      written by faulthandler as the process died

A process that ends by itself takes its rows out again, which needs no room on a disk. One that
crashed did so under one of the rows that it had not finished. One that was killed counts against
them only if it had finished none at all: kills come from outside as well, and a row must not be
called poison for them. Rows that were there at one death run a few at a time, and then alone, so
that the third death names one row.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import re
import sys
from collections import Counter
from pathlib import Path

from nanoengine.jobs.log import O_BINARY, Bitmap, lost

MOST_DEATHS = 3
"""With so many a row is poison."""

RUN = re.compile(rb"^run (\d{1,18}) (\d{1,18})\n", re.MULTILINE)
ROW = re.compile(rb"\d{1,18}\n")
"""Whole lines; what a power cut has left of others tells nothing."""

GROUPS = {2: 1, 1: 16}
"""Deaths of a row -> how many of such rows run at once; those with the most go first."""


class Deaths:
    """The file beside the output, and what it tells of earlier processes.

    Args:
        done: rows that have a record.

    Attributes:
        counts: of rows without a record: deaths under each.

    Raises:
        OutputLostError: the file can't be written; by `note` as well.
    """

    def __init__(self, path: Path, done: Bitmap) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | O_BINARY | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise lost(path, error) from error
        try:
            self.counts = _count(path, done)
            self._write(f"\nrun {os.getpid()} {done.count}\n")  # the line before may be torn
        except OSError:
            os.close(self._fd)
            raise
        self._begin = os.fstat(self._fd).st_size
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self._fd)

    def note(self, row: int) -> None:
        """A row is about to run."""
        self._write(f"{row}\n")

    def _write(self, line: str) -> None:
        try:
            os.write(self._fd, line.encode())
        except OSError as error:
            raise lost(self.path, error) from error

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
    """Who began last, for a message; empty if nobody tells."""
    try:
        runs = RUN.findall(path.read_bytes())
    except OSError:
        return ""
    return f", pid {runs[-1][0].decode()}" if runs else ""


def _count(path: Path, done: Bitmap) -> Counter[int]:
    counts: Counter[int] = Counter()
    rows: list[int] = []
    num_before, crashed = 0, False
    with open(path, "rb") as file:
        for line in itertools.chain(file, [b"run 0 %d\n" % done.count]):  # that which begins now
            if begun := RUN.fullmatch(line):
                num_after = int(begun[2])
                if crashed or num_after <= num_before:
                    counts.update(row for row in rows if row not in done)
                rows, num_before, crashed = [], num_after, False
            elif ROW.fullmatch(line):
                rows.append(int(line))
            elif line.startswith(b"Fatal Python error"):
                crashed = True
    return counts
