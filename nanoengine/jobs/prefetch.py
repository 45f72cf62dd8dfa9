"""Queues rows from another thread for a stream that pulls them; PAUSE if none is ready yet.

    stdin ─ thread ─ Prefetcher: at most MAX_WAITING_BYTES of rows ─▶ window ─▶ engine
    rows from a parent process or from Ray ─ RowQueue ─────────────────────────▶ engine

The engine steps only between two pulls, so a pull that waits for a row would stall running rows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from nanoengine.jobs.source import Line
from nanoengine.text.prompt_forms import PAUSE, Pause

T = TypeVar("T")

MAX_WAITING_BYTES = 16 << 20
"""The thread stops reading at this size; the last row may exceed it."""

QUICK_WAIT_S = 0.001
"""A pull waits this long for a row before it yields PAUSE [s]: the thread may not be scheduled."""


JSON_VALUE_BYTES = 56
"""Memory per JSON value in addition to its text; 50,000 strings of 8 letters take 3 MB."""


class Prefetcher:
    """A thread reads an iterator of lines that may block. A pull raises the iterator's errors."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._queue: queue.SimpleQueue[Line | BaseException | None] = queue.SimpleQueue()
        self._num_bytes = 0
        self._was_pulled = threading.Condition()

    def __iter__(self) -> Iterator[Line | Pause]:
        # Why a daemon: a read of a pipe without data can't be interrupted.
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            try:
                line = self._queue.get(timeout=QUICK_WAIT_S)
            except queue.Empty:
                yield PAUSE
                continue
            if line is None:
                return
            if isinstance(line, BaseException):
                raise line
            with self._was_pulled:
                self._num_bytes -= size_of(line.content)
                self._was_pulled.notify()
            yield line

    def _read(self) -> None:
        end = None
        try:
            for line in self._lines:
                with self._was_pulled:
                    self._was_pulled.wait_for(lambda: self._num_bytes <= MAX_WAITING_BYTES)
                    self._num_bytes += size_of(line.content)
                self._queue.put(line)
        except BaseException as error:
            end = error
        self._queue.put(end)


class RowQueue(Generic[T]):
    """A queue of rows as an iterator for `LLM.stream`. It blocks only while no row is running.

    None in the queue ends a stream; the next stream gets the rows after it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._num_running = 0
        self._has_ended = False

    def put(self, row: T | None) -> None:
        """Adds a row, from any thread; None ends the stream after the rows before it."""
        self._queue.put(row)

    def row_finished(self) -> None:
        """Must be called when a row has its output."""
        self._num_running -= 1

    def discard_rest(self) -> None:
        """Discards the remaining rows of a failed stream, up to its None."""
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
        return len(text) + JSON_VALUE_BYTES * text.count(b"," if text is content else ",")
    except Exception:  # Why all: a caller's row may be too deep, or run code that raises.
        return 0
