"""Possibly invalid content leaves every tier; an early end releases every block."""

from __future__ import annotations

from random import Random

import pytest

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.tiers.lookup import Content, Level
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.engine import LLMEngine
from nanoengine.settings.params import SamplingParams
from tests.support.block_managers import computed, make_sequence
from tests.support.fake_disk import FakeDisk, QuickDisk, make_tiers
from tests.support.fake_executor import FakeExecutor, expected_output, make_engine, make_layout, run

PROMPT = [7, 8, 9, 10] * 5
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)


def engine_with_tiers(**options) -> tuple[LLMEngine, TieredPrefixCache, QuickDisk]:
    created: list[tuple[TieredPrefixCache, QuickDisk]] = []

    def make(executor: FakeExecutor) -> TieredPrefixCache:
        disk = QuickDisk(executor.host, Random(0))
        created.append((make_tiers(executor.layout, disk), disk))
        return created[0][0]

    engine = make_engine(41, 4, make_tiers=make, **options)
    return engine, *created[0]


def ask(engine: LLMEngine, name: str, prompt: list[int] = PROMPT):
    request = engine.add_request(name, prompt, PARAMS)
    run(engine)
    return request.sequences[0]


def contents(engine: LLMEngine, prompt: list[int]) -> list[Content]:
    """Returns the contents of the prompt's full blocks, per group."""
    manager = engine.scheduler.block_manager
    seq = make_sequence(prompt)
    prefixes = manager.prefix_cache._prefixes_of(seq, len(prompt) // manager.block_size)
    return [Content(g, prefix) for prefix in prefixes for g in range(len(manager.layout.groups))]


# --- possibly invalid content ---------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_invalid_content_leaves_host_and_disk(windows):
    engine, tiers, disk = engine_with_tiers(windows=windows)
    assert ask(engine, "good").num_cached_tokens == 0
    ask(engine, "other", [1, 2, 3] * 5)
    kept, invalid = contents(engine, [1, 2, 3] * 5), contents(engine, PROMPT)
    if len(windows) == 2:  # the broken sequence never reads blocks outside its window
        kept, invalid = kept + invalid[1:4:2], [invalid[0], invalid[2], *invalid[4:]]
    assert all(tiers.lookup(content)[0] is Level.HOST for content in invalid + kept)
    assert set(invalid + kept) <= set(disk.files)
    engine.executor.row_errors = lambda row: "NaN" if row.seq_id == 2 else None
    broken = ask(engine, "broken")
    assert (broken.finish_reason, broken.num_cached_tokens) == ("error", 16)
    ask(engine, "later", [4, 5, 6])
    assert [tiers.lookup(content) for content in invalid] == [None] * len(invalid)
    assert not set(invalid) & set(disk.files), "a file would bring it back after a restart"
    assert all(tiers.lookup(content) is not None for content in kept)
    again = ask(engine, "again")
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == expected_output(PROMPT, again.seed, 2)
    engine.close()


def test_invalid_content_in_flight_to_a_tier_is_dropped_on_arrival():
    layout = make_layout(17, 4)
    disk = FakeDisk({}, Random(0))
    disk.host.update({host_id: [0] for host_id in range(41)})
    tiers = make_tiers(layout, disk)
    manager = BlockManager(layout, prefix_cache=tiers, watermark_frac=0.0)
    seq = computed(manager, [*range(9)])
    plan = StepPlan(step=0)
    assert [t.kind for t in tiers.take_transfers(plan)] == ["store"]
    block_ids = list(seq.block_tables[0])
    manager.deallocate(seq)
    manager.prefix_cache.invalidate(block_ids)
    tiers.check()
    invalid = [Content(0, prefix) for prefix in seq.prefixes]
    for step in range(20):
        tiers.commit(StepPlan(step=step), StepResult(token_ids=[]))
        tiers.check()
    assert [tiers.lookup(content) for content in invalid] == [None, None]
    tiers.close()
    assert disk.files == {}


# --- copies ---------------------------------------------------------------------------------------


def test_each_group_of_a_prefix_is_copied():
    """One prefix in two groups is two contents, stored, written and read separately."""
    engine, tiers, disk = engine_with_tiers(windows=(None, 9))
    ask(engine, "one")
    ask(engine, "later", [4, 5, 6])
    stored = contents(engine, PROMPT)
    assert len(stored) == 10 and set(stored) <= set(disk.files)
    assert all(tiers.host.lookup(*content) is not None for content in stored)
    tiers.disk.drain(and_write=True)
    assert engine.scheduler.block_manager.pool.reset() and tiers.host.reset()
    again = ask(engine, "two")
    # The full group needs 4 blocks of the prefix, the window group 2; each is read once.
    assert (tiers.tier_stats()[1].loaded_blocks, tiers.tier_stats()[0].loaded_blocks) == (6, 6)
    assert again.num_cached_tokens == 16
    assert again.output_token_ids == expected_output(PROMPT, again.seed, 2)
    engine.close()


@pytest.mark.parametrize("method", ["abort_all", "abort", "close"])
def test_aborting_all_requests_frees_the_copies_of_the_step_in_flight(method):
    engine, tiers, _ = engine_with_tiers(overlap=True)
    engine.add_request("r", PROMPT, PARAMS)
    engine.step()
    assert tiers.host.counts()["active"] > 0, "its blocks are being copied to the host"
    if method == "abort":
        engine.abort("r")
    else:
        getattr(engine, method)()
    # The remaining blocks belong to disk writes, which end independently.
    assert tiers.host.counts()["active"] == len(tiers.disk.copied_host_ids())
    assert not engine.scheduler.has_unfinished
    if method != "close":
        assert engine.reset_prefix_cache()


@pytest.mark.parametrize("method", ["close", "reset_prefix_cache"])
def test_queued_disk_writes_finish_at_close_and_are_dropped_at_a_reset(method):
    engine, tiers, disk = engine_with_tiers()
    collect = disk.collect
    disk.collect = lambda wait_s: collect(wait_s) if wait_s else []  # no copy ends unless awaited
    ask(engine, "one", [*range(3, 43)] * 2)
    waiting = len(tiers.disk.to_write)
    assert waiting and len(disk.queue) + waiting == 20
    getattr(engine, method)()
    assert tiers.tier_stats()[1].stored_blocks == 20 - (0 if method == "close" else waiting)
