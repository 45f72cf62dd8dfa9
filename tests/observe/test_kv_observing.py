"""Prefix cache statistics: counters, reasons of misses, block events."""

from __future__ import annotations

import pytest

from nanoengine.core.block_pool import Block
from nanoengine.core.prefix_tree import Prefix
from nanoengine.core.stats import CacheStats
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import ExecutorFailure, make_engine, run

ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def ask(engine, prompt, salt=None):
    request = engine.add_request("r", prompt, ONE, cache_salt=salt)
    run(engine)
    return request


def test_every_miss_has_a_reason():
    engine = make_engine(num_blocks=9)
    misses = []
    first, other = list(range(1, 21)), list(range(21, 48))
    for prompt, salt in (
        ([1, 2, 3, 4], None),  # a single block; its last token must be computed
        (first, None),
        (first, None),  # a full hit
        (first, "salt"),
        (first[:8] + other[:12], None),  # a known prefix, then unknown tokens
        (other, None),  # needs the whole pool
        (first, None),
    ):
        before = engine.stats().cache_misses
        ask(engine, prompt, salt)
        after = engine.stats().cache_misses
        misses.append([reason for reason in after if after[reason] > before[reason]])
    assert misses == [["short"], ["cold"], [], ["salt"], ["cold"], ["cold"], ["evicted"]]


def test_the_recent_hit_rate_forgets_old_queries():
    stats = CacheStats()
    for _ in range(1000):
        stats.count(10, 0)
    for _ in range(1000):
        stats.count(10, 5)
    assert (stats.hit_rate, stats.recent_hit_rate) == (0.25, 0.5)


def test_readmissions_are_counted_separately():
    engine = make_engine(num_blocks=9, max_num_seqs=3)
    for i in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.add_request(str(i), range(1 + 9 * i, 9 + 9 * i), params)
    run(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cache_readmit_queried_tokens >= stats.cache_readmit_hit_tokens > 0
    assert (stats.cache_queried_tokens, stats.cache_hit_tokens) == (24, 0)


def test_empty_slots_are_reported():
    engine = make_engine(block_size=8)
    engine.add_request("a", range(1, 14), SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    assert engine.stats().waste_slots == 16 - 13
    run(engine)
    assert engine.stats().waste_slots == 0


# --- events ---------------------------------------------------------------------------------------


class Mirror:
    """The cached contents by block id, rebuilt only from a `BlockObserver`'s events."""

    def __init__(self) -> None:
        self.contents: dict[int, Prefix] = {}
        self.events: list[str] = []

    def on_block(self, event: str, block: Block) -> None:
        self.events.append(event)
        if event == "cleared":
            self.contents.clear()
        elif event == "stored":
            assert block.block_id not in self.contents
            parent = block.prefix.parent
            assert parent.parent is None or parent in self.contents.values()
            self.contents[block.block_id] = block.prefix
        elif event == "removed":
            assert self.contents.pop(block.block_id) is block.prefix


def test_block_events_reconstruct_the_cache():
    engine, mirror = make_engine(num_blocks=17), Mirror()
    pool = engine.scheduler.block_manager.pool
    pool.observers.append(mirror)
    for i in range(12):
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        engine.add_request(str(i), [1, 2, 3, 4, 5 + i % 3] * 3, params)
        for _ in range(4):
            engine.step()
            held = {block.block_id: block.prefix for block in pool.blocks if block.prefix}
            assert held == mirror.contents
    assert pool.num_evicted > 0


def test_a_reset_and_a_failed_step_are_one_event_each():
    engine, mirror = make_engine(), Mirror()
    engine.scheduler.block_manager.pool.observers.append(mirror)
    ask(engine, range(1, 18))
    assert mirror.events.count("stored") == len(mirror.contents) == 4
    assert engine.reset_prefix_cache()
    engine.executor.fail_at = "end"
    with pytest.raises(ExecutorFailure):
        ask(engine, range(1, 10))
    assert (mirror.events.count("cleared"), mirror.contents) == (2, {})
    ask(engine, range(1, 10))
    assert len(mirror.contents) == 2
