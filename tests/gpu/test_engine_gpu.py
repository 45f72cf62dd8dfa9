"""The engine's GPU paths: graphs at every batch size, memory, staging, and tiers on side streams.

Where tokens must be equal, the model runs in float64 with the naive backend, as in the CPU tests,
so that only the path can differ and not the rounding.
"""

import gc

import numpy as np
import pytest
import torch

from nanoengine import HostTier
from nanoengine.features.kv_tiers import HostStorage
from nanoengine.observe.metrics import Metrics
from nanoengine.runner.transfers import Download, ship
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

MIB = 2**20
CUDA = torch.device("cuda")
EXACT = {"device": "cuda", "dtype": "float64", "attention_backend": "naive"}


def fast_engine(dtype="bfloat16", **options):
    """A tiny Qwen3 with the GPU kernels."""
    options = {"attention_backend": "triton", "debug_checks": False} | options
    return make_engine(checkpoint("qwen3"), device="cuda", dtype=dtype, **options)


# --- the loop -------------------------------------------------------------------------------------


def test_the_gpu_generates_the_tokens_of_the_cpu():
    prompts = random_prompts(9, [3, 40, 17, 64, 90])
    found = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(
            checkpoint("qwen3"), **EXACT | {"device": device}, max_num_batched_tokens=40,
            max_num_seqs=6, num_kv_blocks=22,
        )  # fmt: skip
        found[device] = tokens(run(engine, prompts, greedy(20)))
        assert engine.stats().preemptions > 0
        engine.close()
    assert found["cuda"] == found["cpu"]


def test_repeated_runs_generate_equal_tokens():
    prompts = random_prompts(12, [3, 40, 70])
    found = []
    for _ in range(2):
        engine = fast_engine(max_num_seqs=8)
        found.append(tokens(run(engine, prompts, greedy(30))))
        engine.close()
    assert found[0] == found[1]


# --- graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 3, 21])
def test_graphs_cover_every_batch_size(max_num_seqs):
    """Batches shrink one by one from the largest size; eager steps are the reference.

    Float32, because products of padded batches are added in another order.
    """
    prompts = random_prompts(max_num_seqs, [5, 70, 33])
    lengths = [greedy(4 + 2 * i) for i in range(max_num_seqs)]
    found = []
    for eager in (True, False):
        engine = fast_engine("float32", max_num_seqs=max_num_seqs, enforce_eager=eager)
        metrics = Metrics()
        engine.observers.append(metrics)
        found.append(tokens(run(engine, prompts, lengths)))
        engine.close()
        decodes = [r.rows for r in metrics.records if max(r.num_scheduled, default=0) == 1]
        assert set(map(len, decodes)) == set(range(1, max_num_seqs + 1))
    assert found[0] == found[1]


# --- memory ---------------------------------------------------------------------------------------


def test_shutdown_frees_all_memory():
    prompts = random_prompts(6, [40, 90])

    def round_trip():
        engine = fast_engine(max_num_seqs=8, num_kv_blocks=200)
        run(engine, prompts, greedy(10))
        during = torch.cuda.memory_allocated()
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        return during, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    round_trip()  # Why: libraries keep workspaces that they allocate at their first use.
    during, allocated, reserved = round_trip()
    for _ in range(3):
        again = round_trip()
        assert again[1] - allocated < MIB
        assert again[2] - reserved < 4 * MIB
    assert during - allocated > MIB


