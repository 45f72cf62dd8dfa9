"""ArgumentTable: constant arguments, kept in memory in the form that compiled code uses.

numba converts each array argument of a call from its Python object, 0.1 us per array. The layers of
a model have hundreds, the same ones in each step. They are converted here once:

    ArgumentTable([arguments of layer 0, of layer 1, ...])  ─►  in a kernel: table_entry(table, i)

Perf: docs/experiments.md.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target
from numba.core.typing.ctypes_utils import to_ctypes
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from nanoengine.kernels.linking import borrowed


class ArgumentTableType(types.Opaque):
    """The type of an `ArgumentTable` whose entries have one type; in compiled code their
    address."""

    def __init__(self, entry_type: types.Type) -> None:
        self.entry_type = entry_type
        super().__init__(f"ArgumentTableType({_type_text(entry_type)})")


def _type_text(typ: types.Type) -> str:
    """A type in the syntax that `aot.py` reads, because numba's text of a named tuple is not valid
    Python."""
    if not isinstance(typ, types.BaseTuple):
        return repr(typ)
    parts = "".join(f"{_type_text(field)}, " for field in typ)
    is_named = isinstance(typ, types.BaseNamedTuple)
    return f"{typ.instance_class.__name__}({parts})" if is_named else f"Tuple(({parts}))"


register_model(ArgumentTableType)(models.OpaqueModel)


type_of = numba.typeof
"""Returns the type of a value in compiled code; for an array its dtype, dimensions and layout."""


class ArgumentTable:
    """Tuples of arrays, scalars and such tuples, all of one `type_of`.

    Keeps the arrays alive, but does not notice if their memory is replaced.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values, entry = values, type_of(values[0])
        assert all(type_of(value) == entry for value in values), "entries of several types"
        c_type = _c_type(entry)
        target = cpu_target.target_context
        assert ctypes.sizeof(c_type) == target.get_abi_sizeof(target.get_value_type(entry)), entry
        self._memory = (c_type * len(values))(*(_to_c(entry, value) for value in values))
        self._numba_type_ = ArgumentTableType(entry)
        self.address = ctypes.addressof(self._memory)

    def __len__(self) -> int:
        return len(self._values)


@functools.cache
def _c_type(typ: types.Type) -> Any:
    """numba's native representation of a type, as a C type."""
    fields: list[Any]
    if isinstance(typ, types.Array):  # numba's `arystruct_t`; the first two count references
        fields = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t]
        fields += [ctypes.c_void_p, ctypes.c_ssize_t * typ.ndim, ctypes.c_ssize_t * typ.ndim]
    elif isinstance(typ, types.BaseTuple):
        fields = [_c_type(element) for element in typ]
    else:
        return to_ctypes(typ)
    names = [(f"part{i}", field) for i, field in enumerate(fields)]
    return type("Native", (ctypes.Structure,), {"_fields_": names})


def _to_c(typ: types.Type, value: Any) -> Any:
    """The value as a `_c_type`. References to its arrays are not counted."""
    c_type = _c_type(typ)
    if isinstance(typ, types.Array):
        shape, strides = (dict(c_type._fields_)[field] for field in ("part5", "part6"))
        return c_type(
            None, None, value.size, value.itemsize, value.ctypes.data, shape(*value.shape),
            strides(*value.strides),
        )  # fmt: skip
    if isinstance(typ, types.BaseTuple):
        return c_type(*(_to_c(field, item) for field, item in zip(typ, value, strict=True)))
    return c_type(value.item() if isinstance(value, np.generic) else value)


@unbox(ArgumentTableType)
def _address_of(numba_type, value, c):
    address = c.pyapi.object_getattr_string(value, "address")
    pointer = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    return NativeValue(c.builder.inttoptr(pointer, c.context.get_value_type(numba_type)))


@intrinsic
def table_entry(typing_context, table, i):
    """The value at index i of an `ArgumentTable`."""

    def codegen(context, builder, signature, args):
        llvm_type = context.get_value_type(table.entry_type)
        first = builder.bitcast(args[0], llvm_type.as_pointer())
        value = builder.load(builder.gep(first, [builder.sext(args[1], ir.IntType(64))]))
        return borrowed(context, builder, table.entry_type, value)

    return table.entry_type(table, i), codegen
