"""The compiled kernels of `CPUBackend`: paged attention for float32 and float64, by numba.

Called by `attention/cpu.py` and, in fused layers, `cpu_decoder.py`. Kernels see flat arrays,
offsets and ints, never torch. The reference implementation is `attention/naive.py`.

`attention_tasks.py` cuts a step into tasks: one KV head of one sequence, a tile of its queries,
whose query heads and queries are rows, and a range of its context. A task walks the block table in
steps of `KV_TILE` tokens with an online softmax:

    queries [rows, D] x keys of a run [D, n]   -> scores [rows, KV_TILE]    run: tokens in one block
    softmax of the scores against the running maximum of each row
    scores [rows, KV_TILE] x values of a run [n, D]  -> added to output [rows, D]

`attention_microkernels.py` has the products, the softmax, and the layout of keys and values in the
cache. Each sum is one chain in a fixed order, whatever the width of vectors and the other rows: a
sequence's result has the same bits in any batch.

Source: online softmax and tiling from FlashAttention (Dao et al. 2022, section 3); splitting the
context of a decode from Flash-Decoding (Dao et al. 2023); block tables from PagedAttention (Kwon et
al. 2023, section 4).

Legend: T tokens, S sequences, H / K query / KV heads, R = H / K, D head dim, B blocks, P block
size.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.attention_microkernels import (
    FASTMATH,
    KV_TILE,
    ROWS,
    as_words,
    buffer_for_few,
    can_interleave,
    elements_per_word,
    few_rows,
    line_indices,
    make_weights,
    prefetch_element,
    read_run,
    scale_elements,
    scale_row,
    softmax_and_add,
    softmax_step,
    store_lines,
)
from nanoengine.kernels.attention_tasks import (
    COUNT,
    FIRST,
    HEAD,
    KV_START,
    KV_STOP,
    MERGE_HEAD,
    MERGE_QUERIES,
    MERGE_QUERY,
    NUM_QUERIES,
    PARTIAL,
    POSITION,
    QUERY,
    ROW_TILE,
    SEQ,
)
from nanoengine.kernels.exp import exp
from nanoengine.kernels.gemm import LINE
from nanoengine.kernels.jit import compiled, specialize
from nanoengine.kernels.pool import parallel_for

MASKED = -1e30  # a score with weight 0; finite, so that max - max is not NaN
LN2 = math.log(2)
PAGE = 4096  # bytes
CONVERTED_ROWS = 16  # with at least so many rows (pairs: half) a run is converted once for all


@specialize()
def run_scales(cache, table, head, begin, sizes):
    """An array with the scales of a run's tokens, and their index in it; 0 if there are none."""
    if cache.dtype != types.int8:
        return lambda cache, table, head, begin, sizes: (0, 0)
    from nanoengine.kernels.int8_cache import run_scales_index

    return run_scales_index


@specialize()
def tile_scales(cache, table, head, first, end, sizes, scales):
    """The scales of a tile's tokens from `first` on, one per token: in the cache itself if they
    belong to one run, else in `scales` [KV_TILE]; 0 if there are none."""
    if cache.dtype != types.int8:
        return lambda cache, table, head, first, end, sizes, scales: 0
    from nanoengine.kernels.int8_cache import gather_scales

    return gather_scales


@specialize()
def prefetch_scales(cache, at, sizes):
    """Prefetches the scales of the run that begins at this index, if the cache has any."""
    if cache.dtype != types.int8:
        return lambda cache, at, sizes: None
    from nanoengine.kernels.int8_cache import prefetch_run_scales

    return prefetch_run_scales


@compiled(fastmath=FASTMATH, inline=True)
def _mask(scores, first_row, rows, group_size, tile_start, position, window):
    """Sets the scores that a row may not see (its future, or before its window) to MASKED."""
    masked = scores.dtype.type(MASKED)
    for r in range(first_row, rows):
        p = position + r // group_size
        first, stop = max(0, p - window + 1 - tile_start), max(0, p + 1 - tile_start)
        scores[r, : min(first, KV_TILE)] = masked
        scores[r, stop:] = masked


