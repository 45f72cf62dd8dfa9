"""A matrix multiplication in Triton whose rows don't depend on each other.

Called by `layers/triton_linear.py`; products of experts share its parts. Each output is one sum
over the inputs, from the first to the last, in tiles of a fixed size. The sum is never split, and
nothing depends on the number of rows. So a row has the same bits alone and among thousands. A
library that chooses its algorithm by shape does not guarantee that.

The kernel has run in Triton's interpreter and been compiled to machine code ahead of time; it has
not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def products(
    out, x_rows, inside, weight, bias, columns,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Rows of x times the `columns` [N] of weight [OUT, IN].T, + bias: [M, N] of out's dtype.

    x_rows [M, 1]: pointers to the rows; inside [M, 1]: which rows exist.
    """
    acc = tl.full([M, N], 0, tl.float32)
    valid = (columns < OUT)[:, None]
    weight_rows = weight + columns.to(tl.int64)[:, None] * IN
    for start in range(0, IN, K):
        inputs = start + tl.arange(0, K)
        mask, w_mask = inside, valid
        if IN % K != 0:
            mask, w_mask = inside & (inputs < IN)[None, :], valid & (inputs < IN)[None, :]
        left = tl.load(x_rows + inputs[None, :], mask=mask, other=0.0)
        right = tl.load(weight_rows + inputs[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return with_bias(acc, out, bias, columns, OUT, BIAS)


@triton.jit
def with_bias(acc, out, bias, columns, OUT: tl.constexpr, BIAS: tl.constexpr):
    """Sums [M, N] + bias, rounded to out's dtype."""
    if BIAS:
        bias_values = tl.load(bias + columns, mask=columns < OUT, other=0.0)
        acc += bias_values.to(tl.float32)[None, :]
    return acc.to(out.dtype.element_ty)


@triton.jit(do_not_specialize=["num_rows"])
def gemm_kernel(
    out, x, weight, bias, num_rows,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] @ weight [OUT, IN].T + bias. Grid: [T / M, OUT / N], rounded up.

    The first axis of the grid is rows: programs that run together then share weights.
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = (rows < num_rows)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * X_ROW
    result = products(out, x_rows, inside, weight, bias, columns, IN, OUT, M, N, K, BIAS)
    target = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, result, mask=inside & (columns < OUT)[None, :])
