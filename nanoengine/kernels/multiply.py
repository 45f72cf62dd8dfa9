"""multiply: the product with a weight by the kernel for its form, for kernels of whole layers.

A weight is a tuple, whose form says what it is:

    (panels, bias)                                     floats: `cpu_linear.linear`, or of pairs
                                                       `linear_of_rounded`, unless x is of pairs;
                                                       bytes, in groups:
                                                       `linear_grouped`, signed `linear_floats`
    (values, scales, bias)                             int8: `cpu_quantized.linear8`
    (values, form, scales, zeros, group_size, bias)    weight-only: `cpu_weight_only.py`
"""

from __future__ import annotations

from numba import types

from nanoengine.kernels.cpu_grouped import linear_floats, linear_grouped
from nanoengine.kernels.cpu_linear import linear, linear_of_rounded
from nanoengine.kernels.cpu_quantized import linear8
from nanoengine.kernels.jit import by_types


@by_types()
def multiply(x, weight, out, workers):
    """out[T, outputs] = x[T, inputs] times the weight, by the kernel for its form."""
    of_panels = {
        types.uint32: linear_of_rounded, types.uint8: linear_grouped, types.int8: linear_floats
    }  # fmt: skip
    if x.dtype == types.uint32:
        kernel = linear
    elif len(weight) == 2:
        kernel = of_panels.get(weight[0].dtype, linear)
    elif len(weight) == 3:
        kernel = linear8
    else:
        from nanoengine.kernels.cpu_weight_only import linear_dequantized as kernel
    return lambda x, weight, out, workers: kernel(x, *weight, out, workers)
