"""Invariants of the core, checked by assertions after each step with `debug_checks=True`.

    check           queue, rows and blocks of a scheduler agree
    check_manager   the block tables of sequences and the pool agree
    check_pool      I1 free + used + null = total   I2 a count is the number of table entries
                    I3 free if and only if count 0  I4 the index matches the blocks' content
                    I6 the null block is never allocated, indexed or freed

All of them raise AssertionError. Called by `LLMEngine` and by tests.
"""

from __future__ import annotations

from collections.abc import Iterable

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.block_pool import NULL_BLOCK, Block, BlockPool, Queue
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence, Status


def check(scheduler: Scheduler) -> None:
    """Checks queue, rows and blocks of a scheduler, between two steps."""
    running, rows, waiting = scheduler.running, scheduler.rows, scheduler.waiting
    check_manager(scheduler.block_manager, running)
    used_rows = [seq.row for seq in running]
    assert sorted(used_rows + rows.free) == list(range(rows.num_rows)), used_rows
    num_waiting = sum(seq.status is Status.WAITING for _, seq in waiting.heap)
    assert num_waiting == waiting.num_waiting, (num_waiting, waiting.num_waiting)
    assert all(seq.status is Status.RUNNING for seq in running)
    assert [s.order for s in running] == sorted(s.order for s in running)
    for seq in running:
        num_drafts = len(seq.extras.draft_token_ids) if seq.extras is not None else 0
        assert seq.num_computed_tokens <= seq.num_tokens + num_drafts, seq


def check_manager(manager: BlockManager, sequences: list[Sequence]) -> None:
    """Checks that the tables of `sequences`, all that have blocks, agree with the pool."""
    cache, groups = manager.prefix_cache, manager.layout.groups
    check_pool(cache.pool, [table for seq in sequences for table in seq.block_tables])
    for seq in sequences:
        for index, table in enumerate(seq.block_tables):
            dropped = seq.num_dropped_blocks[index] if seq.num_dropped_blocks else 0
            if groups[index].snapshot_every is not None:
                dropped = -1  # only the last entry of a state's table must be set
            assert NULL_BLOCK not in table[dropped:], seq
            assert len(table) * manager.block_size >= seq.num_computed_tokens, seq
            # Invariant I4: a table's indexed blocks hold the sequence's own prefixes.
            for block_id, prefix in zip(table, seq.prefixes, strict=False):
                assert cache.pool.blocks[block_id].prefix in (None, prefix), seq
    if cache.tiers is not None:
        cache.tiers.check()


def check_pool(pool: BlockPool, tables: Iterable[Iterable[int]] | None = None) -> None:
    """Checks all blocks of a pool.

    Args:
        tables: all lists that hold references; None skips the comparison with the counts.
    """
    num_free = sum(map(_check_queue, pool.queues))
    # Invariant I6: the null block is never allocated, indexed or freed.
    null = pool.blocks[NULL_BLOCK]
    assert null.ref_count == 0 and null.prefix is None, null
    # Invariant I3: a block is free if and only if its count is 0.
    assert sum(block.ref_count == 0 for block in pool.blocks[1:]) == num_free, "lost blocks"
    # Invariant I4: index entries and blocks with content match one to one.
    indexed: list[int] = []
    assert all(pool.duplicates.values()), pool.duplicates
    assert all(prefix in pool.index[group] for group, prefix in pool.duplicates)
    for group, index in enumerate(pool.index):
        for prefix, first in index.items():
            same = [first, *pool.duplicates.get((group, prefix), ())]
            assert all(pool.blocks[i].prefix is prefix for i in same), prefix
            assert all(pool.blocks[i].group == group for i in same), group
            indexed += same
    with_content = [block.block_id for block in pool.blocks if block.prefix is not None]
    assert sorted(indexed) == with_content, "the index and the blocks differ"
    if tables is not None:
        # Invariant I2: a block's reference count is the number of table entries.
        counts = [0] * len(pool.blocks)
        for table in tables:
            for block_id in table:
                counts[block_id] += 1
        for block in pool.blocks[1:]:
            assert block.ref_count == counts[block.block_id], (block, counts[block.block_id])


def _check_queue(queue: Queue) -> int:
    """Checks one queue; returns its length."""
    free: list[Block] = []
    block = queue.end.after
    # Invariant I1: free + used + null = total; each block is in one queue, once.
    while block is not queue.end and len(free) <= queue.num_free:
        assert block.before.after is block and block.after.before is block, block
        assert block.queue is queue, block
        free.append(block)
        block = block.after
    assert len(free) == queue.num_free == len(set(free)), "the queue and its length differ"
    assert all(block.ref_count == 0 for block in free), free
    is_cached = [block.prefix is not None for block in free]
    assert is_cached == sorted(is_cached), "an empty block after a cached one"
    assert is_cached.count(False) == queue.num_empty, queue.num_empty
    return len(free)
