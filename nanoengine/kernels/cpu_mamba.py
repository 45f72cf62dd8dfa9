"""Mamba-2 on the CPU, from the projection to normed and gated heads.

The recurrent state of a sequence is one row of elements: a matrix [E, V] per head, followed by the
last inputs of the convolution, [W - 1, C]. The tokens of a prompt are processed one by one, like
those in a decode, so **a token has the same bits however a prompt was cut, and in any batch**.

Why not products over chunks of tokens, as in `mamba2.scan`: a token costs 3 operations per element
of the matrix, with chunks of 64 two and a half. One row of a strip of the matrix, two vectors wide,
stays in registers for `TOGETHER` tokens, and the strip stays in the L1 cache for 64.

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
from nanoengine.kernels.matmul import multiply
from nanoengine.kernels.pool import SMALL, parallel_for

Mamba = namedtuple("Mamba", "projection weights shape kind eps limits")
"""Operands of `mamba`: the weights of the projection, and the remaining arguments of
`mamba_rule`."""

TOGETHER = 4 if CURRENT.registers == 32 else 2  # tokens of a tile, whose sums are in registers
PLAIN, BEHIND, BEFORE = 0, 1, 2  # the norm: none, after the gate, before the gate


@tile_function(
    "float* source, float* target, step, float* b, float* c, wide, keys, float* kept,"
    " float* change, float* read, size"
)
def mamba_tile(builder, isa: ISA, of, tokens: int):
    """Updates a strip [E, STRIP] of a state with some tokens, from source to target. Token t:
    strip = kept[t] * strip + b[t] ⊗ change[t]; read[t] = c[t] times the strip.

    Rows of a strip are `step` elements apart; neighbouring tokens are `wide` elements apart in b
    and c, and `size` in change and read. Each sum is one chain over the rows.
    """
    tile = Emit(None, builder, bits=isa.vector_bits, isa=isa)
    lanes = [I64(v * tile.width) for v in range(VECTORS)]
    places = [tile.variable(of.source), tile.variable(of.target)]
    kept = [tile.broadcast(tile.at(of.kept, I64(t))) for t in range(tokens)]
    changes = [
        [tile.load(tile.at(row, lane)) for lane in lanes]
        for row in tile.rows(of.change, of.size, tokens)
    ]
    sums = [[tile.variable(tile.constant(0.0)) for _ in lanes] for _ in range(tokens)]
    asked = [tile.rows(of.b, of.wide, tokens), tile.rows(of.c, of.wide, tokens)]

    def step(e):
        row, to = (tile.moved(place, of.step) for place in places)
        strip = [tile.load(tile.at(row, lane)) for lane in lanes]
        for t in range(tokens):
            b, c = (tile.broadcast(tile.at(rows[t], e)) for rows in asked)
            for v, cell in enumerate(sums[t]):
                strip[v] = tile.fma(b, changes[t][v], builder.fmul(strip[v], kept[t]))
                builder.store(tile.fma(strip[v], c, builder.load(cell)), cell)
        for lane, numbers in zip(lanes, strip, strict=True):
            tile.store(numbers, tile.at(to, lane))

    tile.loop(of.keys, step, unroll=2 if tokens == 1 else 1)
    for cells, line in zip(sums, tile.rows(of.read, of.size, tokens), strict=True):
        for cell, lane in zip(cells, lanes, strict=True):
            tile.store(builder.load(cell), tile.at(line, lane))


@tile_call(
    lambda isa: [(1, 1), (TOGETHER, 1)],
    lambda module, kinds, tokens, _: mamba_tile(module, CURRENT, tokens),
)
def advance(source, source_at, target, target_at, step, b, b_at, c, c_at, wide, keys,
            kept, kept_at, change, change_at, read, read_at, size, tokens, one):  # fmt: skip
    """`mamba_tile` of this number of tokens."""


@compiled(fastmath=FASTMATH)
def _advance(projected, mixed, spans, states, weights, shape, limits, out, begin, lo, hi):
    (pieces, firsts, _), (_, _, a_log, dt_bias, d, _) = spans, weights
    groups, heads, keys, values = shape
    num_heads, wide = groups * heads, mixed.shape[1]
    inner, size = num_heads * values, -(-values // STRIP) * STRIP
    longest, flat = min(TOKENS, len(mixed)), mixed.reshape(-1)
    change, read = zeros((longest * size,), mixed.dtype), empty((longest * size,), mixed.dtype)
    part, kept = empty((keys * STRIP,), mixed.dtype), empty((longest,), mixed.dtype)
    least, most = limits
    for task in range(lo, hi):
        span, h = begin + task // num_heads, task % num_heads
        at, of_head = h * keys * values, h * values
        b_at = inner + h // heads * keys
        rate = -math.exp(a_log[h])
        before = states[pieces[firsts[span], 2], at:]
        for piece in range(firsts[span], firsts[span + 1]):
            behind = states[pieces[piece, 3], at:]
            end = pieces[piece, 1]
            for t in range(pieces[piece, 0], end, TOKENS):
                count = min(TOKENS, end - t)
                for i in range(count):
                    x = projected[t + i, inner + wide + h] + dt_bias[h]
                    dt = max(x, np.float32(0)) + math.log1p(exp(-abs(x)))
                    dt = least if dt < least else most if dt > most else dt
                    kept[i], own = exp(rate * dt), mixed[t + i, of_head:]
                    for v in range(values):
                        change[i * size + v] = own[v] * dt
                for first in range(0, values, STRIP):
                    columns, step = values - first, values
                    source, target, at_source, at_target = before, behind, first, first
                    if columns < STRIP:
                        for e in range(keys):
                            copy(before[e * values + first :], part[e * STRIP :], columns)
                        source, target, step, at_source, at_target = part, part, STRIP, 0, 0
                    i = 0
                    while i < count:
                        tokens = TOGETHER if count - i >= TOGETHER else 1
                        b_place, place = (t + i) * wide + b_at, i * size + first
                        advance(
                            source, at_source, target, at_target, step, flat, b_place, flat,
                            b_place + groups * keys, wide, keys, kept, i, change, place, read,
                            place, size, tokens, 1,
                        )  # fmt: skip
                        source, at_source, i = target, at_target, i + tokens
                    if columns < STRIP:
                        for e in range(keys):
                            copy(part[e * STRIP :], behind[e * values + first :], columns)
                for i in range(count):
                    own, row = mixed[t + i, of_head:], out[t + i, of_head:]
                    for v in range(values):
                        row[v] = read[i * size + v] + own[v] * d[h]
                before = behind


@compiled(fastmath=FASTMATH)
def _leave(out, projected, norm, kind, eps, groups, lo, hi):
    size = out.shape[1] // groups
    # Why: if a row is read and written under two names, LLVM does not vectorize the loop.
    other = empty((size,), out.dtype)
    for task in range(lo, hi):
        t, first = task // groups, task % groups * size
        row, gate = out[t, first : first + size], projected[t, first : first + size]
        own = norm[first : first + size]
        if kind == BEFORE:
            norm_row(row, own, eps, other)
            gate_row(gate, other, 0, row)
        else:
            gate_row(gate, row, 0, other)
            if kind == BEHIND:
                norm_row(other, own, eps, row)
            else:
                copy(other, row, size)


@compiled(fastmath=FASTMATH)
def mamba_rule(projected, spans, states, weights, shape, kind, eps, limits, out, workers):
    """Advances the states of sequences by their tokens of a step.

    Args:
        projected: [T, H * V + C + H]: output gates, inputs of the convolution, dt.
        spans: made by `spans_of` (`layers/cpu_linear_attention.py`).
        states: [states, elements of one].
        weights: of the convolution [W, C] and its bias [C], or none; a_log, dt_bias and d of
            `MambaHeads` [H]; the norm [H * V], or any array.
        shape: G, R, E and V.
        kind: PLAIN, BEHIND or BEFORE, the position of the norm.
        eps, limits: the norm's epsilon, and the range to which dt is clamped.
        out: [T, H * V].
    """
    (groups, heads, keys, values), waves, tokens = shape, spans[2], len(projected)
    conv, bias, norm = weights[0], weights[1], weights[5]
    num_heads = groups * heads
    mixed = empty((tokens, conv.shape[1]), projected.dtype)
    for wave in range(len(waves) - 1):
        begin, count = waves[wave], waves[wave + 1] - waves[wave]
        convolve_channels(
            projected, num_heads * values, False, spans, states, num_heads * keys * values, conv,
            bias, mixed, wave, workers,
        )  # fmt: skip
        parallel_for(
            _advance, count * num_heads, workers,
            (projected, mixed, spans, states, weights, shape, limits, out, begin),
        )  # fmt: skip
    parallel_for(
        _leave, tokens * groups, 1 if out.size <= SMALL else workers,
        (out, projected, norm, kind, eps, groups),
    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def mamba(x, spans, memory, mixer, workers):
    """Returns the mixer's output [T, H * V] for normed rows x [T, N].

    Args:
        memory: the states.
        mixer: a `Mamba`.
    """
    projection, weights, shape, kind, eps, limits = mixer
    inner = shape[0] * shape[1] * shape[3]
    projected = empty((len(x), inner + weights[0].shape[1] + len(weights[2])), x.dtype)
    multiply(x, projection, projected, workers)
    mixed = empty((len(x), inner), x.dtype)
    mamba_rule(
        projected, spans, memory[0], weights, shape, kind, eps, limits, mixed, workers
    )  # fmt: skip
    return mixed


MIXERS[Mamba] = mamba
