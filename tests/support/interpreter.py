"""Caches repeated work in Triton's interpreter: the same results in a third of the time.

    functions   it looks up all functions of the language to patch them, at each launch and each
                time that a kernel calls a function; here they stay patched, without a wrapper
    dtypes      each operator builds a dict of all dtypes to look up one
    shapes      each result recomputes the attributes of its type, and its shape as constants and
                names; each operator compares the shapes of its operands element by element

Used by conftest.py when kernels run in the interpreter. No compiler runs in such a process.
"""

from __future__ import annotations

import types
from typing import Any


def quicken() -> None:
    """Applies the caches to all launches of this process."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, stays = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)
    patched: dict[int, Any] = {}

    def patch_once(fn: Any) -> Any:
        # By module, which determines a kernel's names. Why kept: the id cannot be reused.
        if id(fn.__globals__) not in patched:
            patched[id(fn.__globals__)] = fn
            patch(fn)
        return stays

    interpreter._patch_lang = patch_once
    wrapper, semantic = core.to_tensor.__code__, interpreter.interpreter_semantic

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # The wrapper only checks that `_semantic` is passed.
        call = member.__wrapped__ if member.__code__ is wrapper else member

        def interpreted(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return call(*args, **options)

        scope.set_attr(owner, name, interpreted)

    interpreter._patch_attr = patch_attribute
    find, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = find(kind)
        return dtypes[name]

    interpreter._get_np_dtype = np_dtype
    init_type, known_types = core.block_type.__init__, dict[Any, dict[str, Any]]()
    shapes: dict[Any, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (*map(int, shape),)
        attributes = known_types.get((element_ty.name, sizes))
        if attributes is None:
            init_type(self, element_ty, shape)
            # Equal shapes are one object, so `broadcast` needs no comparison.
            self.shape = shapes.setdefault(sizes, self.shape)
            known_types[element_ty.name, sizes] = vars(self).copy()
        else:
            self.__dict__.update(attributes, element_ty=element_ty)

    core.block_type.__init__ = block_type
    init_tensor, known_tensors = core.tensor.__init__, dict[str, Any]()

    def tensor(self: Any, handle: Any, type: Any) -> None:
        found = known_tensors.get(type.name)
        if found is None:
            init_tensor(self, handle, type)
            known_tensors[type.name] = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = found

    core.tensor.__init__ = tensor
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal
