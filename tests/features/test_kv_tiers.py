"""KV tiers: blocks are restored from host memory and disk byte for byte; outputs don't change."""

from __future__ import annotations

import os
import shutil
from threading import Event

import pytest
import torch

from nanoengine import ConfigError, DiskTier, EngineConfig, HostTier
from nanoengine.core.plan import StepPlan, StepResult, StepTimes, Transfer
from nanoengine.core.tiers.cost import CostModel, LoadCost, Rate
from nanoengine.core.tiers.disk import MAX_WRITES, DiskCopy, FinishedCopy
from nanoengine.engine import LLMEngine
from nanoengine.features.kv_tiers import DiskFiles, HostStorage, model_fingerprint
from tests.support.disk_files import PREFIXES, carry_out, content
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

MIB = 2**-10  # GiB

# --- engines on tiny models -----------------------------------------------------------------------

PROMPTS = random_prompts(6, [40, 50, 60])
NUM_TOKENS = 12


def small_engine(tiers, **options) -> LLMEngine:
    """Creates an engine whose device pool holds two of the prompts; the others are evicted."""
    options = {"block_size": 8, "num_kv_blocks": 25} | options
    return make_engine(checkpoint("qwen3"), kv_tiers=tiers, **options)


def outputs(engine: LLMEngine, prompts=PROMPTS) -> list[list[list[int]]]:
    return tokens(run(engine, prompts, greedy(NUM_TOKENS)))


@pytest.fixture(scope="module")
def truth():
    return outputs(make_engine(checkpoint("qwen3"), enable_prefix_caching=False))


def host_and_disk(path, host_mib: float = 4, disk_mib: float = 16, **options):
    return [
        HostTier(gib=host_mib * MIB, policy="load", **options),
        DiskTier(path, gib=disk_mib * MIB, policy="load"),
    ]


def test_blocks_evicted_from_the_device_are_loaded_from_the_host(truth):
    engine = small_engine([HostTier(gib=4 * MIB, policy="load")])
    assert outputs(engine) == truth
    before = engine.stats().tiers[0]
    assert before.stored_blocks > engine.stats().cached_blocks, "the device was meant to evict"
    loaded = before.loaded_blocks
    assert outputs(engine) == truth
    (host,) = engine.stats().tiers
    # Full blocks per prompt without the last one: 4, 6, 7, twice, minus the blocks on the device.
    assert 20 <= host.loaded_blocks - loaded <= 34
    assert host.hit_blocks == host.loaded_blocks
    assert host.block_bytes == engine.info.block_bytes
    assert host.active_blocks == 0 and host.cached_blocks == host.stored_blocks


def test_a_warm_directory_gives_hits_after_a_restart(truth, tmp_path):
    tiers = host_and_disk(tmp_path)
    first = small_engine(tiers, num_kv_blocks=40)
    assert outputs(first) == truth
    first.close()
    second = small_engine(tiers, num_kv_blocks=40)
    _, disk = second.stats().tiers
    assert disk.cached_blocks == len(list(tmp_path.glob("*/*.kv"))) > 0
    assert outputs(second) == truth
    host, disk = second.stats().tiers
    assert disk.loaded_blocks == disk.hit_blocks > 0
    assert host.loaded_blocks >= disk.loaded_blocks, "blocks from the disk are also loaded to the"
    " device"
    assert disk.failed_copies == 0
    assert second.stats().cache_hit_tokens == 2 * (32 + 48 + 56)
    second.close()


def test_a_preempted_request_loads_its_blocks_from_the_tier():
    prompts = random_prompts(6, [20], seed=3)
    expected = tokens(run(make_engine(checkpoint("qwen3")), prompts, greedy(40)))
    counts = {}
    for policy in ("load", "recompute"):
        engine = small_engine([HostTier(gib=4 * MIB, policy=policy)], num_kv_blocks=22)
        assert tokens(run(engine, prompts, greedy(40))) == expected
        assert engine.stats().preemptions > 0
        counts[policy] = (engine.stats().recomputed_tokens, engine.stats().tiers[0].loaded_blocks)
    assert counts["load"][1] > 0 and counts["recompute"][1] == 0
    assert counts["load"][0] < counts["recompute"][0]


def test_a_slow_disk_does_not_delay_steps(truth, tmp_path, monkeypatch):
    engine = small_engine(host_and_disk(tmp_path))
    disk, submitted, may_go_on = engine.scheduler.block_manager.prefix_cache.storage, [], Event()
    submit, carry_out = disk.submit, disk._run_copy

    def carry_out_later(copy: DiskCopy) -> FinishedCopy:
        assert may_go_on.wait(60), "a step waits for the disk"
        return carry_out(copy)

    monkeypatch.setattr(disk, "submit", lambda copy: submitted.append(copy) or submit(copy))
    monkeypatch.setattr(disk, "_run_copy", carry_out_later)
    assert outputs(engine, PROMPTS[:2]) == truth[:2]
    assert not may_go_on.is_set() and not list(tmp_path.rglob("*.kv")), "the disk has done nothing"
    assert len(submitted) == MAX_WRITES, "at most MAX_WRITES copies are in flight"
    may_go_on.set()
    engine.close()
    assert len(submitted) > MAX_WRITES
    assert len(list(tmp_path.rglob("*.kv"))) == sum(copy.kind == "write" for copy in submitted)


