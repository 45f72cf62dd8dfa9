"""Matrix multiplication in Triton by weights of floats, and of 4 and 8 bits.

Called by `layers/triton_linear.py`; `triton_experts.py` has the kernel for experts. Each output is
one sum over the inputs, from the first to the last, in tiles of a fixed size. The sum is never
split, and nothing depends on the number of rows. So with one tile size a row has the same bits
alone and among thousands. A library that chooses its algorithm by shape does not guarantee that.

Weights of 4 and 8 bits are dequantized in registers (`triton_quantized.py`): a weight is (code -
zero) * scale in float32, rounded to the dtype of the rows. It equals `QuantizedWeight.dequantized`,
so the results differ from float products at most in the order of summation.

The kernel has run in Triton's interpreter and been compiled to machine code ahead of time; it has
not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_quantized import dequantized


@triton.jit
def products(
    out, x_rows, inside, weight, scales, zeros, bias, columns,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Rows of x times the `columns` [N] of weight [OUT, IN].T, + bias: [M, N] of out's dtype.

    x_rows [M, 1]: pointers to the rows; inside [M, 1]: which rows exist.

    FORM "": floats. "int4" or "e2m1": [OUT, IN / 2] uint8, whose low halves are the first half of
    the inputs and whose high halves the second half. Why: one load then gives two tiles of inputs,
    and no value moves between threads. int4 is stored plus 8; e2m1 codes are twice their value.
    "int8": [OUT, IN] int8. "e4m3": [OUT, IN] int8, the bits of floats. scales, zeros: [IN / GROUP,
    OUT] float32. K divides GROUP, and IN (with 4 bits, half of it), unless the weight is floats.
    """
    HALVES: tl.constexpr = 2 if FORM == "int4" or FORM == "e2m1" else 1
    WIDTH: tl.constexpr = IN // HALVES
    dtype: tl.constexpr = x_rows.dtype.element_ty
    valid = (columns < OUT)[:, None]
    weight_rows = weight + columns.to(tl.int64)[:, None] * WIDTH
    acc = tl.full([M, N], 0, tl.float32)
    for start in range(0, WIDTH, K):
        inputs = start + tl.arange(0, K)
        mask, w_mask = inside, valid
        if WIDTH % K != 0:
            mask, w_mask = inside & (inputs < IN)[None, :], valid & (inputs < IN)[None, :]
        right = tl.load(weight_rows + inputs[None, :], mask=w_mask, other=0)
        for half in tl.static_range(HALVES):
            first = half * WIDTH
            left = tl.load(x_rows + first + inputs[None, :], mask=mask, other=0.0)
            values = right
            if FORM != "":
                values = dequantized(
                    right, scales, zeros, columns, start + first, OUT, GROUP, FORM, half, ZEROS,
                    dtype,
                )  # fmt: skip
            acc = tl.dot(left, tl.trans(values), acc, input_precision="ieee")
    if BIAS:
        bias_values = tl.load(bias + columns, mask=columns < OUT, other=0.0)
        acc += bias_values.to(tl.float32)[None, :]
    return acc.to(out.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def gemm_kernel(
    out, x, weight, scales, zeros, bias, num_rows,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FORM: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] @ weight.T + bias, see `products`. Grid: [T / M, OUT / N], rounded
    up.

    The first axis of the grid is rows: programs that run together then share weights.
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = (rows < num_rows)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * X_ROW
    result = products(
        out, x_rows, inside, weight, scales, zeros, bias, columns,
        IN, OUT, M, N, K, GROUP, FORM, ZEROS, BIAS,
    )  # fmt: skip
    target = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, result, mask=inside & (columns < OUT)[None, :])
