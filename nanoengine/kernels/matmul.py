"""matmul: the product with a weight in any format, for kernels of whole layers; matmul_panels: some
panels of it, for kernels that divide the work themselves.

A weight is a tuple, whose type determines its format:

    (panels, bias)                                     floats: `cpu_linear.linear`, or of pairs
                                                       `linear_bf16_inputs`, unless x is of pairs;
                                                       bytes, group-wise quantized:
                                                       `linear_groupwise`, signed `linear_fp32`
    (values, scales, bias)                             int8, rotated: `cpu_quantized.linear8`
    (values, form, scales, zeros, group_size, bias)    weight-only: `cpu_weight_only.py`
"""

from __future__ import annotations

import numpy as np
from numba import types

from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.cpu_linear import (
    linear,
    linear_bf16_inputs,
    linear_panels,
    native_weight,
    round_to_bf16,
)
from nanoengine.kernels.cpu_quantized import linear8, linear8_panels, quantize_groups
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.kernels.jit import specialize


def _is_groupwise(weight):
    """Whether a weight of this type is group-wise quantized."""
    return len(weight) == 2 and weight[0].dtype in (types.uint8, types.int8)


@specialize()
def matmul(x, weight, out, workers):
    """out[T, outputs] = x[T, inputs] times the weight, with the kernel for its format."""
    if x.dtype == types.uint32:
        kernel = linear
    elif _is_groupwise(weight):
        from nanoengine.kernels.cpu_groupwise import linear_fp32, linear_groupwise

        kernel = linear_groupwise if weight[0].dtype == types.uint8 else linear_fp32
    elif len(weight) == 2:
        kernel = linear_bf16_inputs if weight[0].dtype == types.uint32 else linear
    elif len(weight) == 3:
        kernel = linear8
    else:
        from nanoengine.kernels.cpu_weight_only import linear_dequantized as kernel
    return lambda x, weight, out, workers: kernel(x, *weight, out, workers)


@specialize()
def to_operand(x, weight, workers):
    """Converts x [T, inputs] to the form that `matmul_panels` reads: a tuple of arrays, rows
    first."""
    if len(weight) == 3:
        return lambda x, weight, workers: quantize_groups(x, GROUP, workers)
    if len(weight) == 2 and weight[0].dtype == types.uint8:
        return lambda x, weight, workers: quantize_groups(x, UNIT, workers)
    if weight[0].dtype == types.uint32:
        return lambda x, weight, workers: (round_to_bf16(x, workers),)
    return lambda x, weight, workers: (x,)


@specialize()
def slice_rows(inputs, first, last):
    """Rows first ... last - 1 of the result of `to_operand`."""
    if len(inputs) == 0:
        return lambda inputs, first, last: ()
    return lambda inputs, first, last: (inputs[0][first:last], *slice_rows(inputs[1:], first, last))


@specialize()
def from_panel(weight, panel):
    """A weight of floats or int8 from a panel on. A weight-only quantized weight is returned
    unchanged, because its callers always start at panel 0."""

    def of_floats(weight, panel):
        w, bias = native_weight(weight[0]), weight[1]
        return w[panel * (len(w) // (len(bias) // PANEL)) :], bias[panel * PANEL :]

    def of_bytes(weight, panel):
        w, scales, bias = weight
        panels = len(bias) // PANEL
        first, scale = panel * (len(w) // panels), panel * (len(scales) // panels)
        return w[first:], scales[scale:], bias[panel * PANEL :]

    return {2: of_floats, 3: of_bytes}.get(len(weight), lambda weight, panel: weight)


@specialize()
def has_whole_panels(weight):
    """Whether each 16 outputs of a weight are a separate panel."""
    if not _is_groupwise(weight):
        return lambda weight: True
    from nanoengine.kernels.cpu_groupwise import IS_UNPADDED

    return lambda weight: weight[0].view(np.int64)[IS_UNPADDED] != 0


@specialize()
def matmul_panels(inputs, first, last, weight, origin, out, lo, hi):
    """Rows first ... last - 1 of a `to_operand` times panels lo ... hi - 1 of a weight, whose pairs
    are in the form of `native_weight`. `out` begins at panel `origin`."""
    if _is_groupwise(weight):
        from nanoengine.kernels.cpu_groupwise import groupwise_fp32_panels, groupwise_panels

        kernel = groupwise_panels if weight[0].dtype == types.uint8 else groupwise_fp32_panels
        return lambda inputs, first, last, weight, origin, out, lo, hi: kernel(
            *slice_rows(inputs, first, last), *weight, out, origin, lo, hi
        )
    if len(weight) == 2:
        kernel = linear_panels
    elif len(weight) == 3:
        kernel = linear8_panels
    else:
        from nanoengine.kernels.cpu_weight_only import dequantized_panels as kernel
    return lambda inputs, first, last, weight, origin, out, lo, hi: kernel(
        *slice_rows(inputs, first, last), *from_panel(weight, origin), out, lo - origin, hi - origin
    )
