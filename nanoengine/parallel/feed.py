"""Feed: rows that another thread brings, for a stream that pulls them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Generic, TypeVar

from nanoengine.text.prompt_forms import PAUSE, Pause

T = TypeVar("T")


class Feed(Generic[T]):
    """A queue as an iterator for `LLM.stream`: it pauses while rows run, and waits while none does.

    Why: a stream steps only between two pulls, so one that waited for a row would keep those that
    run waiting too. None ends one stream; the next one goes on behind it.
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
        if row is None:
            self._has_ended = True
            raise StopIteration
        self._num_running += 1
        return row
