"""The compiled kernels of `CPUBackend`: paged attention for float32 and float64, by numba.

Called by `attention/cpu.py` and, in a fused layer, `cpu_decoder.py`. Kernels see flat arrays,
offsets and ints, never torch. The readable form is `attention/naive.py`.

A *task* is one KV head of one sequence, a tile of its queries and a range of its context. Its query
heads and queries together are the *rows* of the tile, so each key and value is loaded once for all
of them. A task walks the block table in steps of `KV_TILE` tokens with an online softmax:

    tile [rows, D] x keys of a run [n, D]     -> scores [rows, KV_TILE]     run: tokens in one block
    softmax of the scores against the running maximum of each row
    scores [rows, KV_TILE] x values of a run  -> added to output [rows, D]

Products and softmax are register tiles written as vector instructions (`_score_tile`, `_weigh`,
`_value_tile`), so their speed does not hang on the loop vectorizer, and the sum of one row never
depends on the rows beside it: a sequence's result has the same bits in any batch.

Source: online softmax and tiling from FlashAttention (Dao et al. 2022, section 3); splitting the
context of a decode from Flash-Decoding (Dao et al. 2023); block tables from PagedAttention (Kwon et
al. 2023, section 4).

Legend: T tokens, S sequences, H / K query / KV heads, R = H / K, D head dim, B blocks, P block
size.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import Emit
from nanoengine.kernels.exp import exp
from nanoengine.kernels.jit import compiled

KV_TILE = 64  # tokens between two updates of the running maximum
ROW_TILE = 32  # rows a task may hold: queries times query heads of one KV head
SPLIT = 256  # tokens of context a task of a lone query tile covers; fixed, so results are too
MASKED = -1e30  # a score that weighs nothing; finite, so that max - max is not NaN

# Why: no "nnan" and "ninf": a NaN in one sequence must come out as NaN, there and only there. No
# "arcp": it lets LLVM divide in one variant of a loop and multiply by the reciprocal in another,
# and with it equal inputs gave unequal last bits in some of 100 runs.
FASTMATH = ("reassoc", "contract", "nsz")

# Columns of a task.
SEQ, HEAD, QUERY, NUM_QUERIES, POSITION, KV_START, KV_STOP, PARTIAL = range(8)
# Columns of a merge: its parts, and the tile that they are parts of.
FIRST, COUNT, OF_HEAD, OF_QUERY, OF_QUERIES = range(5)


@intrinsic(prefer_literal=True)
def _score_tile(typing, q, q_at, k, k_at, scores, scores_at, head_dim, rows):
    """scores[r, t] = q[r] . k[t] for `rows` x 4 tokens, held in registers over the head dim."""
    num_rows, num_tokens = rows.literal_value, 4
    signature = types.void(q, q_at, k, k_at, scores, scores_at, head_dim, rows)

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, q, 256)
        dim = args[6]
        word = dim.type
        q_rows = [emit.pointer(q, args[0], args[1])]
        k_rows = [emit.pointer(k, args[2], args[3])]
        for _ in range(num_rows - 1):
            q_rows.append(emit.at(q_rows[-1], dim))
        for _ in range(num_tokens - 1):
            k_rows.append(emit.at(k_rows[-1], dim))
        zero = ir.Constant(emit.vector, [0.0] * emit.width)
        sums = [[emit.variable(zero) for _ in k_rows] for _ in q_rows]
        with cgutils.for_range(builder, builder.udiv(dim, word(emit.width))) as loop:
            d = builder.mul(loop.index, word(emit.width))
            keys = [emit.load(emit.at(pointer, d)) for pointer in k_rows]
            for q_row, cells in zip(q_rows, sums, strict=True):
                query = emit.load(emit.at(q_row, d))
                for key, cell in zip(keys, cells, strict=True):
                    builder.store(emit.fma(query, key, builder.load(cell)), cell)
        target = emit.pointer(scores, args[4], args[5])
        for r, cells in enumerate(sums):
            four = emit.sums_of_four(*[builder.load(cell) for cell in cells])
            emit.store(four, emit.at(target, word(r * KV_TILE)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _value_tile(typing, p, p_at, v, v_at, num_tokens, out, out_at, head_dim, rows, vectors):
    """out[r, :] += sum over t of p[r, t] * v[t, :] for `rows` rows and `vectors` vectors of it."""
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    signature = types.void(p, p_at, v, v_at, num_tokens, out, out_at, head_dim, rows, vectors)

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, v, 256)
        dim = args[7]
        word = dim.type
        weights = emit.pointer(p, args[0], args[1])
        values = emit.pointer(v, args[2], args[3])
        targets = [emit.pointer(out, args[5], args[6])]
        for _ in range(num_rows - 1):
            targets.append(emit.at(targets[-1], dim))
        lanes = [word(i * emit.width) for i in range(num_vectors)]
        cells = [
            [emit.variable(emit.load(emit.at(target, lane))) for lane in lanes]
            for target in targets
        ]
        with cgutils.for_range(builder, args[4]) as loop:
            row_of_v = emit.at(values, builder.mul(loop.index, dim))
            loaded = [emit.load(emit.at(row_of_v, lane)) for lane in lanes]
            for r in range(num_rows):
                weight = emit.broadcast(emit.at(weights, loop.index, word(r * KV_TILE)))
                for value, cell in zip(loaded, cells[r], strict=True):
                    builder.store(emit.fma(weight, value, builder.load(cell)), cell)
        for row, target in zip(cells, targets, strict=True):
            for cell, lane in zip(row, lanes, strict=True):
                emit.store(builder.load(cell), emit.at(target, lane))
        return context.get_dummy_value()

    return signature, codegen


@compiled(fastmath=FASTMATH)
def _scores_of_run(q_tile, rows, k, k_at, num_tokens, scores, column, head_dim):
    """Scores of all rows against the keys of one run, into columns from `column`."""
    for r in range(0, rows - 1, 2):
        at = r * KV_TILE + column
        for t in range(0, num_tokens, 4):
            _score_tile(q_tile, r * head_dim, k, k_at + t * head_dim, scores, at + t, head_dim, 2)
    if rows % 2:
        r = rows - 1
        at = r * KV_TILE + column
        for t in range(0, num_tokens, 4):
            _score_tile(q_tile, r * head_dim, k, k_at + t * head_dim, scores, at + t, head_dim, 1)


@compiled(fastmath=FASTMATH)
def _values_of_run(weights, column, rows, v, v_at, num_tokens, out, out_at, head_dim):
    """Adds the weighted values of one run to all rows of `out`."""
    width = 32 // v.itemsize
    vectors = head_dim // width
    r = 0
    while r < rows:
        p_at, o_at = r * KV_TILE + column, out_at + r * head_dim
        i = 0
        if rows - r >= 4:
            while vectors - i >= 2:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 4, 2)
                i += 2
            if i < vectors:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 4, 1)
            r += 4
        elif rows - r >= 2:
            while vectors - i >= 4:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 2, 4)
                i += 4
            while i < vectors:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 2, 1)
                i += 1
            r += 2
        else:
            while vectors - i >= 8:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 1, 8)
                i += 8
            while i < vectors:
                d = i * width
                _value_tile(weights, p_at, v, v_at + d, num_tokens, out, o_at + d, head_dim, 1, 1)
                i += 1
            r += 1


@compiled(fastmath=FASTMATH)
def _mask(scores, rows, group_size, tile_start, position, window):
    """Sets the scores that a row may not see (its future, or before its window) to MASKED."""
    masked = scores.dtype.type(MASKED)
    for r in range(rows):
        p = position + r // group_size
        first, stop = max(0, p - window + 1 - tile_start), max(0, p + 1 - tile_start)
        scores[r, : min(first, KV_TILE)] = masked
        scores[r, stop:] = masked


@intrinsic
def _weigh(typing, scores, at, start):
    """(highest, total): highest = max(start, a row of KV_TILE scores from `at`); the scores become
    weights e ** (score - highest), whose sum is `total`. With a NaN among the scores, highest is
    any of them and total NaN."""
    signature = types.UniTuple(scores.dtype, 2)(scores, at, start)

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, scores, 256)
        line, word = emit.pointer(scores, args[0], args[1]), args[1].type
        places = [emit.at(line, word(i)) for i in range(0, KV_TILE, emit.width)]
        values = [emit.load(place) for place in places]
        first = emit.maximum(values[0], emit.splat(args[2]))
        highest = emit.across([first, *values[1:]], emit.maximum)
        lowered = emit.splat(highest)
        weights = [emit.exp(builder.fsub(value, lowered)) for value in values]
        for weight, place in zip(weights, places, strict=True):
            emit.store(weight, place)
        total = emit.across(weights, builder.fadd)
        return context.make_tuple(builder, sig.return_type, (highest, total))

    return signature, codegen


@compiled(fastmath=FASTMATH)
def _softmax_step(scores, rows, maximum, total, out):
    """Turns the scores of each row into weights and rescales what the row has summed so far."""
    for r in range(rows):
        old = maximum[r]
        new, added = _weigh(scores, r * KV_TILE, old)
        if new != old:
            factor = exp(old - new)
            total[r] *= factor
            maximum[r] = new
            summed = out[r]  # Why: a loop over a slice vectorizes, over out[r, d] it does not.
            for d in range(len(summed)):
                summed[d] *= factor
        total[r] += added


@compiled(fastmath=FASTMATH)
def _softcap(scores, rows, softcap):
    """scores = softcap * tanh(scores / softcap), by way of exp of what is not positive."""
    one, two = scores.dtype.type(1), scores.dtype.type(2)
    for r in range(rows):
        row = scores[r]
        for t in range(KV_TILE):
            x = row[t] / softcap
            e = exp(-two * abs(x))
            row[t] = np.copysign(softcap * (one - e) / (one + e), x)


@compiled(fastmath=FASTMATH)
def _run_task(
    task, table, q, q_stride, k, v, sizes, scale, softcap, window, tile, scores, maximum, total, out
):
    """Attends one task; leaves maximum, total and the unscaled sum [rows, D] in the scratch."""
    num_heads, num_kv_heads, head_dim, block_size = sizes
    group_size = num_heads // num_kv_heads
    rows = task[NUM_QUERIES] * group_size
    head, stop = task[HEAD], task[KV_STOP]
    for r in range(rows):
        token = task[QUERY] + r // group_size
        at = token * q_stride + (head * group_size + r % group_size) * head_dim
        for d in range(head_dim):
            tile[r, d] = q[at + d] * scale
            out[r, d] = 0
        maximum[r] = MASKED
        total[r] = 0

    step = min(block_size, KV_TILE)
    tile_start = task[KV_START] // KV_TILE * KV_TILE
    while tile_start < stop:
        start, end = max(tile_start, task[KV_START]), min(tile_start + KV_TILE, stop)
        first = start // step * step
        for begin in range(first, end, step):
            # Why: whole fours of tokens; what is beyond start and end is in the block, and masked.
            lo, hi = max(begin, start // 4 * 4), min(begin + step, end)
            offset = lo % block_size
            at = ((table[lo // block_size] * num_kv_heads + head) * block_size + offset) * head_dim
            _scores_of_run(tile, rows, k, at, hi - lo, scores, lo - tile_start, head_dim)
        if softcap > 0:
            _softcap(scores, rows, softcap)
        _mask(scores, rows, group_size, tile_start, task[POSITION], window)
        _softmax_step(scores, rows, maximum, total, out)
        for begin in range(first, end, step):
            lo, hi = max(begin, start), min(begin + step, end)
            offset = lo % block_size
            at = ((table[lo // block_size] * num_kv_heads + head) * block_size + offset) * head_dim
            _values_of_run(scores, lo - tile_start, rows, v, at, hi - lo, out, 0, head_dim)
        tile_start += KV_TILE


@compiled(parallel=True, fastmath=FASTMATH)
def attend(
    queries, k_cache, v_cache, tables, tasks, bounds, sizes, scale, softcap, window,
    out_rows, partial_out, partial_stats,
):  # fmt: skip
    """Runs all tasks; whole ones write to `out_rows`, splits to the partial buffers.

    Worker w takes tasks bounds[w] ... bounds[w + 1] - 1.
    """
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    q, q_stride, result = queries.reshape(-1), num_heads * head_dim, out_rows.reshape(-1)
    k, v = k_cache.reshape(-1), v_cache.reshape(-1)
    for worker in prange(len(bounds) - 1):
        room = max(ROW_TILE, group_size)
        tile = np.empty((room, head_dim), q.dtype)
        out = np.empty((room, head_dim), q.dtype)
        scores = np.empty((room, KV_TILE), q.dtype)
        maximum = np.empty(room, q.dtype)
        total = np.empty(room, q.dtype)
        for i in range(bounds[worker], bounds[worker + 1]):
            task = tasks[i]
            _run_task(
                task, tables[task[SEQ]], q, q_stride, k, v, sizes, scale, softcap, window,
                tile, scores, maximum, total, out,
            )  # fmt: skip
            rows = task[NUM_QUERIES] * group_size
            if task[PARTIAL] < 0:
                for r in range(rows):
                    head = task[HEAD] * group_size + r % group_size
                    at = ((task[QUERY] + r // group_size) * num_heads + head) * head_dim
                    inverse, summed = q.dtype.type(1) / total[r], out[r]
                    line = result[at : at + head_dim]
                    for d in range(head_dim):
                        line[d] = summed[d] * inverse
            else:
                base = task[PARTIAL] * room
                for r in range(rows):
                    partial_stats[base + r, 0] = maximum[r]
                    partial_stats[base + r, 1] = total[r]
                    part, summed = partial_out[base + r], out[r]
                    for d in range(head_dim):
                        part[d] = summed[d]


@compiled(parallel=True, fastmath=FASTMATH)
def combine(merges, parts, sizes, out_rows, partial_out, partial_stats):
    """Joins the splits of each tile: result = sum of e^(m_i - m) out_i / sum of e^(m_i - m) l_i.

    merges, parts: as `plan_tasks` made them.
    """
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    result = out_rows.reshape(-1)
    for i in prange(len(merges)):
        merge = merges[i]
        rows_of = parts[merge[FIRST] : merge[FIRST] + merge[COUNT]]
        for r in range(merge[OF_QUERIES] * group_size):
            highest = partial_stats[rows_of[0] + r, 0]
            for s in range(1, len(rows_of)):
                highest = max(highest, partial_stats[rows_of[s] + r, 0])
            head = merge[OF_HEAD] * group_size + r % group_size
            at = ((merge[OF_QUERY] + r // group_size) * num_heads + head) * head_dim
            total, line = result.dtype.type(0), result[at : at + head_dim]
            for d in range(head_dim):
                line[d] = 0
            for s in range(len(rows_of)):
                row = rows_of[s] + r
                weight, part = exp(partial_stats[row, 0] - highest), partial_out[row]
                total += weight * partial_stats[row, 1]
                for d in range(head_dim):
                    line[d] += weight * part[d]
            inverse = result.dtype.type(1) / total
            for d in range(head_dim):
                line[d] *= inverse


@compiled(parallel=True, fastmath=FASTMATH)
def store(k, k_stride, v, v_stride, slots, k_blocks, v_blocks, sizes):
    """Copies the key and value of token t to k_blocks and v_blocks at slots[t]."""
    _, num_kv_heads, head_dim, block_size = sizes
    k_cache, v_cache = k_blocks.reshape(-1), v_blocks.reshape(-1)
    for t in prange(len(slots)):
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(num_kv_heads):
            at = ((block * num_kv_heads + h) * block_size + offset) * head_dim
            for d in range(head_dim):
                k_cache[at + d] = k[t * k_stride + h * head_dim + d]
                v_cache[at + d] = v[t * v_stride + h * head_dim + d]


@compiled(fastmath=FASTMATH)
def _shared_splits(query_start, seq_lens, tables, block_size, window):
    """For each sequence the splits, from its first, whose blocks are those of the sequence before.

    Both decode, so that their queries lie side by side, and see all of these splits.
    """
    shared = np.zeros(len(seq_lens) + 1, np.int64)  # the last is a sentinel
    for s in range(1, len(seq_lens)):
        if query_start[s + 1] - query_start[s - 1] != 2 or window < seq_lens[s]:
            continue
        seen = min(seq_lens[s], seq_lens[s - 1])
        if seen <= SPLIT:
            continue  # one split: attended as a whole, never in parts
        blocks = 0
        while (blocks + 1) * block_size <= seen and tables[s, blocks] == tables[s - 1, blocks]:
            blocks += 1
        shared[s] = blocks * block_size // SPLIT
    return shared


@compiled(fastmath=FASTMATH)
def plan_tasks(
    query_start, seq_lens, tables, group_size, num_kv_heads, block_size, window, num_workers
):
    """Cuts a step into tasks of equal kind and shares them out by cost.

    Neighbouring decodes with the same first blocks attend those splits in one task, their queries
    as its rows: keys and values are read once for all of them. A split is the same tokens with and
    without company and rows don't touch each other, so this changes no bit.

    Source: Juravsky et al., Hydragen (arXiv 2402.05099), for attending a shared prefix at once.

    Returns:
        tasks [N, 8], bounds [num_workers + 1], merges [M, 5], parts [Q], number of partial results.
        A merge joins the rows of `parts[first : first + count]`, rows of the partial buffers.
    """
    queries_per_tile = max(1, ROW_TILE // group_size)
    room = max(ROW_TILE, group_size)
    shared = _shared_splits(query_start, seq_lens, tables, block_size, window)
    count, most_splits = 0, 1
    for s in range(len(seq_lens)):
        n = query_start[s + 1] - query_start[s]
        tiles = -(-n // queries_per_tile)
        count += num_kv_heads * max(tiles, seq_lens[s] // SPLIT + 2)
        most_splits = max(most_splits, seq_lens[s] // SPLIT + 2)
    tasks = np.empty((count, 8), np.int64)
    costs = np.empty(count + 1, np.int64)
    merges = np.empty((count, 5), np.int64)
    parts = np.empty(count, np.int64)
    leader = np.zeros(most_splits, np.int64)  # who began the task that is shared now
    begun = np.zeros((num_kv_heads, most_splits), np.int64)  # where its rows begin
    num_tasks, num_merges, num_parts, num_partials = 0, 0, 0, 0
    costs[0] = 0
    for s in range(len(seq_lens)):
        n = query_start[s + 1] - query_start[s]
        for head in range(num_kv_heads):
            for query in range(0, n, queries_per_tile):
                num_queries = min(queries_per_tile, n - query)
                position = seq_lens[s] - n + query
                start, stop = max(0, position - window + 1), position + num_queries
                # Why: a lone tile is split over its context, so that one sequence keeps all cores
                # busy. Chunks of many tiles are not: their partial sums would fill the memory.
                split = SPLIT if n <= queries_per_tile else stop
                first_split = start // split
                num_splits = -(-stop // split) - first_split
                if num_splits > 1:
                    merge = merges[num_merges]
                    merge[FIRST], merge[COUNT], merge[OF_HEAD] = num_parts, num_splits, head
                    merge[OF_QUERY], merge[OF_QUERIES] = query_start[s] + query, num_queries
                    num_merges += 1
                for i in range(first_split, first_split + num_splits):
                    if i < shared[s] and s - leader[i] < queries_per_tile:
                        parts[num_parts] = begun[head, i] + (s - leader[i]) * group_size
                        num_parts += 1
                        continue
                    task = tasks[num_tasks]
                    task[SEQ], task[HEAD] = s, head
                    task[QUERY], task[NUM_QUERIES] = query_start[s] + query, num_queries
                    task[POSITION] = position
                    task[KV_START] = max(start, i * split)
                    task[KV_STOP] = min(stop, (i + 1) * split)
                    task[PARTIAL] = -1
                    if num_splits > 1:
                        task[PARTIAL] = num_partials
                        parts[num_parts] = num_partials * room
                        num_parts += 1
                        if n == 1:
                            begun[head, i] = num_partials * room
                            together = 1
                            while together < queries_per_tile and shared[s + together] > i:
                                together += 1
                            if together > 1:  # all of the split is before each of the queries
                                task[NUM_QUERIES], task[POSITION] = together, task[KV_STOP]
                        num_partials += 1
                    # Reading a key costs about as much as computing with it for 8 rows.
                    rows = task[NUM_QUERIES] * group_size
                    work = (task[KV_STOP] - task[KV_START] + 16) * (rows + 8)
                    costs[num_tasks + 1] = costs[num_tasks] + work
                    num_tasks += 1
        for i in range(most_splits):  # after all heads, which share one leader
            if i >= shared[s] or s - leader[i] >= queries_per_tile:
                leader[i] = s
    bounds = np.empty(num_workers + 1, np.int64)
    for w in range(num_workers):
        bounds[w] = np.searchsorted(costs[: num_tasks + 1], costs[num_tasks] * w // num_workers)
    bounds[num_workers] = num_tasks
    return tasks[:num_tasks], bounds, merges[:num_merges], parts[:num_parts], num_partials
