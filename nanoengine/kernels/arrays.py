"""empty, zeros: new arrays in kernels, without a numba function for each shape and type.

Perf: each of numba's functions takes some 50 ms to compile, and a model's first token needs 24 of
them.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import _empty_nd_impl


def _allocator(is_zeroed):
    def allocate(typing_context, shape, dtype):
        """np.empty(shape, dtype) or np.zeros(shape, dtype) for a tuple `shape`."""
        array_type = types.Array(dtype.dtype, len(shape), "C")

        def codegen(context, builder, signature, args):
            lengths = [
                context.cast(builder, size, types.unliteral(size_type), types.intp)
                for size, size_type in zip(
                    cgutils.unpack_tuple(builder, args[0]), shape, strict=True
                )
            ]
            array = _empty_nd_impl(context, builder, array_type, lengths)
            if is_zeroed:
                cgutils.memset(builder, array.data, builder.mul(array.itemsize, array.nitems), 0)
            return array._getvalue()

        return array_type(shape, dtype), codegen

    return intrinsic(allocate)


empty, zeros = _allocator(False), _allocator(True)
