"""The gated delta rule, from projections to normed and gated heads, in one parallel call.

The recurrent state of a sequence is one row of elements: a matrix [E, V] per value head, then the
last W - 1 inputs of the convolution, [W - 1, C]. The tokens of a prompt are processed one by one,
like those in a decode, so **a token has the same bits however a prompt was cut, and in any batch**.

Why not products over chunks of tokens, as in `delta_rule.scan`: they would not be fewer. A token
costs 4 operations per element of the matrix; with chunks of 64 it costs as many, and a triangular
system. A strip of the matrix, two vectors wide, stays in the L1 cache for 64 tokens. One pass over
it updates it with a token, reads for its query, and computes the product with the next token's key.

Each key head of each sequence is a separate task. The reference implementation is
`GatedDeltaNet.mix`.

Legend: T tokens, G key heads, R value heads per key head, H = G * R, E / V size of a key / value, C
channels, W kernel.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_layers import FASTMATH
from nanoengine.kernels.emit import Emit, declare_intrinsic
from nanoengine.kernels.exp import exp
from nanoengine.kernels.gemm import I64, tile_function
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

VECTORS = 2  # of a strip
STRIP = VECTORS * CURRENT.vector_bits // 32  # columns of a matrix
TOKENS = 64  # for which a strip stays in the cache


@tile_function(
    "float* source, step, float* target, target_step, float* key, float* query, float* next_key,"
    " keys, float* decay, float* change, float* read, float* recalled"
)
def delta_tile(builder, isa: ISA, arg):
    """target = decay * source + key ⊗ change, two strips [E, STRIP] whose rows are `step` and
    `target_step` elements apart; read = query target, recalled = next_key target. Each sum is one
    chain over the keys."""
    tile = Emit(None, builder, bits=isa.vector_bits, isa=isa)
    lanes = [I64(v * tile.width) for v in range(VECTORS)]
    decay = tile.broadcast(arg.decay)
    cells = [(tile.variable(arg.source), arg.step), (tile.variable(arg.target), arg.target_step)]
    changes = [tile.load(tile.at(arg.change, lane)) for lane in lanes]
    reads, recalls = ([tile.variable(tile.constant(0.0)) for _ in lanes] for _ in range(2))

    def step(e):
        row, target = (tile.advance(cell, size) for cell, size in cells)
        key, *factors = (tile.broadcast(tile.at(x, e)) for x in (arg.key, arg.query, arg.next_key))
        for lane, change, *sums in zip(lanes, changes, reads, recalls, strict=True):
            new = tile.fma(key, change, builder.fmul(tile.load(tile.at(row, lane)), decay))
            tile.store(new, tile.at(target, lane))
            for total, factor in zip(sums, factors, strict=True):
                builder.store(tile.fma(new, factor, builder.load(total)), total)

    tile.loop(arg.keys, step, unroll=2)
    for row_cells, out in ((reads, arg.read), (recalls, arg.recalled)):
        for total, lane in zip(row_cells, lanes, strict=True):
            tile.store(builder.load(total), tile.at(out, lane))


@tile_function("float* source, step, float* target, float* key, keys, float* recalled, ahead")
def recall_tile(builder, isa: ISA, arg):
    """target = source, two strips [E, STRIP], whose rows are `step` elements apart in the source;
    recalled = key target. Prefetches `ahead` elements after each row, because no hardware
    prefetcher predicts the parts of rows that form the next strip."""
    tile = Emit(None, builder, bits=isa.vector_bits, isa=isa)
    lanes = [I64(v * tile.width) for v in range(VECTORS)]
    source, target = tile.variable(arg.source), tile.variable(arg.target)
    sums = [tile.variable(tile.constant(0.0)) for _ in lanes]

    def step(e):
        row, out = tile.advance(source, arg.step), tile.advance(target, I64(STRIP))
        key = tile.broadcast(tile.at(arg.key, e))
        for lane, cell in zip(lanes, sums, strict=True):
            tile.prefetch(tile.at(row, arg.ahead, lane))
            value = tile.load(tile.at(row, lane))
            tile.store(value, tile.at(out, lane))
            tile.store(tile.fma(value, key, tile.load(cell)), cell)

    tile.loop(arg.keys, step, unroll=2)
    for cell, lane in zip(sums, lanes, strict=True):
        tile.store(tile.load(cell), tile.at(arg.recalled, lane))


def _of_arrays(tile):
    """A decorator for a function that compiled code calls: it calls a tile whose pointers are the
    starts of arrays."""

    def write(emit, *values):
        operands = [
            emit.pointer(kind, value, I64(0)) if isinstance(kind, types.Array) else value
            for kind, value in zip(vars(emit.kinds).values(), values, strict=True)
        ]
        emit.builder.call(tile(emit.builder.module, CURRENT), operands)

    return declare_intrinsic(write)


@_of_arrays(delta_tile)
def advance_strip(source, step, target, target_step, key, query, next_key, keys, decay, change,
                  read, recalled):  # fmt: skip
    """`delta_tile`, with arrays."""


@_of_arrays(recall_tile)
def recall_strip(source, step, target, key, keys, recalled, ahead):
    """`recall_tile`, with arrays."""


# Why no "contract": the bits are the same as in `CausalConv`, which rounds each product.
@compiled(fastmath=("nsz",), inline=True)
def convolve(window, weight, bias, count, out):
    """out[:count] = the convolution of the rows of a window [W - 1 + count, N], weight [W, N]."""
    for t in range(count):
        row = out[t]
        for i in range(window.shape[1]):
            row[i] = window[t, i] * weight[0, i]
        for tap in range(1, len(weight)):
            inputs, factors = window[t + tap], weight[tap]
            for i in range(window.shape[1]):
                row[i] += inputs[i] * factors[i]
        for i in range(len(bias)):
            row[i] += bias[i]


@compiled(fastmath=(), inline=True)
def copy(source, target, count):
    """Copies the first `count` elements."""
    for i in range(count):
        target[i] = source[i]


@compiled(fastmath=FASTMATH, inline=True)
def keep_last(window, count, taps):
    """Moves the last W - 1 rows of a window with `count` tokens to its start."""
    for tap in range(taps):
        copy(window[tap + count], window[tap], window.shape[1])


@compiled(fastmath=FASTMATH, inline=True)
def silu(row):
    one = np.float32(1)
    for i in range(len(row)):
        x = row[i]
        e = exp(-abs(x))
        row[i] = (x if x >= 0 else x * e) / (one + e)


@compiled(fastmath=FASTMATH, inline=True)
def _scale_to(x, length):
    """Scales a vector to this length; a vector of zeros is unchanged."""
    total = np.float32(1e-6)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = length / np.sqrt(total)
    for i in range(len(x)):
        x[i] *= factor


@compiled(fastmath=FASTMATH, inline=True)
def _gates(beta, a, a_log, dt_bias):
    """The learning rate (beta) of a head at a token, and the decay factor of its state."""
    one, x = np.float32(1), a + dt_bias
    e = exp(-abs(beta))
    learning_rate = (one if beta >= 0 else e) / (one + e)
    softplus = max(x, np.float32(0)) + math.log1p(exp(-abs(x)))
    return learning_rate, exp(-math.exp(a_log) * softplus)


@compiled(fastmath=FASTMATH, inline=True)
def _copy_conv_inputs(state, base, window, taps, g, shape, to_state):
    """Copies the W - 1 inputs of a task's channels from the state, or to it if `to_state`."""
    key_heads, heads, keys, values = shape
    channels = key_heads * (2 * keys + heads * values)
    for tap in range(taps):
        row, at = window[tap], base + tap * channels
        _copy_channels(state[at : at + channels], row, g, shape, to_state)


