"""search_groups, round_groups: scales, minima and codes with the least squared error, for weights
that are quantized to a few bits when they are loaded.

`layers/quantized_weight.py` calls these: a group of 32 weights becomes code * scale - min. There
are two stages, because the scales and minima of a block are themselves quantized after the search.

Perf: groups are independent and stay in registers. All candidates of a group take some 10 ns per
weight and thread; the same arithmetic in torch takes 73.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

FASTMATH = ("contract", "nsz", "reassoc")
STRETCHES = np.array([-0.06, -0.02, 0.03, 0.1], np.float32)
"""Candidate steps of a group, relative to the step that spans it exactly; shorter ones clip its
largest weights. Perf: on normal weights the squared error of 4 bits, relative to the weights, is
0.498 % with these four, 0.515 % with two (0, 0.07), 0.495 % with six from -0.08 to 0.12."""
TINY, HALF, TWO, SIZE = np.float32(1e-37), np.float32(0.5), np.float32(2), np.float32(UNIT)
ZERO, MAX_SCALE = np.float32(0), np.float32(63)


@compiled(fastmath=FASTMATH, inline=True)
def _code(weight, inverse, low, max_code):
    """The nearest code. Why not `rint`: truncation to an integer is one instruction on any CPU."""
    return np.int32(min(max((weight - low) * inverse, ZERO), max_code) + HALF)


@compiled(fastmath=FASTMATH, inline=True)
def _sums(group, scale, low, max_code):
    """Sums over a group of the codes, of their squares, and of codes times weights."""
    inverse = np.float32(1) / max(scale, TINY)
    c, cc, cg = np.int32(0), np.int32(0), ZERO
    for i in range(UNIT):
        code = _code(group[i], inverse, low, max_code)
        c += code
        cc += code * code
        cg += np.float32(code) * group[i]
    return np.float32(c), np.float32(cc), cg


@compiled(fastmath=FASTMATH, inline=True)
def _error(scale, low, c, cc, cg, total):
    """The squared error of codes * scale + low, minus the error of zeros."""
    of_scale = scale * (scale * cc - TWO * cg)
    return of_scale + low * (SIZE * low + TWO * (scale * c - total))


@compiled(fastmath=FASTMATH)
def _search_groups(weights, max_code, stretches, out, lo, hi):
    for g in range(lo, hi):
        group = weights[g]
        lowest, highest, total = ZERO, ZERO, ZERO
        for i in range(UNIT):
            lowest, highest = min(lowest, group[i]), max(highest, group[i])
            total += group[i]
        best_error = np.float32(np.inf)
        for stretch in stretches:
            scale, low = (highest - lowest) / (max_code * (np.float32(1) + stretch)), lowest
            for _ in range(2):
                c, cc, cg = _sums(group, scale, low, max_code)
                spread = SIZE * cc - c * c
                if spread > ZERO:
                    scale, low = (SIZE * cg - c * total) / spread, (cc * total - c * cg) / spread
                if cc > ZERO and (low > ZERO or spread <= ZERO):  # or all codes are the same
                    scale, low = cg / cc, ZERO
                error = _error(scale, low, c, cc, cg, total)
                if error < best_error:
                    best_error, out[g, 0], out[g, 1] = error, scale, -low


@compiled(fastmath=FASTMATH)
def search_groups(weights, max_code, stretches, out, num_workers):
    """out [M, 2] = scale and min of each group [M, 32] of float32, for codes from 0 to `max_code`;
    unchanged for groups of zeros."""
    operands = weights, np.float32(max_code), stretches, out
    parallel_for(_search_groups, len(weights), num_workers, operands)


@compiled(fastmath=FASTMATH)
def _round_groups(weights, max_code, targets, factors, numbers, codes, lo, hi):
    for g in range(lo, hi):
        group, of_scale, of_min = weights[g], factors[g, 0], factors[g, 1]
        total = ZERO
        for i in range(UNIT):
            total += group[i]
        first = np.int32(min(targets[g, 0] / max(of_scale, TINY), MAX_SCALE) + HALF)
        low = -of_min * np.float32(np.int32(targets[g, 1] / max(of_min, TINY) + HALF))
        best_scale, best_min, best_error = 0, 0, np.float32(np.inf)
        for number in range(max(first - 1, 0), min(first + 1, 63) + 1):
            scale = np.float32(number) * of_scale
            c, cc, cg = _sums(group, scale, low, max_code)
            least_squares = (scale * c - total) / (SIZE * max(of_min, TINY))
            of_low = np.int32(min(max(least_squares, ZERO), MAX_SCALE) + HALF)
            error = _error(scale, -of_min * np.float32(of_low), c, cc, cg, total)
            if error < best_error:
                best_scale, best_min, best_error = number, of_low, error
        numbers[g, 0], numbers[g, 1] = best_scale, best_min
        scale, low = np.float32(best_scale) * of_scale, -of_min * np.float32(best_min)
        inverse = np.float32(1) / max(scale, TINY) if best_scale else ZERO
        for i in range(UNIT):
            codes[g, i] = _code(group[i], inverse, low, max_code)


@compiled(fastmath=FASTMATH)
def round_groups(weights, max_code, targets, factors, numbers, codes, num_workers):
    """numbers [M, 2] uint8 = scale and min of each group as integers up to 63, in units of
    `factors` [M, 2]; codes [M, 32] int8 of the group, 0 if the scale is 0.

    The neighbours of the nearest scale are also tried, each with its best minimum.
    """
    operands = weights, np.float32(max_code), targets, factors, numbers, codes
    parallel_for(_round_groups, len(weights), num_workers, operands)
