"""Dequantization of weights of 4 and 8 bits in Triton, for `triton_gemm.py`; and quantization of
activations to fp8, for products of fp8 by fp8, called by `layers/triton_quantized.py`.

They have run in Triton's interpreter and been compiled to machine code ahead of time; they have not
run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
