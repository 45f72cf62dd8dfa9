"""Turns: who may use an engine when: one thread after the other, and a forked process never.

    engine.step, LLM's loops    with turns.turn():      waits for those who stand in the door
    all else of an engine       @one_at_a_time          stands in the door, so it is next

Two locks, because a thread that steps in a loop takes a lock again before one that waits for it
wakes up: who waits holds the *door*, and who wants another turn must pass through it first.

Each `LLMEngine` has one. It knows nothing of what the engine does.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from nanoengine.errors import EngineDeadError

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """The turns at one engine.

    Attributes:
        why_over: why the engine can't be used any more; "" while it can.
    """

    def __init__(self) -> None:
        self.why_over = ""
        self.make_locks()
        _watch_forks()
        _all_turns.add(self)

    def make_locks(self) -> None:
        """New locks, which nobody holds.

        Why plain `with` wherever they are taken: an interrupt between taking a lock and noting it
        would leave it taken.
        """
        self.door, self.lock = threading.RLock(), threading.RLock()
        self.owner: int | None = None  # the thread that holds `lock`

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Keeps other threads out over several calls, once those that wait have had theirs."""
        me = threading.get_ident()
        if self.owner == me:
            yield
            return
        with self.door:
            pass
        with self.lock:
            self.owner = me
            try:
                yield
            finally:
                self.owner = None

    def require_open(self) -> None:
        """Raises EngineDeadError if the engine is closed, or another process's."""
        if self.why_over:
            raise EngineDeadError(self.why_over)


class TakesTurns(Protocol):
    """What has methods that are `one_at_a_time`."""

    turns: Turns


E = TypeVar("E", bound=TakesTurns)


def one_at_a_time(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """A method that waits until no other thread's runs, and goes before that thread's next turn."""

    @functools.wraps(method)
    def wrapped(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        me, turns = threading.get_ident(), self.turns
        if turns.owner == me:
            return method(self, *args, **kwargs)
        with turns.door, turns.lock:
            turns.owner = me
            try:
                return method(self, *args, **kwargs)
            finally:
                turns.owner = None

    return wrapped  # type: ignore[return-value]  # it is bound like any method


# --- processes ------------------------------------------------------------------------------------

_all_turns: weakref.WeakSet[Turns] = weakref.WeakSet()
_why_no_engine = ""


def require_unforked() -> None:
    """Raises EngineDeadError in a process that was forked from one which has had an engine.

    Why: OpenMP ends a process that uses it on both sides of a fork, and CUDA can't start again.
    """
    if _why_no_engine:
        raise EngineDeadError(_why_no_engine)


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    """In a child: the engines are its parent's, and another thread may have held their locks."""
    global _why_no_engine
    _why_no_engine = (
        "this process was forked from one that has had an engine, and neither its threads nor its"
        " GPU come along: start processes by multiprocessing.get_context('spawn'), or fork before"
        " the first engine is made"
    )
    for turns in _all_turns:
        turns.why_over = _why_no_engine
        turns.make_locks()
