"""MLA attention on the CPU by numba: values are the first elements of their keys.

All query heads share one KV head. A task has many rows, its query heads and queries, and each key
is read from memory once for all of them:

    keys of a run [n, D] x queries [D, rows]    -> scores [n, rows], transposed to [rows, KV_TILE]
    softmax of the scores against the running maximum of each row
    scores [rows, KV_TILE] x the first V elements of the keys [n, V]  -> added to output [rows, V]

The cache holds a token's elements contiguously, [B, 1, P, D]; bfloat16 is converted to floats one
tile at a time. Tasks, softmax and the merge of splits are shared with `cpu_attention.py`. Called by
`attention/cpu.py`; the reference implementation is `attention/naive.py`.

Legend: T tokens, H query heads, D elements of a key, V of a value, B blocks, P block size.
"""

from __future__ import annotations

import numpy as np
from numba import types

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.attention_microkernels import (
    FASTMATH,
    KV_TILE,
    ROWS,
    VECTOR_BYTES,
    VECTORS,
    few_rows,
    line_tile,
    softmax_step,
    to_cache_dtype,
)
from nanoengine.kernels.attention_tasks import (
    KV_START,
    KV_STOP,
    NUM_QUERIES,
    PARTIAL,
    POSITION,
    QUERY,
    ROW_TILE,
    SEQ,
)
from nanoengine.kernels.cpu_attention import LN2, MASKED, combine
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.pool import parallel_for

TALL = 8  # rows of a tile of one vector: two FMA units need so many sums
BLOCK = 64  # adjacent lanes in the operand b of `times_lines`
LANES = 16  # the number of rows is padded to a multiple of this, for vectors of any width


@specialize()
def as_floats(cache, at, count, buffer, buffer_at):
    """The cache's elements from `at` on as floats: an array and an index. bfloat16 elements are
    converted into `buffer` from `buffer_at` on when a `count` is given."""
    if cache.dtype != types.uint16:
        return lambda cache, at, count, buffer, buffer_at: (cache, at)

    def converted(cache, at, count, buffer, buffer_at):
        source, bits = cache[at : at + count], buffer[buffer_at : buffer_at + count].view(np.uint32)
        for i in range(len(source)):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
        return buffer, buffer_at

    return converted


@compiled(fastmath=FASTMATH, inline=True)
def times_lines(a, a_at, depth, rows, b, lanes, c, c_at, next_at, next_size):
    """c[rows, lanes] = a[rows, depth] x b, in whole tiles: up to TALL rows after the last row are
    also read in a, and written in c. b is [depth, BLOCK] for each BLOCK lanes; the last block may
    be narrower, in whole vectors. Each row of a also prefetches `next_size` elements; the first row
    begins at index `next_at` of b."""
    width = VECTOR_BYTES // c.itemsize
    for start in range(0, lanes, BLOCK):
        wide, at = min(BLOCK, lanes - start), 0
        while at < wide:
            b_at, to = start * depth + at, c_at + start + at
            ahead, step = (next_at, next_size) if b_at == 0 else (b_at, 0)
            if wide - at >= VECTORS * width:
                for r in range(0, rows, ROWS):
                    line_tile(a, a_at + r * depth, depth, b, b_at, wide, depth, c, to + r * lanes,
                              lanes, 0, 0, ahead + r * step, ROWS * step // depth, ROWS,
                              VECTORS, 0, 0)  # fmt: skip
                at += VECTORS * width
            else:
                for r in range(0, rows, TALL):
                    line_tile(a, a_at + r * depth, depth, b, b_at, wide, depth, c, to + r * lanes,
                              lanes, 0, 0, ahead + r * step, TALL * step // depth, TALL, 1, 0,
                              0)  # fmt: skip
                at += width


@compiled(fastmath=FASTMATH, inline=True)
def _transpose_queries(task, q, sizes, scale, queries_t, lanes):
    """queries_t[d, r] = element d of row r's query, scaled; in blocks of rows, see
    `times_lines`."""
    num_heads, size, _, _ = sizes
    for r in range(task[NUM_QUERIES] * num_heads):
        at, start = task[QUERY] * num_heads + r, r // BLOCK * BLOCK
        query, wide = q[at * size : (at + 1) * size], min(BLOCK, lanes - start)
        block = queries_t[start * size + r - start :]
        for d in range(size):
            block[d * wide] = query[d] * scale


