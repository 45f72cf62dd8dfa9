"""Linear layers with int8 and int4 weights on a CPU: whole numbers times whole numbers.

    x float32 ─ quantize each row to int8 ─┐
                                           ├─ exact int32 dot products ─ times scales ─ + bias
    weight ─ panels of 16 outputs ─────────┘

    int8   a line holds 16 outputs x 4 inputs;  one scale an output
    int4   the same for 8 inputs: the low halves of its bytes are the first four, the high halves
           the other four; a scale, and a zero if the weights have them, an output and group

`byte_tiles.py` multiplies, in whatever way the CPU has. Sums of whole numbers are exact, and groups
are added in order: a row's result has the same bits alone, in any batch and on any CPU.
`layers/quantized.py` is the readable form.

Perf: `benchmarks/cpu_kernels.py`; docs/experiments.md.

Legend: T rows of x, N outputs, K inputs, a multiple of 32, G groups of inputs.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.byte_tiles import (
    UNIT,
    multiply4,
    multiply8,
    shapes4,
    shapes8,
    unit_sum,
)
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.shares import share_of
from nanoengine.kernels.tiles import LINE, PANEL

ROWS8, PANELS8 = max(shapes8(CURRENT))
ROWS4, _ = max(shapes4(CURRENT))
OFFSET8 = 16 if CURRENT.byte_dots == "vpdpbusd" else 0  # of -8 times a sum: weights count 128 more
ROW_BLOCK = 128  # rows that take turns on one panel
FEW = 8  # rows quantized by the calling thread
# Rows of one tile read panel after panel, as memory likes it best, and ask for what lies so far
# ahead.
AHEAD = 16384  # bytes
INFINITY = np.int32(0x7F800000)  # its bits; those of a NaN are larger

# Why no "nnan" and "ninf": a row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("contract", "nsz")


@compiled(fastmath=FASTMATH, part=True)
def _largest(x):
    """max |x|; NaN where x holds NaN or infinity. As whole numbers: the bits of floats without a
    sign have the floats' order, and no rule on NaN keeps the loop from vectors."""
    most, bits = np.int32(0), x.view(np.int32)
    for i in range(len(bits)):  # Why by index: numba's way to walk an array keeps LLVM from vectors
        size = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        most = size if size > most else most
    return np.float32(np.nan) if most >= INFINITY else np.int32(most).view(np.float32)


@compiled(fastmath=FASTMATH, part=True)
def _quantize_row(x, values, offsets):
    """values = x * 127 / max |x|, rounded half to even; -8 times the sum of each unit; returns the
    scale."""
    most = _largest(x)
    scale = most / np.float32(127)
    values[:] = 0
    offsets[:] = 0
    if not most > 0:  # zeros, or a row whose scale makes every result NaN
        return scale
    inverse = np.float32(1) / scale
    row = values[: len(x)]
    for i in range(len(x)):
        row[i] = np.int8(np.rint(x[i] * inverse))
    for unit in range(len(offsets)):
        offsets[unit] = np.int32(-8) * unit_sum(values, unit * UNIT)
    return scale


@compiled(fastmath=FASTMATH)
def _quantize_rows(x, values, scales, offsets, lo, hi):
    for t in range(lo, hi):
        scales[t] = _quantize_row(x[t], values[t], offsets[t])


@compiled(parallel=True, fastmath=FASTMATH)
def _quantize_rows_parallel(x, values, scales, offsets, num_workers):
    for worker in prange(num_workers):
        lo, hi = len(x) * worker // num_workers, len(x) * (worker + 1) // num_workers
        _quantize_rows(x, values, scales, offsets, lo, hi)


