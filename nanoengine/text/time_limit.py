"""call_within: runs Python code that may never end, and ends it.

Called by `tokenizer.py` for chat templates, which are programs out of a checkpoint or a row of a
file. jinja's sandbox bounds a range, not loops in loops, macros that call themselves twice, or
filters over filters; all of them are Python in the end, and time bounds Python whatever its shape.
A process of its own would bind single calls into C as well, and would have to import transformers
for a second before the first chat.

One thread watches all calls of a process, and ends when there is none left.
Perf: with a thread for each call, template and tokenizer took 129 us a row of a batch, now 37 (two
Zen 5 cores).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class _Expired(BaseException):
    """Why no Exception: code that is ended must not handle it."""


@dataclass(slots=True, eq=False)
class _Call:
    """A function that runs in `thread`, until `deadline` [s of `time.monotonic`]."""

    thread: int
    deadline: float
    has_expired: bool = False


class _Watcher:
    """Ends calls that pass their deadline.

    Why a plain lock: a thread may be ended as it gets it, and `with` then gives it back; a
    Condition, which is Python, would keep it.
    """

    def __init__(self) -> None:
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._calls: set[_Call] = set()
        self._wakes_at = 0.0
        self._thread: threading.Thread | None = None

    def add(self, call: _Call) -> None:
        """Watches a call from now on."""
        with self._lock:
            self._calls.add(call)
            if self._thread is None or not self._thread.is_alive():  # as in a forked process
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            elif call.deadline < self._wakes_at:
                self._wake.set()

    def remove(self, call: _Call) -> None:
        """Forgets a call; `has_expired` does not change any more."""
        with self._lock:
            self._calls.discard(call)

    def _watch(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                for call in [call for call in self._calls if call.deadline <= now]:
                    self._calls.remove(call)
                    call.has_expired = True
                    _raise_in(call.thread, ctypes.py_object(_Expired))
                if not self._calls:
                    self._thread = None
                    return
                self._wakes_at = min(call.deadline for call in self._calls)
                self._wake.clear()
            self._wake.wait(self._wakes_at - now)


_watcher = _Watcher()


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """The function's value. Between any two steps of its Python code it can be ended.

    One call into C is not ended, however long it takes: the caller refuses what could be one.

    Raises:
        TimeoutError: the function had not returned after `seconds`.
    """
    call = _Call(threading.get_ident(), time.monotonic() + seconds)
    try:
        try:
            _watcher.add(call)
            return function()
        finally:
            _watcher.remove(call)
            if call.has_expired:  # and has perhaps not been raised yet
                _raise_in(call.thread, None)
                raise _Expired
    except _Expired:
        raise TimeoutError(f"it did not end within {seconds:g} s") from None


def _raise_in(thread: int, exception: object) -> None:
    """Has another thread raise; None: no more, if it has not yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
