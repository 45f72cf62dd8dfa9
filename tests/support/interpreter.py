"""Triton's interpreter without what it makes again and again: the same numbers in half of the time.

    functions   it looks for all of the language's, to put its own in their place, at each launch
                and each time that a kernel calls a function; here they stay where it has put them
    dtypes      at each operator it makes a dict of all, to ask for one
    shapes      at each result it makes what follows from a type, its shape as constants and names

Used by conftest.py, where kernels run in the interpreter: no compiler shares this process.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """For all launches of this process."""
    from triton.language import core
    from triton.runtime import interpreter

    patch, stays = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)
    patched: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        # By module: it decides which names a kernel has. Why kept: no other function has its id.
        if patched.setdefault(id(fn.__globals__), fn) is fn:
            patch(fn)
        return stays

    interpreter._patch_lang = patch_once
    find, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    interpreter._get_np_dtype = np_dtype
    remember(core.tensor, lambda handle, kind: kind.name, "handle", "type")
    remember(core.block_type, lambda element, shape: (element.name, *map(int, shape)), "element_ty")


def remember(made: Any, key: Callable[..., Any], *own: str) -> None:
    """Objects of one key share their attributes; `own` are the first arguments, as they come."""
    make, known = made.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, *given: Any) -> None:
        name = key(*given)
        if name in known:
            self.__dict__ |= known[name] | dict(zip(own, given, strict=False))
        else:
            make(self, *given)
            known[name] = vars(self).copy()

    made.__init__ = init
