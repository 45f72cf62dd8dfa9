"""One token of the gated delta rule, from projections to what each head reads, in one call.

The state of a sequence is one row of numbers: a matrix [E, V] for each value head, then the last
W - 1 inputs of the convolution, [W - 1, C]. A decode is as fast as this memory: a matrix is read
once and written once, its second look at it finds it in the cache.

Each key head of each token is a task of its own, so a token has the same bits in any batch. The
readable forms are `step` (`layers/delta_rule.py`) and `CausalConv.step`.

Legend: T tokens, G key heads, R value heads a key head, E / V size of a key / value, C channels, W
kernel.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.cpu_layers import FASTMATH
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for


@compiled(fastmath=FASTMATH, part=True)
def _convolve(before, behind, base, row, weight, first, out):
    """Convolves and gates the channels from `first` on, as many as `out` has, and shifts the inputs
    kept of them; `before` and `behind` may be the same state."""
    taps, channels = weight.shape
    count, one = len(out), out.dtype.type(1)
    for i in range(count):
        out[i] = 0
    for tap in range(taps - 1):
        at = base + tap * channels + first
        kept = before[at : at + count]
        factors = weight[tap, first : first + count]
        for i in range(count):
            out[i] += kept[i] * factors[i]
        if tap > 0:
            behind[at - channels : at - channels + count] = kept
    at = base + (taps - 2) * channels + first
    behind[at : at + count] = row[first : first + count]
    factors = weight[taps - 1, first : first + count]
    for i in range(count):
        x = out[i] + row[first + i] * factors[i]
        e = exp(-abs(x))
        out[i] = (x if x >= 0 else x * e) / (one + e)


@compiled(fastmath=FASTMATH, part=True)
def _scale_to(x, length):
    """Gives a vector this length; a vector of zeros keeps its own."""
    total = x.dtype.type(1e-6)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = length / np.sqrt(total)
    for i in range(len(x)):
        x[i] *= factor


@compiled(fastmath=FASTMATH, part=True)
def _learn(before, behind, at, q, k, v, decay, beta, recalled, out):
    """One head: its matrix lies at `at` in both states."""
    size, kept = len(v), exp(decay)
    for i in range(size):
        recalled[i] = 0
        out[i] = 0
    for e in range(len(k)):
        row, factor = before[at + e * size : at + (e + 1) * size], k[e] * kept
        for i in range(size):
            recalled[i] += row[i] * factor
    for i in range(size):
        recalled[i] = (v[i] - recalled[i]) * beta
    for e in range(len(k)):
        row = before[at + e * size : at + (e + 1) * size]
        new = behind[at + e * size : at + (e + 1) * size]
        key, query = k[e], q[e]
        for i in range(size):
            number = row[i] * kept + key * recalled[i]
            new[i] = number
            out[i] += number * query


@compiled(fastmath=FASTMATH, part=True)
def _advance(qkv, decay, beta, weight, states, reads, writes, out, shape, task):
    key_heads, heads, keys, values = shape
    t, g = task // key_heads, task % key_heads
    before, behind, row = states[reads[t]], states[writes[t]], qkv[t]
    base = key_heads * heads * keys * values
    mixed = empty((2 * keys + (heads + 1) * values,), out.dtype)
    q, k = mixed[:keys], mixed[keys : 2 * keys]
    v = mixed[2 * keys : 2 * keys + heads * values]
    recalled = mixed[2 * keys + heads * values :]
    _convolve(before, behind, base, row, weight, g * keys, q)
    _convolve(before, behind, base, row, weight, (key_heads + g) * keys, k)
    _convolve(before, behind, base, row, weight, 2 * key_heads * keys + g * heads * values, v)
    one = out.dtype.type(1)
    _scale_to(q, one / np.sqrt(out.dtype.type(keys)))
    _scale_to(k, one)
    for r in range(heads):
        h = g * heads + r
        _learn(
            before, behind, h * keys * values, q, k, v[r * values : (r + 1) * values],
            decay[t, h], beta[t, h], recalled, out[t, h],
        )  # fmt: skip


@compiled(fastmath=FASTMATH)
def _advance_tasks(qkv, decay, beta, weight, states, reads, writes, out, shape, lo, hi):
    for task in range(lo, hi):
        _advance(qkv, decay, beta, weight, states, reads, writes, out, shape, task)


@compiled(fastmath=FASTMATH)
def delta_step(qkv, decay, beta, weight, states, reads, writes, out, shape, workers):
    """Advances the states of T sequences by a token each.

    Args:
        qkv: [T, C], as projected; `weight` of the convolution [W, C].
        decay, beta: [T, G * R]; decays are logarithms.
        states: [states, numbers of one]; a token starts from row `reads[t]` and its state goes to
            row `writes[t]`, which no other token reads or writes.
        out: [T, G * R, V], what each head reads.
        shape: G, R, E and V.
    """
    operands = qkv, decay, beta, weight, states, reads, writes, out, shape
    parallel_for(_advance_tasks, len(qkv) * shape[0], workers, operands)
