"""Rows that another thread brings, for a stream that pulls them: PAUSE while none is there.

    stdin ─ thread ─ Ahead: rows, WAITING_BYTES at most ─▶ window ─▶ engine
    rows of a parent, or of Ray ─ Feed ────────────────────────────▶ engine

A stream steps only between two pulls, so one that waited for a row would keep those that run
waiting too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from nanoengine.jobs.source import Line
from nanoengine.text.prompt_forms import PAUSE, Pause

T = TypeVar("T")

WAITING_BYTES = 16 << 20
"""The thread stops reading at so much; then one row more is in memory."""

SOON_S = 0.001
"""A row that comes within this time is no pause: the thread only needs its turn."""


ITEM_BYTES = 56
"""What a value of JSON takes in memory beside its text: 50,000 strings of 8 letters take 3 MB."""


class Ahead:
    """The lines of an iterator that may block, read by a thread. What it raises is raised here."""

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


class Feed(Generic[T]):
    """A queue as an iterator for `LLM.stream`: it waits for a row only while none runs.

    None ends one stream; the next one goes on behind it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._num_running = 0
        self._has_ended = False

    def put(self, row: T | None) -> None:
        """Adds a row, from any thread; None ends the stream that pulls, behind those before it."""
        self._queue.put(row)

    def finished(self) -> None:
        """The stream has answered a row."""
        self._num_running -= 1

    def drop(self) -> None:
        """Takes what is left of a stream that has failed, up to its end."""
        while not self._has_ended:
            self._has_ended = self._queue.get() is None

    def __iter__(self) -> Iterator[T | Pause]:
        """Begins a stream."""
        self._num_running, self._has_ended = 0, False
        return self

    def __next__(self) -> T | Pause:
        try:
            row = self._queue.get(block=not self._num_running)
        except queue.Empty:
            return PAUSE
        self._has_ended = row is None
        if row is None:
            raise StopIteration
        self._num_running += 1
        return row


def size_of(content: object) -> int:
    """Of all that a row holds once it is read, near enough [bytes]."""
    try:
        text: Any = content if isinstance(content, bytes) else str(content)
        return len(text) + ITEM_BYTES * text.count(b"," if text is content else ",")
    except Exception:  # Why: a caller's row in memory may be too deep, or code that raises.
        return 0
