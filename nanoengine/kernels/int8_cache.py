"""What `cpu_attention` does beside the plain way where keys and values are int8.

    one head of a block    its lines of numbers, as floats have them (`attention_tiles.py`)
                           behind all of them a float32 scale a token, [P]

A row is rounded when it is stored (`store_rows`). Its numbers are widened in registers, and the
scales are multiplied with scores and weights, so that a line needs nothing else (`scaled`). Where
queries and weights are pairs of bfloat16 numbers, a run becomes lines of pairs, once for all rows
(`widened`): a whole number of 8 bits is one of bfloat16.

Imported where a cache of int8 is met; `attention/int8.py` is the readable form.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from nanoengine.kernels.attention_tiles import FASTMATH, KV_TILE, CacheTile, bfloat16
from nanoengine.kernels.cpu_attention import lines_of
from nanoengine.kernels.jit import by_types, compiled

LEAST = np.float32(2.0**-100)  # see `attention/int8.py`


@compiled(fastmath=FASTMATH, part=True)
def _scale_place(block, head, token, sizes):
    """Where a flat cache, seen as float32, has the scale of a token's head."""
    _, num_kv_heads, head_dim, block_size = sizes
    first = (block * num_kv_heads + head) * block_size
    return (first * (head_dim + 4) + block_size * head_dim) // 4 + token % block_size


@compiled(fastmath=FASTMATH, part=True)
def _store_row(row, cache, at, step, scale_at):
    """Writes a row's numbers from `at` on, `step` apart, and its scale."""
    most = np.uint32(0)  # Why whole numbers: NaN is the largest, and the loop is of vectors
    for d in range(len(row)):
        size = np.uint32(np.float32(row[d]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        most = size if size > most else most
    largest = np.uint32(most).view(np.float32)
    scale = largest / np.float32(127)
    cache.view(np.float32)[scale_at] = scale
    factor = np.float32(1) / scale if largest > LEAST else np.float32(0)
    for d in range(len(row)):
        cache[at + d * step] = np.int8(np.rint(np.float32(row[d]) * factor))


def store_rows(key, value, slot, head, k_cache, v_cache, sizes):
    """`cpu_attention.store_head` of a cache of int8."""
    lanes = min(sizes[3], KV_TILE)
    k_at, v_at = lines_of(k_cache, slot, head, lanes, sizes)
    scale_at = _scale_place(slot // sizes[3], head, slot, sizes)
    _store_row(key, k_cache, k_at, lanes, scale_at)
    _store_row(value, v_cache, v_at, 1, scale_at)


@by_types(FASTMATH)
def _rounded(scores, r, first, stop, weights):
    """Columns of a row of scores as pairs, where weights are pairs."""
    if weights.dtype != types.uint32:
        return lambda scores, r, first, stop, weights: None

    def pairs(scores, r, first, stop, weights):
        line, words = scores[r, first:], weights[r, first // 2 : (stop + 1) // 2]
        for i in range(len(words)):
            words[i] = bfloat16(line[2 * i]) << np.uint32(16) | bfloat16(line[2 * i + 1])

    return pairs


def scaled(scores, weights, rows, columns, cache, block, head, sizes):
    """`attention_tiles.scale_tokens`."""
    (first_row, last), (first, stop, token) = rows, columns
    at = _scale_place(block, head, token, sizes)
    scales = cache.view(np.float32)[at : at + stop - first]
    for r in range(first_row, last):
        line = scores[r, first:stop]
        for t in range(len(scales)):
            line[t] *= scales[t]
        _rounded(scores, r, first, stop, weights)


@intrinsic(prefer_literal=True)
def _widen_two(typing, codes, at, width, words, place, asked, lanes):
    """Two lines of codes from `at` on as one of pairs at a place of words, `lanes` at once. It asks
    for as many codes from `asked` on."""

    def codegen(context, builder, sig, args):
        emit = CacheTile(context, builder, bits=32 * lanes.literal_value)
        source, ahead = (emit.pointer(codes, args[0], first) for first in (args[1], args[5]))
        target, word = emit.pointer(words, *args[3:5]), args[2].type

        def part(turn):
            lane = builder.mul(turn, word(emit.width))
            emit.prefetch(emit.at(ahead, lane, lane))
            lines = emit.at(source, lane), emit.at(source, lane, args[2])
            high, low = (builder.bitcast(emit.codes(line), emit.words) for line in lines)
            pairs = builder.or_(high, builder.lshr(low, emit.every(16)))
            emit.store(pairs, emit.at(target, lane))

        emit.loop(builder.udiv(args[2], word(emit.width)), part)
        return context.get_dummy_value()

    return types.void(codes, at, width, words, place, asked, lanes), codegen


def widened(cache, at, count, width, next_at, pairs):
    """`attention_tiles.run_of` where rows are pairs."""
    for i in range(count // 2):
        first = 2 * i * width
        if width % 16 == 0:
            _widen_two(cache, at + first, width, pairs, i * width, next_at + first, 16)
        else:
            _widen_two(cache, at + first, width, pairs, i * width, next_at + first, 8)
    return pairs, 0, 0
