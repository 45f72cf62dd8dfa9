"""A matrix multiplication in Triton by weights of 4 and 8 bits, which are widened in registers; and
rows of activations as fp8, for products of fp8 by fp8.

Called by `layers/triton_quantized.py` alone. A weight is (code - zero) * scale in float32, rounded
to the dtype of the rows: the number that `QuantizedWeight.dequantized` gives, so that the products
differ from those by floats in the order of a sum at most.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(
    codes, scales, zeros, columns, start,
    OUT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """codes [N, K] as floats, whose inputs begin at `start` and share one group: [N, K]."""
    place = start // GROUP * OUT + columns
    if ZEROS:
        codes -= tl.load(zeros + place, mask=columns < OUT, other=0.0)[:, None]
    scale = tl.load(scales + place, mask=columns < OUT, other=0.0)
    return (codes * scale[:, None]).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def quantized_gemm_kernel(
    out, x, weight, scales, zeros, bias, num_rows,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FORM: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] @ weight.T + bias. Grid: [T / M, OUT / N], rounded up.

    FORM "int4": weight [OUT, IN / 2] uint8, whose low halves are the first half of the inputs and
    whose high halves the second, both plus 8. Why: a load then gives two tiles of inputs, and no
    value moves between threads. "int8": [OUT, IN] int8. "e4m3": [OUT, IN] int8, the bits of floats.
    scales, zeros: [IN / GROUP, OUT] float32. K divides GROUP, and IN (of int4 its half).
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = (rows < num_rows)[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = IN // 2 if FORM == "int4" else IN
    acc = tl.full([M, N], 0, tl.float32)
    for start in range(0, WIDTH, K):
        inputs = start + tl.arange(0, K)
        x_place = x + rows.to(tl.int64)[:, None] * X_ROW + inputs[None, :]
        place = weight + columns.to(tl.int64)[:, None] * WIDTH + inputs[None, :]
        stored = tl.load(place, mask=(columns < OUT)[:, None], other=0)
        left = tl.load(x_place, mask=inside, other=0.0)
        if FORM == "int4":
            codes = (stored & 15).to(tl.float32) - 8
        elif FORM == "e4m3":
            # The same sign, exponent and fraction in float16 are the number over 2 ** 8, exactly.
            # Why not a cast: GPUs before sm_89 have none.
            bits = stored.to(tl.int16)
            bits = (bits & -32768) | ((bits & 127) << 7)
            codes = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
        else:
            codes = stored.to(tl.float32)
        right = widened(codes, scales, zeros, columns, start, OUT, GROUP, ZEROS, dtype)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if FORM == "int4":
            left = tl.load(x_place + WIDTH, mask=inside, other=0.0)
            codes = (stored >> 4).to(tl.float32) - 8
            right = widened(codes, scales, zeros, columns, start + WIDTH, OUT, GROUP, ZEROS, dtype)
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, acc.to(dtype), mask=inside & (columns < OUT)[None, :])


@triton.jit
def e4m3_rows_kernel(
    codes, scales, x, X_ROW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """x [T, SIZE] is about codes * scales: codes [T, SIZE] e4m3, scales [T] float32. Grid: [T].

    The largest magnitude of a row becomes 448, the largest number of e4m3. A row that holds NaN or
    infinity gets NaN.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = columns < SIZE
    numbers = tl.load(x + row * X_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(numbers), 0) / 448
    tl.store(scales + row, scale)
    rounded = (numbers / tl.where(scale == 0, 1.0, scale)).to(tl.float8e4nv)
    tl.store(codes + row * SIZE + columns, rounded, mask=inside)
