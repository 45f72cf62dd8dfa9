"""Rows that another thread supplies to a stream that pulls them; PAUSE if there is none yet.

    stdin ─ thread ─ Ahead: at most WAITING_BYTES of rows ─▶ window ─▶ engine
    rows from a parent or from Ray ─ Feed ──────────────────────────▶ engine

A stream steps only between two pulls, so waiting for a row would block the rows that run.
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
"""The thread stops reading at this size; one more row may be in memory."""

SOON_S = 0.001
"""A row that arrives within this time [s] causes no pause: its thread was only not scheduled."""


ITEM_BYTES = 56
"""Memory per JSON value in addition to its text: 50,000 strings of 8 letters take 3 MB."""


class Ahead:
    """The lines of an iterator that may block, read by a thread. Its exceptions are raised here."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._found: queue.SimpleQueue[Line | BaseException | None] = queue.SimpleQueue()
        self._num_bytes = 0
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[Line | Pause]:
        # Why a daemon: a read of a pipe without data can't be interrupted.
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
    """A queue as an iterator for `LLM.stream`: it blocks for a row only while none runs.

    None ends a stream; a new iteration continues with the rows after it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._num_running = 0
        self._has_ended = False

    def put(self, row: T | None) -> None:
        """Adds a row, from any thread; None ends the current stream after the rows before it."""
        self._queue.put(row)

    def finished(self) -> None:
        """Must be called when the stream has answered a row."""
        self._num_running -= 1

    def drop(self) -> None:
        """Discards the remaining rows of a failed stream, up to its end."""
        while not self._has_ended:
            self._has_ended = self._queue.get() is None

    def __iter__(self) -> Iterator[T | Pause]:
        """Starts a stream."""
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
    """The approximate size of a row's content in memory [bytes]."""
    try:
        text: Any = content if isinstance(content, bytes) else str(content)
        return len(text) + ITEM_BYTES * text.count(b"," if text is content else ",")
    except Exception:  # Why all: a caller's row may be too deep, or run code that raises.
        return 0