@compiled(fastmath=FASTMATH, inline=True)
def _index(table, token, sizes):
    """Index of a token's first element in the flat cache."""
    _, size, _, block_size = sizes
    return (table[token // block_size] * block_size + token % block_size) * size


@compiled(fastmath=FASTMATH)
def _run_task(
    task, table, next_at, cache, sizes, queries_t, lanes, scores_t, scores, buffer,
    out, maximum, total, factors,
):  # fmt: skip
    """Attends one task; leaves maximum, total and the unscaled sum [rows, V] in the buffers.
    `next_at` is prefetched after the last run."""
    num_heads, size, _, block_size = sizes
    rows, position, stop = task[NUM_QUERIES] * num_heads, task[POSITION], task[KV_STOP]
    run, masked = min(block_size, KV_TILE), scores.dtype.type(MASKED)
    for r in range(rows):
        maximum[r] = MASKED
        total[r] = 0
    out[: -(-rows // ROWS) * ROWS] = 0
    weights, sums, out_width = scores.reshape(-1), out.reshape(-1), out.shape[1]
    for tile_start in range(task[KV_START], stop, KV_TILE):  # a multiple of KV_TILE
        end = min(tile_start + KV_TILE, stop)
        for begin in range(tile_start, end, run):
            offset, token_at, after = begin - tile_start, _index(table, begin, sizes), begin + run
            lines, at = as_floats(cache, token_at, run * size, buffer, offset * size)
            ahead = _index(table, after, sizes) if after < stop else next_at
            ahead = (cache[ahead:].ctypes.data - queries_t.ctypes.data) // queries_t.itemsize
            times_lines(
                lines, at, size, min(run, end - begin), queries_t, lanes, scores_t, offset * lanes,
                ahead, size * cache.itemsize // queries_t.itemsize,
            )  # fmt: skip
        first_row = max(0, tile_start - position) * num_heads // ROWS * ROWS
        for r in range(first_row, rows):
            seen, line = min(end, position + r // num_heads + 1) - tile_start, scores[r]
            for t in range(KV_TILE):
                line[t] = scores_t[t * lanes + r] if t < seen else masked
        softmax_step(scores, first_row, rows, maximum, total, factors, scores, 0)
        for begin in range(tile_start, end, run):
            offset = begin - tile_start
            lines, at = as_floats(cache, _index(table, begin, sizes), 0, buffer, offset * size)
            for r in range(first_row, rows, ROWS):
                seen = position + 1 - begin + (r + ROWS - 1) // num_heads
                few_rows(
                    weights, r * KV_TILE + offset, KV_TILE, lines, at, size,
                    max(0, min(seen, end - begin, run)), sums, r * out_width, out_width,
                    factors, r, at, 0, rows - r, out_width, out_width, 0, 0,
                )  # fmt: skip
            if begin + run < end:  # sums are rescaled once per tile
                factors[:rows] = 1


@compiled(fastmath=FASTMATH)
def _attend_tasks(
    queries, blocks, tables, tasks, bounds, sizes, scale, out_rows, partial_out, partial_stats,
    first, last,
):  # fmt: skip
    """`attend_latents` for the shares first ... last - 1."""
    lo, hi = bounds[first], bounds[last]
    num_heads, size, value_size, _ = sizes
    q, cache, result = queries.reshape(-1), blocks.reshape(-1), out_rows.reshape(-1)
    scale, max_queries = scale / q.dtype.type(LN2), 1
    for i in range(lo, hi):
        max_queries = max(max_queries, tasks[i, NUM_QUERIES])
    num_rows = -(-max_queries * num_heads // LANES) * LANES
    queries_t = zeros((size * num_rows,), q.dtype)
    scores_t = empty((KV_TILE * num_rows,), q.dtype)
    scores = zeros((num_rows, KV_TILE), q.dtype)
    buffer = empty((KV_TILE * size if cache.itemsize < q.itemsize else 0,), q.dtype)
    out = empty((num_rows, -(-value_size // 8) * 8), q.dtype)  # whole vectors, within a key
    maximum, total = empty((num_rows,), q.dtype), empty((num_rows,), q.dtype)
    factors = empty((num_rows,), q.dtype)
    factors[:] = 1
    for i in range(lo, hi):
        task, following = tasks[i], tasks[min(i + 1, len(tasks) - 1)]
        rows = task[NUM_QUERIES] * num_heads
        lanes = -(-rows // LANES) * LANES
        previous = tasks[max(i - 1, lo)]
        is_same = previous[QUERY] == task[QUERY] and previous[NUM_QUERIES] == task[NUM_QUERIES]
        if i == lo or not is_same:
            _transpose_queries(task, q, sizes, scale, queries_t, lanes)
        next_at = _index(tables[following[SEQ]], following[KV_START], sizes)
        _run_task(
            task, tables[task[SEQ]], next_at, cache, sizes, queries_t, lanes, scores_t, scores,
            buffer, out, maximum, total, factors,
        )  # fmt: skip
        if task[PARTIAL] < 0:
            for r in range(rows):
                at = (task[QUERY] * num_heads + r) * value_size
                inverse, sums = q.dtype.type(1) / total[r], out[r]
                line = result[at : at + value_size]
                for d in range(value_size):
                    line[d] = sums[d] * inverse
        else:
            base = task[PARTIAL] * max(ROW_TILE, num_heads)
            for r in range(rows):
                partial_stats[base + r, 0] = maximum[r]
                partial_stats[base + r, 1] = total[r]
                part, sums = partial_out[base + r], out[r]
                for d in range(value_size):
                    part[d] = sums[d]


@compiled(fastmath=FASTMATH)
def attend_latents(
    queries, blocks, tables, tasks, bounds, merges, parts, partial_out, partial_stats, sizes, scale,
    no_sinks, out_rows, workers,
):  # fmt: skip
    """Runs all tasks and merges their splits: queries [T, H, D] -> out_rows [T, H, V].

    blocks: the cache, contiguous, [B, 1, P, D]; sizes: (H, D, V, P). `plan_tasks` makes the rest.
    """
    parallel_for(
        _attend_tasks, len(bounds) - 1, workers,
        (queries, blocks, tables, tasks, bounds, sizes, scale, out_rows, partial_out,
         partial_stats),
    )  # fmt: skip
    if len(merges):
        num_heads, _, value_size, block_size = sizes
        combine(
            merges, parts, (num_heads, 1, value_size, block_size), no_sinks, out_rows, partial_out,
            partial_stats, workers,
        )  # fmt: skip


@compiled(fastmath=FASTMATH)
def _store_tokens(keys, slots, cache, lo, hi):
    size = keys.shape[1]
    for t in range(lo, hi):
        key, line = keys[t], cache[slots[t] * size : (slots[t] + 1) * size]
        for d in range(size):
            line[d] = to_cache_dtype(key[d], cache)


@compiled(fastmath=FASTMATH)
def store_latents(keys, slots, blocks, workers):
    """Copies keys [T, D] to their slots; blocks: the cache, [B, 1, P, D]."""
    parallel_for(_store_tokens, len(slots), workers, (keys, slots, blocks.reshape(-1)))
