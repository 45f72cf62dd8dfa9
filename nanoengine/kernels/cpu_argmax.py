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
order, and an output is a float32 itself. So each output is between its `least` and its `most`, and
the `most` of the largest output is not below any `least`; a panel is skipped only if its `most` is.
Source: error of a dot product, Higham, "Accuracy and Stability of Numerical Algorithms" (2002),
3.1.

Outputs equal to the largest are also computed, so the lowest index is found. Outputs without a
bound (weights that are not finite, or huge) are always computed. For inputs without a bound the
caller computes all outputs, which is also the reference implementation (`runner/sampling/draw.py`).

Masks restrict the outputs: bit i % 32 of masks[r, i // 32] says whether output i of row r may be
the largest. A panel without such an output is skipped. No masks: all outputs may be.

`largest_of` does the same for outputs that exist already.

Legend: L rows of x, N outputs, K inputs, padded with zeros to a multiple of 4 in the copy.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_linear import FASTMATH, last_outputs
from nanoengine.kernels.emit import writes
from nanoengine.kernels.gemm import LINE, PANEL, number, place, tile
from nanoengine.kernels.int8_gemm import most_rows, multiply16
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import PIECES, parallel_for, share_of

MAX_ROWS = most_rows(CURRENT)
INFINITY = np.int32(0x7F800000)  # its bits; the bits of a NaN are larger

# Norms of x and of rows of w between which float32 neither overflows nor loses small terms: an
# output is below 1e30, scale times unit a normal number. A product below this range loses 1e-45, or
# 1e-38 if the processor flushes it to zero; K of them stay below LEAST_SLACK * SMALLEST.
SMALLEST, LARGEST = 1e-14, 1e15
LEAST_SLACK = 1e-18
MOST_INPUT_ERROR = 2.0**-13  # |d| / |x|; an x with a larger error in 16 bits is not screened
MOST_SUM = 2.0**24  # of |z|: times 127 it stays below 2^31
WHOLE = (1 << PANEL) - 1
SEARCHED = 16  # panels that are searched one by one if one of them holds the largest so far
# A share may compute one panel out of MOST_PANELS, and FEW_PANELS more, which may all be in one
# small share; with more candidates, computing all outputs is as fast.
MOST_PANELS, FEW_PANELS = 16, 8


@compiled(fastmath=FASTMATH)
def _quantize_panels(w, values, scales, slack, num_inputs, lo, hi):
    for p in range(lo, hi):
        panel, copy = w[p * PANEL * num_inputs :], values[p]
        of_scale, of_slack = scales[p * PANEL :], slack[p * PANEL :]
        most, squares = zeros((PANEL,), np.float32), zeros((PANEL,), np.float64)
        for k in range(num_inputs):
            for j in range(PANEL):
                weight = number(panel, place(panel, k, j, PANEL))
                most[j] = max(most[j], abs(weight))
                squares[j] += np.float64(weight) * np.float64(weight)
        inverse, errors = zeros((PANEL,), np.float32), zeros((PANEL,), np.float64)
        for j in range(PANEL):
            of_scale[j] = 0
            if squares[j] < LARGEST * LARGEST and most[j] > SMALLEST:
                of_scale[j] = most[j] / np.float32(127)
                inverse[j] = np.float32(1) / of_scale[j]
        copy[:] = 0
        for k in range(num_inputs):
            for j in range(PANEL):
                weight = number(panel, place(panel, k, j, PANEL))
                value = np.rint(weight * inverse[j]) if inverse[j] > 0 else np.float32(0)
                error = np.float64(weight) - np.float64(value) * np.float64(of_scale[j])
                errors[j] += error * error
                copy[(k // 2 * PANEL + j) * 2 + k % 2] = np.int8(value)
        for j in range(PANEL):
            of_slack[j] = np.inf
            if squares[j] < LARGEST * LARGEST:
                error, length = np.sqrt(errors[j]), np.sqrt(squares[j])
                relative = MOST_INPUT_ERROR + (2 * num_inputs + 16) * 2.0**-24
                bound = (error + relative * (length + error)) * (1 + 1e-6)
                of_slack[j] = max(bound, LEAST_SLACK)


@compiled(fastmath=FASTMATH)
def quantize_outputs(w, values, scales, slack, num_inputs, workers):
    """The int8 copy of packed panels: w = values * scale, within `slack`.

    Inputs are stored in pairs for the tiles: a row of values [panels, K * 16] is [K / 2, 16, 2]. An
    output whose weights are not finite, or too large to be bounded, gets an infinite slack.
    """
    operands = w, values, scales, slack, num_inputs
    parallel_for(_quantize_panels, len(values), workers, operands)


@compiled(fastmath=FASTMATH, part=True)
def _quantize_row(x, values):
    """(unit, |x| rounded up): x = unit * values, in 16 bits. unit is 0 for an x that can't be
    screened: not finite, too large or small, or with too wide a range."""
    most, total, squares = np.float64(0), np.float64(0), np.float64(0)
    for value in x:
        size = abs(np.float64(value))
        most = max(most, size)
        total += size
        squares += size * size
    norm = np.sqrt(squares)
    if not SMALLEST < norm < LARGEST:
        return np.float32(0), np.float32(0)
    unit = np.float32(max(most / 32000, total / (MOST_SUM - len(x))))
    inverse, errors = 1 / np.float64(unit), np.float64(0)
    for i in range(len(x)):
        value = np.rint(np.float64(x[i]) * inverse)
        values[i] = np.int16(value)
        error = np.float64(x[i]) - value * np.float64(unit)
        errors += error * error
    if np.sqrt(errors) > MOST_INPUT_ERROR * norm:
        return np.float32(0), np.float32(0)
    return unit, np.float32(norm * (1 + 1e-6))


@writes(types.UniTuple(types.float32, 2))
def _bounds(emit, estimates, at, scales, slack, column, unit, norm, allowed):
    """(most, least) over a panel's outputs with a bit in `allowed`: the largest is between them;
    -inf if there is none."""
    builder, kinds, word, lanes = emit.builder, emit.kinds, at.type, emit.words
    bits = emit.splat(builder.trunc(allowed, lanes.element), lanes)
    unit, norm, nothing = emit.splat(unit), emit.splat(norm), emit.constant(-np.inf)
    lines = [emit.pointer(kinds.estimates, estimates, at)]
    lines += [emit.pointer(kinds.scales, array, column) for array in (scales, slack)]
    most, least = [], []
    for i in range(0, PANEL, emit.width):
        estimate, scale, span = (emit.load(emit.at(line, word(i))) for line in lines)
        own = ir.Constant(lanes, [1 << (i + j) for j in range(emit.width)])
        banned = builder.icmp_unsigned("==", builder.and_(bits, own), lanes(None))
        value = builder.fmul(estimate, builder.fmul(scale, unit))
        reach = builder.fmul(span, norm)
        most.append(builder.select(banned, nothing, builder.fadd(value, reach)))
        least.append(builder.select(banned, nothing, builder.fsub(value, reach)))
    both = emit.across(most, emit.maximum), emit.across(least, emit.maximum)
    return emit.context.make_tuple(builder, types.UniTuple(types.float32, 2), both)


@compiled(fastmath=FASTMATH, part=True)
def _allowed(masks, r, p):
    """The mask bits of a panel's outputs in row r."""
    if not len(masks):
        return WHOLE
    return (np.int64(masks[r, p // 2]) >> PANEL * (p % 2)) & WHOLE


@compiled(fastmath=FASTMATH, part=True)
def _bound_panels(values, copy, scales, slack, units, norms, masks, most, least, lo, hi):
    """`_bound` for panels lo ... hi - 1."""
    (num_rows, size), tiles = values.shape, -(-len(values) // MAX_ROWS)
    x, w, turns = values.reshape(-1), copy.reshape(-1), size // 4
    share = -(-LINE // max(1, tiles))  # bytes of the next panel that a tile prefetches each time
    estimates = empty((num_rows * PANEL,), np.float32)  # of a panel, in units of both factors
    least[:] = -np.inf
    for p in range(lo, hi):
        for t in range(tiles):
            first, last = num_rows * t // tiles, num_rows * (t + 1) // tiles
            multiply16(x, first * size, size, w, p * PANEL * size, turns, estimates, first * PANEL,
                       PANEL, PANEL * size + t * share * turns, share, last - first,
                       1)  # fmt: skip
        for r in range(num_rows):
            most[r, p], known = _bounds(
                estimates, r * PANEL, scales, slack, p * PANEL, units[r], norms[r],
                _allowed(masks, r, p),
            )  # fmt: skip
            least[r] = max(least[r], known)


@compiled(fastmath=FASTMATH)
def _bound(values, copy, scales, slack, units, norms, masks, most, least, first, last):
    """most[r, p] = an upper bound of panel p's largest output in row r; least[s, r] = a lower bound
    of the largest output in the panels of share s. From estimates: values [L, K] times the copy."""
    for share in range(first, last):
        lo, hi = share_of(len(copy), share, len(least))
        _bound_panels(values, copy, scales, slack, units, norms, masks, most, least[share], lo, hi)


@compiled(fastmath=FASTMATH, part=True)
def _first_largest(outputs, lo, hi, allowed, index, largest, second):
    """The first of the largest of outputs[lo : hi] and a previous one, and the largest of all
    others; NaN is the largest."""
    for i in range(lo, hi):
        output = outputs[i]
        if not allowed >> (i - lo) & 1:
            continue
        if output > largest or (output != output and largest == largest):
            index, largest, second = i, output, largest
        elif output > second:
            second = output
    return index, largest, second


@compiled(fastmath=FASTMATH, part=True)
def _ordered(x):
    """A float32 as an integer of the same order, NaN above all. Why: without NaN rules, a loop over
    these vectorizes."""
    bits = np.float32(x).view(np.int32)
    size = np.int32(bits & np.int32(0x7FFFFFFF))
    if size > INFINITY:
        return size
    return size if bits >= 0 else np.int32(-size)


@compiled(fastmath=FASTMATH, part=True)
def _highest(row, lo, hi):
    """The largest of `_ordered` outputs lo ... hi - 1."""
    highest, part = np.int32(-0x80000000), row[lo:hi]
    for i in range(len(part)):  # Why by index: numba's array iteration does not vectorize
        output = _ordered(part[i])
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
            for first in range(start, stop, SEARCHED):
                last = min(first + SEARCHED, stop)
                if _highest(row, first * PANEL, last * PANEL) <= _ordered(best):
                    continue
                for p in range(first, last):
                    index, best, other = _first_largest(
                        row, p * PANEL, min(p * PANEL + PANEL, num_outputs),
                        _allowed(masks, r, p), index, best, other,
                    )  # fmt: skip
            ids[share, r], largest[share, r], second[share, r] = index, best, other


@compiled(fastmath=FASTMATH, part=True)
def _joined(ids, largest, second, r):
    """Merges the shares of row r: the index of the largest output, the lowest among equals, or -1
    if a share has no result; the largest output, and the second largest."""
    index, best, other = ids[0, r], largest[0, r], second[0, r]
    for share in range(1, len(ids)):
        output = largest[share, r]
        if ids[share, r] < 0 or index < 0:
            index = -1
        elif _ordered(output) > _ordered(best):
            index, best, other = ids[share, r], output, max(best, other)
        else:
            other = max(output, other)
        other = max(second[share, r], other)
    return index, best, other


@compiled(fastmath=FASTMATH)
def largest_of(outputs, masks, ids, largest, workers):
    """ids[r] and largest[r] of the largest output in each row of outputs [L, N]: the lowest index
    among equals; of NaN, which counts as the largest, the first. masks: see `largest_outputs`."""
    found = empty((workers * PIECES, len(outputs)), np.int64)
    best, second = empty(found.shape, np.float32), empty(found.shape, np.float32)
    parallel_for(_largest_of_shares, len(found), workers, (outputs, masks, found, best, second))
    for r in range(len(outputs)):
        ids[r], largest[r], _ = _joined(found, best, second, r)


@compiled(fastmath=FASTMATH, part=True)
def _tie_width(largest, softcap):
    """How far below the largest output another may be, at most, so that rounding makes both equal
    after softcap * tanh(output / softcap): 8 roundings of the cap divided by the slope there."""
    e = np.exp(np.float32(-2) * largest / softcap)
    slope = np.float32(4) * e / ((np.float32(1) + e) * (np.float32(1) + e))
    return softcap * np.float32(2**-20) / slope


@compiled(fastmath=FASTMATH)
def _look(x, w, bias, masks, most, least, ids, largest, second, first, last):
    """Computes the panels that may contain the largest output of each row, in each share.

    ids[s, r], largest[s, r], second[s, r]: the best output of the share, and the second best; ids
    is -1 if there were too many panels.
    """
    (num_rows, num_inputs), num_panels, num_outputs = x.shape, most.shape[1], len(bias)
    flat, lines = x.reshape(-1), num_inputs * PANEL * w.itemsize // LINE
    outputs = empty((num_outputs,), np.float32)
    for share in range(first, last):
        lo, hi = share_of(num_panels, share, len(ids))
        for r in range(num_rows):
            row, index = most[r], np.int64(0)
            best, other = np.float32(-np.inf), np.float32(-np.inf)
            left = FEW_PANELS + (hi - lo) // MOST_PANELS
            for p in range(lo, hi):
                allowed = _allowed(masks, r, p)
                if row[p] < least[r] or not allowed:
                    continue
                left -= 1
                if left < 0:
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
                rest = _allowed(masks, r, num_panels) if num_panels * PANEL < num_outputs else 0
                index, best, other = _first_largest(
                    outputs, num_panels * PANEL, num_outputs, rest, index, best, other
                )
            ids[share, r], largest[share, r], second[share, r] = index, best, other


@compiled(fastmath=FASTMATH)
def largest_outputs(x, w, values, scales, slack, bias, softcap, masks, ids, largest, workers):
    """ids[r] and largest[r] of the largest output of each row, the lowest index among equals; False
    if some row needs all outputs for a decision.

    If softcap is not 0, it is applied to the outputs, and rounding may make some equal. A NaN
    output counts as the largest.

    Args:
        x: [L, K] float32.
        w: flat panels of [N, K]; `values`, `scales` and `slack` by `quantize_outputs`.
        bias: [N] zeros.
        masks: [L, ceil(N / 32)] int32, the outputs that count in each row; [0, 0]: all of them. A
            row without any gives -inf.
        ids: [L] int64; largest: [L] float32.
    """
    num_rows, num_outputs = len(x), len(bias)
    whole = zeros((num_rows, values.shape[1] // PANEL), np.int16)
    units, norms = empty((num_rows,), np.float32), empty((num_rows,), np.float32)
    for r in range(num_rows):
        units[r], norms[r] = _quantize_row(x[r], whole[r])
        if units[r] == 0:
            return False
    most = empty((num_rows, num_outputs // PANEL), np.float32)
    shares = workers * PIECES
    least = empty((shares, num_rows), np.float32)
    operands = whole, values, scales, slack, units, norms, masks, most, least
    parallel_for(_bound, shares, workers, operands)
    for share in range(1, shares):
        for r in range(num_rows):
            least[0, r] = max(least[0, r], least[share, r])
    widths = zeros((num_rows,), np.float32)
    if softcap > 0:
        for r in range(num_rows):
            if not least[0, r] >= 0:  # Why: below 0 the slope is different
                return False
            widths[r] = _tie_width(np.max(most[r]), softcap)
            least[0, r] -= widths[r]
    found = empty((shares, num_rows), np.int64)
    best, second = empty(found.shape, np.float32), empty(found.shape, np.float32)
    bound = least[0]
    parallel_for(_look, shares, workers, (x, w, bias, masks, most, bound, found, best, second))
    for r in range(num_rows):
        ids[r], largest[r], other = _joined(found, best, second, r)
        if ids[r] < 0 or (softcap > 0 and largest[r] - other <= widths[r]):
            return False
    return True
