"""Rows of standard input, read by a thread: whoever writes them may be slow.

    stdin ─ thread ─ rows, WAITING_BYTES at most ─▶ PAUSE while none is there ─▶ window ─▶ engine

Reading in the engine's thread would keep rows that run waiting for rows that are not written yet.
"""

from __future__ import annotations

import threading
from collections import deque
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
        self._found: deque[Line] = deque()
        self._num_bytes = 0
        self._has_ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Line | Pause]:
        # Why a daemon: nobody can end a read of a pipe on which nothing comes.
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            with self._changed:
                if not self._found and not self._has_ended:
                    self._changed.wait(SOON_S)
                if self._found:
                    line = self._found.popleft()
                    self._num_bytes -= size_of(line.content)
                    self._changed.notify()
                elif self._error is not None:
                    raise self._error
                elif self._has_ended:
                    return
                else:
                    line = None
            yield PAUSE if line is None else line

    def _read(self) -> None:
        try:
            for line in self._lines:
                with self._changed:
                    while self._num_bytes > WAITING_BYTES:
                        self._changed.wait()
                    self._found.append(line)
                    self._num_bytes += size_of(line.content)
                    self._changed.notify()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify()
