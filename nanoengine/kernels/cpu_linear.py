"""Linear layers on the CPU: y = x W^T + b over weights packed once, compiled by numba.

    weight [N, K]                  packed, in place: panels of 16 outputs, inputs outermost
    row 0  ─────────────── K       panel 0:  w[0..15, 0]  w[0..15, 1]  ...  w[0..15, K-1]
    ...                            panel 1:  w[16..31, 0] ...
    row N-1                        the remaining N % 16 rows are a narrower panel

A register tile (`gemm.py`) computes some rows x 16 results and loops over the inputs. Memory is
read once and in order, for any number of rows. One layout therefore serves one row, at memory
speed, and many rows, at the speed of the multipliers. Each tile of a panel also prefetches its
share of the next panel, so that memory is always busy.

Weights are float32, float16 or bfloat16; bfloat16 is stored in pairs of inputs, see `gemm.py`.
16-bit weights become float32 in registers, so results have the bits of a float32 copy at half its
bytes. Each result is one chain of fused multiply-adds over the inputs in order, whatever tile
computes it: **a row's result has the same bits alone and in any batch**.

The reference implementation is `F.linear`, as `UnquantizedLinear` calls it
(`tests/kernels/test_cpu_kernels.py`).

Source: register tiling over packed panels, Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication" (2008). Perf: `benchmarks/cpu_kernels.py`; docs/experiments.md.

Legend: T rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.gemm import FEW, LINE, PANEL, PANELS, ROWS, element, inputs_in, offset, tile
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.pool import PIECES, parallel_for, share_of

INPUTS = 2048  # inputs per pass of a tile: its panels (128 KiB each) stay in the L2 cache
ROW_BLOCK = 96  # rows per panel before the next panel: with 2,048 inputs 768 KiB, read in order
AHEAD = 80 * LINE  # bytes: few rows prefetch weights 5 KiB ahead, beyond the hardware prefetcher
MIN_PART_ROWS = 32  # per part of the rows: four tiles for each panel that the part reads
MAX_FEW_ROWS = max(FEW)
BF16_DOTS = CURRENT.bf16_dots == "vdpbf16ps"
BF16_OPERAND = np.uint32 if BF16_DOTS else np.float32
PANELS_BY_ROWS = tuple(FEW.get(rows, 1) for rows in range(MAX_FEW_ROWS + 1))

# Why no "reassoc": a result is one chain, whose order gives a row its bits. No "nnan" and "ninf": a
# row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("contract", "nsz")


@compiled(fastmath=FASTMATH, inline=True)
def run_tiles(
    rows, panels, x, x_at, x_step, w, w_at, w_step, size, start, start_at, s_stride,
    out, out_at, o_stride, to_next,
):  # fmt: skip
    """Multiplies any number of rows by some panels, in tiles of equal size if possible: 8 rows are
    4 + 4.

    Why equal: a tile of two rows waits for its own sums and leaves FMA units idle. Each tile
    prefetches its share of the panels `to_next` bytes later. Why each: if only the first tile
    prefetched, memory would be idle during the others.
    """
    tiles = -(-rows // ROWS)
    share = -(-LINE // tiles)  # bytes of each line of a panel
    lines = size * PANEL * w.itemsize // LINE
    for t in range(tiles):
        r = rows * t // tiles
        tile(x, x_at + r * x_step, x_step, w, w_at, w_step * w.itemsize, lines, start,
             start_at + r * s_stride, s_stride, out, out_at + r * o_stride, o_stride,
             to_next + t * share * lines, share, rows * (t + 1) // tiles - r, panels)  # fmt: skip


@compiled(fastmath=FASTMATH, inline=True)
def last_outputs(rows, x, w, bias, out, num_inputs, num_outputs):
    """The last num_outputs % 16 outputs: a panel so narrow that slow code is good enough."""
    width = num_outputs % PANEL
    first = num_outputs - width
    at = first * num_inputs
    for r in range(rows):
        for j in range(width):
            total = bias[first + j]
            for k in range(num_inputs):
                value = element(x, r * num_inputs + offset(x, k, 0, 1))
                total += value * element(w, at + offset(w, k, j, width))
            out[r * num_outputs + first + j] = total


@compiled(fastmath=FASTMATH, inline=True)
def block_rows(rows, block, blocks):
    """(first, end) of one of `blocks` blocks of rows, which consist of whole tiles."""
    first, stop = share_of(-(-rows // ROWS), block, blocks)
    return first * ROWS, min(stop * ROWS, rows)


@compiled(fastmath=FASTMATH)
def linear_panels(x, w, bias, out, lo, hi):
    """`linear` for the outputs of panels lo ... hi - 1: one worker's share."""
    num_rows, num_inputs = x.shape  # or pairs of them
    num_outputs = out.shape[1]
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    step = num_inputs * PANEL  # from one panel to the next
    few = num_rows <= MAX_FEW_ROWS
    at_once = PANELS_BY_ROWS[num_rows] if few else PANELS
    max_inputs = num_inputs if few else INPUTS
    blocks = -(-num_rows // ROW_BLOCK)
    for block in range(blocks):
        row, stop = block_rows(num_rows, block, blocks)
        rows = stop - row
        for first in range(0, num_inputs, max_inputs):
            size, x_at, p = min(max_inputs, num_inputs - first), row * num_inputs + first, lo
            while p < hi:
                panels = at_once if p + at_once <= hi else 1
                n, o_at = p * PANEL, row * num_outputs + p * PANEL
                start, at, stride = (bias, n, 0) if first == 0 else (outputs, o_at, num_outputs)
                ahead = AHEAD if few else panels * step * w.itemsize
                run_tiles(rows, panels, inputs, x_at, num_inputs, w,
                                p * step + first * PANEL, step, size, start, at, stride,
                                outputs, o_at, num_outputs, ahead)  # fmt: skip
                p += panels


@compiled(fastmath=FASTMATH, inline=True)
def row_parts(rows, tiles, workers):
    """Number of parts into which rows are cut if a weight has too few tiles for all workers.

    Work items are then parts of tiles; the parts of one tile follow each other.
    """
    parts = 1
    while tiles * parts < PIECES * workers and rows >= (parts + 1) * MIN_PART_ROWS:
        parts += 1
    return parts


@compiled(fastmath=FASTMATH, inline=True)
def plan_items(rows, tiles, workers):
    """(work items, parts of the rows) of a product. With 0 parts each item is all tiles for a few
    rows.

    Why by rows if they are many: the worker that computes a row also reads it next, from its own
    cache. In return each worker reads all weights.
    """
    if rows >= ROW_BLOCK * PIECES * workers:
        return -(-rows // ROWS), 0
    parts = row_parts(rows, tiles, workers)
    return tiles * parts, parts


@compiled(fastmath=FASTMATH, inline=True)
def item_range(i, count, rows, tiles, parts):
    """(first row, end, first tile, end) of items i ... i + count - 1; count is 1 with several
    parts."""
    if parts == 0:
        return i * ROWS, min((i + count) * ROWS, rows), 0, tiles
    first, last = share_of(rows, i % parts, parts)
    return first, last, i // parts, i // parts + count


@compiled(fastmath=FASTMATH)
def _linear(x, w, bias, out, tiles, parts, lo, hi):
    """`linear_panels` by PANELS; includes the outputs after the last whole panel if they are in the
    range."""
    whole, step = out.shape[1] // PANEL, hi - lo if parts <= 1 else 1
    for i in range(lo, hi, step):
        first, last, tile, stop = item_range(i, step, len(x), tiles, parts)
        rows, results = x[first:last], out[first:last]
        linear_panels(rows, w, bias, results, tile * PANELS, min(stop * PANELS, whole))
        if stop * PANELS > whole:
            size = x.shape[1] * inputs_in(x)
            last_outputs(
                len(rows), rows.reshape(-1), w, bias, results.reshape(-1), size, out.shape[1]
            )


@compiled(fastmath=FASTMATH)
def linear(x, w, bias, out, num_workers):
    """out[T, N] = x[T, K] @ weight^T + bias[N], in pieces of whole tiles: some panels of w.

    w is flat: float32, float16, or bfloat16 as uint16; or bfloat16 as uint32, for an x of pairs of
    bfloat16 from `round_to_bf16`.
    """
    tiles = -(-out.shape[1] // (PANELS * PANEL))
    count, parts = plan_items(len(x), tiles, num_workers)
    parallel_for(_linear, count, num_workers, (x, w, bias, out, tiles, parts))


@specialize()
def native_weight(w):
    """bfloat16 pairs in the form that `linear` reads on this CPU; other weights are unchanged."""
    if w.dtype == types.uint32 and not BF16_DOTS:
        return lambda w: w.view(np.uint16)
    return lambda w: w


@compiled(fastmath=FASTMATH)
def _round_rows(x, out, lo, hi):
    for t in range(lo, hi):
        row, bits = out[t].view(np.uint32), x[t].view(np.uint32)
        for i in range(len(row)):
            if BF16_DOTS:
                row[i] = to_bf16(bits[2 * i]) << np.uint32(16) | to_bf16(bits[2 * i + 1])
            else:
                row[i] = to_bf16(bits[i]) << np.uint32(16)


@compiled(fastmath=FASTMATH)
def round_to_bf16(x, num_workers):
    """x [T, K] rounded to bfloat16: pairs of inputs [T, K / 2], the first in the high half; or
    float32 on a CPU without bfloat16 dot products, which converts both in registers."""
    out = empty((len(x), x.shape[1] // 2 if BF16_DOTS else x.shape[1]), BF16_OPERAND)
    parallel_for(_round_rows, len(x), num_workers, (x, out))
    return out


@compiled(fastmath=FASTMATH)
def linear_bf16_inputs(x, w, bias, out, num_workers):
    """`linear` of x [T, K] float32 rounded to bfloat16, accumulated in float32; w is flat uint32,
    pairs of bfloat16."""
    linear(round_to_bf16(x, num_workers), native_weight(w), bias, out, num_workers)


@compiled(fastmath=FASTMATH, inline=True)
def to_bf16(bits):
    """The bits of a float32 rounded to bfloat16, half to even; a NaN stays NaN."""
    if bits & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint32(0x7FC0)
    last = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint32(bits + np.uint32(0x7FFF) + last) >> np.uint32(16)


@compiled(fastmath=FASTMATH, inline=True)
def copy_outputs(padded, out):
    """Copies the outputs from a buffer with padded panels to out [T, N]."""
    for t in range(len(out)):
        for n in range(out.shape[1]):
            out[t, n] = padded[t, n]


@compiled(fastmath=FASTMATH)
def _pack_panels(weight, num_inputs, num_outputs, in_pairs, lo, hi):
    rows = empty((PANEL * num_inputs,), weight.dtype)
    for p in range(lo, hi):
        width = min(PANEL, num_outputs - p * PANEL)
        panel = weight[p * PANEL * num_inputs : (p * PANEL + width) * num_inputs]
        for i in range(len(panel)):
            rows[i] = panel[i]
        for j in range(width):
            row = rows[j * num_inputs : (j + 1) * num_inputs]
            for k in range(num_inputs):
                at = (k // 2 * width + j) * 2 + 1 - k % 2 if in_pairs else k * width + j
                panel[at] = row[k]


@compiled(fastmath=FASTMATH)
def pack(weight, num_inputs, num_outputs, in_pairs, num_workers):
    """Packs a flat row-major weight into panels, in place: 16 rows become one panel.

    weight: the bits of its elements, uint32 or uint16; in_pairs: the layout of bfloat16.
    """
    panels = -(-num_outputs // PANEL)
    parallel_for(_pack_panels, panels, num_workers, (weight, num_inputs, num_outputs, in_pairs))


@compiled(fastmath=FASTMATH)
def _unpack_rows(w, ids, out, num_outputs, lo, hi):
    for i in range(lo, hi):
        panel, j, row = ids[i] // PANEL, ids[i] % PANEL, out[i]
        width = min(PANEL, num_outputs - panel * PANEL)
        at = panel * PANEL * len(row)
        for k in range(len(row)):
            row[k] = element(w, at + offset(w, k, j, width))


@compiled(fastmath=FASTMATH)
def unpack_rows(w, ids, out, num_outputs, num_workers):
    """out[i] = row ids[i] of the packed weight [N, K]."""
    parallel_for(_unpack_rows, len(ids), num_workers, (w, ids, out, num_outputs))
