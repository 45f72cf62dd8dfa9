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
from numba.extending import NativeValue, intrinsic, models, register_model, unbox

from nanoengine.kernels.linking import borrowed

NUMBERS = {
    types.boolean: ctypes.c_bool,
    types.int64: ctypes.c_int64,
    types.float32: ctypes.c_float,
    types.float64: ctypes.c_double,
}


class ArgumentTableType(types.Opaque):
    """The type of an `ArgumentTable` with values of type `of`; in compiled code, their address."""

    def __init__(self, of: types.Type) -> None:
        self.of = of
        super().__init__(f"ArgumentTableType({_text_of(of)})")


def _text_of(of: types.Type) -> str:
    """A type in the syntax that `aot.py` reads; numba's text of a named tuple is not valid
    Python."""
    if not isinstance(of, types.BaseTuple):
        return repr(of)
    parts = "".join(f"{_text_of(part)}, " for part in of)
    named = isinstance(of, types.BaseNamedTuple)
    return f"{of.instance_class.__name__}({parts})" if named else f"Tuple(({parts}))"


register_model(ArgumentTableType)(models.OpaqueModel)


def type_of(value: Any) -> types.Type:
    """The type of a value in compiled code; for an array its dtype, dimensions and layout."""
    return numba.typeof(value)


class ArgumentTable:
    """Tuples of arrays, numbers and such tuples, all of one `type_of`.

    Keeps the arrays alive, but does not notice if their memory is replaced.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values, of = values, type_of(values[0])
        assert all(type_of(value) == of for value in values), "of several types"
        kind = _kind(of)
        target = cpu_target.target_context
        assert ctypes.sizeof(kind) == target.get_abi_sizeof(target.get_value_type(of)), of
        self._memory = (kind * len(values))(*(_native(of, value) for value in values))
        self._numba_type_ = ArgumentTableType(of)
        self.address = ctypes.addressof(self._memory)

    def __len__(self) -> int:
        return len(self._values)


@functools.cache
def _kind(of: types.Type) -> Any:
    """numba's native representation of a type, as a C type."""
    fields: list[Any]
    if isinstance(of, types.Array):  # numba's `arystruct_t`; the first two count references
        fields = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t]
        fields += [ctypes.c_void_p, ctypes.c_ssize_t * of.ndim, ctypes.c_ssize_t * of.ndim]
    elif isinstance(of, types.BaseTuple):
        fields = [_kind(part) for part in of]
    else:
        return NUMBERS[of]
    names = [(f"part{i}", field) for i, field in enumerate(fields)]
    return type("Native", (ctypes.Structure,), {"_fields_": names})


def _native(of: types.Type, value: Any) -> Any:
    """The value in its representation `_kind`. References to its arrays are not counted."""
    kind = _kind(of)
    if isinstance(of, types.Array):
        shape, strides = (dict(kind._fields_)[part] for part in ("part5", "part6"))
        return kind(
            None, None, value.size, value.itemsize, value.ctypes.data, shape(*value.shape),
            strides(*value.strides),
        )  # fmt: skip
    if isinstance(of, types.BaseTuple):
        return kind(*(_native(part, one) for part, one in zip(of, value, strict=True)))
    return kind(value.item() if isinstance(value, np.generic) else value)


@unbox(ArgumentTableType)
def _address_of(of, value, c):
    address = c.pyapi.object_getattr_string(value, "address")
    number = c.pyapi.long_as_longlong(address)
    c.pyapi.decref(address)
    return NativeValue(c.builder.inttoptr(number, c.context.get_value_type(of)))


@intrinsic
def table_entry(typing_context, table, i):
    """The value at index i of an `ArgumentTable`."""

    def codegen(context, builder, signature, args):
        kind = context.get_value_type(table.of)
        first = builder.bitcast(args[0], kind.as_pointer())
        value = builder.load(builder.gep(first, [builder.sext(args[1], ir.IntType(64))]))
        return borrowed(context, builder, table.of, value)

    return table.of(table, i), codegen
