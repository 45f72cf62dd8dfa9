"""multiply: the product with a weight in any format, for kernels of whole layers; and its parts,
for kernels that multiply some panels.

A weight is a tuple, whose type determines its format:

    (panels, bias)                                     floats: `cpu_linear.linear`, or of pairs
                                                       `linear_of_rounded`, unless x is of pairs;
                                                       bytes, group-wise quantized:
                                                       `linear_grouped`, signed `linear_floats`
    (values, scales, bias)                             int8, rotated: `cpu_quantized.linear8`
    (values, form, scales, zeros, group_size, bias)    weight-only: `cpu_weight_only.py`
"""

from __future__ import annotations

import numpy as np
from numba import types

from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.cpu_linear import (
    as_read,
    linear,
    linear_of_rounded,
    linear_panels,
    rounded_rows,
)
from nanoengine.kernels.cpu_quantized import (
    linear8,
    linear8_panels,
    quantize_groups,
)
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.kernels.jit import specialize


def _in_groups(weight):
    """Whether a weight of this type is group-wise quantized."""
    return len(weight) == 2 and weight[0].dtype in (types.uint8, types.int8)


@specialize()
def multiply(x, weight, out, workers):
    """out[T, outputs] = x[T, inputs] times the weight, with the kernel for its format."""
    if x.dtype == types.uint32:
        kernel = linear
    elif _in_groups(weight):
        from nanoengine.kernels.cpu_groupwise import linear_floats, linear_grouped

        kernel = linear_grouped if weight[0].dtype == types.uint8 else linear_floats
    elif len(weight) == 2:
        kernel = linear_of_rounded if weight[0].dtype == types.uint32 else linear
    elif len(weight) == 3:
        kernel = linear8
    else:
        from nanoengine.kernels.cpu_weight_only import linear_dequantized as kernel
    return lambda x, weight, out, workers: kernel(x, *weight, out, workers)


@specialize()
def as_multiplied(x, weight, workers):
    """x [T, inputs] in the form that `multiply_panels` reads: a tuple of arrays, rows first."""
    if len(weight) == 3:
        return lambda x, weight, workers: quantize_groups(x, GROUP, workers)
    if len(weight) == 2 and weight[0].dtype == types.uint8:
        return lambda x, weight, workers: quantize_groups(x, UNIT, workers)
    if weight[0].dtype == types.uint32:
        return lambda x, weight, workers: (rounded_rows(x, workers),)
    return lambda x, weight, workers: (x,)


@specialize()
def rows_of(inputs, first, last):
    """Rows first ... last - 1 of the result of `as_multiplied`."""
    if len(inputs) == 0:
        return lambda inputs, first, last: ()
    return lambda inputs, first, last: (inputs[0][first:last], *rows_of(inputs[1:], first, last))


@specialize()
def from_panel(weight, panel):
    """A weight of floats or int8 from a panel on. A weight-only one is returned unchanged: its
    callers always start at panel 0."""

    def of_floats(weight, panel):
        w, bias = as_read(weight[0]), weight[1]
        return w[panel * (len(w) // (len(bias) // PANEL)) :], bias[panel * PANEL :]

    def of_bytes(weight, panel):
        w, scales, bias = weight
        panels = len(bias) // PANEL
        first, scale = panel * (len(w) // panels), panel * (len(scales) // panels)
        return w[first:], scales[scale:], bias[panel * PANEL :]

    return {2: of_floats, 3: of_bytes}.get(len(weight), lambda weight, panel: weight)


@specialize()
def starts_panels(weight):
    """Whether each 16 outputs of a weight are a separate panel."""
    if not _in_groups(weight):
        return lambda weight: True
    from nanoengine.kernels.cpu_groupwise import IS_WHOLE

    return lambda weight: weight[0].view(np.int64)[IS_WHOLE] != 0


@specialize()
def multiply_panels(inputs, first, last, weight, origin, out, lo, hi):
    """Rows first ... last - 1 of `as_multiplied` times panels lo ... hi - 1 of a weight, whose
    pairs are in the form of `as_read`. `out` begins at panel `origin`."""
    if _in_groups(weight):
        from nanoengine.kernels.cpu_groupwise import grouped_float_panels, grouped_panels

        kernel = grouped_panels if weight[0].dtype == types.uint8 else grouped_float_panels
        return lambda inputs, first, last, weight, origin, out, lo, hi: kernel(
            *rows_of(inputs, first, last), *weight, out, origin, lo, hi
        )
    if len(weight) == 2:
        kernel = linear_panels
    elif len(weight) == 3:
        kernel = linear8_panels
    else:
        from nanoengine.kernels.cpu_weight_only import dequantized_panels as kernel
    return lambda inputs, first, last, weight, origin, out, lo, hi: kernel(
        *rows_of(inputs, first, last), *from_panel(weight, origin), out, lo - origin, hi - origin
    )
