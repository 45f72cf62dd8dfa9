"""CostModel: a tier that was slow once is tried again, and trying it costs little."""

from __future__ import annotations

import pytest

from nanoengine import DiskTier, HostTier
from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.core.tiers.cost import RETRY_SHARE, CostModel, LoadCost
from nanoengine.core.tiers.disk import FinishedCopy
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

NUM_TOKENS = 16
PREFILL_S = 0.016  # of one block at 1 ms per token


def make_model(**options: object) -> CostModel:
    """Creates a model whose prefill takes 1 ms per token, with blocks of one byte."""
    cost = CostModel(host=LoadCost(block_bytes=1, **options), disk=LoadCost(block_bytes=1))
    cost.prefill.add(1000, 1.0)
    return cost


def run_step(cost: CostModel, seconds: float) -> None:
    """Runs a step of one decode, which gives no information about the prefill rate."""
    plan = StepPlan(step=0, rows=[0], starts=[0], num_scheduled_tokens=[1], num_logits=[1])
    result = StepResult(token_ids=[[1]], times=StepTimes(forward_s=seconds))
    cost.observe(plan, result, block_bytes=1)


def prefer_load(cost: CostModel, tier: str = "host") -> tuple[bool, str]:
    """Returns whether one block is loaded, and the reason."""
    num_disk = 1 if tier == "disk" else 0
    return cost.prefer_load(tier, num_host=1, num_disk=num_disk, num_tokens=NUM_TOKENS)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_one_slow_load_does_not_disable_a_tier_forever(tier):
    cost = make_model()
    cost.host.rate.add(1, 1e-3)
    rate = (cost.host if tier == "host" else cost.disk).rate
    for _ in range(5):
        rate.add(100, 100.0)
    refused = 0
    while not prefer_load(cost, tier)[0]:
        refused += 1
        run_step(cost, 0.1)
        assert refused < 1000
    assert refused > 100, "the load of one block is estimated as 1 s, a twentieth of 20 s"
    assert not prefer_load(cost, tier)[0], "no second load before the first is measured"
    rate.add(1, 1e-3)
    assert prefer_load(cost, tier)[0], "the new measurement replaces the old ones"


def test_retrying_a_slow_tier_costs_a_twentieth():
    cost = make_model()
    cost.host.rate.add(1, 0.5)
    computed_s = lost_s = 0.0
    num_loads = 0
    for _ in range(5000):
        run_step(cost, 0.02)
        computed_s += 0.02
        if prefer_load(cost)[0]:
            num_loads += 1
            lost_s += 0.5 - PREFILL_S
            cost.host.rate.add(1, 0.5)
    assert num_loads > 5
    assert lost_s <= RETRY_SHARE * computed_s


def test_the_reason_says_that_a_load_is_a_trial():
    cost = make_model()
    cost.host.rate.add(1, 0.5)
    assert prefer_load(cost) == (
        False,
        "16 tokens of it are in the host tier: recompute, as loading takes 500 ms and computing"
        " 16 ms",
    )
    run_step(cost, 12.0)
    assert prefer_load(cost) == (
        True,
        "16 tokens of it are in the host tier: load, to measure it again after 12 s without,"
        " though loading takes 500 ms and computing 16 ms",
    )


def test_a_retry_loads_from_the_disk_to_the_device(tmp_path, monkeypatch):
    tiers = [HostTier(gib=4 * 2**-10), DiskTier(tmp_path, gib=16 * 2**-10)]
    prompts = random_prompts(6, [40, 50])
    model = checkpoint("qwen3")
    first = make_engine(model, kv_tiers=tiers, block_size=8, num_kv_blocks=40)
    expected = tokens(run(first, prompts, greedy(4)))
    first.close()
    second = make_engine(model, kv_tiers=tiers, block_size=8, num_kv_blocks=40)
    storage, finished = second.scheduler.block_manager.prefix_cache.storage, []
    collect = storage.collect

    def collect_one(wait_s: float) -> list[FinishedCopy]:
        """Finishes one block per step, so that blocks reach the host one at a time."""
        finished.extend(collect(wait_s))
        return [finished.pop(0)] if finished else []

    monkeypatch.setattr(storage, "collect", collect_one)
    cost = second.scheduler.block_manager.prefix_cache.cost
    cost.prefill.add(1e6, 1.0)
    for slow in (cost.host, cost.disk):
        slow.rate.add(1.0, 1.0)
    block_bytes = second.info.block_bytes
    cost.host.rate.unused_s = cost.disk.rate.unused_s = 1e3 * block_bytes
    assert tokens(run(second, prompts, greedy(4))) == expected
    host, disk = second.stats().tiers
    assert disk.loaded_blocks > 0 and host.loaded_blocks > 0
    assert cost.host.rate.time_for(block_bytes) < block_bytes / 2, "only the new measurement counts"
    second.close()