@compiled(fastmath=FASTMATH, inline=True)
def _copy_channels(channels, row, g, shape, to_state):
    """Copies a key head's query, key and values from a row of all channels to `row`, where they are
    contiguous, or back if `to_state`."""
    key_heads, heads, keys, values = shape
    at = 0
    for part in range(3):
        size = heads * values if part == 2 else keys
        first = part * key_heads * keys + g * size
        if to_state:
            copy(row[at:], channels[first:], size)
        else:
            copy(channels[first:], row[at:], size)
        at += size


@compiled(fastmath=FASTMATH, inline=True)
def _copy_strip(state, values, strip, size, to_state):
    """Copies a strip with the last columns of a matrix from the state, or back if `to_state`."""
    for e in range(len(strip) // STRIP):
        row, strip_row = state[e * values :], strip[e * STRIP :]
        if to_state:
            copy(strip_row, row, size)
        else:
            copy(row, strip_row, size)


@compiled(fastmath=FASTMATH, inline=True)
def _advance_tokens(
    source, step, ahead, strip, target, target_step, mixed, v, first, size, count, gates, keys, read
):  # fmt: skip
    """Advances a strip by some tokens of a head, from the source through `strip` to a target; their
    rows are `step` and `target_step` elements apart. The outputs for the queries go to read [count,
    ...]. The strip is `size` columns of the values, from `first` on."""
    change, recalled = zeros((STRIP,), np.float32), empty((STRIP,), np.float32)
    recall_strip(source, step, strip, mixed[0, keys : 2 * keys], keys, recalled, ahead)
    for t in range(count):
        beta, decay = gates[t, 0], gates[t, 1]
        for i in range(size):
            change[i] = (mixed[t, v + first + i] - recalled[i] * decay) * beta
        key, query = mixed[t, keys : 2 * keys], mixed[t, :keys]
        is_last = t == count - 1
        next_key = mixed[t if is_last else t + 1, keys : 2 * keys]
        advance_strip(
            strip, STRIP, target if is_last else strip, target_step if is_last else STRIP, key,
            query, next_key, keys, gates[t, 1:], change, read[t, first:], recalled,
        )  # fmt: skip


@compiled(fastmath=FASTMATH, inline=True)
def _norm_and_gate(head_out, gate, weight, eps, out):
    """out [V] = the norm of a head's output, times the silu of its gate."""
    total = np.float32(0)
    one, size = np.float32(1), len(out)
    for i in range(size):
        total += head_out[i] * head_out[i]
    scale = one / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        x = gate[i]
        e = exp(-abs(x))
        out[i] = head_out[i] * scale * weight[i] * ((x if x >= 0 else x * e) / (one + e))


@compiled(fastmath=FASTMATH)
def _advance(qkvz, ba, segments, states, weights, shape, eps, out, begin, lo, hi):
    (chunks, first_chunks, _), (conv, a_log, dt_bias, norm, head_order) = segments, weights
    key_heads, heads, keys, values = shape
    taps, channels = len(conv) - 1, conv.shape[1]
    base, width = key_heads * heads * keys * values, 2 * keys + heads * values
    strips, size = -(-values // STRIP), keys * STRIP
    one, no_bias = np.float32(1), zeros((0,), conv.dtype)
    weight, gates = empty((taps + 1, width), conv.dtype), empty((TOKENS, 2), conv.dtype)
    for task in range(lo, hi):
        segment, g = begin + task // key_heads, task % key_heads
        first, last = first_chunks[segment], first_chunks[segment + 1]
        max_tokens = min(chunks[last - 1, 1] - chunks[first, 0], TOKENS)
        window = empty((taps + max_tokens, width), conv.dtype)
        mixed = empty((max_tokens, width), conv.dtype)
        read = empty((max_tokens, strips * STRIP), conv.dtype)
        # Why only one if possible: it stays in the L1 cache.
        keeps_all = max_tokens == TOKENS or values % STRIP > 0
        matrices = empty((heads * strips if keeps_all else 1, size), conv.dtype)
        state_in = states[chunks[first, 2]]
        _copy_conv_inputs(state_in, base, window, taps, g, shape, False)
        for tap in range(taps + 1):
            _copy_channels(conv[tap], weight[tap], g, shape, False)
        for chunk in range(first, last):
            start, end = chunks[chunk, 0], chunks[chunk, 1]
            state_out = states[chunks[chunk, 3]]
            for t in range(start, end, TOKENS):
                count = min(TOKENS, end - t)
                for i in range(count):
                    _copy_channels(qkvz[t + i], window[taps + i], g, shape, False)
                convolve(window, weight, no_bias, count, mixed)
                keep_last(window, count, taps)
                for i in range(count):
                    silu(mixed[i])
                    _scale_to(mixed[i, :keys], one / np.sqrt(np.float32(keys)))
                    _scale_to(mixed[i, keys : 2 * keys], one)
                for r in range(heads):
                    h, v = g * heads + r, 2 * keys + r * values
                    for i in range(count):
                        row = ba[t + i]
                        a = row[key_heads * heads + h]
                        gates[i, 0], gates[i, 1] = _gates(row[h], a, a_log[h], dt_bias[h])
                    for s in range(strips):
                        strip = matrices[r * strips + s if keeps_all else 0]
                        columns = min(STRIP, values - s * STRIP)
                        source, step, target, target_step, ahead = strip, STRIP, strip, STRIP, 0
                        at = h * keys * values + s * STRIP
                        if columns < STRIP:
                            if t == chunks[first, 0]:
                                _copy_strip(state_in[at:], values, strip, columns, False)
                        else:
                            if t == start:
                                source, step, ahead = state_in[at:], values, STRIP
                                if s == strips - 1:  # the first of the next matrix
                                    ahead = keys * values - s * STRIP
                            if t + count == end:
                                target, target_step = state_out[at:], values
                        _advance_tokens(
                            source, step, ahead, strip, target, target_step, mixed, v, s * STRIP,
                            columns, count, gates, keys, read,
                        )  # fmt: skip
                        if columns < STRIP and t + count == end:
                            _copy_strip(state_out[at:], values, strip, columns, True)
                    at, z = head_order[h] * values, channels + h * values
                    for i in range(count):
                        _norm_and_gate(
                            read[i], qkvz[t + i, z : z + values], norm, eps,
                            out[t + i, at : at + values],
                        )  # fmt: skip
            _copy_conv_inputs(state_out, base, window, taps, g, shape, True)
            state_in = state_out


@compiled(fastmath=FASTMATH)
def delta_rule(qkvz, ba, segments, states, weights, shape, eps, out, workers):
    """Advances the states of sequences by their tokens of a step.

    Args:
        qkvz: [T, C + H * V], as projected: inputs of the convolution, then output gates.
        ba: [T, 2 H]: learning rates and decays, as projected.
        segments: (chunks, first_chunks, steps), from `spans_of` (`layers/cpu_linear_attention.py`).
        states: [states, elements of one].
        weights: of the convolution [W, C], `Decay`'s a_log and dt_bias [H], the norm [V], and the
            index of each head in `out`, [H] int64.
        shape: G, R, E and V.
        out: [T, H * V].
    """
    steps = segments[2]
    for step in range(len(steps) - 1):
        parallel_for(
            _advance, (steps[step + 1] - steps[step]) * shape[0], workers,
            (qkvz, ba, segments, states, weights, shape, eps, out, steps[step]),
        )  # fmt: skip
