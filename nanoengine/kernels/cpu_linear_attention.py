"""Mixers with recurrent states, in `cpu_decoder.decoder_layers`: the kernels of their parts, in
order.

    norm ─ projections ─ delta rule, or convolution between two gates ─ out_proj

The reference implementation is `GenericLayer.forward`; `tests/layers/test_fused_layers.py` compares
the two.

Legend: T tokens, N hidden size, C channels, W kernel.
"""

from __future__ import annotations

from collections import namedtuple

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_decoder import MIXERS
from nanoengine.kernels.cpu_delta import convolve, copy, delta_rule, keep_last, silu
from nanoengine.kernels.cpu_layers import FASTMATH
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.matmul import multiply
from nanoengine.kernels.pool import SMALL, parallel_for

Delta = namedtuple("Delta", "qkvz ba weights shape eps")
"""Operands of `delta`: the weights of two projections, and the remaining arguments of
`delta_rule`."""

Convolution = namedtuple("Convolution", "projection weight bias")
"""Operands of `convolution`: the weights of the projection, and the kernel and bias."""

CHANNELS = 64  # per task: a cache line holds 16, and adjacent lines are prefetched together
TOKENS = 64  # at a time; their inputs stay in the L1 cache


@compiled(fastmath=(), part=True)
def multiplied(a, b, out, count):
    """The first `count` products of two rows."""
    for i in range(count):
        out[i] = a[i] * b[i]


@compiled(fastmath=("nsz",))
def _convolve_some(x, first_of, gated, spans, states, base, weight, bias, out, begin, lo, hi):
    (pieces, firsts, _), taps, channels = spans, len(weight) - 1, weight.shape[1]
    parts = -(-channels // CHANNELS)
    window, own = zeros((taps + TOKENS, CHANNELS), x.dtype), zeros((taps + 1, CHANNELS), x.dtype)
    mixed, own_bias = empty((TOKENS, CHANNELS), x.dtype), zeros((CHANNELS,), x.dtype)
    for task in range(lo, hi):
        span, at = begin + task // parts, task % parts * CHANNELS
        width = min(CHANNELS, channels - at)
        first, last = firsts[span], firsts[span + 1]
        for tap in range(taps + 1):
            copy(weight[tap, at:], own[tap], width)
        copy(bias[at:], own_bias, min(width, len(bias)))
        for tap in range(taps):
            copy(states[pieces[first, 2], base + tap * channels + at :], window[tap], width)
        for piece in range(first, last):
            start, end = pieces[piece, 0], pieces[piece, 1]
            for t in range(start, end, TOKENS):
                count = min(TOKENS, end - t)
                for row in range(count):
                    value, to = x[t + row, first_of + at :], window[taps + row]
                    if gated:
                        multiplied(x[t + row, at:], value, to, width)
                    else:
                        copy(value, to, width)
                convolve(window, own, own_bias, count, mixed)
                keep_last(window, count, taps)
                for row in range(count):
                    to = out[t + row, at:]
                    if gated:
                        multiplied(x[t + row, channels + at :], mixed[row], to, width)
                    else:
                        silu(mixed[row])
                        copy(mixed[row], to, width)
            for tap in range(taps):
                behind = states[pieces[piece, 3], base + tap * channels + at :]
                copy(window[tap], behind, width)


@compiled(fastmath=FASTMATH)
def convolve_channels(
    x, first, gated, spans, states, base, weight, bias, out, wave, workers
):  # fmt: skip
    """out [T, C] = the silu of the convolution of a wave's tokens; or, if gated, the output gate
    times the convolution of the input gate times the values.

    Args:
        x: [T, columns], as projected; values from column `first` on; gates in the first 2 C
            columns, first the input gate, then the output gate.
        spans: made by `spans_of` (`layers/cpu_linear_attention.py`).
        states: [states, elements of one], in which [W - 1, C] begins at element `base`.
        weight, bias: [W, C]; [C], or none.
    """
    waves, parts = spans[2], -(-weight.shape[1] // CHANNELS)
    parallel_for(
        _convolve_some, (waves[wave + 1] - waves[wave]) * parts,
        1 if x.size <= SMALL else workers,
        (x, first, gated, spans, states, base, weight, bias, out, waves[wave]),
    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def delta(x, spans, memory, mixer, workers):
    """Returns the output of the delta rule [T, H * V] for normed rows x [T, N].

    Args:
        memory: the states.
        mixer: a `Delta`.
    """
    qkvz, ba, weights, shape, eps = mixer
    key_heads, heads, keys, values = shape
    out = empty((len(x), key_heads * heads * values), x.dtype)
    wide = empty((len(x), out.shape[1] + key_heads * (2 * keys + heads * values)), x.dtype)
    both = empty((len(x), 2 * key_heads * heads), x.dtype)
    multiply(x, qkvz, wide, workers)
    multiply(x, ba, both, workers)
    delta_rule(wide, both, spans, memory[0], weights, shape, eps, out, workers)
    return out


@compiled(fastmath=FASTMATH)
def convolution(x, spans, memory, mixer, workers):
    """Returns the output [T, C] of a convolution between two gates for normed rows x [T, N].

    Args:
        memory: the states.
        mixer: a `Convolution`.
    """
    projection, weight, bias = mixer
    wide = empty((len(x), 3 * weight.shape[1]), x.dtype)
    multiply(x, projection, wide, workers)
    out = empty((len(x), weight.shape[1]), x.dtype)
    for wave in range(len(spans[2]) - 1):
        first = 2 * weight.shape[1]
        convolve_channels(
            wide, first, True, spans, memory[0], 0, weight, bias, out, wave, workers
        )  # fmt: skip
    return out


MIXERS |= {Delta: delta, Convolution: convolution}
