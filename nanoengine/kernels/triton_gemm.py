"""A matrix multiplication in Triton whose rows don't depend on each other, with or without gates.

Called by `layers/triton_linear.py` alone. Each output is one sum over the inputs, from the first to
the last, in tiles of a fixed size: no split of the sum, no choice by the number of rows. So a row
has the same bits alone and among thousands, which a library that picks its algorithm by shape does
not promise.

The kernel has run in Triton's interpreter and been compiled to machine code ahead of time; it has
not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_layers import gated


@triton.jit
def load_tile(
    start, rows, columns, num_rows, SIZE: tl.constexpr, ROW: tl.constexpr, EVEN: tl.constexpr
):
    """[rows, columns] of a row-major matrix; zeros past its end."""
    mask = (rows < num_rows)[:, None]
    if not EVEN:
        mask = mask & (columns < SIZE)[None, :]
    place = start + rows.to(tl.int64)[:, None] * ROW + columns[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def gemm_kernel(
    out, x, weight, bias, num_rows,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] @ weight [OUT, IN].T + bias. Grid: [T / M, OUT / N], rounded up.

    ACTIVATION, if not "": weight is [2 OUT, IN], gate first, and out is act(gate) * up, rounded at
    each step as separate layers would. The first axis of the grid goes over rows: programs that run
    together then share their weights.
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    up_acc = tl.zeros([M, N], tl.float32)
    for start in range(0, IN, K):
        inputs = start + tl.arange(0, K)
        left = load_tile(x, rows, inputs, num_rows, IN, X_ROW, IN % K == 0)
        right = load_tile(weight, columns, inputs, OUT, IN, IN, IN % K == 0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if ACTIVATION != "":
            up = load_tile(weight + OUT * IN, columns, inputs, OUT, IN, IN, IN % K == 0)
            up_acc = tl.dot(left, tl.trans(up), up_acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if ACTIVATION != "":
        up_result = up_acc.to(out.dtype.element_ty).to(tl.float32)
        result = gated(result.to(tl.float32), up_result, ACTIVATION, out.dtype.element_ty)
    place = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(place, result, mask=(rows < num_rows)[:, None] & (columns < OUT)[None, :])
