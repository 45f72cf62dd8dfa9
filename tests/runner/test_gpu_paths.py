"""The engine's GPU paths on an emulated device; see `support/emulated_gpu.py`.

Tokens equal the CPU's, no launch synchronizes, streams are ordered, and all memory is freed.
"""

import subprocess
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch

import nanoengine.features.kv_tiers as kv_tiers
import nanoengine.runner.start as start
from nanoengine import HostTier
from nanoengine.errors import ConfigError
from nanoengine.features.kv_tiers import HostStorage
from nanoengine.kernels import launch
from nanoengine.runner import memory
from nanoengine.runner.sampling.draw import SamplingKind
from nanoengine.settings.params import SamplingParams
from tests.support.emulated_gpu import CUDA, NODE_BYTES, EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.late_device import make_graph_safe

PROMPTS = random_prompts(4, [1, 7, 40, 20])
SHAPE = {"head_dim": 64, "num_hidden_layers": 2}
SMALL = {"max_model_len": 64, "max_num_seqs": 3, "block_size": 16, "num_kv_blocks": 20}
PARAMS = [
    greedy(5),
    SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=3, max_tokens=5, ignore_eos=True),
    SamplingParams(repetition_penalty=1.3, temperature=0, logprobs=2, prompt_logprobs=1,
                   min_tokens=3, max_tokens=5),
]  # fmt: skip


def on_cpu(params, prompts=PROMPTS):
    options = {"dtype": "float32", "attention_backend": "naive"}
    engine = make_engine(checkpoint("qwen3", **SHAPE), **SMALL | options)
    return tokens(run(engine, prompts, params))


def on_gpu(**options):
    defaults = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
    return make_engine(checkpoint("qwen3", **SHAPE), **SMALL | defaults | options)


def on_gpu_without_triton(**options):
    """Like `on_gpu`, in float64 and without Triton, whose interpreter is slow."""
    with mock.patch.object(start, "make_backend", make_graph_safe):
        return on_gpu(**{"dtype": "float64", "attention_backend": "naive"} | options)


@pytest.fixture(scope="module", autouse=True)
def write_checkpoint():
    """Why first: transformers writes the model, and can't be imported with an emulated GPU."""
    checkpoint("qwen3", **SHAPE)


def test_auto_selects_the_naive_backend_on_an_old_gpu(caplog):
    old = mock.patch("tests.support.emulated_gpu.CAPABILITY", (7, 5))
    with old, EmulatedGPU() as gpu:
        engine = on_gpu(attention_backend="auto")
        assert tokens(run(engine, PROMPTS, PARAMS)) == on_cpu(PARAMS)
        assert engine.info.attention_backend == "naive"
        close(gpu, engine)
    assert [r.levelname for r in caplog.records if "compute capability is 7.5" in r.message] == [
        "WARNING"
    ]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("Failed to find C compiler."), subprocess.CalledProcessError(1, ["gcc", "x.c"])],
    ids=["no compiler", "no Python.h"],
)
def test_a_missing_compiler_raises_before_weights_are_read(error):
    patch_kernel = mock.patch.object(launch, "empty_kernel")
    no_loading = mock.patch.object(start, "load_model", side_effect=AssertionError)
    with EmulatedGPU(), patch_kernel as kernel, no_loading:
        kernel.__getitem__.side_effect = error
        with pytest.raises(ConfigError, match="gcc and python3-dev"):
            on_gpu()


def test_tensor_parallelism_disables_cuda_graphs():
    """CUDA graphs that contain NCCL operations are untested."""
    with EmulatedGPU() as gpu:
        engine = on_gpu_without_triton()
        assert engine.executor._uses_graphs
        engine.executor.config = replace(engine.executor.config, tensor_parallel_size=2)
        assert not engine.executor._uses_graphs
        close(gpu, engine)


def close(gpu, engine):
    """Closes an engine, and checks what must hold for every engine."""
    engine.close()
    assert not gpu.disorder
    assert gpu.num_allocated == 0


@pytest.mark.parametrize("eager", [False, True])
def test_tokens_match_the_cpu_and_no_launch_waits(eager):
    expected = on_cpu(PARAMS)
    with EmulatedGPU() as gpu:
        engine = on_gpu(enforce_eager=eager)
        assert engine.overlap
        gpu.waits.clear()
        assert tokens(run(engine, PROMPTS, PARAMS)) == expected
        assert set(gpu.waits) == {"event.synchronize, runner/transfers.py wait"}
        assert bool(gpu.num_replayed) is not eager
        close(gpu, engine)