@compiled(fastmath=FASTMATH, inline=True)
def _softcap(scores, first_row, rows, softcap):
    """scores = softcap * tanh(scores / softcap) / ln 2, computed with exp of values that are not
    positive."""
    one, two = scores.dtype.type(1), scores.dtype.type(2)
    cap = softcap / scores.dtype.type(LN2)
    for r in range(first_row, rows):
        row = scores[r]
        for t in range(KV_TILE):
            x = row[t] / softcap
            e = exp(-two * abs(x))
            row[t] = np.copysign(cap * (one - e) / (one + e), x)


@compiled(fastmath=FASTMATH, inline=True)
def _run_index(cache, table, head, token, sizes):
    """Index of the run that begins with a token in the flat cache."""
    _, num_kv_heads, head_dim, block_size = sizes
    first = (table[token // block_size] * num_kv_heads + head) * block_size
    at = first * (head_dim + scale_elements(cache)) + token % block_size * head_dim
    return at // elements_per_word(cache)


@compiled(fastmath=FASTMATH, inline=True)
def _next_run_index(cache, token, lanes, task, table, following, next_table, sizes):
    """The index that is prefetched while this token's run is read: the next run, or the first run
    of the `following` task. If a task ends within a run, its last run prefetches the last run of
    the following task, and the run before it prefetches the first. Why: a partial run would
    prefetch only a part of a whole run, and a whole run more than the partial run that is read."""
    last = (task[KV_STOP] - 1) // lanes * lanes
    in_part = task[PARTIAL] < 0 and task[KV_STOP] % lanes > 0
    if token + lanes <= last - (lanes if in_part else 0):
        return _run_index(cache, table, task[HEAD], token + lanes, sizes)
    first = following[KV_START] // lanes * lanes
    if in_part and token == last > task[KV_START]:
        first = max(first, (following[KV_STOP] - 1) // lanes * lanes)
    return _run_index(cache, next_table, following[HEAD], first, sizes)


@compiled(fastmath=FASTMATH, inline=True)
def _prefetch_pages(k, v, task, table, sizes):
    """Prefetches one line of each memory page that a task will read.

    Why: a prefetch waits for the page table lookup, and the products have evicted the page tables
    from the cache.
    """
    lanes, head_dim = min(sizes[3], KV_TILE), sizes[2]
    for begin in range(task[KV_START] // lanes * lanes, task[KV_STOP], lanes):
        at = _run_index(k, table, task[HEAD], begin, sizes)
        for i in range(at, at + lanes * head_dim // elements_per_word(k), PAGE // k.itemsize):
            prefetch_element(k, i, 0)
            prefetch_element(v, i, 0)


@compiled(fastmath=FASTMATH)
def _run_task(
    task, table, following, next_table, buffer, q, q_stride, k, v, sizes, scale, softcap, window,
    tile, scores, weights, scale_buffer, out, maximum, total, factors,
):  # fmt: skip
    """Attends one task; leaves maximum, total and the unscaled sum [rows, D] in the buffers.
    `buffer` is for a run that is converted (`read_run`), `scale_buffer` for a tile's scales.

    Scores are in units of ln 2, so that weights are powers of 2. While it computes the scores of a
    run, it prefetches the next run's keys; while it adds values, the next run's values, or the
    `following` task's.
    """
    num_heads, num_kv_heads, head_dim, block_size = sizes
    group_size = num_heads // num_kv_heads
    rows, head, position = task[NUM_QUERIES] * group_size, task[HEAD], task[POSITION]
    queries, lines, flat_weights, sums = (
        tile.reshape(-1), scores.reshape(-1), weights.reshape(-1), out.reshape(-1)
    )  # fmt: skip
    if softcap == 0:
        scale = scale / q.dtype.type(LN2)
    for r in range(rows):
        token = task[QUERY] + r // group_size
        at = token * q_stride + (head * group_size + r % group_size) * head_dim
        scale_row(q, at, scale, queries, r * tile.shape[1], head_dim)
        maximum[r] = MASKED
        total[r] = 0
    out[: -(-rows // ROWS) * ROWS] = 0

    lanes = min(block_size, KV_TILE)
    per_weight = elements_per_word(weights)
    start, stop = task[KV_START], task[KV_STOP]
    for tile_start in range(start // KV_TILE * KV_TILE, stop, KV_TILE):
        end = min(tile_start + KV_TILE, stop)
        first = max(tile_start, start // lanes * lanes)
        # Rows of queries before the tile see nothing of it.
        first_row = max(0, tile_start - position) * group_size // ROWS * ROWS
        for begin in range(first, end, lanes):
            at = _run_index(k, table, head, begin, sizes)
            next_at = _next_run_index(k, begin, lanes, task, table, following, next_table, sizes)
            prefetch_scales(k, next_at, sizes)
            run, at, next_at = read_run(k, at, head_dim, lanes, next_at, buffer)
            scales, scales_at = run_scales(k, table, head, begin, sizes)
            for r in range(first_row, rows, ROWS):
                seen = position + 1 - begin + (r + ROWS - 1) // group_size
                few_rows(
                    queries, r * tile.shape[1], tile.shape[1], run, at, lanes, head_dim,
                    lines, r * KV_TILE + begin - tile_start, KV_TILE, 0, 0,
                    next_at, int(r == 0), rows - r, min(seen, end - begin, lanes), lanes,
                    scales, scales_at,
                )  # fmt: skip
        token_scales = tile_scales(v, table, head, first, end, sizes, scale_buffer)
        if softcap > 0:
            _softcap(scores, first_row, rows, softcap)
        last = position + task[NUM_QUERIES] - 1
        if tile_start + KV_TILE - 1 > position or tile_start + window <= last:
            _mask(scores, first_row, rows, group_size, tile_start, position, window)
        elif (
            can_interleave(scores, weights, v, buffer)
            and min(lanes, head_dim) >= KV_TILE
            and rows >= ROW_TILE
        ):
            at = _run_index(k, table, head, tile_start, sizes)
            run, at, _ = read_run(v, at, lanes, head_dim, at, buffer)
            softmax_and_add(
                scores, rows, maximum, total, factors, weights, token_scales, run, at, out, head_dim
            )
            continue
        softmax_step(scores, first_row, rows, maximum, total, factors, weights, token_scales)
        for begin in range(first, end, lanes):
            at = _run_index(k, table, head, begin, sizes)
            next_at = _next_run_index(k, begin, lanes, task, table, following, next_table, sizes)
            prefetch_scales(v, next_at, sizes)
            run, at, next_at = read_run(v, at, lanes, head_dim, next_at, buffer)
            for r in range(first_row, rows, ROWS):
                seen = position + 1 - begin + (r + ROWS - 1) // group_size
                few_rows(
                    flat_weights, r * weights.shape[1] + (begin - tile_start) // per_weight,
                    weights.shape[1], run, at, head_dim, max(0, min(seen, end - begin, lanes)),
                    sums, r * head_dim, head_dim, factors, r,
                    next_at, int(r == 0), rows - r, head_dim, head_dim, 0, 0,
                )  # fmt: skip
            if begin + lanes < end:  # sums are rescaled once per tile
                factors[:rows] = 1


@compiled(fastmath=FASTMATH, inline=True)
def _inverse(highest, total, sinks, head):
    """1 / the softmax's sum: `total` plus the term of the head's sink, which has no value vector.

    `highest` is in units of ln 2, the sink is not.
    """
    one = sinks.dtype.type(1)
    if len(sinks) == 0:
        return one / total
    above = sinks[head] - highest * sinks.dtype.type(LN2)
    if above <= 0:
        return one / (total + exp(above))
    shrink = exp(-above)
    return shrink / (total * shrink + one)


@compiled(fastmath=FASTMATH)
def _attend_tasks(
    queries, k_cache, v_cache, tables, tasks, bounds, sizes, scale, softcap, window, operand, sinks,
    out_rows, partial_out, partial_stats, first, last,
):  # fmt: skip
    """`attend` for the shares first ... last - 1."""
    lo, hi = bounds[first], bounds[last]
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    q, q_stride, result = queries.reshape(-1), num_heads * head_dim, out_rows.reshape(-1)
    k, v = as_words(k_cache.reshape(-1)), as_words(v_cache.reshape(-1))
    partial_rows, max_queries = max(ROW_TILE, group_size), 1
    for i in range(lo, hi):
        max_queries = max(max_queries, tasks[i, NUM_QUERIES])
    num_rows = -(-max_queries * group_size // ROWS) * ROWS
    per_word = elements_per_word(operand)
    tile = zeros((num_rows, head_dim // per_word), operand.dtype)
    scores = zeros((num_rows, KV_TILE), q.dtype)
    weights = make_weights(scores, operand, k)
    buffer = empty((KV_TILE * head_dim // per_word,), operand.dtype)
    scale_buffer = zeros((KV_TILE,), np.float32)
    out = empty((num_rows, head_dim), q.dtype)
    sums, parts, one = out.reshape(-1), partial_out.reshape(-1), q.dtype.type(1)
    maximum = empty((num_rows,), q.dtype)
    total = empty((num_rows,), q.dtype)
    factors = empty((num_rows,), q.dtype)
    factors[:] = 1
    common_args = (
        q, q_stride, k, v, sizes, scale, softcap, window,
        tile, scores, weights, scale_buffer, out, maximum, total, factors,
    )  # fmt: skip
    for i in range(lo, hi):
        task, following = tasks[i], tasks[min(i + 1, len(tasks) - 1)]
        rows = task[NUM_QUERIES] * group_size
        task_args = task, tables[task[SEQ]], following, tables[following[SEQ]]
        if rows * per_word < CONVERTED_ROWS:
            later = tasks[min(i + 2, len(tasks) - 1)]
            _prefetch_pages(k, v, later, tables[later[SEQ]], sizes)
            _run_task(*task_args, buffer_for_few(k, buffer), *common_args)
        else:
            _run_task(*task_args, buffer, *common_args)
        if task[PARTIAL] < 0:
            for r in range(rows):
                head = task[HEAD] * group_size + r % group_size
                at = ((task[QUERY] + r // group_size) * num_heads + head) * head_dim
                inverse = _inverse(maximum[r], total[r], sinks, head)
                scale_row(sums, r * head_dim, inverse, result, at, head_dim)
        else:
            base = task[PARTIAL] * partial_rows
            for r in range(rows):
                partial_stats[base + r, 0] = maximum[r]
                partial_stats[base + r, 1] = total[r]
                scale_row(sums, r * head_dim, one, parts, (base + r) * head_dim, head_dim)


@compiled(fastmath=FASTMATH)
def _combine(merges, parts, sizes, sinks, out_rows, partial_out, partial_stats, lo, hi):
    """`combine` for the tiles lo ... hi - 1."""
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    result = out_rows.reshape(-1)
    ln2 = result.dtype.type(LN2)  # maxima are in units of it
    for i in range(lo, hi):
        merge = merges[i]
        part_rows = parts[merge[FIRST] : merge[FIRST] + merge[COUNT]]
        for r in range(merge[MERGE_QUERIES] * group_size):
            highest = partial_stats[part_rows[0] + r, 0]
            for s in range(1, len(part_rows)):
                highest = max(highest, partial_stats[part_rows[s] + r, 0])
            head = merge[MERGE_HEAD] * group_size + r % group_size
            at = ((merge[MERGE_QUERY] + r // group_size) * num_heads + head) * head_dim
            total, line = result.dtype.type(0), result[at : at + head_dim]
            for d in range(head_dim):
                line[d] = 0
            for s in range(len(part_rows)):
                row = part_rows[s] + r
                weight = exp((partial_stats[row, 0] - highest) * ln2)
                part = partial_out[row]
                total += weight * partial_stats[row, 1]
                for d in range(head_dim):
                    line[d] += weight * part[d]
            inverse = _inverse(highest, total, sinks, head)
            for d in range(head_dim):
                line[d] *= inverse


@compiled(fastmath=FASTMATH)
def combine(merges, parts, sizes, sinks, out_rows, partial_out, partial_stats, workers):
    """Merges the splits of each tile: result = sum of 2^(m_i - m) out_i / sum of 2^(m_i - m) l_i.

    merges, parts: from `plan_tasks`. A sink is added here, once for all splits.
    """
    operands = merges, parts, sizes, sinks, out_rows, partial_out, partial_stats
    parallel_for(_combine, len(merges), workers, operands)


@specialize()
def transform_rows(rows, cache, workers):
    """In place: multiplies rows [T, H, D] by the Hadamard matrix, as an int8 cache stores its rows;
    does nothing for other caches."""
    if cache.dtype != types.int8:
        return lambda rows, cache, workers: None
    from nanoengine.kernels.int8_cache import times_hadamard

    return times_hadamard


@compiled(fastmath=FASTMATH)
def attend(
    queries, k_cache, v_cache, tables, tasks, bounds, merges, parts, sizes, scale, softcap, window,
    operand, sinks, out_rows, partial_out, partial_stats, workers,
):  # fmt: skip
    """Runs all tasks: whole tasks write to `out_rows`, splits to the partial buffers, which
    `combine` merges.

    Share i is tasks bounds[i] ... bounds[i + 1] - 1. `operand` is an empty array with the dtype to
    which queries and weights are converted before they are multiplied: the queries' floats, or
    uint32 for pairs of bfloat16, which need a bfloat16 cache. `sinks` are [H], or empty. The
    queries are overwritten if the cache is int8.
    """
    transform_rows(queries, k_cache, workers)
    parallel_for(
        _attend_tasks, len(bounds) - 1, workers,
        (queries, k_cache, v_cache, tables, tasks, bounds, sizes, scale, softcap, window, operand,
         sinks, out_rows, partial_out, partial_stats),
    )  # fmt: skip
    if len(merges):
        combine(merges, parts, sizes, sinks, out_rows, partial_out, partial_stats, workers)
    transform_rows(out_rows, v_cache, workers)


@compiled(fastmath=FASTMATH)
def _store_tokens(k, v, slots, k_cache, v_cache, sizes, lo, hi):
    for t in range(lo, hi):
        for h in range(k.shape[1]):
            store_head(k[t, h], v[t, h], slots[t], h, k_cache, v_cache, sizes)


@compiled(fastmath=FASTMATH)
def store(k, v, slots, k_blocks, v_blocks, sizes, workers):
    """Copies the key and value [K, D] of token t to k_blocks and v_blocks at slots[t]."""
    operands = k, v, slots, k_blocks.reshape(-1), v_blocks.reshape(-1), sizes
    parallel_for(_store_tokens, len(slots), workers, operands)


@specialize(FASTMATH)
def store_head(key, value, slot, head, k_cache, v_cache, sizes):
    """Writes the key and value [D] of one head of the token at `slot`."""

    def floats(key, value, slot, head, k_cache, v_cache, sizes):
        lanes = min(sizes[3], KV_TILE)
        k_at, v_at = line_indices(k_cache, slot, head, lanes, sizes)
        store_lines(key, value, k_cache, k_at, lanes, v_cache, v_at)

    if k_cache.dtype != types.int8:
        return floats
    from nanoengine.kernels.int8_cache import store_rows

    return store_rows


@compiled(fastmath=FASTMATH, inline=True)
def prefetch_slots(slots, k_blocks, v_blocks, sizes):
    """Prefetches the lines that `store_head` will write for tokens at these slots.

    Why: each element of a key is in a different cache line, and few of these lines are in a cache.
    """
    _, num_kv_heads, head_dim, block_size = sizes
    k_cache, v_cache = k_blocks.reshape(-1), v_blocks.reshape(-1)
    per_word, lanes = elements_per_word(k_cache), min(block_size, KV_TILE)
    for slot in slots:
        for head in range(num_kv_heads):
            k_at, v_at = line_indices(k_cache, slot, head, lanes, sizes)
            for d in range(0, head_dim, per_word):
                prefetch_element(k_cache, k_at + d * lanes, 1)
            for d in range(0, head_dim, LINE // k_cache.itemsize // per_word):
                prefetch_element(v_cache, v_at + d * per_word, 1)