def test_memory_fraction_is_not_exceeded(monkeypatch):
    """A pool that uses its whole share leaves space for prompts, logits, sampling and graphs.

    Free memory is counted as if this process were alone, because other test files run in parallel.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, (_, total) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()

    def free_if_alone(*device):
        return total - torch.cuda.memory_reserved(), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", free_if_alone)
    free, _ = free_if_alone()
    directory = checkpoint("qwen3", vocab_size=150_000, max_position_embeddings=131_072)
    engine = make_engine(
        directory, device="cuda", dtype="bfloat16", attention_backend="triton", debug_checks=False,
        kv_cache_gib=None, memory_fraction=(total - free) / total + 0.05, max_num_seqs=128,
        max_num_batched_tokens=4096,
    )  # fmt: skip
    assert engine.info.num_kv_blocks * engine.info.block_bytes > 0.02 * total
    run(engine, random_prompts(256, [200, 400]), greedy(40))
    peak = torch.cuda.max_memory_allocated() - before
    engine.close()
    assert peak < 0.05 * total + 64 * MIB


# --- staging --------------------------------------------------------------------------------------


def test_staging_transfers_arrays_unchanged():
    """Several transfers are in flight at once, each from its own pinned buffer."""
    draw, under_way = np.random.default_rng(0), []
    torch.cuda._sleep(50_000_000)  # about 25 ms in which no transfer can finish
    for size in (1, 3, 17, 1000, 5, 40_000, 2):
        arrays = [
            draw.integers(-(2**40), 2**40, size),
            draw.integers(0, 2**30, (2, size)).astype(np.int32),
            np.zeros(0, np.int64),
            draw.random((3, size)),
            draw.integers(0, 2**30, (1, size, 3)).astype(np.int32)[:, :, :2],
        ]
        under_way.append((arrays, ship(CUDA, *arrays)))
    for arrays, shipped in under_way:
        for array, tensor in zip(arrays, shipped, strict=True):
            assert tensor.device.type == "cuda"
            assert tensor.data_ptr() % 16 == 0
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)
            assert tensor.cpu().numpy().dtype == array.dtype


def test_downloads_contain_the_values_at_their_start():
    stream, tensor = torch.cuda.Stream(CUDA), torch.zeros(100_000, dtype=torch.int64, device=CUDA)
    under_way = []
    for number in range(4):
        torch.cuda._sleep(20_000_000)
        tensor.fill_(number)
        under_way.append(Download([tensor.clone(), tensor[:3] + 1], stream))
    for number, download in enumerate(under_way):
        large, small = download.wait()
        assert large.device.type == small.device.type == "cpu"
        assert (large == number).all()
        assert small.tolist() == [number + 1] * 3


# --- tiers ----------------------------------------------------------------------------------------


def test_blocks_stored_and_loaded_on_the_side_stream_are_correct():
    """The side stream copies after earlier work of the main stream, and loads before later work.

    Long sleeps on the main stream expose a wrong order.
    """
    kv = torch.zeros(2, 3, 9, 16, 2, 64, dtype=torch.bfloat16, device=CUDA)
    storage = HostStorage(kv, 9)
    assert all(chunk.is_pinned() for chunk in storage.chunks)
    cycles = 50_000_000  # about 25 ms
    for trial in range(3):
        content = torch.randn_like(kv)
        torch.cuda._sleep(cycles)
        kv.copy_(content)
        storage.store([1, 4, 7], [8, 2, 5])()
        kv.fill_(trial)
        storage.load([8, 2, 5], [3, 6, 2])
        for stored, loaded in ((1, 3), (4, 6), (7, 2)):
            assert torch.equal(kv[:, :, loaded], content[:, :, stored])
        for untouched in (0, 1, 4, 5, 7, 8):
            assert (kv[:, :, untouched] == trial).all()


def test_a_host_tier_generates_the_same_tokens():
    prompts = random_prompts(12, [60, 90, 40])
    found = {}
    for name, tiers in {"without": (), "with": (HostTier(gib=0.05, policy="load"),)}.items():
        engine = make_engine(
            checkpoint("qwen3"), **EXACT, num_kv_blocks=30, max_num_seqs=6, kv_tiers=tiers
        )
        found[name] = [tokens(run(engine, prompts, greedy(30))) for _ in range(2)]
        if tiers:
            assert sum(tier.loaded_blocks for tier in engine.stats().tiers) > 0
        engine.close()
    assert found["with"] == found["without"]
