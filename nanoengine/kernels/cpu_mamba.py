"""Mamba-2 on the CPU, from the projection to normed and gated heads.

The recurrent state of a sequence is one row of elements: a matrix [E, V] per head, followed by the
last inputs of the convolution, [W - 1, C]. The tokens of a prompt are processed one by one, like
those in a decode, so **a token has the same bits however a prompt was cut, and in any batch**.

Why not products over chunks of tokens, as in `mamba2.scan`: a token costs 3 operations per element
of the matrix, with chunks of 64 two and a half. One row of a strip of the matrix, two vectors wide,
stays in registers for `TILE_TOKENS` tokens, and the strip stays in the L1 cache for 64.

Each head of each sequence is a separate task. Channels are convolved before the tasks; rows are
gated and normed after them. The reference implementation is `MambaMixer.mix`.

Legend: T tokens, G groups, R heads per group, H = G * R, E / V size of a state's rows / of a head,
C channels, W kernel.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.cpu_decoder import MIXERS
from nanoengine.kernels.cpu_delta import STRIP, TOKENS, VECTORS, copy
from nanoengine.kernels.cpu_layers import FASTMATH, gate_row, norm_row
from nanoengine.kernels.cpu_linear_attention import convolve_channels
from nanoengine.kernels.emit import Emit
from nanoengine.kernels.exp import exp
from nanoengine.kernels.gemm import I64, tile_call, tile_function
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.matmul import matmul
from nanoengine.kernels.pool import SMALL, parallel_for

Mamba = namedtuple("Mamba", "projection weights shape kind eps limits")
"""Operands of `mamba`: the weights of the projection, and the remaining arguments of
`mamba_rule`."""

TILE_TOKENS = 4 if CURRENT.registers == 32 else 2  # tokens of a tile, whose sums are in registers
NO_NORM, AFTER_GATE, BEFORE_GATE = range(3)  # the position of the norm


@tile_function(
    "float* source, float* target, step, float* b, float* c, wide, keys, float* decay,"
    " float* change, float* read, size"
)
def mamba_tile(builder, isa: ISA, arg, tokens: int):
    """Updates a strip [E, STRIP] of a state with some tokens, from source to target. Token t:
    strip = decay[t] * strip + b[t] ⊗ change[t]; read[t] = c[t] times the strip.

    Rows of a strip are `step` elements apart; neighbouring tokens are `wide` elements apart in b
    and c, and `size` in change and read. Each sum is one chain over the rows.
    """
    tile = Emit(None, builder, bits=isa.vector_bits, isa=isa)
    lanes = [I64(v * tile.width) for v in range(VECTORS)]
    pointers = [tile.variable(arg.source), tile.variable(arg.target)]
    decay = [tile.broadcast(tile.at(arg.decay, I64(t))) for t in range(tokens)]
    changes = [
        [tile.load(tile.at(row, lane)) for lane in lanes]
        for row in tile.rows(arg.change, arg.size, tokens)
    ]
    sums = [[tile.variable(tile.constant(0.0)) for _ in lanes] for _ in range(tokens)]
    vectors = [tile.rows(arg.b, arg.wide, tokens), tile.rows(arg.c, arg.wide, tokens)]

    def step(e):
        row, target = (tile.advance(pointer, arg.step) for pointer in pointers)
        strip = [tile.load(tile.at(row, lane)) for lane in lanes]
        for t in range(tokens):
            b, c = (tile.broadcast(tile.at(rows[t], e)) for rows in vectors)
            for v, cell in enumerate(sums[t]):
                strip[v] = tile.fma(b, changes[t][v], builder.fmul(strip[v], decay[t]))
                builder.store(tile.fma(strip[v], c, builder.load(cell)), cell)
        for lane, values in zip(lanes, strip, strict=True):
            tile.store(values, tile.at(target, lane))

    tile.loop(arg.keys, step, unroll=2 if tokens == 1 else 1)
    for cells, line in zip(sums, tile.rows(arg.read, arg.size, tokens), strict=True):
        for cell, lane in zip(cells, lanes, strict=True):
            tile.store(builder.load(cell), tile.at(line, lane))


@tile_call(
    lambda isa: [(1, 1), (TILE_TOKENS, 1)],
    lambda module, kinds, tokens, _: mamba_tile(module, CURRENT, tokens),
)
def advance(source, source_at, target, target_at, step, b, b_at, c, c_at, wide, keys,
            decay, decay_at, change, change_at, read, read_at, size, tokens, unused):  # fmt: skip
    """`mamba_tile` for this number of tokens."""


@compiled(fastmath=FASTMATH)
def _advance(projected, mixed, segments, states, weights, shape, limits, out, begin, lo, hi):
    (chunks, first_chunks, _), (_, _, a_log, dt_bias, d, _) = segments, weights
    groups, heads, keys, values = shape
    num_heads, wide = groups * heads, mixed.shape[1]
    inner, size = num_heads * values, -(-values // STRIP) * STRIP
    longest, flat = min(TOKENS, len(mixed)), mixed.reshape(-1)
    change, read = zeros((longest * size,), mixed.dtype), empty((longest * size,), mixed.dtype)
    strip, decay = empty((keys * STRIP,), mixed.dtype), empty((longest,), mixed.dtype)
    dt_min, dt_max = limits
    for task in range(lo, hi):
        segment, h = begin + task // num_heads, task % num_heads
        at, head_at = h * keys * values, h * values
        b_at = inner + h // heads * keys
        rate = -math.exp(a_log[h])
        state_in = states[chunks[first_chunks[segment], 2], at:]
        for chunk in range(first_chunks[segment], first_chunks[segment + 1]):
            state_out = states[chunks[chunk, 3], at:]
            end = chunks[chunk, 1]
            for t in range(chunks[chunk, 0], end, TOKENS):
                count = min(TOKENS, end - t)
                for i in range(count):
                    x = projected[t + i, inner + wide + h] + dt_bias[h]
                    dt = max(x, np.float32(0)) + math.log1p(exp(-abs(x)))
                    dt = dt_min if dt < dt_min else dt_max if dt > dt_max else dt
                    decay[i], inputs = exp(rate * dt), mixed[t + i, head_at:]
                    for v in range(values):
                        change[i * size + v] = inputs[v] * dt
                for first in range(0, values, STRIP):
                    columns, step = values - first, values
                    source, target, at_source, at_target = state_in, state_out, first, first
                    if columns < STRIP:
                        for e in range(keys):
                            copy(state_in[e * values + first :], strip[e * STRIP :], columns)
                        source, target, step, at_source, at_target = strip, strip, STRIP, 0, 0
                    i = 0
                    while i < count:
                        tokens = TILE_TOKENS if count - i >= TILE_TOKENS else 1
                        b_index, row_at = (t + i) * wide + b_at, i * size + first
                        advance(
                            source, at_source, target, at_target, step, flat, b_index, flat,
                            b_index + groups * keys, wide, keys, decay, i, change, row_at, read,
                            row_at, size, tokens, 1,
                        )  # fmt: skip
                        source, at_source, i = target, at_target, i + tokens
                    if columns < STRIP:
                        for e in range(keys):
                            copy(strip[e * STRIP :], state_out[e * values + first :], columns)
                for i in range(count):
                    inputs, row = mixed[t + i, head_at:], out[t + i, head_at:]
                    for v in range(values):
                        row[v] = read[i * size + v] + inputs[v] * d[h]
                state_in = state_out


@compiled(fastmath=FASTMATH)
def _gate_and_norm(out, projected, norm, kind, eps, groups, lo, hi):
    size = out.shape[1] // groups
    # Why: if a row is read and written under two names, LLVM does not vectorize the loop.
    buffer = empty((size,), out.dtype)
    for task in range(lo, hi):
        t, first = task // groups, task % groups * size
        row, gate = out[t, first : first + size], projected[t, first : first + size]
        weight = norm[first : first + size]
        if kind == BEFORE_GATE:
            norm_row(row, weight, eps, buffer)
            gate_row(gate, buffer, 0, row)
        else:
            gate_row(gate, row, 0, buffer)
            if kind == AFTER_GATE:
                norm_row(buffer, weight, eps, row)
            else:
                copy(buffer, row, size)


@compiled(fastmath=FASTMATH)
def mamba_rule(projected, segments, states, weights, shape, kind, eps, limits, out, workers):
    """Advances the states of sequences by their tokens of a step.

    Args:
        projected: [T, H * V + C + H]: output gates, inputs of the convolution, dt.
        segments: (chunks, first_chunks, steps), from `spans_of` (`layers/cpu_linear_attention.py`).
        states: [states, elements of one].
        weights: of the convolution [W, C] and its bias [C], or none; a_log, dt_bias and d of
            `MambaHeads` [H]; the norm [H * V], or any array.
        shape: G, R, E and V.
        kind: NO_NORM, AFTER_GATE or BEFORE_GATE, the position of the norm.
        eps, limits: the norm's epsilon, and the range to which dt is clamped.
        out: [T, H * V].
    """
    (groups, heads, keys, values), steps, tokens = shape, segments[2], len(projected)
    conv, bias, norm = weights[0], weights[1], weights[5]
    num_heads = groups * heads
    mixed = empty((tokens, conv.shape[1]), projected.dtype)
    convolve_channels(
        projected, num_heads * values, False, segments, states, num_heads * keys * values, conv,
        bias, mixed, workers,
    )  # fmt: skip
    for step in range(len(steps) - 1):
        parallel_for(
            _advance, (steps[step + 1] - steps[step]) * num_heads, workers,
            (projected, mixed, segments, states, weights, shape, limits, out, steps[step]),
        )  # fmt: skip
    parallel_for(
        _gate_and_norm, tokens * groups, 1 if out.size <= SMALL else workers,
        (out, projected, norm, kind, eps, groups),
    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def mamba(x, segments, layer_cache, mixer, workers):
    """Returns the mixer's output [T, H * V] for normed rows x [T, N].

    Args:
        layer_cache: the states.
        mixer: a `Mamba`.
    """
    projection, weights, shape, kind, eps, limits = mixer
    inner = shape[0] * shape[1] * shape[3]
    projected = empty((len(x), inner + weights[0].shape[1] + len(weights[2])), x.dtype)
    matmul(x, projection, projected, workers)
    out = empty((len(x), inner), x.dtype)
    mamba_rule(
        projected, segments, layer_cache[0], weights, shape, kind, eps, limits, out, workers
    )  # fmt: skip
    return out


MIXERS[Mamba] = mamba
