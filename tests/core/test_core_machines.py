"""A Hypothesis state machine: the pool against a simple model of it.

It covers I7, among others: eviction is least recently used first, tails before heads. The engine's
machine and all invariants are in tests/core/test_engine_machine.py.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoengine.core.block_pool import BlockPool
from nanoengine.core.checks import check_pool
from nanoengine.core.prefix_tree import Prefix, pack

Content = tuple[int, Prefix]
CONTENTS = st.tuples(
    st.sampled_from([0, 1]),
    st.sampled_from([Prefix(bytes([i]), None, pack([i])) for i in range(8)]),
)


class PoolMachine(RuleBasedStateMachine):
    """A BlockPool and a slow model of it made of lists and dicts."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, num_groups=2)
        self.tables: list[list[int]] = []
        self.contents: dict[int, Content] = {}
        self.lru: list[int] = []

    def refs(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table if block_id)

    def num_empty(self) -> int:
        return self.NUM_BLOCKS - 1 - len(self.lru) - len(self.refs())

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_empty = self.num_empty()
        count = data.draw(st.integers(0, num_empty + len(self.lru)))
        got = self.pool.allocate(count)
        assert len(set(got)) == count and 0 not in got
        evicted = self.lru[: max(0, count - num_empty)]
        assert got[num_empty:] == evicted, "empty blocks first, then the oldest cached ones"
        assert not set(got[:num_empty]) & (self.contents.keys() | self.refs().keys())
        self.lru = self.lru[len(evicted) :]
        for block_id in evicted:
            del self.contents[block_id]
        self.tables.append(got)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        with_null = [0, *table]
        self.pool.touch(with_null)
        self.tables.append(with_null)

    @rule(data=st.data())
    @precondition(lambda self: self.tables)
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        left = self.refs()
        for block_id in reversed(table):
            if block_id and not left[block_id] and block_id in self.contents:
                self.lru.append(block_id)

    @rule(data=st.data(), content=CONTENTS)
    def register(self, data: st.DataObject, content: Content) -> None:
        blank = sorted(self.refs().keys() - self.contents.keys())
        if not blank:
            return
        block_id = data.draw(st.sampled_from(blank))
        group, prefix = content
        assert self.pool.register([block_id], group, [prefix]) == [self.pool.blocks[block_id]]
        self.contents[block_id] = content

    @rule(content=CONTENTS, revive=st.booleans())
    def lookup(self, content: Content, revive: bool) -> None:
        hit = self.pool.lookup(*content)
        holders = [block_id for block_id, held in self.contents.items() if held == content]
        assert (hit in holders) if holders else hit is None
        if hit is not None and revive:
            self.pool.touch([hit])
            self.tables.append([hit])
            if hit in self.lru:
                self.lru.remove(hit)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def evict(self, block_ids: list[int]) -> None:
        evicted = {block_id for block_id in block_ids if block_id in self.lru}
        assert self.pool.evict(block_ids) == len(evicted)
        self.lru = [block_id for block_id in self.lru if block_id not in evicted]
        for block_id in evicted:
            del self.contents[block_id]

    @rule()
    def reset(self) -> None:
        in_use = bool(self.refs())
        assert self.pool.reset() is not in_use
        if not in_use:
            self.lru, self.contents = [], {}

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def free_twice(self, block_id: int) -> None:
        if block_id and not self.refs()[block_id]:
            with pytest.raises(ValueError, match="freed twice"):
                self.pool.free([block_id])

    @invariant()
    def agrees_with_the_model(self) -> None:
        check_pool(self.pool, self.tables)
        cached, active = len(self.lru), len(self.refs())
        empty = self.num_empty()
        assert self.pool.counts() == {"empty": empty, "cached": cached, "active": active}
        assert self.pool.num_free == empty + cached
        held = {block.block_id for block in self.pool.blocks if block.prefix is not None}
        assert held == self.contents.keys()


QUICK = settings(
    max_examples=70,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(QUICK, max_examples=300, stateful_step_count=50, derandomize=False)


def test_machine():
    run_state_machine_as_test(PoolMachine, settings=QUICK)


@pytest.mark.soak
def test_machine_for_long():
    run_state_machine_as_test(PoolMachine, settings=SOAK)
