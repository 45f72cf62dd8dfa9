"""Hooks: replace methods by functions that call them and observe the calls.

    engine ── schedule() ──► [hook] ──► Scheduler.schedule
                                └─► for example, a line of a trace

The observed code has no checks for this: without a hook, a method is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Hook = tuple[object, str, Callable[..., Any]]
"""An object, the name of its method, and a function that gets the method, then its arguments."""


def after_call(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A hook function that calls `callback` after the method, with its result and arguments."""

    def wrapper(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        callback(result, *args, **kwargs)
        return result

    return wrapper


class Hooks:
    """Replaces some methods until `remove` is called.

    >>> from types import SimpleNamespace
    >>> lamp, seen = SimpleNamespace(shine=lambda colour: f"{colour} light"), []
    >>> hooks = Hooks((lamp, "shine", lambda call, colour: seen.append(colour) or call(colour)))
    >>> lamp.shine("red"), seen
    ('red light', ['red'])
    """

    def __init__(self, *hooks: Hook) -> None:
        self._installed = []
        for owner, name, wrapper in hooks:
            original = vars(owner).get(name)
            call = functools.partial(wrapper, getattr(owner, name))
            setattr(owner, name, call)
            self._installed.append((owner, name, original, call))

    def remove(self) -> None:
        """Restores the methods, except ones that other code has replaced in the meantime."""
        for owner, name, original, call in self._installed:
            if vars(owner).get(name) is call:
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
        self._installed = []
