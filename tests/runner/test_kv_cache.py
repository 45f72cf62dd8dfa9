"""The KV cache tensor: its sizes, its single allocation, and the location of a token's key."""

from __future__ import annotations

import doctest
import re

import pytest
import torch

from nanoengine import ConfigError, HostTier
from nanoengine.runner import kv_cache, memory
from nanoengine.runner.kv_cache import block_bytes
from nanoengine.runner.memory import GIB
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run

PROMPTS = random_prompts(3, [21, 40, 9])


def test_block_sizes_in_bytes():
    sizes = {"block_size": 16, "head_dim": 128, "dtype": torch.float16}
    layer = block_bytes(num_kv_heads=32, num_layers=1, **sizes)
    assert (layer, 32 * layer) == (262_144, 8_388_608)
    assert block_bytes(num_kv_heads=8, num_layers=1, **sizes) == 65_536
    assert block_bytes(num_kv_heads=8, num_layers=80, **sizes) == 5_242_880
    assert doctest.testmod(kv_cache).failed == doctest.testmod(memory).failed == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 10**9},
        {"num_kv_blocks": 2**63},
        {"num_kv_blocks": 8, "block_size": 2**40},
        {"kv_cache_gib": 1e9},
        {"kv_cache_gib": 1e300},
        {"num_kv_blocks": 64, "max_num_seqs": 10**9},
        {"num_kv_blocks": 64, "max_num_seqs": 2**63},
        {"num_kv_blocks": 64, "kv_tiers": [HostTier(gib=1e9)]},
        {"num_kv_blocks": 64, "kv_tiers": [HostTier(gib=1e300)]},
    ],
    ids=str,
)
def test_a_size_beyond_the_memory_raises_with_the_option(options):
    """In version 3.12 these raised OSError, OverflowError, MemoryError and ValueError."""
    name, value = list(options.items())[-1]
    option = f"HostTier gib={value[0].gib}" if name == "kv_tiers" else f"{name}={value}"
    if name == "block_size":
        option = "num_kv_blocks=8"
    with pytest.raises(ConfigError, match=re.escape(option) + ".* needs .*: lower it"):
        make_engine(checkpoint("qwen3"), **options)


def test_a_failed_allocation_is_a_config_error(monkeypatch):
    """A size below the machine's memory, but above the process's limit, failed in version 3.12."""

    def fail(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(kv_cache.mmap, "mmap", fail)
    with pytest.raises(ConfigError, match=r"no memory for 0\.0 GiB of KV blocks.*num_kv_blocks=64"):
        make_engine(checkpoint("qwen3"), num_kv_blocks=64)


def test_the_cache_is_one_tensor_that_is_allocated_once():
    engine = make_engine(checkpoint("qwen3"))
    cache = engine.executor.kv_cache.kv
    layers = engine.executor.model.attention_layers
    views = [view for layer in layers for view in (layer.cache.k_cache, layer.cache.v_cache)]
    addresses = {view.data_ptr() for view in views}
    run(engine, PROMPTS, greedy(12))
    assert engine.executor.kv_cache.kv is cache
    assert len(addresses) == len(views) >= 4, "each layer has its own keys and values"
    assert addresses == {
        view.data_ptr() for layer in layers for view in (layer.cache.k_cache, layer.cache.v_cache)
    }
    end = cache.data_ptr() + cache.nbytes
    assert all(cache.data_ptr() <= address < end for address in addresses)
    info = engine.info
    assert cache.nbytes == info.num_kv_blocks * info.block_bytes


def test_a_key_is_in_the_block_of_its_table_at_its_offset():
    keys = {}
    for block_size in (8, 32):
        engine = make_engine(checkpoint("qwen3"), block_size=block_size)
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, greedy(9))
        plan = engine.scheduler.schedule()
        result = engine.executor.launch(plan).result()
        tables = [seq.block_tables[0] for seq in engine.scheduler.running]
        assert len(tables) == 3
        cache = engine.executor.kv_cache.kv  # [2, layers, blocks, P, K, D]
        keys[block_size] = [
            torch.stack(
                [cache[0, :, table[t // block_size], t % block_size] for t in range(len(prompt))]
            )
            for table, prompt in zip(tables, PROMPTS, strict=True)
        ]
        engine.scheduler.commit(plan, result)
    for small, large in zip(keys[8], keys[32], strict=True):
        assert small.abs().sum() > 0
        torch.testing.assert_close(small, large)


def test_the_pool_size_is_set_in_blocks_or_in_gib():
    assert make_engine(checkpoint("qwen3"), num_kv_blocks=9, block_size=8).info.num_kv_blocks == 9
    engine = make_engine(checkpoint("qwen3"), kv_cache_gib=0.001)
    assert engine.info.num_kv_blocks == int(0.001 * GIB) // engine.info.block_bytes
    plan = engine.info.memory_plan
    tokens = (engine.info.num_kv_blocks - 1) * engine.info.block_size
    fit = tokens / engine.info.max_model_len
    assert f"{engine.info.num_kv_blocks} blocks of" in plan
    assert f"= {tokens} tokens = {fit:.1f} sequences of {engine.info.max_model_len}" in plan
    assert "weights" in plan and "activations" in plan


def test_too_little_memory_names_the_longest_sequence_that_fits():
    options = {"num_kv_blocks": 5, "block_size": 8}
    with pytest.raises(ConfigError, match="the largest that fits is 32: lower max_model_len"):
        make_engine(checkpoint("qwen3"), max_model_len=33, **options)
    with pytest.raises(ConfigError, match=r"\(one is the null block\); raise num_kv_blocks"):
        make_engine(checkpoint("qwen3"), kv_cache_gib=1e-6)
    engine = make_engine(checkpoint("qwen3"), max_model_len=32, **options)
    (request,) = run(engine, [[5] * 20], greedy(12))
    assert len(request.sequences[0].token_ids) == 32
