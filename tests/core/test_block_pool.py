"""BlockPool, one operation at a time; tests/core/test_core_machines.py tests combinations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine.core.block_pool import BlockPool
from nanoengine.core.checks import check_pool
from nanoengine.core.prefix_tree import Prefix, PrefixTree, pack

X = Prefix(b"x", None, pack([1]))


def filled(pool: BlockPool, count: int) -> list[int]:
    """Allocates blocks and registers one chain of contents in them."""
    table = pool.allocate(count)
    prefixes = PrefixTree()
    pool.register(table, 0, prefixes.extend_blocks(prefixes.root(None), range(count), 1))
    return table


def test_a_pool_needs_a_usable_block():
    with pytest.raises(ValueError, match="null block and one more, got 1"):
        BlockPool(1)


def test_counts_are_empty_cached_and_active():
    # 32 blocks = 1 null + 7 active + 17 cached + 7 empty
    pool = BlockPool(32)
    cached = filled(pool, 17)
    pool.allocate(7)
    pool.free(reversed(cached))
    assert pool.counts() == {"empty": 7, "cached": 17, "active": 7}
    assert (pool.num_usable, pool.num_free) == (31, 24)
    check_pool(pool)


def test_allocate_prefers_empty_blocks_then_the_oldest_tail():
    pool = BlockPool(8)
    old = filled(pool, 3)
    pool.free(reversed(old))
    young = pool.allocate(1)
    pool.register(young, 0, [X])
    pool.free(young)
    assert pool.allocate(3) == [5, 6, 7]
    assert pool.num_evicted == 0
    assert pool.allocate(4) == [*reversed(old), *young]
    assert pool.num_evicted == 4
    check_pool(pool)


def test_allocating_more_than_is_free_fails_an_assertion():
    with pytest.raises(AssertionError, match="4 blocks requested, 3 are free"):
        BlockPool(4).allocate(4)


def test_the_null_block_is_skipped_and_never_allocated():
    pool = BlockPool(4)
    assert 0 not in pool.allocate(3)
    pool.touch([0])
    pool.free([0, 0])
    pool.touch([0])
    assert pool.register([0], 0, [X]) == [] and pool.lookup(0, X) is None
    assert pool.evict([0]) == 0
    check_pool(pool)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: setattr(pool.blocks[1], "ref_count", 2),
        lambda pool: setattr(pool.blocks[3], "ref_count", 1),
        lambda pool: setattr(pool.blocks[0], "ref_count", 1),
        lambda pool: setattr(pool.blocks[1], "prefix", X),
        lambda pool: setattr(pool.blocks[1], "group", 1),
        lambda pool: setattr(pool.blocks[4], "prefix", X),
        lambda pool: setattr(pool.blocks[4], "after", pool.blocks[3]),
        lambda pool: setattr(pool.blocks[4], "before", pool.blocks[2]),
        lambda pool: setattr(pool.blocks[0], "after", pool.blocks[4]),
        lambda pool: setattr(pool._kv, "num_free", 3),
        lambda pool: setattr(pool._kv, "num_empty", 2),
        lambda pool: pool._push_empty(pool.blocks[2]),
        lambda pool: (pool.evict([2]), setattr(pool.blocks[5], "prefix", X)),
        lambda pool: pool.index[0].clear(),
        lambda pool: pool.duplicates.update({(0, X): [1]}),
        lambda pool: pool.duplicates.update({(0, pool.blocks[1].prefix): [2]}),
    ],
)
def test_check_pool_finds_each_broken_invariant(break_it):
    pool = BlockPool(6, num_groups=2)
    table = filled(pool, 2)
    pool.free(table[1:])
    check_pool(pool, [[1]])
    break_it(pool)
    with pytest.raises(AssertionError):
        check_pool(pool, [[1]])


COUNT_EVENTS = """
import sys
from nanoengine.core.block_pool import BlockPool
from tests.core.test_block_pool import filled

pool, events = BlockPool(2_000), 0
table = filled(pool, 1_999)
pool.free(table)

def count(frame, event, arg):
    global events
    events += 1
    return count

for start in (0, 1_000, 1_990):
    touched, events = table[start : start + 5], 0
    sys.settrace(count)
    pool.touch(touched)
    sys.settrace(None)
    print(events)
check_pool(pool)
"""


def test_touching_a_block_takes_constant_time():
    # Why a separate process: in a process that had run thousands of other tests, Python 3.11 once
    # traced one line forever.
    done = subprocess.run(
        [sys.executable, "-c", COUNT_EVENTS], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    head, middle, tail = map(int, done.stdout.split())
    assert head == middle == tail > 0, done.stderr


def test_a_block_costs_less_than_300_bytes():
    num_blocks = 20_000
    pool = BlockPool(num_blocks)
    size = sum(sys.getsizeof(block) for block in pool.blocks)
    size += sys.getsizeof(pool.blocks)
    size += sum(sys.getsizeof(i) for i in range(num_blocks))
    assert size / num_blocks < 300
    assert not hasattr(pool.blocks[1], "__dict__")


def test_str_shows_one_character_per_block():
    pool = BlockPool(6)
    table = filled(pool, 2)
    pool.touch(table[:1])
    pool.free(table[1:])
    assert str(pool) == "02c..."
    assert (
        repr(pool.blocks[1]) == f"Block(1, refs=2, digest={pool.blocks[1].prefix.digest.hex()[:8]})"
    )
