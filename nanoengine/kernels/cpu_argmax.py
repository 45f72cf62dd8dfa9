"""Exact argmax over many outputs that reads a quarter of the bytes: for the LM head on the CPU.

    x ─ times an int8 copy of the weight ─ each output's estimate, plus or minus its slack
                                                   │
    panels that may hold the largest output <──────┘
    x ─ times the float32 weight, these panels ─ the largest output and its index

Each row would read every weight of the head, a quarter of a small model's weights. The copy finds
the few panels that can contain the row's largest output. The tiles of `cpu_linear.linear` then
compute these panels, so index and value equal its results **bit for bit**.

Estimates are sums of integers: 8-bit weights times 16-bit inputs (`int8_gemm.py`), faster than
float32 and exact.

Why nothing is missed: with w = scale * q + e and x = unit * z + d, an output differs from its
estimate by e . x + scale * q . d, at most |e| |x| + |w - e| |d| (Cauchy and Schwarz); its float32
chain of K multiply-adds, fused or not, by at most K 2^-24 |w| |x|; products with the scales by a
few 2^-24 of themselves. `slack` times |x| exceeds the sum of these: rounding terms count twice,
which also covers higher-order terms. The sum of estimate and slack needs no margin: rounding keeps
order, and an output is a float32 itself. So each output is between its `lower` and its `upper`
bound. The upper bound of the largest output is not below any lower bound, and a panel is skipped
only if its upper bound is.
Source: error of a dot product, Higham, "Accuracy and Stability of Numerical Algorithms" (2002),
3.1.

Outputs equal to the largest are also computed, so the lowest index is found. Outputs without a
bound (weights that are not finite, or huge) are always computed. For inputs without a bound the
caller computes all outputs, which is also the reference implementation (`runner/sampling/draw.py`).

Masks restrict the outputs: bit i % 32 of masks[r, i // 32] says whether output i of row r is
allowed. A panel without an allowed output is skipped. Without masks all outputs are allowed.

`largest_of` finds the largest of outputs that are already computed.

Legend: L rows of x, N outputs, K inputs, padded with zeros to a multiple of 4 in the copy.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_linear import FASTMATH, last_outputs
from nanoengine.kernels.emit import emit_intrinsic
from nanoengine.kernels.gemm import LINE, PANEL, element, offset, tile
from nanoengine.kernels.int8_gemm import max_rows, multiply16
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import PIECES, parallel_for, share_of

MAX_ROWS = max_rows(CURRENT)
INFINITY = np.int32(0x7F800000)  # its bits; the bits of a NaN are larger

# Norms of x and of rows of w between which float32 neither overflows nor loses small terms: an
# output is below 1e30, scale times unit a normal number. A product below this range loses 1e-45, or
# 1e-38 if the processor flushes it to zero; K of them stay below MIN_SLACK * SMALLEST.
SMALLEST, LARGEST = 1e-14, 1e15
MIN_SLACK = 1e-18
MAX_INPUT_ERROR = 2.0**-13  # |d| / |x|; for an x with a larger error all outputs are computed
MAX_SUM = 2.0**24  # of |z|: times 127 it stays below 2^31
ALL_OUTPUTS = (1 << PANEL) - 1
SEARCH_PANELS = 16  # searched one by one if one of them contains the largest output so far
# A share may compute one panel out of COMPUTED_ONE_IN, plus EXTRA_PANELS, because all candidates
# may be in one small share. With more candidates, computing all outputs is as fast.
COMPUTED_ONE_IN, EXTRA_PANELS = 16, 8


@compiled(fastmath=FASTMATH)
def _quantize_panels(w, values, scales, slack, num_inputs, lo, hi):
    for p in range(lo, hi):
        panel, copy = w[p * PANEL * num_inputs :], values[p]
        panel_scales, panel_slack = scales[p * PANEL :], slack[p * PANEL :]
        largest, squares = zeros((PANEL,), np.float32), zeros((PANEL,), np.float64)
        for k in range(num_inputs):
            for j in range(PANEL):
                weight = element(panel, offset(panel, k, j, PANEL))
                largest[j] = max(largest[j], abs(weight))
                squares[j] += np.float64(weight) * np.float64(weight)
        inverse, errors = zeros((PANEL,), np.float32), zeros((PANEL,), np.float64)
        for j in range(PANEL):
            panel_scales[j] = 0
            if squares[j] < LARGEST * LARGEST and largest[j] > SMALLEST:
                panel_scales[j] = largest[j] / np.float32(127)
                inverse[j] = np.float32(1) / panel_scales[j]
        copy[:] = 0
        for k in range(num_inputs):
            for j in range(PANEL):
                weight = element(panel, offset(panel, k, j, PANEL))
                value = np.rint(weight * inverse[j]) if inverse[j] > 0 else np.float32(0)
                error = np.float64(weight) - np.float64(value) * np.float64(panel_scales[j])
                errors[j] += error * error
                copy[(k // 2 * PANEL + j) * 2 + k % 2] = np.int8(value)
        for j in range(PANEL):
            panel_slack[j] = np.inf
            if squares[j] < LARGEST * LARGEST:
                error, length = np.sqrt(errors[j]), np.sqrt(squares[j])
                relative = MAX_INPUT_ERROR + (2 * num_inputs + 16) * 2.0**-24
                bound = (error + relative * (length + error)) * (1 + 1e-6)
                panel_slack[j] = max(bound, MIN_SLACK)


@compiled(fastmath=FASTMATH)
def quantize_outputs(w, values, scales, slack, num_inputs, workers):
    """The int8 copy of packed panels: w = values * scale, within `slack`.

    Inputs are stored in pairs for the tiles: each row of values [panels, K * 16] is [K / 2, 16, 2].
    An output whose weights are not finite, or too large for a bound, gets an infinite slack.
    """
    operands = w, values, scales, slack, num_inputs
    parallel_for(_quantize_panels, len(values), workers, operands)


@compiled(fastmath=FASTMATH, inline=True)
def _quantize_row(x, values):
    """(unit, |x| rounded up): x = unit * values, in 16 bits. unit is 0 for an x without a bound: it
    is not finite, too large or too small, or its range is too wide."""
    largest, total, squares = np.float64(0), np.float64(0), np.float64(0)
    for value in x:
        size = abs(np.float64(value))
        largest = max(largest, size)
        total += size
        squares += size * size
    norm = np.sqrt(squares)
    if not SMALLEST < norm < LARGEST:
        return np.float32(0), np.float32(0)
    unit = np.float32(max(largest / 32000, total / (MAX_SUM - len(x))))
    inverse, errors = 1 / np.float64(unit), np.float64(0)
    for i in range(len(x)):
        value = np.rint(np.float64(x[i]) * inverse)
        values[i] = np.int16(value)
        error = np.float64(x[i]) - value * np.float64(unit)
        errors += error * error
    if np.sqrt(errors) > MAX_INPUT_ERROR * norm:
        return np.float32(0), np.float32(0)
    return unit, np.float32(norm * (1 + 1e-6))


@emit_intrinsic(types.UniTuple(types.float32, 2))
def _bounds(emit, estimates, at, scales, slack, column, unit, norm, allowed):
    """(upper, lower) bound of the largest of a panel's outputs that have a bit in `allowed`; -inf
    if there is none."""
    builder, kinds, word, lanes = emit.builder, emit.kinds, at.type, emit.words
    bits = emit.splat(builder.trunc(allowed, lanes.element), lanes)
    unit, norm, lowest = emit.splat(unit), emit.splat(norm), emit.constant(-np.inf)
    lines = [emit.pointer(kinds.estimates, estimates, at)]
    lines += [emit.pointer(kinds.scales, array, column) for array in (scales, slack)]
    upper, lower = [], []
    for i in range(0, PANEL, emit.width):
        estimate, scale, span = (emit.load(emit.at(line, word(i))) for line in lines)
        own_bits = ir.Constant(lanes, [1 << (i + j) for j in range(emit.width)])
        banned = builder.icmp_unsigned("==", builder.and_(bits, own_bits), lanes(None))
        value = builder.fmul(estimate, builder.fmul(scale, unit))
        margin = builder.fmul(span, norm)
        upper.append(builder.select(banned, lowest, builder.fadd(value, margin)))
        lower.append(builder.select(banned, lowest, builder.fsub(value, margin)))
    bounds = emit.reduce_lanes(upper, emit.maximum), emit.reduce_lanes(lower, emit.maximum)
    return emit.context.make_tuple(builder, types.UniTuple(types.float32, 2), bounds)


@compiled(fastmath=FASTMATH, inline=True)
def _allowed(masks, r, p):
    """The mask bits of a panel's outputs in row r."""
    if not len(masks):
        return ALL_OUTPUTS
    return (np.int64(masks[r, p // 2]) >> PANEL * (p % 2)) & ALL_OUTPUTS


@compiled(fastmath=FASTMATH)
def _bound(values, copy, scales, slack, units, norms, masks, upper, lower, first, last):
    """upper[r, p] = an upper bound of panel p's largest output in row r; lower[s, r] = a lower
    bound of the largest output in the panels of share s. From estimates: values [L, K] times the
    int8 copy."""
    (num_rows, size), tiles = values.shape, -(-len(values) // MAX_ROWS)
    x, w, steps = values.reshape(-1), copy.reshape(-1), size // 4
    fetch = -(-LINE // max(1, tiles))  # bytes of the next panel that a tile prefetches each time
    estimates = empty((num_rows * PANEL,), np.float32)  # of a panel, in units of both factors
    for share in range(first, last):
        lo, hi = share_of(len(copy), share, len(lower))
        share_lower = lower[share]
        share_lower[:] = -np.inf
        for p in range(lo, hi):
            for t in range(tiles):
                row, stop = num_rows * t // tiles, num_rows * (t + 1) // tiles
                multiply16(x, row * size, size, w, p * PANEL * size, steps, estimates, row * PANEL,
                           PANEL, PANEL * size + t * fetch * steps, fetch, stop - row,
                           1)  # fmt: skip
            for r in range(num_rows):
                upper[r, p], panel_lower = _bounds(
                    estimates, r * PANEL, scales, slack, p * PANEL, units[r], norms[r],
                    _allowed(masks, r, p),
                )  # fmt: skip
                share_lower[r] = max(share_lower[r], panel_lower)


@compiled(fastmath=FASTMATH, inline=True)
def _first_largest(outputs, lo, hi, allowed, index, largest, second):
    """Updates (index, largest, second) with outputs[lo : hi]: the first of the largest outputs, and
    the largest of all others; NaN is the largest."""
    for i in range(lo, hi):
        output = outputs[i]
        if not allowed >> (i - lo) & 1:
            continue
        if output > largest or (output != output and largest == largest):
            index, largest, second = i, output, largest
        elif output > second:
            second = output
    return index, largest, second


@compiled(fastmath=FASTMATH, inline=True)
def _sort_key(x):
    """A float32 as an integer with the same order; NaN is the largest. Why: comparisons without NaN
    rules vectorize."""
    bits = np.float32(x).view(np.int32)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    if size > INFINITY:
        return size
    return size if bits >= 0 else np.int32(-size)


@compiled(fastmath=FASTMATH, inline=True)
def _largest_key(row, lo, hi):
    """The largest `_sort_key` of outputs lo ... hi - 1."""
    highest, part = np.int32(-0x80000000), row[lo:hi]
    for i in range(len(part)):  # Why by index: numba's array iteration does not vectorize
        output = _sort_key(part[i])
        highest = output if output > highest else highest
    return highest


@compiled(fastmath=FASTMATH)
def _largest_of_shares(outputs, masks, ids, largest, second, first_share, last_share):
    """`largest_of` for each share: ids[s, r], largest[s, r], and some smaller output."""
    num_rows, num_outputs = outputs.shape
    num_panels = -(-num_outputs // PANEL)
    for share in range(first_share, last_share):
        start, stop = share_of(num_panels, share, len(ids))
        for r in range(num_rows):
            row, index = outputs[r], np.int64(0)
            best, other = np.float32(-np.inf), np.float32(-np.inf)
            for first in range(start, stop, SEARCH_PANELS):
                last = min(first + SEARCH_PANELS, stop)
                if _largest_key(row, first * PANEL, last * PANEL) <= _sort_key(best):
                    continue
                for p in range(first, last):
                    index, best, other = _first_largest(
                        row, p * PANEL, min(p * PANEL + PANEL, num_outputs),
                        _allowed(masks, r, p), index, best, other,
                    )  # fmt: skip
            ids[share, r], largest[share, r], second[share, r] = index, best, other


@compiled(fastmath=FASTMATH, inline=True)
def _merge_shares(ids, largest, second, r):
    """Merges the shares of row r: the index of the largest output, the lowest among equals, or -1
    if a share has no result; the largest output, and the second largest."""
    index, best, other = ids[0, r], largest[0, r], second[0, r]
    for share in range(1, len(ids)):
        output = largest[share, r]
        if ids[share, r] < 0 or index < 0:
            index = -1
        elif _sort_key(output) > _sort_key(best):
            index, best, other = ids[share, r], output, max(best, other)
        else:
            other = max(output, other)
        other = max(second[share, r], other)
    return index, best, other


@compiled(fastmath=FASTMATH)
def largest_of(outputs, masks, ids, largest, workers):
    """ids[r] and largest[r] of the largest output in each row of outputs [L, N]: the lowest index
    among equals; of NaN, which counts as the largest, the first. masks: see `largest_outputs`."""
    winners = empty((workers * PIECES, len(outputs)), np.int64)
    best, second = empty(winners.shape, np.float32), empty(winners.shape, np.float32)
    parallel_for(_largest_of_shares, len(winners), workers, (outputs, masks, winners, best, second))
    for r in range(len(outputs)):
        ids[r], largest[r], _ = _merge_shares(winners, best, second, r)


@compiled(fastmath=FASTMATH, inline=True)
def _tie_width(largest, softcap):
    """The maximum distance below the largest output at which rounding can make another output equal
    to it after softcap * tanh(output / softcap): 8 roundings of the cap, divided by the slope."""
    e = np.exp(np.float32(-2) * largest / softcap)
    slope = np.float32(4) * e / ((np.float32(1) + e) * (np.float32(1) + e))
    return softcap * np.float32(2**-20) / slope


@compiled(fastmath=FASTMATH)
def _search(x, w, bias, masks, upper, lower, ids, largest, second, first, last):
    """Computes the panels that may contain the largest output of each row, in each share.

    ids[s, r], largest[s, r], second[s, r]: the best output of the share, and the second best; ids
    is -1 if there were too many panels.
    """
    (num_rows, num_inputs), num_panels, num_outputs = x.shape, upper.shape[1], len(bias)
    flat, lines = x.reshape(-1), num_inputs * PANEL * w.itemsize // LINE
    outputs = empty((num_outputs,), np.float32)
    for share in range(first, last):
        lo, hi = share_of(num_panels, share, len(ids))
        for r in range(num_rows):
            row, index = upper[r], np.int64(0)
            best, other = np.float32(-np.inf), np.float32(-np.inf)
            remaining = EXTRA_PANELS + (hi - lo) // COMPUTED_ONE_IN
            for p in range(lo, hi):
                allowed = _allowed(masks, r, p)
                if row[p] < lower[r] or not allowed:
                    continue
                remaining -= 1
                if remaining < 0:
                    index = -1
                    break
                n = p * PANEL
                tile(flat, r * num_inputs, 0, w, n * num_inputs, 0, lines, bias, n, 0,
                     outputs, n, 0, 0, 0, 1, 1)  # fmt: skip
                index, best, other = _first_largest(
                    outputs, n, n + PANEL, allowed, index, best, other
                )
            if share == len(ids) - 1 and index >= 0:
                last_outputs(1, x[r], w, bias, outputs, num_inputs, num_outputs)
                tail = _allowed(masks, r, num_panels) if num_panels * PANEL < num_outputs else 0
                index, best, other = _first_largest(
                    outputs, num_panels * PANEL, num_outputs, tail, index, best, other
                )
            ids[share, r], largest[share, r], second[share, r] = index, best, other


@compiled(fastmath=FASTMATH)
def largest_outputs(x, w, values, scales, slack, bias, softcap, masks, ids, largest, workers):
    """ids[r] and largest[r] of the largest output of each row, the lowest index among equals.
    Returns False if a row needs all outputs for a decision.

    If softcap is not 0, the caller applies it to the outputs, and rounding may make some equal. A
    NaN output counts as the largest.

    Args:
        x: [L, K] float32.
        w: flat panels of [N, K]; `values`, `scales` and `slack` by `quantize_outputs`.
        bias: [N] zeros.
        masks: [L, ceil(N / 32)] int32, the allowed outputs of each row; [0, 0]: all of them. A row
            without an allowed output gives -inf.
        ids: [L] int64; largest: [L] float32.
    """
    num_rows, num_outputs = len(x), len(bias)
    x_values = zeros((num_rows, values.shape[1] // PANEL), np.int16)
    units, norms = empty((num_rows,), np.float32), empty((num_rows,), np.float32)
    for r in range(num_rows):
        units[r], norms[r] = _quantize_row(x[r], x_values[r])
        if units[r] == 0:
            return False
    upper = empty((num_rows, num_outputs // PANEL), np.float32)
    shares = workers * PIECES
    lower = empty((shares, num_rows), np.float32)
    operands = x_values, values, scales, slack, units, norms, masks, upper, lower
    parallel_for(_bound, shares, workers, operands)
    for share in range(1, shares):
        for r in range(num_rows):
            lower[0, r] = max(lower[0, r], lower[share, r])
    widths = zeros((num_rows,), np.float32)
    if softcap > 0:
        for r in range(num_rows):
            if not lower[0, r] >= 0:  # Why: below 0 the slope is different
                return False
            widths[r] = _tie_width(np.max(upper[r]), softcap)
            lower[0, r] -= widths[r]
    winners = empty((shares, num_rows), np.int64)
    best, second = empty(winners.shape, np.float32), empty(winners.shape, np.float32)
    bound = lower[0]
    parallel_for(_search, shares, workers, (x, w, bias, masks, upper, bound, winners, best, second))
    for r in range(num_rows):
        ids[r], largest[r], other = _merge_shares(winners, best, second, r)
        if ids[r] < 0 or (softcap > 0 and largest[r] - other <= widths[r]):
            return False
    return True
