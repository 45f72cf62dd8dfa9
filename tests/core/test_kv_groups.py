"""Retention rules: the blocks that a group needs and drops, and where a hit may end."""

from __future__ import annotations

import itertools

import pytest

from nanoengine.core.groups.rules import (
    longest_common_hit,
    longest_hit,
    make_kv_groups,
    num_dropped_blocks,
    num_needed_blocks,
)
from nanoengine.core.layout import KVGroup

FULL = KVGroup(layers=(0,))


def window(size: int) -> KVGroup:
    return KVGroup(layers=(0,), sliding_window=size)


def test_a_window_drops_blocks_that_no_later_query_sees():
    # block size 2, window 4: after 4/5/6/7/11 computed tokens there are 0/1/1/2/4 null blocks
    dropped = [num_dropped_blocks(window(4), n, 2) for n in (4, 5, 6, 7, 11)]
    assert dropped == [0, 1, 1, 2, 4]
    assert num_dropped_blocks(FULL, 1_000, 2) == 0


@pytest.mark.parametrize(
    ("size", "block_size"), list(itertools.product([1, 2, 5, 8, 16], [1, 2, 4, 8]))
)
def test_dropped_blocks_equal_those_found_position_by_position(size, block_size):
    for computed in range(60):
        first_seen = max(0, computed - size + 1)
        assert num_dropped_blocks(window(size), computed, block_size) == first_seen // block_size


@pytest.mark.parametrize(("size", "block_size"), list(itertools.product([1, 3, 8], [1, 2, 4])))
def test_a_window_never_holds_more_than_needed(size, block_size):
    for num_tokens, chunk in itertools.product(range(1, 40), (1, 3, 7, 64)):
        highest, start = 0, 0
        while start < num_tokens:
            end = min(start + chunk, num_tokens)
            held = -(-end // block_size) - num_dropped_blocks(window(size), start, block_size)
            highest, start = max(highest, held), end
        assert highest <= num_needed_blocks(window(size), num_tokens, chunk, block_size)
    assert num_needed_blocks(FULL, 17, 4, 16) == 2


@pytest.mark.parametrize(
    ("size", "block_size"), list(itertools.product([1, 2, 4, 5, 9], [1, 2, 4]))
)
def test_a_window_hit_needs_its_last_blocks_only(size, block_size):
    needed = -(-(size - 1) // block_size)
    for found in itertools.product([False, True], repeat=6):
        best = max(length for length in range(7) if all(found[max(0, length - needed) : length]))
        assert longest_hit(window(size), found, block_size, 6) == best
    assert longest_hit(FULL, (True, True, False, True), block_size, 4) == 2
    assert longest_hit(FULL, (True, True, True), block_size, 2) == 2


def test_the_common_hit_is_the_longest_that_all_groups_allow():
    groups = (FULL, window(3), window(5))
    for bits in itertools.product([False, True], repeat=12):
        found = [bits[:4], bits[4:8], bits[8:]]
        lengths = [
            length
            for length in range(5)
            if all(
                longest_hit(group, hits, 2, length) == length
                for group, hits in zip(groups, found, strict=True)
            )
        ]
        common = longest_common_hit(groups, found, 2)
        assert common == max(lengths)


def test_layers_are_grouped_by_rule_and_nearly_equal_size():
    assert [g.layers for g in make_kv_groups([None] * 3)] == [(0, 1, 2)]
    gemma = make_kv_groups(([512] * 5 + [None]) * 2)
    assert [(len(g.layers), g.sliding_window) for g in gemma] == [(2, 512)] * 5 + [(2, None)]
    assert sorted(layer for g in gemma for layer in g.layers) == list(range(12))
    nearly = make_kv_groups([4, None] * 5 + [4])
    assert [(len(g.layers), g.sliding_window) for g in nearly] == [(6, 4), (5, None)]
