"""Linear layers with int8 weights on a CPU: integers times integers.

    x float32 ─ rotate, quantize groups of 64 inputs ─┐
                                                      ├─ int32 dot product per group ─ scales, bias
    weight of rotated inputs ─ panels of 16 outputs ──┘

A line of a panel holds 16 outputs x 4 inputs. Weights and activations have one scale per group of
64 inputs, which are rotated in blocks of 16 before they are rounded (`code_tables.py` has both
sizes, `layers.quantized_weight.quantize_rotated` says why). `cpu_groupwise.py` handles other weight
formats. `int8_gemm.py` multiplies with the CPU's own instructions. Dot products are exact, and
groups are added in order: a row's result has the same bits alone, in any batch and on any CPU.

`layers/quantized.py` is the reference implementation. Perf: `benchmarks/cpu_kernels.py`;
docs/experiments.md.

Legend: T rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.cpu_linear import copy_outputs, row_parts
from nanoengine.kernels.gemm import LINE, PANEL
from nanoengine.kernels.int8_gemm import (
    GROUP_INTS,
    UNIT,
    multiply8,
    quantize_rotated_group,
    quantize_unit,
    shapes8,
)
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for, share_of

ROWS8, PANELS8 = max(shapes8(CURRENT))
ROW_BLOCK = 128  # rows per panel before the next panel
FEW_ROWS = 8  # rows quantized by the calling thread
AHEAD = 16384  # bytes between read and prefetch, if one tile has all rows and reads panels in order

# Why no "nnan" and "ninf": a row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("contract", "nsz")


@compiled(fastmath=FASTMATH)
def _quantize_groups(x, values, groups, lo, hi):
    rotated = GROUP_INTS * x.shape[1] == GROUP * groups.shape[1]
    for t in range(lo, hi):
        row, row_values, row_groups = x[t], values[t], groups[t]
        for group in range(len(row_groups) // GROUP_INTS):
            at = group * GROUP_INTS
            if rotated:
                x_at = group * GROUP
                quantize_rotated_group(row, x_at, row_values, x_at, row_groups, at)
            else:
                x_at = group * UNIT
                quantize_unit(row, x_at, row_values, x_at, row_groups, at)


@compiled(fastmath=FASTMATH)
def quantize_groups(x, size, num_workers):
    """Quantizes x [T, K] to int8 with one scale per UNIT inputs, or per GROUP inputs after a
    rotation. Scales are the largest magnitude / 127, values are rounded half to even.

    Args:
        size: UNIT or GROUP.

    Returns:
        values: int8 [T, K padded to whole groups].
        groups: int32 [T, 4 * groups], four integers per group: -8 times the sum of its values, the
            same for its two halves, and the bits of its float32 scale. If the group contains NaN or
            infinity, the scale is NaN and the values are 0.
    """
    num_rows, count = len(x), -(-x.shape[1] // size)
    values = empty((num_rows, count * size), np.int8)
    groups = empty((num_rows, GROUP_INTS * count), np.int32)
    if x.shape[1] < count * size:
        unpadded, x = x, zeros((num_rows, count * size), np.float32)
        x[:, : unpadded.shape[1]] = unpadded
    workers = 1 if num_rows <= FEW_ROWS else num_workers
    parallel_for(_quantize_groups, num_rows, workers, (x, values, groups))
    return values, groups


@compiled(fastmath=FASTMATH)
def linear8_panels(values, x_groups, w, w_scales, bias, out, lo, hi):
    """`linear8` of quantized rows for the outputs of panels lo ... hi - 1: one worker's share.

    Rows are divided into tiles as equally as possible. Each tile prefetches its share of the next
    panels, so that memory is always busy.
    """
    (num_rows, size), num_outputs, groups = values.shape, out.shape[1], values.shape[1] // GROUP
    x, flat, step, steps = values.reshape(-1), out.reshape(-1), PANEL * size, size // 4
    flat_groups = x_groups.reshape(-1)
    few = num_rows <= ROWS8
    at_once = 1 if few else PANELS8
    for row in range(0, num_rows, ROW_BLOCK):
        rows, p = min(ROW_BLOCK, num_rows - row), lo
        tiles = -(-rows // ROWS8)
        share = -(-LINE // tiles)  # bytes per iteration
        while p < hi:
            panels = at_once if p + at_once <= hi else 1
            ahead = AHEAD if few else panels * step
            for t in range(tiles):
                first, last = row + rows * t // tiles, row + rows * (t + 1) // tiles
                n = p * PANEL
                multiply8(x, first * size, flat_groups, first * groups * GROUP_INTS, w, p * step,
                          w_scales, n * groups, groups, bias, n, flat, first * num_outputs + n,
                          num_outputs, ahead + t * share * steps, share, last - first,
                          panels)  # fmt: skip
            p += panels


@compiled(fastmath=FASTMATH)
def _linear8(values, x_groups, w, w_scales, bias, out, parts, lo, hi):
    """`linear8_panels` by PANELS8, so that tiles are whole."""
    step = hi - lo if parts == 1 else 1
    for i in range(lo, hi, step):
        first, last = share_of(len(values), i % parts, parts)
        tile = i // parts
        linear8_panels(
            values[first:last], x_groups[first:last], w, w_scales, bias, out[first:last],
             tile * PANELS8, min((tile + step) * PANELS8, out.shape[1] // PANEL),
        )  # fmt: skip


@compiled(fastmath=FASTMATH)
def linear8(x, w, w_scales, bias, out, num_workers):
    """out[T, N] = rotated and quantized x[T, K] @ w^T * scales + bias.

    w is packed int8, of rotated inputs; its scales and the bias are padded to whole panels.
    """
    values, x_groups = quantize_groups(x, GROUP, num_workers)
    panels = -(-out.shape[1] // PANEL)
    padded = out if out.shape[1] % PANEL == 0 else empty((len(out), panels * PANEL), np.float32)
    tiles = -(-panels // PANELS8)
    parts = row_parts(len(values), tiles, num_workers)
    operands = values, x_groups, w, w_scales, bias, padded, parts
    parallel_for(_linear8, tiles * parts, num_workers, operands)
    if out.shape[1] % PANEL:
        copy_outputs(padded, out)
