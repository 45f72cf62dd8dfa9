"""Mixers with recurrent states, in `cpu_decoder.decoder_layers`.

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
from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.pool import SMALL, parallel_for

Delta = namedtuple("Delta", "qkvz ba weights shape eps")
"""Operands of `delta`: the weights of two projections, and the remaining arguments of
`delta_rule`."""

Convolution = namedtuple("Convolution", "projection weight bias")
"""Operands of `convolution`: the weights of the projection, and the kernel and bias."""

CHANNELS = 64  # per task: a cache line holds 16, and adjacent lines are prefetched together
TOKENS = 64  # at a time; their inputs stay in the L1 cache


@compiled(fastmath=(), inline=True)
def multiply_rows(a, b, out, count):
    """The first `count` products of two rows."""
    for i in range(count):
        out[i] = a[i] * b[i]


@compiled(fastmath=("nsz",))
def _convolve_some(x, column, gated, segments, states, base, weight, bias, out, begin, lo, hi):
    (chunks, first_chunks, _), taps, channels = segments, len(weight) - 1, weight.shape[1]
    parts = -(-channels // CHANNELS)
    window, kernel = zeros((taps + TOKENS, CHANNELS), x.dtype), zeros((taps + 1, CHANNELS), x.dtype)
    mixed, own_bias = empty((TOKENS, CHANNELS), x.dtype), zeros((CHANNELS,), x.dtype)
    for task in range(lo, hi):
        segment, at = begin + task // parts, task % parts * CHANNELS
        width = min(CHANNELS, channels - at)
        first, last = first_chunks[segment], first_chunks[segment + 1]
        for tap in range(taps + 1):
            copy(weight[tap, at:], kernel[tap], width)
        copy(bias[at:], own_bias, min(width, len(bias)))
        for tap in range(taps):
            copy(states[chunks[first, 2], base + tap * channels + at :], window[tap], width)
        for chunk in range(first, last):
            start, end = chunks[chunk, 0], chunks[chunk, 1]
            for t in range(start, end, TOKENS):
                count = min(TOKENS, end - t)
                for row in range(count):
                    value, target = x[t + row, column + at :], window[taps + row]
                    if gated:
                        multiply_rows(x[t + row, at:], value, target, width)
                    else:
                        copy(value, target, width)
                convolve(window, kernel, own_bias, count, mixed)
                keep_last(window, count, taps)
                for row in range(count):
                    target = out[t + row, at:]
                    if gated:
                        multiply_rows(x[t + row, channels + at :], mixed[row], target, width)
                    else:
                        silu(mixed[row])
                        copy(mixed[row], target, width)
            for tap in range(taps):
                state_out = states[chunks[chunk, 3], base + tap * channels + at :]
                copy(window[tap], state_out, width)


@compiled(fastmath=FASTMATH)
def convolve_channels(x, first, gated, segments, states, base, weight, bias, out, workers):
    """out [T, C] = the silu of the convolution of a step's tokens; or, if gated, the output gate
    times the convolution of (input gate times values).

    Args:
        x: [T, columns], as projected; values from column `first` on; gates in the first 2 C
            columns, first the input gate, then the output gate.
        segments: (chunks, first_chunks, steps), from `spans_of` (`layers/cpu_linear_attention.py`).
        states: [states, elements of one], in which [W - 1, C] begins at element `base`.
        weight, bias: [W, C]; [C], or none.
    """
    steps, parts = segments[2], -(-weight.shape[1] // CHANNELS)
    for step in range(len(steps) - 1):
        parallel_for(
            _convolve_some, (steps[step + 1] - steps[step]) * parts,
            1 if x.size <= SMALL else workers,
            (x, first, gated, segments, states, base, weight, bias, out, steps[step]),
        )  # fmt: skip


@compiled(fastmath=FASTMATH)
def delta(x, segments, layer_cache, mixer, workers):
    """Returns the output of the delta rule [T, H * V] for normed rows x [T, N].

    Args:
        layer_cache: the states.
        mixer: a `Delta`.
    """
    qkvz, ba, weights, shape, eps = mixer
    key_heads, heads, keys, values = shape
    out = empty((len(x), key_heads * heads * values), x.dtype)
    qkvz_out = empty((len(x), out.shape[1] + key_heads * (2 * keys + heads * values)), x.dtype)
    ba_out = empty((len(x), 2 * key_heads * heads), x.dtype)
    matmul(x, qkvz, qkvz_out, workers)
    matmul(x, ba, ba_out, workers)
    delta_rule(qkvz_out, ba_out, segments, layer_cache[0], weights, shape, eps, out, workers)
    return out


@compiled(fastmath=FASTMATH)
def convolution(x, segments, layer_cache, mixer, workers):
    """Returns the output [T, C] of a convolution between two gates for normed rows x [T, N].

    Args:
        layer_cache: the states.
        mixer: a `Convolution`.
    """
    projection, weight, bias = mixer
    channels = weight.shape[1]
    projected, out = empty((len(x), 3 * channels), x.dtype), empty((len(x), channels), x.dtype)
    matmul(x, projection, projected, workers)
    convolve_channels(
        projected, 2 * channels, True, segments, layer_cache[0], 0, weight, bias, out, workers
    )
    return out


MIXERS |= {Delta: delta, Convolution: convolution}