def test_the_memory_plan_includes_cuda_graphs():
    """A pool sized by memory_fraction stays within that share, including CUDA graphs."""
    with EmulatedGPU(memory_bytes=384 * 2**20) as gpu:
        engine = on_gpu_without_triton(
            num_kv_blocks=None, kv_cache_gib=None, memory_fraction=0.5, max_model_len=512,
            max_num_seqs=20, max_num_batched_tokens=256,
        )  # fmt: skip
        plan, info = engine.executor.memory, engine.info
        assert plan.graph_bytes > 30 * 5 * NODE_BYTES, "six sizes, and more kernels than these"
        assert f"CUDA graphs {plan.graph_bytes / 2**30:.2f} GiB" in info.memory_plan
        free, total = torch.cuda.mem_get_info()
        assert total - free + plan.activation_bytes <= 0.5 * total
        assert 100 < plan.layout.num_blocks < 20 * 512 // 16, "at most what fits in the memory"
        close(gpu, engine)


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernel_launches_of_a_decode_step(deterministic):
    """Nine launches per layer, one sampling kernel for any parameters, and 40 small operators that
    gather inputs and advance positions."""
    matmul, attention = (
        ("gemm_kernel", "varlen_kernel") if deterministic else ("mm", "decode_kernel")
    )
    with EmulatedGPU() as gpu, torch.inference_mode():
        engine = on_gpu(deterministic=deterministic)
        decode = engine.executor.graphed.step
        for kind in SamplingKind:
            gpu.kernels.clear()
            decode.sample(1, kind)
            assert gpu.kernels.pop("sample_kernel") == 1
            assert gpu.kernels.total() == 6
        gpu.kernels.clear()
        decode.device_batch.gather(decode.batch_rows[:1])
        gather = gpu.kernels.copy()
        assert gather.total() == 34
        gpu.kernels.clear()
        decode.forward(1)
        layers = {matmul: 2 * 4, "rotate_store_kernel": 2, attention: 2, "gate_kernel": 2}
        layers |= {"rms_norm_kernel": 2 * 2}
        rest = {"embedding": 1, "index_select": 1, "rms_norm_kernel": 1, matmul: 1, "copy_": 1}
        assert gpu.kernels == gather + Counter(layers) + Counter(rest)
        del decode
        close(gpu, engine)


def test_a_host_tier_stores_and_loads_during_steps():
    params, prompts = greedy(6), random_prompts(4, [40, 33, 36])
    expected = on_cpu(params, prompts)
    with EmulatedGPU() as gpu:
        engine = on_gpu_without_triton(
            num_kv_blocks=6, kv_tiers=(HostTier(gib=0.01, policy="load"),)
        )
        for _ in range(2):
            assert tokens(run(engine, prompts, params)) == expected
        (host,) = engine.stats().tiers
        assert host.stored_blocks > 0 and host.loaded_blocks > 0
        close(gpu, engine)


@pytest.fixture
def gpu():
    with EmulatedGPU() as gpu, torch.inference_mode():
        yield gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("buffer_blocks", [1, 2, 64])
def test_blocks_survive_a_round_trip_through_buffers_of_any_size(
    gpu, monkeypatch, dtype, buffer_blocks
):
    kv = torch.randn(2, 3, 12, 4, 2, 8).to(dtype).to(CUDA)
    block_bytes = kv[:, :, 0].numel() * dtype.itemsize
    monkeypatch.setattr(memory, "STAGING_BYTES", buffer_blocks * block_bytes)
    monkeypatch.setattr(kv_tiers, "CHUNK_BYTES", 4096)
    storage = HostStorage(kv, 20)
    before = kv.view(torch.uint8).cpu()
    for _ in range(3):
        wait = storage.store([1, 4, 7, 8, 2], [8, 9, 10, 19, 3])
        kv.view(torch.uint8).fill_(0)
        wait()
        storage.load([10, 9, 3, 8, 19], [7, 4, 2, 1, 8])
    after = kv.view(torch.uint8).cpu()
    for block in range(12):
        expected = before[:, :, block] if block in (1, 2, 4, 7, 8) else torch.tensor(0)
        assert (after[:, :, block] == expected).all()
    assert not gpu.disorder


def test_a_step_stores_its_blocks_with_one_kernel_and_one_copy(gpu):
    kv = torch.zeros(2, 3, 300, 4, 2, 8, device=CUDA)
    storage = HostStorage(kv, 2000)
    gpu.kernels.clear()
    gpu.waits.clear()
    storage.store(range(20, 276), range(1, 257))
    assert gpu.kernels == {"upload": 1, "index_select": 1, "download": 1}
    assert not gpu.waits, "a store does not wait"


