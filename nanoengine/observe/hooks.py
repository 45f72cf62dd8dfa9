"""Taps: replace methods by functions that call them and observe the calls.

    engine ── schedule() ──► [tap] ──► Scheduler.schedule
                               └─► for example, a line of a trace

The observed code has no checks for this: without a tap, a method is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Tap = tuple[object, str, Callable[..., Any]]
"""An object, the name of its method, and a function that gets the method, then its arguments."""


def after_call(look: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a tap function that calls `look` after the method, with its result and arguments."""

    def through(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = call(*args, **more)
        look(result, *args, **more)
        return result

    return through


class Taps:
    """Replaces some methods until it is removed.

    >>> from types import SimpleNamespace
    >>> lamp, seen = SimpleNamespace(shine=lambda colour: f"{colour} light"), []
    >>> taps = Taps((lamp, "shine", lambda call, colour: seen.append(colour) or call(colour)))
    >>> lamp.shine("red"), seen
    ('red light', ['red'])
    """

    def __init__(self, *taps: Tap) -> None:
        self._tapped = []
        for owner, name, through in taps:
            had = vars(owner).get(name)
            call = functools.partial(through, getattr(owner, name))
            setattr(owner, name, call)
            self._tapped.append((owner, name, had, call))

    def remove(self) -> None:
        """Restores the methods, except ones that other code has replaced in the meantime."""
        for owner, name, had, call in self._tapped:
            if vars(owner).get(name) is call:
                if had is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, had)
        self._tapped = []
