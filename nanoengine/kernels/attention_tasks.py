"""plan_tasks: cuts a step of `cpu_attention` into tasks, and distributes them to workers by cost.

A *task* is one KV head of one sequence, a tile of its queries and a range of its context. Its query
heads and queries together are the *rows* of the tile, so each key and value is loaded once for all
of them. The cuts depend only on the sequence's own lengths, and so do its bits.

Legend: T tokens, S sequences, R query heads per KV head.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty, zeros
from nanoengine.kernels.attention_microkernels import FASTMATH
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import PIECES

ROW_TILE = 32  # rows of a task with few queries: queries times query heads of one KV head
CHUNK_ROWS = 128  # rows of a task in a chunk of a prompt: they share each load of keys and values
TASKS_PER_WORKER = 16  # for a chunk, if it has enough rows: the imbalance is at most one task
SPLIT = 256  # context tokens per task of few queries; fixed, so that results are too
SPLIT_QUERIES = 9  # queries of a sequence up to which its context is split: a token and 8 drafts

# Columns of a task.
SEQ, HEAD, QUERY, NUM_QUERIES, POSITION, KV_START, KV_STOP, PARTIAL = range(8)
# Columns of a merge: its parts, and the tile to which they belong.
FIRST, COUNT, MERGE_HEAD, MERGE_QUERY, MERGE_QUERIES = range(5)


@compiled(fastmath=FASTMATH, inline=True)
def _shared_splits(query_start, seq_lens, tables, block_size, window):
    """For each sequence the number of first splits whose blocks equal the previous sequence's.

    Both sequences decode, so that their queries are adjacent, and see all of these splits.
    """
    shared = zeros((len(seq_lens) + 1,), np.int64)  # the last is a sentinel
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


@compiled(fastmath=FASTMATH, inline=True)
def _chunk_rows(query_start, needed, queries_per_tile, num_heads, num_workers):
    """Rows per task of a chunk: as many as are useful, and few enough for an even distribution."""
    total = 0
    for s in range(len(needed)):
        if query_start[s + 1] - query_start[s] > queries_per_tile:
            total += max(0, needed[s, 1] - needed[s, 0]) * num_heads
    rows = CHUNK_ROWS
    while rows > ROW_TILE and total < TASKS_PER_WORKER * rows * num_workers:
        rows //= 2
    return rows


@compiled(fastmath=FASTMATH, inline=True)
def _max_tasks(query_start, seq_lens, queries_per_tile, num_kv_heads):
    """Upper bounds of the tasks of a step, and of the splits of one of its sequences."""
    tasks, splits = 0, 1
    for s in range(len(seq_lens)):
        queries = query_start[s + 1] - query_start[s]
        tiles, context_splits = -(-queries // queries_per_tile), seq_lens[s] // SPLIT + 2
        is_split = queries <= max(SPLIT_QUERIES, queries_per_tile)
        tasks += num_kv_heads * tiles * (context_splits if is_split else 1)
        splits = max(splits, context_splits)
    return tasks, splits


@compiled(fastmath=FASTMATH, inline=True)
def _balance_tasks(tasks, group_size, shares):
    """Bounds [shares + 1] between shares of the tasks with about the same cost."""
    costs = zeros((len(tasks) + 1,), np.int64)
    for i in range(len(tasks)):
        # Reading a key costs about as much as computing with it for 8 rows.
        rows = tasks[i, NUM_QUERIES] * group_size
        work = (tasks[i, KV_STOP] - tasks[i, KV_START] + 16) * (rows + 8)
        costs[i + 1] = costs[i] + work
    bounds = empty((shares + 1,), np.int64)
    at = 0  # Why by hand: numba takes two seconds to compile `searchsorted`.
    for share in range(shares):
        while costs[at] < costs[len(tasks)] * share // shares:
            at += 1
        bounds[share] = at
    bounds[shares] = len(tasks)
    return bounds


@compiled(fastmath=FASTMATH)
def plan_tasks(
    query_start, seq_lens, needed, tables, group_size, num_kv_heads, block_size, window, num_workers
):
    """Cuts a step into tasks and distributes them by cost.

    Neighbouring decodes with the same first blocks attend those splits in one task, with their
    queries as its rows: keys and values are read once for all of them. A split has the same tokens
    whether it is shared or not, and rows are independent, so this changes no bits.

    Source: Juravsky et al., Hydragen (arXiv 2402.05099), for attending a shared prefix at once.

    Args:
        needed: [S, 2]: the range (first, end) of a chunk's queries whose results are needed; the
            others get no result.

    Returns:
        tasks [N, 8], bounds [shares + 1], merges [M, 5], parts [Q], number of partial results. Each
        worker has PIECES shares.
        A merge joins the rows of `parts[first : first + count]`, rows of the partial buffers.
    """
    queries_per_tile = max(1, ROW_TILE // group_size)
    partial_rows = max(ROW_TILE, group_size)
    chunk_rows = _chunk_rows(
        query_start, needed, queries_per_tile, group_size * num_kv_heads, num_workers
    )
    shared = _shared_splits(query_start, seq_lens, tables, block_size, window)
    count, max_splits = _max_tasks(query_start, seq_lens, queries_per_tile, num_kv_heads)
    tasks = empty((count, 8), np.int64)
    merges = empty((count, 5), np.int64)
    parts = empty((count,), np.int64)
    leader = zeros((max_splits,), np.int64)  # the sequence that began the shared task
    first_rows = zeros((num_kv_heads, max_splits), np.int64)  # where its rows begin
    num_tasks, num_merges, num_parts, num_partials = 0, 0, 0, 0
    for s in range(len(seq_lens)):
        n = query_start[s + 1] - query_start[s]
        is_split = n <= max(SPLIT_QUERIES, queries_per_tile)
        first, last = (needed[s, 0], needed[s, 1]) if n > queries_per_tile else (0, n)
        per_task = queries_per_tile if is_split else max(1, chunk_rows // group_size)
        for head in range(num_kv_heads):
            for query in range(first, last, per_task):
                num_queries = min(per_task, last - query)
                position = seq_lens[s] - n + query
                start, stop = max(0, position - window + 1), position + num_queries
                # Why: few queries are split over their context, so that a sequence keeps all cores
                # busy, and a token has the same bits alone and with drafts. Chunks of many tiles
                # are not: their partial sums would fill the memory.
                split = SPLIT if is_split else stop
                first_split = start // split
                num_splits = -(-stop // split) - first_split
                if num_splits > 1:
                    merge = merges[num_merges]
                    merge[FIRST], merge[COUNT], merge[MERGE_HEAD] = num_parts, num_splits, head
                    merge[MERGE_QUERY], merge[MERGE_QUERIES] = query_start[s] + query, num_queries
                    num_merges += 1
                for i in range(first_split, first_split + num_splits):
                    if i < shared[s] and s - leader[i] < queries_per_tile:
                        parts[num_parts] = first_rows[head, i] + (s - leader[i]) * group_size
                        num_parts += 1
                        continue
                    task = tasks[num_tasks]
                    task[SEQ], task[HEAD] = s, head
                    task[QUERY], task[NUM_QUERIES] = query_start[s] + query, num_queries
                    task[POSITION], task[PARTIAL] = position, -1
                    task[KV_START] = max(start, i * split)
                    task[KV_STOP] = min(stop, (i + 1) * split)
                    num_tasks += 1
                    if num_splits > 1:
                        task[PARTIAL] = num_partials
                        parts[num_parts] = num_partials * partial_rows
                        num_parts += 1
                        if n == 1:
                            first_rows[head, i] = num_partials * partial_rows
                            num_together = 1
                            while num_together < queries_per_tile and shared[s + num_together] > i:
                                num_together += 1
                            if num_together > 1:  # the whole split precedes each of the queries
                                task[NUM_QUERIES], task[POSITION] = num_together, task[KV_STOP]
                        num_partials += 1
        for i in range(max_splits):  # after all heads, which share one leader
            if i >= shared[s] or s - leader[i] >= queries_per_tile:
                leader[i] = s
    tasks = tasks[:num_tasks]
    bounds = _balance_tasks(tasks, group_size, num_workers * PIECES)
    return tasks, bounds, merges[:num_merges], parts[:num_parts], num_partials
