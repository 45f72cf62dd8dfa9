"""What `cpu_attention` does beside the plain way where keys and values are int8.

    one head of a block    its lines of numbers, as floats have them (`attention_tiles.py`)
                           behind all of them a float32 scale a token, [P]

A row is rounded when it is stored (`store_rows`). Its numbers are widened in registers, and the
scales are multiplied with scores and weights, so that a line needs nothing else (`scaled`). Where
queries and weights are pairs of bfloat16 numbers, a run becomes lines of pairs, once for all rows
(`widened`): a whole number of 8 bits is one of bfloat16.

Functions of the plain way that follow from the types of their arguments have one more form for
int8, once this file is imported: by `CPUBackend`, for a cache of int8. `attention/int8.py` is the
readable form.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from nanoengine.kernels.attention_tiles import (
    FASTMATH,
    KV_TILE,
    CacheTile,
    run_of,
    scale_numbers,
    scale_tokens,
    scales_of,
)
from nanoengine.kernels.cpu_attention import lines_of, store_head
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.tiles import LINE

LEAST = np.float32(2.0**-100)  # see `attention/int8.py`
OPTIONS = {"fastmath": set(FASTMATH)}
LINE_OF_CODES = {"paired": False, "dots": False, "mask": None}


@overload(scale_numbers)
def _four(array):
    return (lambda array: 4) if array.dtype == types.int8 else None


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


@overload(store_head, jit_options=OPTIONS)
def store_rows(key, value, slot, head, k_cache, v_cache, sizes):
    """`cpu_attention.store_head`."""

    def rows(key, value, slot, head, k_cache, v_cache, sizes):
        lanes = min(sizes[3], KV_TILE)
        k_at, v_at = lines_of(k_cache, slot, head, lanes, sizes)
        scale_at = _scale_place(slot // sizes[3], head, slot, sizes)
        _store_row(key, k_cache, k_at, lanes, scale_at)
        _store_row(value, v_cache, v_at, 1, scale_at)

    return rows if k_cache.dtype == types.int8 else None


@overload(scales_of, jit_options=OPTIONS)
def places_of_scales(cache, table, head, begin, sizes):
    """`attention_tiles.scales_of`."""

    def scales(cache, table, head, begin, sizes):
        at = _scale_place(table[begin // sizes[3]], head, begin, sizes)
        return cache.view(np.float32), at

    return scales if cache.dtype == types.int8 else None


@intrinsic(prefer_literal=True)
def _scale(typing, scores, weights, row, column, count, scales, scales_at, lanes):
    """weights = scores * scales, for `count` columns of a row from `column` on, `lanes` at once;
    weights may be pairs of the products, rounded."""
    signature = types.void(scores, weights, row, column, count, scales, scales_at, lanes)

    def codegen(context, builder, sig, args):
        bits = scores.dtype.bitwidth * lanes.literal_value
        emit = CacheTile(context, builder, scores, bits)
        word, size = args[2].type, 2 if weights.dtype == types.uint32 else 1
        first = builder.add(builder.mul(args[2], word(KV_TILE)), args[3])
        source, scale_at = emit.pointer(scores, args[0], first), emit.pointer(scales, *args[5:7])
        target = emit.pointer(weights, args[1], builder.udiv(first, word(size)))

        def part(turn):
            lane = builder.mul(turn, word(emit.width))
            factor = emit.floats(emit.at(scale_at, lane))
            scaled = builder.fmul(emit.load(emit.at(source, lane)), factor)
            to = emit.at(target, builder.udiv(lane, word(size)))
            emit.store(emit.pairs(scaled) if size == 2 else scaled, to)

        emit.loop(builder.udiv(args[4], word(emit.width)), part)
        return context.get_dummy_value()

    return signature, codegen


@overload(scale_tokens, jit_options=OPTIONS)
def scaled(scores, weights, first_row, rows, cache, table, head, begin, end, sizes):
    """`attention_tiles.scale_tokens`, for the whole run from `begin` on."""

    def scaled(scores, weights, first_row, rows, cache, table, head, begin, end, sizes):
        lanes = min(sizes[3], KV_TILE)
        scales, at = scales_of(cache, table, head, begin, sizes)
        lines, flat = scores.reshape(-1), weights.reshape(-1)
        for r in range(first_row, rows):
            if lanes % 16 == 0:
                _scale(lines, flat, r, begin % KV_TILE, lanes, scales, at, 16)
            else:
                _scale(lines, flat, r, begin % KV_TILE, lanes, scales, at, 8)

    return scaled if cache.dtype == types.int8 else None


@intrinsic(prefer_literal=True)
def _widen(typing, codes, at, count, floats, asked):
    """`count` codes as floats, 64 at a time. It asks for as many from `asked` on."""

    def codegen(context, builder, sig, args):
        emit = CacheTile(context, builder, floats)
        source, ahead = (emit.pointer(codes, args[0], first) for first in (args[1], args[4]))
        target, word = emit.pointer(floats, args[3], args[1].type(0)), args[1].type

        def part(turn):
            first = builder.mul(turn, word(LINE))
            emit.prefetch(emit.at(ahead, first))
            for i in range(0, LINE, emit.width):
                (numbers,) = emit.line(emit.at(source, first, word(i)), **LINE_OF_CODES)
                emit.store(numbers, emit.at(target, first, word(i)))

        emit.loop(builder.udiv(args[2], word(LINE)), part)
        return context.get_dummy_value()

    return types.void(codes, at, count, floats, asked), codegen


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
            high, low = (
                builder.bitcast(emit.line(line, **LINE_OF_CODES)[0], emit.words) for line in lines
            )
            pairs = builder.or_(high, builder.lshr(low, emit.every(16)))
            emit.store(pairs, emit.at(target, lane))

        emit.loop(builder.udiv(args[2], word(emit.width)), part, unroll=4)
        return context.get_dummy_value()

    return types.void(codes, at, width, words, place, asked, lanes), codegen


@overload(run_of)
def widened(cache, at, count, width, next_at, room):
    """`attention_tiles.run_of` where it widens."""

    def pairs(cache, at, count, width, next_at, room):
        for i in range(count // 2):
            first = 2 * i * width
            if width % 16 == 0:
                _widen_two(cache, at + first, width, room, i * width, next_at + first, 16)
            else:
                _widen_two(cache, at + first, width, room, i * width, next_at + first, 8)
        return room, 0, 0

    def floats(cache, at, count, width, next_at, room):
        _widen(cache, at, count * width, room, next_at)
        return room, 0, 0

    if cache.dtype != types.int8 or room.dtype == types.int8:
        return None
    return pairs if room.dtype == types.uint32 else floats
