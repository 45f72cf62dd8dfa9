"""Linear layers with weight-only quantization on a CPU: integers or small floats are converted to
float32 when they are read, and multiplied in float32. Many rows share the floats of a panel; few
rows convert in registers. A row's result has the same bits either way.

The reference implementation is `layers/quantized.py`; `layers/cpu_quantized.py` packs.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.arrays import zeros as new_zeros
from nanoengine.kernels.cpu_linear import FASTMATH, ROW_BLOCK, copy_outputs, run_tiles
from nanoengine.kernels.dequant import E4M3, PANELS_AT_ONCE, ZEROS, dequantize, matmul_dequantized
from nanoengine.kernels.gemm import PANEL, PANELS
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

INPUTS_AT_ONCE = 1024  # dequantized at a time: with two panels 128 KiB, which stay in the L2 cache
MAX_REGISTER_ROWS = 2  # for so few rows, each dequantizes in registers


@compiled(fastmath=FASTMATH, inline=True)
def _dequantize(w, p, form, scales, zeros, group_size, size, first, last, panel):
    """panel[k - first, j] = (value - zero) * scale of inputs first ... last - 1 of panel p. `size`:
    all inputs of the panel, which share scales in groups."""
    groups, has_zeros = size // group_size, len(zeros) > 0
    if not has_zeros:
        zeros = new_zeros((PANEL,), np.float32)
    inputs = 1 if form in (8, E4M3) else 2  # per byte
    for g in range(first // group_size, (last - 1) // group_size + 1):
        at = (p * groups + g) * PANEL
        zeros_at, k = at if has_zeros else 0, max(first, g * group_size)
        count, out_at = min(last, (g + 1) * group_size) - k, (k - first) * PANEL
        w_at = (p * size + k) // inputs * PANEL
        dequantize(w, w_at, zeros, zeros_at, scales, at, panel, out_at, count, form, 1)


@compiled(fastmath=FASTMATH, inline=True)
def _few_rows(x, w, form, scales, zeros, group_size, bias, out, lo, hi):
    """`dequantized_panels` for few rows: each row dequantizes in registers."""
    (num_rows, size), num_outputs, p = x.shape, out.shape[1], lo
    step, bytes = size // group_size * PANEL, (size if form in (8, E4M3) else size // 2) * PANEL
    inputs, outputs, kind = x.reshape(-1), out.reshape(-1), form + ZEROS if len(zeros) else form
    while p < hi:
        panels, n = PANELS_AT_ONCE if p + PANELS_AT_ONCE <= hi else 1, p * PANEL
        for row in range(num_rows):
            matmul_dequantized(inputs, row * size, w, p * bytes, bytes, zeros, p * step, scales,
                             p * step, step, size, group_size, bias, n, outputs,
                             row * num_outputs + n, kind, panels)  # fmt: skip
        p += panels


@compiled(fastmath=FASTMATH)
def dequantized_panels(x, w, form, scales, zeros, group_size, bias, out, lo, hi):
    """`linear_dequantized` for the outputs of panels lo ... hi - 1: one worker's share."""
    (num_rows, size), num_outputs = x.shape, out.shape[1]
    if num_rows <= MAX_REGISTER_ROWS:
        _few_rows(x, w, form, scales, zeros, group_size, bias, out, lo, hi)
        return
    inputs, outputs, step = x.reshape(-1), out.reshape(-1), INPUTS_AT_ONCE * PANEL
    floats, p = empty((PANELS * step,), np.float32), lo
    while p < hi:
        panels, n = PANELS if p + PANELS <= hi else 1, p * PANEL
        for first in range(0, size, INPUTS_AT_ONCE):
            last = min(first + INPUTS_AT_ONCE, size)
            for i in range(panels):
                panel = floats[i * step : (i + 1) * step]
                _dequantize(w, p + i, form, scales, zeros, group_size, size, first, last, panel)
            for row in range(0, num_rows, ROW_BLOCK):
                x_at, o_at = row * size + first, row * num_outputs + n
                start, at, stride = (bias, n, 0) if first == 0 else (outputs, o_at, num_outputs)
                run_tiles(min(ROW_BLOCK, num_rows - row), panels, inputs, x_at, size, floats, 0,
                                step, last - first, start, at, stride, outputs, o_at,
                                num_outputs, 0)  # fmt: skip
        p += panels


@compiled(fastmath=FASTMATH)
def _dequantized_tiles(x, w, form, scales, zeros, group_size, bias, out, lo, hi):
    stop = min(hi * PANELS_AT_ONCE, out.shape[1] // PANEL)
    dequantized_panels(x, w, form, scales, zeros, group_size, bias, out, lo * PANELS_AT_ONCE, stop)


@compiled(fastmath=FASTMATH)
def linear_dequantized(x, w, form, scales, zeros, group_size, bias, out, num_workers):
    """`linear` with quantized weights, dequantized panel by panel; T rows share the work.

    w: flat int8, [panels, K, 16] values, or [panels, K / 2, 16] pairs of 4 bits; form: 8, 4 (plus
    8), E4M3 (the bits of floats, none of them NaN) or E2M1; scales, zeros: flat float32 [panels,
    groups, 16], no zero points: an empty array; bias: padded to panels.
    """
    if len(x) == 0:
        return  # Why: each panel would be dequantized for no row.
    panels = -(-out.shape[1] // PANEL)
    padded = out if out.shape[1] % PANEL == 0 else empty((len(out), panels * PANEL), np.float32)
    parallel_for(
        _dequantized_tiles, -(-panels // PANELS_AT_ONCE), num_workers,
        (x, w, form, scales, zeros, group_size, bias, padded),
    )  # fmt: skip
    if out.shape[1] % PANEL:
        copy_outputs(padded, out)
