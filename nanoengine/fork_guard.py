"""Prevents the use of an engine in a process that was forked after an engine was created.

Why: OpenMP terminates a process that uses it both before and after a fork, CUDA can't start again,
and another thread may have held the engine's locks. Called by locking.py and by `LLM`.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

from nanoengine.errors import EngineDeadError

_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_why_no_engine = ""


def watch(watched: Any) -> None:
    """Closes an object of this process, such as an `EngineLock`, in forked child processes: sets
    `why_closed`, and calls `make_locks`."""
    _watch_forks()
    _watched.add(watched)


def require_unforked() -> None:
    """Raises EngineDeadError in a process that was forked after an engine was created."""
    if _why_no_engine:
        raise EngineDeadError(_why_no_engine)


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):  # other systems can't fork
        os.register_at_fork(after_in_child=_close_in_child)


def _close_in_child() -> None:
    """Runs in the child process: closes the objects that belong to the parent."""
    global _why_no_engine
    _why_no_engine = (
        "this process was forked from a process with an engine, whose threads and GPU context a"
        " fork does not copy: start processes with multiprocessing.get_context('spawn'), or fork"
        " before the first engine is created"
    )
    for watched in _watched:
        watched.why_closed = _why_no_engine
        watched.make_locks()