def test_the_salt_isolates_tenants_in_every_tier(truth, tmp_path):
    def run_salted(engine: LLMEngine, salt: str | None):
        request = engine.add_request("r", PROMPTS[0], greedy(NUM_TOKENS), cache_salt=salt)
        while engine.has_unfinished():
            engine.step()
        return tokens([request])[0], engine.stats().cache_hit_tokens

    tiers = host_and_disk(tmp_path)
    first = small_engine(tiers)
    assert run_salted(first, "a") == (truth[0], 0)
    first.close()
    second = small_engine(tiers)
    assert run_salted(second, "b") == (truth[0], 0)
    assert run_salted(second, None) == (truth[0], 0)
    assert run_salted(second, "a") == (truth[0], 32)
    second.close()


def test_a_reset_empties_every_tier(truth, tmp_path):
    engine = small_engine(host_and_disk(tmp_path))
    outputs(engine)
    assert engine.reset_prefix_cache()
    hits = engine.stats().cache_hit_tokens
    assert [tier.cached_blocks for tier in engine.stats().tiers] == [0, 0]
    assert outputs(engine, PROMPTS[:1]) == truth[:1]
    assert engine.stats().cache_hit_tokens == hits
    engine.close()
    assert len(list(tmp_path.glob("*/*.kv"))) == 6, "five blocks of the prompt, one of the answer"


def test_the_reasons_of_a_plan_explain_loads():
    engine = small_engine([HostTier(gib=4 * MIB)])
    outputs(engine)
    reasons = []
    for _ in range(2):  # the first load measures the rate
        engine.add_request("again", PROMPTS[0], greedy(2))
        plan = engine.scheduler.schedule()
        reasons += plan.reasons
        engine.scheduler.commit(plan, engine.executor.launch(plan).result())
        engine.abort("again")
        outputs(engine, PROMPTS[1:])
    assert "32 tokens of it are in the host tier: load, since rates are not" in reasons[0]
    assert ", as loading takes " in reasons[1] and " ms and computing " in reasons[1]


# --- movers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_round_trip_through_the_host_is_exact(dtype, contiguous):
    whole = torch.randn(2, 6, 9, 4, 2, 8, dtype=torch.float32).to(dtype)
    kv = whole if contiguous else whole[:, ::2]
    assert kv.is_contiguous() == contiguous
    before = whole.clone()
    storage = HostStorage(kv, 5)
    storage.store([3, 7, 1], [1, 2, 4])
    kv[:, :, [3, 7, 1]] = 0
    storage.load([4, 1, 2], [5, 3, 7])
    expected = before if contiguous else before[:, ::2]
    for now, then in ((5, 1), (3, 3), (7, 7), (2, 2), (8, 8)):
        assert torch.equal(kv[:, :, now], expected[:, :, then])
    assert not kv[:, :, 1].any()
    if not contiguous:
        assert torch.equal(whole[:, 1::2], before[:, 1::2]), "a neighbour was written"


def test_a_round_trip_through_the_disk_is_exact(tmp_path):
    host = torch.randint(0, 256, (5, 1000), dtype=torch.uint8).numpy()
    before = host.copy()
    files = DiskFiles(tmp_path, "f", host)
    writes = [DiskCopy("write", content(i), i, i) for i in (0, 1, 2)]
    assert carry_out(files, *writes) == [True] * 3
    host[:] = 0
    reads = [DiskCopy("read", content(i), 4 - i, i) for i in (0, 1, 2)]
    assert carry_out(files, *reads) == [True] * 3
    for i in (0, 1, 2):
        assert (host[4 - i] == before[i]).all()
    files.close()
    for age, i in enumerate((2, 0, 1)):  # Why: file timestamps may be too coarse.
        digest = content(i).prefix.digest.hex()
        os.utime(tmp_path / "f" / f"0-{digest}.kv", ns=(age, age))
    again = DiskFiles(tmp_path, "f", host)
    assert again.scan(PREFIXES) == [content(2), content(0), content(1)], "the order of use survives"
    assert carry_out(again, DiskCopy("read", content(1, group=1), 0, 0)) == [False]
    again.close()


