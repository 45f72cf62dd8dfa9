"""PrefixCache without a scheduler: hits, registration, invalidation and counters."""

from __future__ import annotations

from nanoengine.core import prefix_tree
from nanoengine.core.checks import check_manager
from tests.support.block_managers import (
    admit,
    cached,
    compute,
    computed,
    make_manager,
    make_sequence,
)


def test_a_hit_has_full_blocks_and_leaves_one_token_to_compute():
    manager = make_manager()
    computed(manager, list(range(40)))
    assert cached(manager, list(range(40))) == 32
    assert cached(manager, list(range(33))) == 32
    assert cached(manager, list(range(32))) == 16, "a full hit would leave nothing to compute"
    assert cached(manager, list(range(16))) == 0
    assert cached(manager, [*range(16), 99, *range(17, 40)]) == 16, "stops at the first miss"
    assert cached(manager, [99, *range(1, 40)]) == 0


def test_a_hit_ends_before_an_evicted_block():
    """Otherwise it would be used at the position of the evicted block."""
    manager = make_manager()
    first = computed(manager, list(range(70)))
    [table] = first.block_tables
    manager.deallocate(first)
    for evicted, num_cached in ((2, 32), (1, 16), (0, 0)):
        assert manager.pool.evict([table[evicted]]) == 1
        assert cached(manager, list(range(70))) == num_cached


def test_a_prompt_shorter_than_a_block_counts_as_a_miss():
    manager = make_manager()
    for _ in range(2):
        computed(manager, list(range(10)))
    stats = manager.prefix_cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (20, 0)
    smaller = make_manager(block_size=8)
    for _ in range(2):
        computed(smaller, list(range(10)))
    stats = smaller.prefix_cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (20, 8)


def test_salted_and_scored_prompts_read_no_other_blocks():
    manager = make_manager()
    computed(manager, list(range(40)), salt="a", prompt_logprobs=0)
    assert cached(manager, list(range(40)), salt="a") == 32, "it registers its blocks"
    assert cached(manager, list(range(40)), salt="a", prompt_logprobs=0) == 0, "it reads none"
    assert cached(manager, list(range(40)), salt="b") == 0
    assert cached(manager, list(range(40))) == 0
    assert manager.prefix_cache.stats.queried_tokens == 0


def test_prompt_logprobs_start_allows_hits_before_it():
    manager = make_manager()
    computed(manager, list(range(40)))
    found = {
        start: cached(manager, list(range(40)), prompt_logprobs=0, prompt_logprobs_start=start)
        for start in (0, 1, 16, 17, 18, 33, 40, 99)
    }
    # Why 17: position 16, the first after the first block, gives the score of token 17.
    assert found == {0: 0, 1: 0, 16: 0, 17: 16, 18: 16, 33: 32, 40: 32, 99: 32}


def test_without_caching_nothing_is_registered():
    manager = make_manager(enable_prefix_caching=False)
    first = computed(manager, list(range(40)))
    manager.deallocate(first)
    assert manager.pool.counts()["cached"] == 0


def test_a_waiting_sequence_is_hashed_once(monkeypatch):
    manager = make_manager()
    hashed = []
    original = prefix_tree.hash_block
    monkeypatch.setattr(prefix_tree, "hash_block", lambda data: hashed.append(1) or original(data))
    seq = make_sequence(list(range(100)))
    for _ in range(50):
        manager.can_allocate(seq)
    assert len(hashed) == 6
    admit(manager, seq)
    compute(manager, seq)
    manager.deallocate(seq)
    manager.can_allocate(seq)
    assert len(hashed) == 6


def test_invalidate_drops_free_blocks_and_keeps_the_others():
    manager = make_manager(block_size=4)
    first, second = make_sequence([*range(12)]), make_sequence([*range(8), 50, 51, 52, 53, 54])
    for seq in (first, second):
        admit(manager, seq)
        compute(manager, seq)
    assert second.num_cached_tokens == 8
    block_ids = list(first.block_tables[0])
    manager.deallocate(first)
    manager.prefix_cache.invalidate(block_ids)
    assert [manager.pool.blocks[b].prefix is None for b in block_ids] == [False, False, True]
    assert manager.can_allocate(make_sequence([*range(13)])).num_cached_tokens == 8
    manager.deallocate(second)
    manager.prefix_cache.invalidate(block_ids)
    assert manager.can_allocate(make_sequence([*range(13)])).num_cached_tokens == 0
    check_manager(manager, [])
