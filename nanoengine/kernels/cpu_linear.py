"""Linear layers on the CPU in float32: y = x W^T + b over weights packed once, compiled by numba.

    weight [N, K]                  packed, in place: panels of 16 outputs, inputs outermost
    row 0  ─────────────── K       panel 0:  w[0..15, 0]  w[0..15, 1]  ...  w[0..15, K-1]
    ...                            panel 1:  w[16..31, 0] ...
    row N-1                        what N leaves over 16 (N % 16 rows) is a narrower panel

A register tile holds `rows` x 16 results (or more panels for few rows) and walks the inputs: two
vectors of weights, one broadcast input a row. Memory is read once, in order, at any number of rows,
so one row runs at memory speed and many run at the FMA units' speed with one layout. In between the
tiles of a panel ask for the next panel, each for its share, so that memory never rests.

Each result is one chain of fused multiply-adds over the inputs in order, whatever the tile it falls
into: **a row's result has the same bits alone and in any batch**.

The readable form is `F.linear`, as `UnquantizedLinear` calls it; `tests/test_cpu_kernels.py`.

Source: register tiling over packed panels, Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication" (2008). Perf: `benchmarks/cpu_kernels.py`; docs/experiments.md.

Legend: T rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import Emit
from nanoengine.kernels.jit import compiled

PANEL = 16  # outputs side by side: two AVX registers
MAX_ROWS = 6  # rows of the largest tile: 12 sums, 2 weights and 1 input fill the 16 registers
INPUTS = 2048  # inputs that a tile walks at a time: its panel (128 KiB) stays in the L2 cache
ROW_BLOCK = 96  # rows that take turns on one panel: with 2,048 inputs 768 KiB, read in order
UNROLL = 4  # inputs that a tile takes at each turn of its loop
AHEAD = 20 * 64  # floats: few rows prefetch weights 5 KiB ahead, past what the hardware guesses

# Why no "reassoc": a result is one chain, whose order gives a row its bits. No "nnan" and "ninf": a
# row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("contract", "nsz")


@intrinsic(prefer_literal=True)
def tile(typing, x, x_at, x_stride, w, w_at, w_stride, size, start, start_at, start_stride,
         out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """out[r, p * 16 + j] = start[r, p * 16 + j] + sum over k < size of x[r, k] * w[p, k, j].

    For `rows` x `panels` * 16 results in registers. `start` is the bias (stride 0), or `out`. With
    input k it prefetches the weight `ahead` + k * `ahead_stride` after each panel's first.
    """
    num_rows, num_panels = rows.literal_value, panels.literal_value
    signature = types.void(x, x_at, x_stride, w, w_at, w_stride, size, start, start_at,
                           start_stride, out, out_at, out_stride, ahead, ahead_stride,
                           rows, panels)  # fmt: skip

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, w)
        word = args[1].type

        def lines(array_type, array, at, stride, count):
            pointers = [emit.pointer(array_type, array, at)]
            for _ in range(count - 1):
                pointers.append(emit.at(pointers[-1], stride))
            return pointers

        inputs = lines(x, args[0], args[1], args[2], num_rows)
        weights = lines(w, args[3], args[4], args[5], num_panels)
        starts = lines(start, args[7], args[8], args[9], num_rows)
        outputs = lines(out, args[10], args[11], args[12], num_rows)
        lanes = [word(i * emit.width) for i in range(PANEL // emit.width * num_panels)]
        for line in outputs:
            emit.prefetch(line, write=True)
        cells = [[emit.variable(emit.load(emit.at(line, at))) for at in lanes] for line in starts]

        def step(k):
            values = []
            for panel in weights:
                emit.prefetch(emit.at(panel, args[13], builder.mul(k, args[14])), level=2)
                line = emit.at(panel, builder.mul(k, word(PANEL)))
                for i in range(PANEL // emit.width):
                    values.append(emit.load(emit.at(line, word(i * emit.width))))
            for row, sums in zip(inputs, cells, strict=True):
                value = emit.broadcast(emit.at(row, k))
                for cell, weight in zip(sums, values, strict=True):
                    builder.store(emit.fma(value, weight, builder.load(cell)), cell)

        turns = builder.sdiv(args[6], word(UNROLL))
        with cgutils.for_range(builder, turns) as loop:
            first = builder.mul(loop.index, word(UNROLL))
            for i in range(UNROLL):
                step(builder.add(first, word(i)))
        done = builder.mul(turns, word(UNROLL))
        with cgutils.for_range(builder, builder.sub(args[6], done)) as loop:
            step(builder.add(done, loop.index))
        for line, sums in zip(outputs, cells, strict=True):
            for cell, at in zip(sums, lanes, strict=True):
                emit.store(builder.load(cell), emit.at(line, at))
        return context.get_dummy_value()

    return signature, codegen


@compiled(fastmath=FASTMATH)
def _rows_of_panel(
    rows, x, x_at, x_step, w, w_at, size, start, start_at, s_step, out, out_at, o_step, to_next
):
    """One panel for any number of rows, in tiles as equal as can be: 8 rows are 4 + 4, not 6 + 2.

    Why equal: a tile of two rows waits for its own sums instead of keeping both FMA units busy.
    Each tile prefetches its share of the panel `to_next` floats further on. Why: if only the first
    tile read memory, memory would rest during the others.
    """
    tiles = -(-rows // MAX_ROWS)
    share = -(-PANEL // tiles)  # floats for each input of this panel
    for t in range(tiles):
        r, m = rows * t // tiles, rows * (t + 1) // tiles - rows * t // tiles
        a, s, o = x_at + r * x_step, start_at + r * s_step, out_at + r * o_step
        ahead = to_next + t * share * size
        if m == 6:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 6, 1)  # fmt: skip
        elif m == 5:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 5, 1)  # fmt: skip
        elif m == 4:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 4, 1)  # fmt: skip
        elif m == 3:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 3, 1)  # fmt: skip
        elif m == 2:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 2, 1)  # fmt: skip
        else:
            tile(x, a, x_step, w, w_at, 0, size, start, s, s_step, out, o, o_step,
                 ahead, share, 1, 1)  # fmt: skip


@compiled(fastmath=FASTMATH)
def _few_rows(rows, lo, hi, x, w, bias, out, num_inputs, num_outputs):
    """Panels from lo for 1 to 3 rows, several at once, which keeps the FMA units busy; returns the
    first of those that are left over before hi."""
    width = 4 if rows == 1 else 2
    step = num_inputs * PANEL  # from one panel to the next
    for p in range(lo, hi - width + 1, width):
        at, n = p * step, p * PANEL
        if rows == 1:
            tile(x, 0, num_inputs, w, at, step, num_inputs, bias, n, 0, out, n, num_outputs,
                 AHEAD, PANEL, 1, 4)  # fmt: skip
        elif rows == 2:
            tile(x, 0, num_inputs, w, at, step, num_inputs, bias, n, 0, out, n, num_outputs,
                 AHEAD, PANEL, 2, 2)  # fmt: skip
        else:
            tile(x, 0, num_inputs, w, at, step, num_inputs, bias, n, 0, out, n, num_outputs,
                 AHEAD, PANEL, 3, 2)  # fmt: skip
    return hi - (hi - lo) % width


@compiled(fastmath=FASTMATH)
def _block_of_rows(rows, row, lo, hi, x, w, bias, out, num_inputs, num_outputs):
    """Panels lo ... hi - 1 for `rows` rows from `row`, which stay in the cache meanwhile."""
    step = num_inputs * PANEL  # from one panel to the next
    for first in range(0, num_inputs, INPUTS):
        size = min(INPUTS, num_inputs - first)
        a = row * num_inputs + first
        for p in range(lo, hi):
            n, o = p * PANEL, row * num_outputs + p * PANEL
            at = p * step + first * PANEL
            # Why one call: the compiler writes out all tiles at each.
            start, start_at, s_step = (bias, n, 0) if first == 0 else (out, o, num_outputs)
            _rows_of_panel(rows, x, a, num_inputs, w, at, size, start, start_at, s_step,
                           out, o, num_outputs, step)  # fmt: skip


@compiled(fastmath=FASTMATH)
def last_outputs(rows, x, w, bias, out, num_inputs, num_outputs):
    """The last num_outputs % 16 outputs: a narrow panel, small enough to be slow."""
    width = num_outputs % PANEL
    first = num_outputs - width
    at = first * num_inputs
    for r in range(rows):
        for j in range(width):
            total = bias[first + j]
            for k in range(num_inputs):
                total += x[r * num_inputs + k] * w[at + k * width + j]
            out[r * num_outputs + first + j] = total


@compiled(parallel=True, fastmath=FASTMATH)
def linear(x, w, bias, out, num_workers):
    """out[T, N] = x[T, K] @ weight^T + bias[N]; each worker takes a share of the panels of w."""
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    num_panels = num_outputs // PANEL
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    for worker in prange(num_workers):
        lo = num_panels * worker // num_workers
        hi = num_panels * (worker + 1) // num_workers
        if 1 <= num_rows <= 3:  # what this leaves over goes the way of more rows
            lo = _few_rows(num_rows, lo, hi, inputs, w, bias, outputs, num_inputs, num_outputs)
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            _block_of_rows(rows, row, lo, hi, inputs, w, bias, outputs, num_inputs, num_outputs)
        if worker == num_workers - 1 and num_outputs % PANEL:
            last_outputs(num_rows, inputs, w, bias, outputs, num_inputs, num_outputs)


@compiled(fastmath=FASTMATH)
def _dequantize(w, p, bits, scales, zeros, group_size, size, panel):
    """panel[k, j] = (value - zero) * scale of panel p, whose inputs share scales in groups."""
    groups = size // group_size
    for g in range(groups):
        at = (p * groups + g) * PANEL
        scale = scales[at : at + PANEL]
        for k in range(g * group_size, (g + 1) * group_size):
            row = panel[k * PANEL : k * PANEL + PANEL]
            if bits == 8:
                line = w[(p * size + k) * PANEL : (p * size + k) * PANEL + PANEL]
                for j in range(PANEL):
                    row[j] = np.float32(line[j])
            else:  # inputs 2 i and 2 i + 1 are the halves of a byte
                pair = (p * (size // 2) + k // 2) * PANEL
                line, shift = w[pair : pair + PANEL], np.int8(4 * (k % 2))
                for j in range(PANEL):
                    row[j] = np.float32(((line[j] >> shift) & np.int8(15)) - np.int8(8))
            if len(zeros):
                zero = zeros[at : at + PANEL]
                for j in range(PANEL):
                    row[j] -= zero[j]
            for j in range(PANEL):
                row[j] *= scale[j]


@compiled(parallel=True, fastmath=FASTMATH)
def linear_dequantized(x, w, bits, scales, zeros, group_size, bias, out, num_workers):
    """`linear` over whole numbers with scales, made floats panel by panel: T rows share the work.

    w: flat int8, [panels, K, 16] values, or [panels, K / 2, 16] pairs of 4 bits, plus 8; scales,
    zeros: flat float32 [panels, groups, 16], no zeros: an empty array; bias: padded to panels.
    """
    num_rows, size = x.shape
    if num_rows == 0:
        return  # or each panel would be made floats for nobody
    num_outputs = out.shape[1]
    num_panels, rest = -(-num_outputs // PANEL), num_outputs % PANEL
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    for worker in prange(num_workers):
        panel = np.empty(size * PANEL, np.float32)
        aside = np.empty(ROW_BLOCK * PANEL, np.float32)
        lo, hi = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        for p in range(lo, hi):
            _dequantize(w, p, bits, scales, zeros, group_size, size, panel)
            n = p * PANEL
            for row in range(0, num_rows, ROW_BLOCK):
                rows, a = min(ROW_BLOCK, num_rows - row), row * size
                if rest and p == num_panels - 1:
                    _rows_of_panel(rows, inputs, a, size, panel, 0, size, bias, n, 0,
                                   aside, 0, PANEL, 0)  # fmt: skip
                    for r in range(rows):
                        for j in range(rest):
                            outputs[(row + r) * num_outputs + n + j] = aside[r * PANEL + j]
                else:
                    o = row * num_outputs + n
                    _rows_of_panel(rows, inputs, a, size, panel, 0, size, bias, n, 0,
                                   outputs, o, num_outputs, 0)  # fmt: skip


@compiled(parallel=True, fastmath=FASTMATH)
def pack(weight, num_inputs, num_outputs):
    """Turns a flat row-major weight into panels, in place: 16 rows become one panel."""
    num_panels = -(-num_outputs // PANEL)
    for p in prange(num_panels):
        width = min(PANEL, num_outputs - p * PANEL)
        panel = weight[p * PANEL * num_inputs : (p * PANEL + width) * num_inputs]
        rows = panel.copy()
        for j in range(width):
            for k in range(num_inputs):
                panel[k * width + j] = rows[j * num_inputs + k]


@compiled(parallel=True, fastmath=FASTMATH)
def unpack_rows(w, ids, out, num_outputs):
    """out[i] = row ids[i] of the weight [N, K] that was packed."""
    num_inputs = out.shape[1]
    for i in prange(len(ids)):
        panel, j = ids[i] // PANEL, ids[i] % PANEL
        width = min(PANEL, num_outputs - panel * PANEL)
        at, row = panel * PANEL * num_inputs + j, out[i]
        for k in range(num_inputs):
            row[k] = w[at + k * width]
