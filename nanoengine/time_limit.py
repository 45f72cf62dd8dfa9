"""call_within: runs Python code that may never end, and ends it.

Called by `tokenizer.py` for chat templates, which are programs out of a checkpoint or a row of a
file. jinja's sandbox bounds a range, not loops in loops, macros that call themselves twice, or
filters over filters; all of them are Python in the end, and time bounds Python whatever its shape.
A process of its own would bind single calls into C as well, and would have to import transformers
for a second before the first chat.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Expired(BaseException):
    """Why no Exception: code that is ended must not handle it."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """The function's value. Between any two steps of its Python code it can be ended.

    One call into C is not ended, however long it takes: the caller refuses what could be one.

    Raises:
        TimeoutError: the function had not returned after `seconds`.
    """
    thread, lock = threading.get_ident(), threading.Lock()
    is_over = has_expired = False

    def expire() -> None:
        nonlocal has_expired
        with lock:
            if not is_over:
                has_expired = True
                _raise_in(thread, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    try:
        try:
            timer.start()
            return function()
        finally:
            with lock:
                is_over = True
            timer.cancel()
            if has_expired:  # and has perhaps not been raised yet
                _raise_in(thread, None)
                raise _Expired
    except _Expired:
        raise TimeoutError(f"it did not end within {seconds:g} s") from None


def _raise_in(thread: int, exception: object) -> None:
    """Has another thread raise; None: no more, if it has not yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)
