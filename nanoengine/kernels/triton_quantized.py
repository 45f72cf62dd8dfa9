"""Matrix multiplication in Triton by weights of 4 and 8 bits, which are dequantized in registers;
and quantization of activations to fp8, for products of fp8 by fp8.

Called by `layers/triton_quantized.py`, and for products of experts by `triton_experts.py`. A weight
is (code - zero) * scale in float32, rounded to the dtype of the rows. It equals
`QuantizedWeight.dequantized`, so the results differ from float products at most in the order of
summation.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.kernels.triton_gemm import with_bias


@triton.jit
def dequantized(
    stored, scales, zeros, columns, start,
    OUT: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr,
    HIGH: tl.constexpr, ZEROS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Dequantizes stored bytes [N, K], whose inputs begin at `start` and are in one group.

    HIGH: for 4-bit forms, the high halves.
    """
    codes = stored
    if FORM == "int4" or FORM == "e2m1":
        codes = stored >> 4 if HIGH else stored & 15
    # The same sign, exponent and fraction as float16 are the value divided by a power of two,
    # exactly. Why not a cast: GPUs before sm_89 have none.
    if FORM == "int4":
        values = codes.to(tl.float32) - 8
    elif FORM == "e2m1":
        bits = codes.to(tl.int16)
        bits = ((bits & 8) << 12) | ((bits & 7) << 9)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 32768
    elif FORM == "e4m3":
        bits = codes.to(tl.int16)
        bits = (bits & -32768) | ((bits & 127) << 7)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
    else:
        values = codes.to(tl.float32)
    group_at = start // GROUP * OUT + columns
    if ZEROS:
        values -= tl.load(zeros + group_at, mask=columns < OUT, other=0.0)[:, None]
    scale = tl.load(scales + group_at, mask=columns < OUT, other=0.0)
    return (values * scale[:, None]).to(dtype)


@triton.jit
def quantized_products(
    out, x_rows, inside, weight, scales, zeros, bias, columns,
    IN: tl.constexpr, OUT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """`products` of triton_gemm.py by a weight in one of these forms, whose rows are bytes.

    FORM "int4" or "e2m1": [OUT, IN / 2] uint8, whose low halves are the first half of the inputs
    and whose high halves the second half. Why: one load then gives two tiles of inputs, and no
    value moves between threads. int4 is stored plus 8; e2m1 codes are twice their value.
    "int8": [OUT, IN] int8. "e4m3": [OUT, IN] int8, the bits of floats. scales, zeros: [IN / GROUP,
    OUT] float32. K divides GROUP, and IN (with 4 bits, half of it).
    """
    HALVES: tl.constexpr = 2 if FORM == "int4" or FORM == "e2m1" else 1
    WIDTH: tl.constexpr = IN // HALVES
    dtype: tl.constexpr = x_rows.dtype.element_ty
    valid = (columns < OUT)[:, None]
    acc = tl.full([M, N], 0, tl.float32)
    for start in range(0, WIDTH, K):
        inputs = start + tl.arange(0, K)
        pointers = weight + columns.to(tl.int64)[:, None] * WIDTH + inputs[None, :]
        stored = tl.load(pointers, mask=valid, other=0)
        for half in tl.static_range(HALVES):
            first = start + half * WIDTH
            left = tl.load(x_rows + half * WIDTH + inputs[None, :], mask=inside, other=0.0)
            right = dequantized(
                stored, scales, zeros, columns, first, OUT, GROUP, FORM, half, ZEROS, dtype
            )
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return with_bias(acc, out, bias, columns, OUT, BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def quantized_gemm_kernel(
    out, x, weight, scales, zeros, bias, num_rows,
    X_ROW: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FORM: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, OUT] = x [T, IN] @ weight.T + bias, see `quantized_products`. Grid: [T / M, OUT / N],
    rounded up."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inside = (rows < num_rows)[:, None]
    x_rows = x + rows.to(tl.int64)[:, None] * X_ROW
    result = quantized_products(
        out, x_rows, inside, weight, scales, zeros, bias, columns,
        IN, OUT, M, N, K, GROUP, FORM, ZEROS, BIAS,
    )  # fmt: skip
    target = out + rows.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(target, result, mask=inside & (columns < OUT)[None, :])


@triton.jit
def e4m3_rows_kernel(
    codes, scales, x, X_ROW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantizes x [T, SIZE] to codes [T, SIZE] e4m3 with scales [T] float32. Grid: [T].

    The largest magnitude of a row becomes 448, the largest value of e4m3. A row that contains NaN
    or infinity becomes NaN.
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = columns < SIZE
    values = tl.load(x + row * X_ROW + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(values), 0) / 448
    tl.store(scales + row, scale)
    rounded = (values / tl.where(scale == 0, 1.0, scale)).to(tl.float8e4nv)
    tl.store(codes + row * SIZE + columns, rounded, mask=inside)