def test_different_models_have_different_fingerprints(tmp_path):
    config, weights = files = [tmp_path / "config.json", tmp_path / "model.safetensors"]
    config.write_text("{}")
    weights.write_bytes(b"a" * 100)
    facts = {"dtype": "float32"}
    first = model_fingerprint(files, facts)
    copy = shutil.copytree(tmp_path, tmp_path / "copy", copy_function=shutil.copyfile)
    assert model_fingerprint([copy / file.name for file in files], facts) == first
    assert model_fingerprint(files, {"dtype": "float64"}) != first
    weights.write_bytes(b"a" * 99 + b"b")
    second = model_fingerprint(files, facts)
    config.write_text("{ }")
    assert len({first, second, model_fingerprint(files, facts)}) == 3
    config.write_text("{}a")  # the boundary between two files counts
    weights.write_bytes(b"a" * 98 + b"b")
    assert model_fingerprint(files, facts) not in (first, second)


# --- load or recompute ----------------------------------------------------------------------------


def model(host_rate: float = 28e9, disk_rate: float = 7e9, setup_s: float = 0.0) -> CostModel:
    def cost(rate: float) -> LoadCost:
        return LoadCost(5_120_000, setup_s, "auto", Rate(rate, 1.0))

    return CostModel(host=cost(host_rate), disk=cost(disk_rate), prefill=Rate(4000.0, 1.0))


def test_blocks_are_loaded_unless_the_setup_costs_more_than_computing():
    load, reason = model().prefer_load("host", num_host=256, num_disk=0, num_tokens=4096)
    assert load and "46.8 ms and computing 1.02e+03 ms" in reason
    dear = model(setup_s=0.01)
    assert not dear.prefer_load("host", num_host=1, num_disk=0, num_tokens=16)[0]
    assert dear.prefer_load("host", num_host=4, num_disk=0, num_tokens=64)[0]
    # A block from disk pays both transfers and both set-up times.
    assert not dear.prefer_load("disk", num_host=4, num_disk=4, num_tokens=64)[0]
    # The set-up is not paid again for blocks that are loaded together with others.
    assert dear.prefer_load("disk", num_host=8, num_disk=4, num_tokens=64, num_host_before=4)[0]


def test_a_policy_overrides_the_estimate_and_unknown_rates_load():
    cost = model(host_rate=1.0)
    assert not cost.prefer_load("host", num_host=1, num_disk=0, num_tokens=4096)[0]
    cost.host.policy = "load"
    assert cost.prefer_load("host", num_host=1, num_disk=0, num_tokens=16)[0]
    cost.host.policy = "recompute"
    assert not cost.prefer_load("host", num_host=1, num_disk=0, num_tokens=4096)[0]
    cost = CostModel(host=LoadCost(1), disk=LoadCost(1))
    load, reason = cost.prefer_load("host", num_host=1, num_disk=0, num_tokens=16)
    assert load and "not measured yet" in reason


def test_rates_are_learned_from_steps():
    cost = CostModel(host=LoadCost(100), disk=LoadCost(100))
    plan = StepPlan(step=0, rows=[0, 1], num_scheduled_tokens=[1, 1])
    cost.observe(plan, StepResult(token_ids=[[]], times=StepTimes(forward_s=1.0)), 100)
    assert not cost.prefill.is_known, "a decode says nothing about prefill"
    plan = StepPlan(step=1, rows=[0], num_scheduled_tokens=[64])
    plan.transfers = [
        Transfer("load", "host", (1, 2), (3, 4)),
        Transfer("store", "host", (5,), (6,)),
    ]
    cost.observe(plan, StepResult(token_ids=[[]], times=StepTimes(forward_s=0.5, load_s=0.1)), 100)
    assert cost.prefill.time_for(128) == pytest.approx(1.0)
    assert cost.host.rate.time_for(2000) == pytest.approx(1.0)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HostTier(gib=0), "HostTier gib must be greater than 0"),
        (lambda: HostTier(gib="1"), "gib must be a finite number, got '1'"),
        (lambda: HostTier(gib=1, policy="never"), "policy must be one of auto, load, recompute"),
        (lambda: DiskTier("", gib=1), "path must be a directory"),
        (lambda: EngineConfig(model="m", kv_tiers=[DiskTier("p", gib=1)]), "add a HostTier first$"),
        (lambda: EngineConfig(model="m", kv_tiers=HostTier(gib=1)), "kv_tiers must be"),
        (lambda: EngineConfig(model="m", kv_tiers=[HostTier(gib=1)] * 2), "kv_tiers must be"),
        (
            lambda: EngineConfig(
                model="m", kv_tiers=[HostTier(gib=1)], enable_prefix_caching=False
            ),
            "set enable_prefix_caching",
        ),
        (lambda: small_engine([HostTier(gib=1e-9)]), "too small for a block of 16384 bytes"),
        (
            lambda: small_engine([HostTier(gib=0.01), DiskTier("~no such user/kv", gib=1)]),
            "path '~no such user/kv' has no home",
        ),
    ],
)
def test_invalid_tier_settings_raise(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_config_copies_its_list_of_tiers():
    given = [HostTier(gib=1)]
    config = EngineConfig(model="m", kv_tiers=given)
    given.clear()
    assert config.kv_tiers == (HostTier(gib=1),)
