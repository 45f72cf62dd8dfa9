"""BlockManager without a scheduler: admission, growth, copy-on-write, windows, deallocation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoengine.core.block_manager import Verdict
from nanoengine.core.checks import check_manager
from nanoengine.core.forks import share_blocks
from nanoengine.core.plan import BlockCopy, TableUpdate
from tests.support.block_managers import (
    admit,
    cached,
    compute,
    computed,
    make_manager,
    make_sequence,
)

# --- admission ------------------------------------------------------------------------------------


def test_can_allocate_returns_ok_later_or_never():
    manager = make_manager(num_blocks=101, block_size=4, watermark_frac=0.05)
    assert manager.num_watermark_blocks == 5
    verdicts = {
        blocks: manager.can_allocate(make_sequence([1] * 4 * blocks)).verdict
        for blocks in (1, 94, 95, 96, 101)
    }
    assert [v.name for v in verdicts.values()] == ["OK", "OK", "OK", "NEVER", "NEVER"]
    admit(manager, make_sequence([2] * 4 * 60))
    for blocks, with_watermark, without in ((35, "OK", "OK"), (36, "LATER", "OK")):
        seq = make_sequence([3] * 4 * blocks)
        assert manager.can_allocate(seq).verdict.name == with_watermark
        assert manager.can_allocate(seq, keep_watermark=False).verdict.name == without
    assert manager.can_allocate(make_sequence([3] * 4 * 41), keep_watermark=False).verdict is (
        Verdict.LATER
    )


def test_can_allocate_changes_nothing():
    manager = make_manager(num_blocks=5, block_size=4)
    first = computed(manager, list(range(12)))
    manager.deallocate(first)
    manager.updates = []
    before = str(manager.pool), manager.pool.next_evicted(4), replace(manager.prefix_cache.stats)
    for tokens in (list(range(12)), [9] * 16, [9] * 17):
        manager.can_allocate(make_sequence(tokens))
    assert (str(manager.pool), manager.pool.next_evicted(4), manager.prefix_cache.stats) == before
    assert not manager.updates and not manager.copies


def test_only_cached_blocks_that_are_not_active_count_as_needed():
    manager = make_manager(num_blocks=11, block_size=4)
    tokens = list(range(24))
    first = computed(manager, tokens)
    active = manager.can_allocate(make_sequence([*tokens, 1, 2, 3, 4]))
    assert (active.num_cached_tokens, active.num_needed_blocks) == (24, 1)
    manager.deallocate(first)
    revived = manager.can_allocate(make_sequence([*tokens, 1, 2, 3, 4]))
    assert (revived.num_cached_tokens, revived.num_needed_blocks) == (24, 7)
    # 5 of 10 blocks are in use: the hit fits, but its 6 revived blocks would leave too few.
    admit(manager, make_sequence([40] * 20))
    assert manager.can_allocate(make_sequence(tokens)).verdict is Verdict.LATER


def test_a_fresh_block_never_evicts_a_block_of_the_same_hit():
    manager = make_manager(num_blocks=5, block_size=4)
    first = computed(manager, list(range(12)))
    old = list(first.block_tables[0])
    manager.deallocate(first)
    second = make_sequence([*range(8), 40, 41, 42, 43, 44])
    assert admit(manager, second).num_cached_tokens == 8
    assert second.block_tables[0][:2] == old[:2]
    check_manager(manager, [second])


# --- growth ---------------------------------------------------------------------------------------


def test_fifteen_of_sixteen_decodes_allocate_nothing():
    manager = make_manager()
    seq = computed(manager, [1] * 16)
    manager.updates = []
    allocating = []
    for step in range(64):
        seq.token_ids.append(2)
        compute(manager, seq)
        if manager.updates:
            allocating.append(step)
            assert manager.updates == [
                TableUpdate(seq.row, 0, len(seq.block_tables[0]) - 1, (seq.block_tables[0][-1],))
            ]
            manager.updates = []
    assert allocating == [0, 16, 32, 48]


def test_allocate_slots_returns_false_and_allocates_nothing_if_no_block_is_free():
    manager = make_manager(num_blocks=3, block_size=4)
    seq = computed(manager, [1] * 8)
    seq.token_ids.append(1)
    assert manager.may_append(seq, 1) is False
    check_manager(manager, [seq])
    assert len(seq.block_tables[0]) == 2


@pytest.mark.parametrize("num_prompt_tokens", [6, 7, 8, 9, 16])
@pytest.mark.parametrize("num_appended", [1, 2, 3, 8, 9])
def test_copy_on_write_copies_only_the_shared_partial_block(num_prompt_tokens, num_appended):
    # new blocks = ceil((s + a) / 8) - s // 8; a copy only if s % 8 > 0; the sibling is unchanged
    manager = make_manager(block_size=8)
    parent = computed(manager, [1] * num_prompt_tokens)
    child = make_sequence([1] * num_prompt_tokens)
    share_blocks(manager, parent, child)
    assert child.block_tables == parent.block_tables and not manager.copies
    shared, free = list(parent.block_tables[0]), manager.pool.num_free
    check_manager(manager, [parent, child])
    child.token_ids += [2] * num_appended
    manager.updates = []
    compute(manager, child)
    total = num_prompt_tokens + num_appended
    assert free - manager.pool.num_free == -(-total // 8) - num_prompt_tokens // 8
    assert parent.block_tables[0] == shared
    if num_prompt_tokens % 8:
        assert manager.copies == [BlockCopy(shared[-1], child.block_tables[0][len(shared) - 1])]
    else:
        assert manager.copies == []
    check_manager(manager, [parent, child])
    parent.token_ids.append(3)
    copies = len(manager.copies)
    compute(manager, parent)
    assert len(manager.copies) == copies, "the last user of a block writes in place"
    assert parent.block_tables[0][: len(shared)] == shared


def test_a_fork_sends_its_tables_to_the_executor():
    manager = make_manager(windows=(None, 20))
    parent = computed(manager, [1] * 40)
    manager.updates = []
    child = make_sequence([1] * 40)
    share_blocks(manager, parent, child)
    assert manager.updates == [
        TableUpdate(child.row, group, 0, tuple(parent.block_tables[group])) for group in (0, 1)
    ]


# --- windows --------------------------------------------------------------------------------------


def test_admission_counts_the_window_not_the_length():
    manager = make_manager(num_blocks=12, block_size=4, windows=(8,), max_chunk=8)
    long = make_sequence([1] * 400)
    admission = manager.can_allocate(long)
    assert admission.verdict is Verdict.OK
    assert admission.num_needed_blocks == 5  # window - 1 + chunk = 15 tokens: 4 blocks, plus 1
    assert make_manager(num_blocks=12, block_size=4).can_allocate(long).verdict is Verdict.NEVER
    manager.allocate(long, admission)
    while long.num_computed_tokens < 400:
        compute(manager, long, 8)
        assert manager.pool.counts()["active"] <= 5


def test_a_window_hit_needs_the_window_only():
    manager = make_manager(num_blocks=33, block_size=2, windows=(4,), max_chunk=64)
    first = computed(manager, list(range(20)))
    table = list(first.block_tables[0])
    manager.deallocate(first)
    # ceil((4 - 1) / 2) = 2 blocks before the end of the hit are enough.
    manager.pool.evict(table[:7])
    second = make_sequence([*range(20), 30])
    admission = admit(manager, second)
    assert admission.num_cached_tokens == 20
    assert second.block_tables[0] == [0] * 8 + table[8:10]
    check_manager(manager, [second])
    manager.pool.evict(table[8:])
    manager.deallocate(second)
    manager.pool.evict([table[8]])
    assert cached(manager, [*range(20), 30]) == 0


def test_hybrid_groups_share_one_pool_and_hit_together():
    manager = make_manager(num_blocks=65, block_size=2, windows=(None, 4), max_chunk=64)
    first = computed(manager, list(range(20)))
    full, windowed = (list(table) for table in first.block_tables)
    assert not set(full) & set(windowed)
    manager.deallocate(first)
    assert cached(manager, [*range(20), 30]) == 20
    manager.pool.evict(windowed[9:])  # the window group loses its last block: its hit ends at 18
    assert cached(manager, [*range(20), 30]) == 18
    manager.pool.evict(full[5:6])  # the full group now ends at 10, a hit for both
    assert cached(manager, [*range(20), 30]) == 10
    manager.pool.evict(windowed[4:5])  # no longer: each length needs two blocks of the window
    assert cached(manager, [*range(20), 30]) == 8


# --- deallocation ---------------------------------------------------------------------------------


def test_blocks_are_freed_tail_first():
    manager = make_manager(num_blocks=9, block_size=4)
    seq = computed(manager, list(range(18)))
    table = list(seq.block_tables[0])
    manager.deallocate(seq)
    assert manager.pool.counts() == {"empty": 4, "cached": 4, "active": 0}
    assert manager.pool.allocate(8)[4:] == table[3::-1]


def test_evictions_shorten_the_hit_of_all_groups_evenly():
    manager = make_manager(num_blocks=25, block_size=2, windows=(None, None), max_chunk=64)
    seq = computed(manager, list(range(20)))
    manager.deallocate(seq)
    manager.pool.allocate(4)  # the empty ones
    for num_cached in (9, 8, 7):
        manager.pool.allocate(2)
        assert cached(manager, [*range(20), 30]) == 2 * num_cached


def test_a_full_block_is_registered_once_its_last_token_is_known():
    """With overlapped steps. Regression: the block was indexed if a later block, left by rejected
    drafts, was full too."""
    manager = make_manager(block_size=4)
    seq = computed(manager, [1, 2, 3])
    assert manager.may_append(seq, 3)  # a token and two drafts
    seq.num_computed_tokens = 4
    manager.prefix_cache.register(seq)
    assert manager.slots_ready_until(seq) == 0
    seq.token_ids.append(4)
    manager.prefix_cache.register(seq)
    assert manager.slots_ready_until(seq) == 7
