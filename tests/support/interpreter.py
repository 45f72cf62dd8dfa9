"""Caches repeated work in Triton's interpreter: the same results in half of the time.

    functions   it looks up all functions of the language to patch them, at each launch and each
                time that a kernel calls a function; here they stay patched
    dtypes      each operator builds a dict of all dtypes to look up one
    shapes      each result recomputes the attributes of its type, and its shape as constants and
                names

Used by conftest.py when kernels run in the interpreter. No compiler runs in such a process.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Applies the caches to all launches of this process."""
    from triton.language import core
    from triton.runtime import interpreter

    patch, stays = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)
    patched: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        # By module, which determines a kernel's names. Why kept: the id cannot be reused.
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


def remember(cls: Any, key: Callable[..., Any], *own: str) -> None:
    """Objects with equal keys share attributes, except for the leading arguments `own`."""
    make, known = cls.__init__, dict[Any, dict[str, Any]]()

    def init(self: Any, *args: Any) -> None:
        name = key(*args)
        if name in known:
            self.__dict__ |= known[name] | dict(zip(own, args, strict=False))
        else:
            make(self, *args)
            known[name] = vars(self).copy()

    cls.__init__ = init