@compiled(fastmath=FASTMATH)
def quantize_rows(x, num_workers):
    """Each row of x [T, K] on its own: values [T, K padded] int8, scales [T] float32, and offsets
    [T, units] int32, -8 times the sum of each unit's values."""
    num_rows, padded = len(x), -(-x.shape[1] // UNIT) * UNIT
    values = empty((num_rows, padded), np.int8)
    scales = empty((num_rows,), np.float32)
    offsets = empty((num_rows, padded // UNIT), np.int32)
    if num_rows <= FEW:
        _quantize_rows(x, values, scales, offsets, 0, num_rows)
    else:
        _quantize_rows_parallel(x, values, scales, offsets, num_workers)
    return values, scales, offsets


@compiled(fastmath=FASTMATH, part=True)
def _keep(scratch, rows, width, out, out_at, out_step):
    """Copies the outputs that exist of a panel that was computed aside."""
    for r in range(rows):
        for j in range(width):
            out[out_at + r * out_step + j] = scratch[r * PANEL + j]


@compiled(fastmath=FASTMATH, part=True)
def _panels8(rows, row, panels, x, size, starts, x_scales, w, p, ahead, w_scales, bias,
             out, out_at, out_step):  # fmt: skip
    """Some int8 panels from p for `rows` rows from `row`, in tiles as equal as can be.

    Each tile prefetches its share of the panels `ahead`, so that memory never rests.
    """
    tiles, turns = -(-rows // ROWS8), size // 4
    share = -(-LINE // tiles)  # bytes for each turn
    for t in range(tiles):
        r = rows * t // tiles
        first = row + r
        multiply8(x, first * size, size, starts, x_scales, first, w, p * PANEL * size, PANEL * size,
                  turns, w_scales, bias, p * PANEL, out, out_at + r * out_step, out_step,
                  ahead + t * share * turns, share, rows * (t + 1) // tiles - r,
                  panels)  # fmt: skip


@compiled(fastmath=FASTMATH)
def linear8_panels(values, x_scales, starts, w, w_scales, bias, out, lo, hi):
    """`linear8` of quantized rows for the outputs of panels lo ... hi - 1: what one worker does."""
    num_rows, size = values.shape
    num_outputs = out.shape[1]
    num_panels, rest = -(-num_outputs // PANEL), num_outputs % PANEL
    x, flat, step = values.reshape(-1), out.reshape(-1), PANEL * size
    few = num_rows <= ROWS8
    at_once = 1 if few else PANELS8
    scratch = empty((ROW_BLOCK * PANEL,), np.float32)
    whole = hi - 1 if rest and hi == num_panels else hi
    for row in range(0, num_rows, ROW_BLOCK):
        rows, p = min(ROW_BLOCK, num_rows - row), lo
        while p < hi:
            panels = at_once if p + at_once <= whole else 1
            ahead = AHEAD if few else panels * step
            # Why one call: the compiler writes out all tiles at each.
            to, o, o_step = (flat, row * num_outputs + p * PANEL, num_outputs)
            if p >= whole:
                to, o, o_step = (scratch, 0, PANEL)
            _panels8(rows, row, panels, x, size, starts, x_scales, w, p, ahead, w_scales, bias,
                     to, o, o_step)  # fmt: skip
            if p >= whole:
                _keep(scratch, rows, rest, flat, row * num_outputs + p * PANEL, num_outputs)
            p += panels


@compiled(parallel=True, fastmath=FASTMATH)
def _multiply8(values, x_scales, starts, w, w_scales, bias, out, num_workers):
    panels = -(-out.shape[1] // PANEL)
    for worker in prange(num_workers):
        lo, hi = share_of(panels, worker, num_workers)
        linear8_panels(values, x_scales, starts, w, w_scales, bias, out, lo, hi)


@compiled(fastmath=FASTMATH, part=True)
def sums8(offsets):
    """What `linear8` starts the sums of each row from, [T] int32; offsets of `quantize_rows`."""
    starts = empty((len(offsets),), np.int32)
    for t in range(len(offsets)):
        starts[t] = np.int32(OFFSET8) * np.sum(offsets[t])
    return starts


@compiled(fastmath=FASTMATH)
def linear8(x, w, w_scales, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias.

    w is packed int8; its scales and the bias are padded to whole panels.
    """
    values, x_scales, offsets = quantize_rows(x, num_workers)
    _multiply8(values, x_scales, sums8(offsets), w, w_scales, bias, out, num_workers)


@compiled(fastmath=FASTMATH, part=True)
def _panel4(rows, row, x, size, offsets, x_scales, w, p, ahead, scales, zeros, groups,
            units_a_group, w_scales, bias, out, out_at, out_step):  # fmt: skip
    """One int4 panel for `rows` rows from `row`, in tiles as equal as can be; see `_panels8`."""
    tiles, units, step = -(-rows // ROWS4), size // UNIT, PANEL * size // 2
    share = -(-LINE // tiles)  # bytes for each eight inputs
    for t in range(tiles):
        r = rows * t // tiles
        first = row + r
        multiply4(x, first * size, size, offsets, first * units, units, x_scales, first,
                  w, p * step, units, scales, zeros, p * groups * PANEL, units_a_group, w_scales,
                  bias, p * PANEL, out, out_at + r * out_step, out_step,
                  ahead + t * share * units * 4, share, rows * (t + 1) // tiles - r)  # fmt: skip


@compiled(fastmath=FASTMATH)
def linear4_panels(
    values, x_scales, offsets_of_rows, w, w_scales, scales, zeros, units_a_group, bias, out, lo, hi,
):  # fmt: skip
    """`linear4` of quantized rows for the outputs of panels lo ... hi - 1: what one worker does."""
    num_rows, size = values.shape
    num_outputs = out.shape[1]
    num_panels, rest = -(-num_outputs // PANEL), num_outputs % PANEL
    groups, step = -(-(size // UNIT) // units_a_group), PANEL * size // 2
    x, offsets, flat = values.reshape(-1), offsets_of_rows.reshape(-1), out.reshape(-1)
    few = num_rows <= ROWS4
    scratch = empty((ROW_BLOCK * PANEL,), np.float32)
    whole = hi - 1 if rest and hi == num_panels else hi
    for row in range(0, num_rows, ROW_BLOCK):
        rows = min(ROW_BLOCK, num_rows - row)
        for p in range(lo, hi):
            to, o, o_step = (flat, row * num_outputs + p * PANEL, num_outputs)
            if p >= whole:
                to, o, o_step = (scratch, 0, PANEL)
            _panel4(rows, row, x, size, offsets, x_scales, w, p, AHEAD if few else step, scales,
                    zeros, groups, units_a_group, w_scales, bias, to, o, o_step)  # fmt: skip
            if p >= whole:
                _keep(scratch, rows, rest, flat, row * num_outputs + p * PANEL, num_outputs)


@compiled(parallel=True, fastmath=FASTMATH)
def _multiply4(
    values, x_scales, offsets, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers
):  # fmt: skip
    panels = -(-out.shape[1] // PANEL)
    for worker in prange(num_workers):
        lo, hi = share_of(panels, worker, num_workers)
        linear4_panels(
            values, x_scales, offsets, w, w_scales, scales, zeros, units_a_group, bias, out, lo, hi
        )


@compiled(fastmath=FASTMATH)
def linear4(x, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias.

    w is packed int4; w_scales and the bias are padded to whole panels. What each group adds to its
    output's scale: scales and zeros, flat uint16, the bits of float16 [panels, groups, 16]; no
    zeros: an empty array of uint8.
    """
    values, x_scales, offsets = quantize_rows(x, num_workers)
    _multiply4(
        values, x_scales, offsets, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers
    )
