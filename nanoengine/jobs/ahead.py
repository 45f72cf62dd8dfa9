"""Rows of standard input, read by a thread: whoever writes them may be slow.

    stdin ─ thread ─ rows, WAITING_BYTES at most ─▶ PAUSE while none is there ─▶ window ─▶ engine

Reading in the engine's thread would keep rows that run waiting for rows that are not written yet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanoengine.jobs.rows import size_of
from nanoengine.text.prompt_forms import PAUSE, Pause

if TYPE_CHECKING:
    from nanoengine.jobs.source import Line

WAITING_BYTES = 16 << 20
"""The thread stops reading at so much; then one row more is in memory."""

SOON_S = 0.001
"""A row that comes within this time is no pause: the thread only needs its turn."""


class Ahead:
    """The lines of an iterator that may block, or PAUSE. What it raises is raised here."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._found: queue.SimpleQueue[Line | BaseException | None] = queue.SimpleQueue()
        self._num_bytes = 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Line | Pause]:
        # Why a daemon: nobody can end a read of a pipe on which nothing comes.
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            try:
                found = self._found.get(timeout=SOON_S)
            except queue.Empty:
                yield PAUSE
                continue
            if found is None:
                return
            if isinstance(found, BaseException):
                raise found
            with self._changed:
                self._num_bytes -= size_of(found.content)
                self._changed.notify()
            yield found

    def _read(self) -> None:
        end = None
        try:
            for line in self._lines:
                with self._changed:
                    self._changed.wait_for(lambda: self._num_bytes <= WAITING_BYTES)
                    self._num_bytes += size_of(line.content)
                self._found.put(line)
        except BaseException as error:
            end = error
        self._found.put(end)
