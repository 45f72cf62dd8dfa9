"""The Triton kernels between matrix multiplications: RMSNorm, with or without a sum, and gates.

Called by `models/triton.py` alone, which chooses grids and widths. One program computes one row, or
a part of a row if its elements are independent, so a row's result never depends on other rows. All
arithmetic is float32, with intermediate rounding to the model's dtype where plain torch rounds.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.

Source: vLLM and TensorRT-LLM also fuse the residual sum into the norm; the code is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    out, x, residual, weight,
    X_ROW: tl.constexpr, RESIDUAL_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out [T, SIZE] = norm(x) * weight. Grid: [T]. WIDTH is SIZE rounded up to a power of two.

    ADD: x + residual, rounded to x's dtype, is normed and replaces the residual. `out` may be x: a
    row is stored after all of it was read, which its sum waits for.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < SIZE
    value = tl.load(x + row * X_ROW + columns, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        pointers = residual + row * RESIDUAL_ROW + columns
        total = value + tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty)
        tl.store(pointers, total, mask=mask)
        value = total.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + EPS)
    # The weight's dtype says where to round: see `layers/kernels.py`.
    normed = normed.to(weight.dtype.element_ty).to(tl.float32)
    normed = normed * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * OUT_ROW + columns, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """act(gate) * up of float32 values, rounded to DTYPE at each step as separate layers would; the
    clamped form of gpt-oss is one layer, so it is rounded once."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)).to(DTYPE)
    # Both are gate * sigmoid(z): 1 + tanh(y) is 2 * sigmoid(2 y), so one exponential serves both.
    z = gate
    if ACTIVATION == "gelu_pytorch_tanh":
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return ((gate / (1.0 + tl.exp(-z))).to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def gate_kernel(
    out, gate_up,
    ROW: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """out [T, SIZE] = act(gate) * up of gate_up [T, 2 SIZE]. Grid: [T, SIZE / WIDTH rounded up]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < SIZE
    pointers = gate_up + row * ROW + columns
    gate = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(pointers + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gated(gate, up, ACTIVATION, out.dtype.element_ty)
    tl.store(out + row * SIZE + columns, result, mask=mask)