def test_a_step_waits_only_for_its_own_copies(gpu):
    storage = HostStorage(torch.zeros(2, 3, 30, 4, 2, 8, device=CUDA), 30)
    first = storage.store([1, 2], [3, 4])
    done = gpu.streams[-2].clock.copy()
    storage.store([5, 6], [7, 8])
    first()
    down = gpu.streams[-2]
    assert gpu.host_clock[down] == done[down] < down.clock[down]


def test_an_interrupted_store_or_load_keeps_both_buffers(gpu, monkeypatch):
    kv = torch.randn(2, 3, 9, 4, 2, 8, device=CUDA)
    storage, before = HostStorage(kv, 9), kv.cpu()
    with monkeypatch.context() as patch:
        patch.setattr(kv_tiers, "ship", lambda *_: 1 / 0)
        for transfer in (storage.store, storage.load):
            with pytest.raises(ZeroDivisionError):
                transfer([1], [1])
    storage.store([1, 2], [5, 6])()
    kv.zero_()
    storage.load([5, 6], [2, 1])
    assert torch.equal(kv[:, :, 2].cpu(), before[:, :, 1])


def test_a_cache_made_in_inference_mode_can_be_loaded_outside_of_it():
    with EmulatedGPU():
        for device in ("cpu", CUDA):
            with torch.inference_mode():
                kv = torch.ones(2, 3, 9, 4, 2, 8, device=device)
            storage = HostStorage(kv, 9)
            storage.store([1], [2])()
            storage.load([2], [3])


@pytest.mark.parametrize(("gib", "block_bytes"), [(20, 7_340_032), (70, 5_242_880), (0.01, 40_000)])
def test_a_host_tier_pins_its_size_and_not_the_next_power_of_two(gib, block_bytes):
    num_blocks = int(gib * 2**30) // block_bytes
    sizes = kv_tiers.chunk_sizes(num_blocks, block_bytes)
    assert sum(sizes) == num_blocks
    pinned = sum(1 << (size * block_bytes - 1).bit_length() for size in sizes)
    assert pinned <= 1.01 * gib * 2**30 + 2**24


# --- the emulated device --------------------------------------------------------------------------


def test_unordered_accesses_of_two_streams_are_detected(gpu):
    tensor, side = torch.zeros(4, device=CUDA), torch.cuda.Stream()
    host = torch.empty(4, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    assert list(gpu.disorder) == ["download reads what another stream uses, test"]
    gpu.disorder.clear()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
        copied = side.record_event()
    tensor.fill_(1)
    assert list(gpu.disorder) == ["fill_ writes what another stream uses, test"]
    gpu.disorder.clear()
    torch.cuda.current_stream().wait_event(copied)
    tensor.fill_(2)
    assert not gpu.disorder and not gpu.waits
    with torch.cuda.stream(side):
        host.copy_(tensor, non_blocking=True)
    gpu.disorder.clear()
    del tensor
    assert list(gpu.disorder) == ["memory freed while another stream may still use it"]


def test_synchronizations_are_recorded_and_raise_in_a_capture(gpu):
    tensor = torch.arange(4, device=CUDA)
    calls = [lambda: tensor.tolist(), lambda: tensor[0].item(), lambda: tensor[tensor > 1],
             lambda: tensor.bincount(), lambda: torch.zeros(3).to(CUDA)]  # fmt: skip
    for call in calls:
        gpu.waits.clear()
        call()
        assert gpu.waits
        with (
            pytest.raises((RuntimeError, AssertionError)),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    gpu.waits.clear()
    pinned = torch.zeros(3, pin_memory=True)
    assert pinned.is_pinned() and not torch.zeros(3).is_pinned()
    pinned.copy_(pinned.to(CUDA, non_blocking=True) + 1, non_blocking=True)
    assert not gpu.waits
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.zeros(4)


def test_a_replay_repeats_the_recording_and_graphs_share_memory(gpu):
    inputs, shift, graphs = torch.zeros(3, device=CUDA), [1.0], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, inputs + shift[0]))
    inputs.fill_(2.0)
    shift[0] = 5.0
    for graph, out in graphs:
        graph.replay()
        assert out.tolist() == [3.0] * 3
    assert graphs[0][1].isnan().all()


def test_allocated_memory_is_counted(gpu):
    assert torch.cuda.memory_allocated() == 0
    tensor = torch.zeros(1000, device=CUDA)
    part = tensor[10:20]
    del tensor
    assert torch.cuda.memory_allocated() == 4096, "in units of 512 bytes, while a view exists"
    free, total = torch.cuda.mem_get_info()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part + 1
    assert free == total - 4096 > torch.cuda.mem_get_info()[0]
    del part, graph
    assert torch.cuda.memory_allocated() == 0
