"""The most likely of many outputs, exactly, from a quarter of the bytes: for the head on the CPU.

    x ─ times an int8 copy of the weight ─ each output's estimate, give or take its slack
                                                   │
    panels that may hold the largest output <──────┘
    x ─ times the float32 weight, these panels ─ the largest output and its index

One token alone reads each weight once, and a small model's head is a quarter of them. The copy
finds the few panels in which the largest output can be. These are then computed by the tiles of
`cpu_linear.linear`, so index and value are the ones it would give, **bit for bit**.

Why nothing is missed: with w = scale * q + e, an output differs from its estimate by e . x, at most
|e| |x| (Cauchy and Schwarz), and by the rounding of two chains of K multiply-adds, at most
K 2^-24 |w| |x| each. `slack` holds |e| and both, half as much again. Source: error of a dot
product, Higham, "Accuracy and Stability of Numerical Algorithms" (2002), 3.1.

Legend: L rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from nanoengine.kernels.cpu_linear import FASTMATH, PANEL, last_outputs, linear, tile
from nanoengine.kernels.emit import Emit
from nanoengine.kernels.jit import compiled

# Norms of x and of rows of w between which float32 neither overflows nor loses small terms.
SMALLEST, LARGEST = 1e-15, 1e15
LEAST_SLACK = 1e-18  # times SMALLEST still far above what products lose below the normal numbers
MOST_PANELS = 1 / 16  # of all: where more are left, all outputs are as fast to compute


@compiled(parallel=True, fastmath=FASTMATH)
def quantize_outputs(w, values, scales, slack, num_inputs):
    """The int8 copy of packed panels, in their layout: w = values * scale, within `slack`.

    An output whose weights are not finite, or too large to be bounded, gets an infinite slack.
    """
    for p in prange(len(scales) // PANEL):
        at, column = p * PANEL * num_inputs, p * PANEL
        most, squares = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float64)
        for k in range(num_inputs):
            for j in range(PANEL):
                weight = w[at + k * PANEL + j]
                most[j] = max(most[j], abs(weight))
                squares[j] += np.float64(weight) * np.float64(weight)
        scale, inverse = np.zeros(PANEL, np.float32), np.zeros(PANEL, np.float32)
        for j in range(PANEL):
            if squares[j] < LARGEST * LARGEST and most[j] > SMALLEST:
                scale[j] = most[j] / np.float32(127)
                inverse[j] = np.float32(1) / scale[j]
        errors = np.zeros(PANEL, np.float64)
        for k in range(num_inputs):
            for j in range(PANEL):
                i = at + k * PANEL + j
                value = np.rint(w[i] * inverse[j]) if scale[j] > 0 else np.float32(0)
                error = np.float64(w[i]) - np.float64(value) * np.float64(scale[j])
                errors[j] += error * error
                values[i] = np.int8(value)
        for j in range(PANEL):
            scales[column + j] = scale[j]
            slack[column + j] = np.inf
            if squares[j] < LARGEST * LARGEST:
                rounding = (3 * num_inputs + 16) * 2.0**-24
                bound = np.sqrt(errors[j]) + rounding * (np.sqrt(squares[j]) + np.sqrt(errors[j]))
                slack[column + j] = max(bound * (1 + 1e-6), LEAST_SLACK)


@intrinsic
def _bounds(typing, estimates, scales, slack, column, norm):
    """(most, least) of the PANEL outputs from `column`: the largest is at most `most`, and not less
    than `least`. An estimate counts in units of its scale."""
    signature = types.UniTuple(estimates.dtype, 2)(estimates, scales, slack, column, norm)

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, estimates)
        word, lines = args[3].type, []
        for array_type, array in zip(sig.args[:3], args[:3], strict=True):
            line = emit.pointer(array_type, array, args[3])
            places = [emit.at(line, word(i)) for i in range(0, PANEL, emit.width)]
            lines.append([emit.load(place) for place in places])
        length = emit.splat(args[4])
        values = [builder.fmul(value, scale) for value, scale in zip(*lines[:2], strict=True)]
        spans = [builder.fmul(span, length) for span in lines[2]]
        pairs = list(zip(values, spans, strict=True))
        most = emit.across([builder.fadd(value, span) for value, span in pairs], emit.maximum)
        least = emit.across([builder.fsub(value, span) for value, span in pairs], emit.maximum)
        return context.make_tuple(builder, sig.return_type, (most, least))

    return signature, codegen


@compiled(parallel=True, fastmath=FASTMATH)
def _bound_panels(estimates, scales, slack, norm, most, workers):
    """most[p] = what panel p's largest output may be; returns what the largest of all must be."""
    least = np.full(workers, -np.inf, np.float32)
    for worker in prange(workers):
        best = np.float32(-np.inf)
        for p in range(len(most) * worker // workers, len(most) * (worker + 1) // workers):
            most[p], known = _bounds(estimates, scales, slack, p * PANEL, norm)
            best = max(best, known)
        least[worker] = best
    return least.max()


@compiled(fastmath=FASTMATH)
def _norm(row):
    """|x|, rounded up; NaN where x holds NaN."""
    total = np.float64(0)
    for value in row:
        total += np.float64(value) * np.float64(value)
    return np.sqrt(total) * (1 + 1e-6)


@compiled(fastmath=FASTMATH)
def largest_outputs(x, w, values, scales, slack, bias, ids, largest, workers):
    """ids[r] and largest[r] of the largest output of each row, the lowest index among equals; False
    if some row had to be computed whole to tell.

    A NaN output counts as the largest.

    Args:
        x: [L, K] float32.
        w: flat panels of [N, K]; `values`, `scales` and `slack` by `quantize_outputs`.
        bias: [N] zeros.
        ids: [L] int64; largest: [L] float32.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(bias)
    num_panels = num_outputs // PANEL
    most = np.empty(num_panels, np.float32)
    estimates = np.empty((num_rows, num_outputs), np.float32)
    linear(x, values, bias, estimates, workers)
    for r in range(num_rows):
        row, outputs, norm = x[r], estimates[r], _norm(x[r])
        if not SMALLEST < norm < LARGEST:
            return False
        least = _bound_panels(outputs, scales, slack, np.float32(norm), most, workers)
        ids[r], largest[r], left = 0, -np.inf, int(MOST_PANELS * num_panels)
        last_outputs(1, row, w, bias, outputs, num_inputs, num_outputs)
        for p in range(num_panels + 1):
            n = p * PANEL
            if p < num_panels:
                if most[p] < least:
                    continue
                left -= 1
                if left < 0:
                    return False
                tile(row, 0, 0, w, n * num_inputs, 0, num_inputs, bias, n, 0, outputs, n, 0,
                     0, 0, 1, 1)  # fmt: skip
            for i in range(n, min(n + PANEL, num_outputs)):
                output, best = outputs[i], largest[r]
                if output > best or (output != output and best == best):
                    ids[r], largest[r] = i, output
    return True
