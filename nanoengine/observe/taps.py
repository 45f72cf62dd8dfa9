"""Taps: each call of a method passes through a function of ours, which makes it and looks on.

    engine ── schedule() ──► [tap] ──► Scheduler.schedule
                               └─► a line of a trace, say

Nobody asks whether somebody looks on: without a tap the method is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Tap = tuple[object, str, Callable[..., Any]]
"""An object, the name of its method, and what is called with the method before its arguments."""


def behind(look: Callable[..., Any]) -> Callable[..., Any]:
    """What a tap calls to look on once a call is made: `look` gets its result and arguments."""

    def through(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = call(*args, **more)
        look(result, *args, **more)
        return result

    return through


class Taps:
    """Stands in front of some methods until it is removed.

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
        """Puts the methods back; one that somebody else has replaced meanwhile stays theirs."""
        for owner, name, had, call in self._tapped:
            if vars(owner).get(name) is call:
                if had is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, had)
        self._tapped = []
