"""KV caches in fp8, int8 and bfloat16 compared with float32: rounding errors, their effect on
attention and logits, and unsupported models."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoengine.attention import make_backend
from nanoengine.attention.kv_quantization import (
    FP8,
    FP8_MAX,
    from_fp8,
    from_int8,
    hadamard,
    to_fp8,
    to_int8,
)
from nanoengine.attention.triton import TritonBackend
from nanoengine.errors import ConfigError, WeightLoadError
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.tiers import HostTier
from tests.support.attention_cases import DEVICE, backend_of, make_case
from tests.support.checkpoints import make_checkpoint
from tests.support.drafts import draft_always
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

CPU = torch.device("cpu")


def random_values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 0.01, 3.0])
def test_the_rounding_error_is_at_most_a_sixteenth(scale):
    x = random_values(4000) * 20 * scale
    x[:1000] *= 1e-4
    error = (from_fp8(to_fp8(x, scale), scale, torch.float64) - x).abs()
    bound = torch.maximum(x.abs() / 16, torch.tensor(2.0**-10) * scale)
    assert (error <= bound * (1 + 1e-12)).all()
    assert (error > 0.9 * x.abs() / 16).any(), "the bound is reached"


def test_large_values_are_clamped_and_nan_stays_nan():
    x = torch.tensor([448.0, 449.0, 1e6, -1e6, float("inf"), float("nan")])
    out = to_fp8(x, 1.0).float()
    assert out[:5].tolist() == [FP8_MAX, FP8_MAX, FP8_MAX, -FP8_MAX, FP8_MAX]
    assert out[5].isnan()
    assert to_fp8(x[:2], 2.0).float().tolist() == [224.0, 224.0]


@pytest.mark.parametrize("window", [None, 20])
def test_the_error_of_attention_is_bounded_by_the_rounding(window):
    """Scores change by at most d = scale * sum |q| |k| / 16, so weights by a factor of at most
    e ** 2d, and values by a sixteenth."""
    case = make_case((1, 60), (7, 40), group_size=2, head_dim=32, sliding_window=window)
    case.q.mul_(0.3)
    exact = case.expected()
    stored = [torch.full_like(x, float("nan")).to(FP8) for x in (case.k_cache, case.v_cache)]
    for full, codes in zip((case.k_cache, case.v_cache), stored, strict=True):
        codes.copy_(to_fp8(full, 1.0))
    largest_k = case.k_cache.nan_to_num().abs().amax().maximum(case.k.abs().amax())
    largest_v = case.v_cache.nan_to_num().abs().amax().maximum(case.v.abs().amax())
    case.k_cache, case.v_cache = stored
    out = case.run(backend_of(case, "naive"))
    errors = case.spec.scale * case.q.abs().sum(-1, keepdim=True) * largest_k / 16
    bound = torch.expm1(2 * errors) * largest_v * (1 + 1 / 16) + largest_v / 16
    error = (out - exact).abs()
    assert (error <= bound).all()
    assert 0.001 < error.max() < 0.1, "far below the bound, and not nothing"


def test_triton_with_a_window_and_a_softcap():
    case = make_case(
        (1, 75), (18, 50), fp8=True, sliding_window=17, softcap=5.0, block_size=32, group_size=2
    )
    # Why: the interpreter reads an fp8 NaN as 480, and masked rows must not reach the output.
    case.batch.block_tables[1, 0, :1] = 0
    case.check(backend_of(case))


def logprobs_of(directory, prompts, **options):
    engine = make_engine(directory, dtype="float32", **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    requests = run(engine, prompts, params)
    info = engine.info
    engine.close()
    found = [[entry[0].logprob for entry in r.prompt_logprobs if entry] for r in requests]
    return torch.tensor([x for each in found for x in each]), info


# name -> block size relative to float32 with 32-wide heads, bounds of the mean error, and whether
# the cpu backend supports it. A random model of two layers with logits between -10 and 10.
ERRORS = {
    "fp8": (1 / 4, 1e-3, 0.08, False),
    "bfloat16": (1 / 2, 1e-4, 0.01, True),  # four more mantissa bits than fp8
    "int8": (36 / 128, 1e-4, 0.02, True),  # includes a scale of 4 bytes
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_of_log_probabilities_is_small_and_more_blocks_fit(name):
    share, min_error, max_error, on_cpu = ERRORS[name]
    directory, prompts = checkpoint("qwen3"), random_prompts(4, [40, 70])
    exact, plain = logprobs_of(directory, prompts, attention_backend="naive")
    options = {"kv_cache_dtype": name, "long_prefill_threshold": 33}
    oracle, info = logprobs_of(directory, prompts, attention_backend="naive", **options)
    errors = (oracle - exact).abs()
    assert min_error < errors.mean() < max_error
    assert info.block_bytes == share * plain.block_bytes
    assert info.num_kv_blocks > 0.97 / share * plain.num_kv_blocks
    assert info.kv_cache_dtype == {"fp8": "float8_e4m3fn"}.get(name, name)
    if on_cpu:
        ours, _ = logprobs_of(directory, prompts, attention_backend="cpu", **options)
        # The difference is far below the rounding error, so both backends read the same values. It
        # is not zero: float32 differs in the last bits, which rounds some keys to other values.
        assert (ours - oracle).abs().mean() < 0.2 * errors.mean()


CACHES = [
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "bfloat16", "dtype": "float32", "attention_backend": "cpu"},
    {"kv_cache_dtype": "int8", "dtype": "float32", "attention_backend": "cpu"},
]
CACHE_NAMES = ["fp8", "bfloat16", "int8"]


@pytest.mark.parametrize("cache", CACHES, ids=CACHE_NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": False},
        {"long_prefill_threshold": 7},
        {"num_kv_blocks": 12},
        {
            "num_kv_blocks": 8,
            "admission": "watermark",  # thrashes, so that blocks are loaded from the tier
            "kv_tiers": (HostTier(gib=0.01, policy="load"),),
        },
    ],
)
def test_features_do_not_change_the_output(options, cache):
    directory = checkpoint("qwen3")
    prompts = random_prompts(3, [40, 33]) + random_prompts(3, [40, 33])
    common = {"max_model_len": 100, "block_size": 16, **cache}
    found = []
    for extra in ({}, options):
        engine = make_engine(directory, **common, **extra)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found.append(tokens(run(engine, prompts, params)))
        assert all(tier.loaded_blocks for tier in engine.stats().tiers)
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", CACHES, ids=CACHE_NAMES)
def test_a_fork_copies_its_block(cache):
    directory = checkpoint("qwen3")
    (prompt,) = random_prompts(1, [21])
    engine = make_engine(directory, **cache)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    forked = tokens(run(engine, [prompt], params))[0]
    again = tokens(run(engine, [prompt], params))[0]
    engine.close()
    assert forked == again
    assert len({tuple(t) for t in forked}) > 1


def with_scales(tmp_path, k_scale, v_scale):
    make_checkpoint(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn"
        weights[f"{name}.k_scale"] = torch.tensor([k_scale])
        weights[f"{name}.v_scale"] = torch.tensor([v_scale])
    save_file(weights, path, metadata={"format": "pt"})
    return str(tmp_path)


def test_scales_come_from_the_checkpoint(tmp_path):
    plain, prompts = checkpoint("qwen3"), random_prompts(2, [30])
    scaled = with_scales(tmp_path, 0.5, 0.25)
    engine = make_engine(scaled, kv_cache_dtype="fp8")
    specs = [layer.spec for layer in engine.executor.model.attention_layers]
    engine.close()
    assert [(s.k_scale, s.v_scale) for s in specs] == [(0.5, 0.25)] * 2
    assert [s.group for s in specs] == [0, 0]
    # Powers of two leave mantissas unchanged, and a cache of the model's dtype ignores scales: the
    # tokens equal those with scales of 1.
    for kind in ("fp8", "auto"):
        found = []
        for directory in (plain, scaled):
            engine = make_engine(directory, kv_cache_dtype=kind)
            found.append(tokens(run(engine, prompts, greedy(8))))
            engine.close()
        assert found[0] == found[1]


def test_the_error_of_int8_is_at_most_half_a_step():
    x = random_values(500, 3, 64) * torch.logspace(-20, 20, 500, dtype=torch.float64)[:, None, None]
    stored = to_int8(x)
    assert stored.shape == (500, 3, 68)
    error = hadamard(from_int8(stored, torch.float64) - x).abs()
    bound = hadamard(x).abs().amax(-1, keepdim=True) / 254
    assert (error <= bound * (1 + 1e-4)).all()
    assert (error > 0.99 * bound).any(), "the bound is reached"
    assert torch.equal(to_int8(x[7:9, 1:]), stored[7:9, 1:]), "a row depends on itself alone"


@pytest.mark.parametrize("size", [1, 3, 8, 24, 64, 80, 256])
def test_the_hadamard_matrix_is_its_own_inverse_and_spreads_each_channel(size):
    block = size & -size
    spread = hadamard(torch.eye(size))
    assert torch.equal(spread.abs(), torch.eye(size // block).kron(torch.ones(block, block)))
    assert torch.equal(hadamard(spread), block * torch.eye(size))


def test_a_large_channel_costs_the_others_little():
    x = random_values(500, 64)
    x[:, 5] += 100
    error = (from_int8(to_int8(x), torch.float64) - x)[:, torch.arange(64) != 5]
    assert 0.01 < error.square().mean().sqrt() < 0.06, "0.23 with one scale and no matrix"


def test_int8_rows_of_any_size_and_alignment_are_restored():
    """Scales of rows of 2 elements start at any even byte, and a single row is contiguous."""
    stored = to_int8(torch.ones(3, 1, 2))
    for row in stored.unbind():
        assert torch.equal(from_int8(row, torch.float32), torch.ones(1, 2))


def test_int8_keeps_zeros_nan_and_infinity():
    x = torch.ones(5, 8)
    x[0], x[1], x[2, 3], x[3, 3] = 0, 1e-38, torch.nan, torch.inf
    back = from_int8(to_int8(x), torch.float32)
    assert (back[:2] == 0).all() and (back[4] == 1).all()
    assert back[2].isnan().all() and not back[3].isfinite().all()


def with_large_key_biases(tmp_path):
    """Makes two channels of each key head far larger than the others, as in trained Qwen2 models,
    and the same query channels small."""
    make_checkpoint(tmp_path, "qwen2")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if name.endswith(("k_proj.bias", "q_proj.bias", "q_proj.weight")):
            head_dim = 16
            channels = tensor.unflatten(0, (-1, head_dim))[:, 5::8]
            if name.endswith("k_proj.bias"):
                channels += 200
            else:
                channels /= 50
    save_file(weights, path, metadata={"format": "pt"})
    return str(tmp_path)


@pytest.mark.parametrize("backend", ["cpu", "naive"])
def test_large_key_biases_cause_small_errors(backend, tmp_path):
    directory, prompts = with_large_key_biases(tmp_path), random_prompts(4, [40, 70])
    exact, _ = logprobs_of(directory, prompts, attention_backend=backend)
    ours, _ = logprobs_of(directory, prompts, attention_backend=backend, kv_cache_dtype="int8")
    assert (ours - exact).abs().mean() < 0.03, "0.53 with one scale per row alone"


FEATURES = {
    "biases": ("qwen2", {}),
    "windows": ("gemma3", {}),
    "sinks": ("gpt_oss", {}),
    "states": ("qwen3_next", {}),
    "drafts": ("qwen3", {"speculative": "ngram:k=3"}),
}


@pytest.mark.parametrize(("family", "options"), FEATURES.values(), ids=list(FEATURES))
def test_int8_gives_the_same_tokens_on_cpu_and_naive(family, options):
    """One engine runs chunks, preemption and prefix caching, the other one none of them."""
    prompts = random_prompts(3, [40, 33]) + random_prompts(3, [40, 33])
    common = {"dtype": "float32", "kv_cache_dtype": "int8", "block_size": 16, **options}
    busy = {"attention_backend": "cpu", "long_prefill_threshold": 7, "num_kv_blocks": 24}
    found = []
    for extra in ({"attention_backend": "naive", "enable_prefix_caching": False}, busy):
        engine = make_engine(checkpoint(family), max_model_len=100, **common, **extra)
        if engine.proposer is not None:
            draft_always(engine)
        found.append(tokens(run(engine, prompts, greedy(12))))
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_8_bit_caches_raise_if_keys_and_values_share_memory(family, kv_cache_dtype):
    with pytest.raises(ConfigError, match="an 8-bit kv_cache_dtype is not supported for"):
        make_engine(
            checkpoint(family), dtype="float32", attention_backend="naive",
            kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip


def test_int8_raises_on_unsupported_backends():
    backend = TritonBackend(device=DEVICE, dtype=torch.float32, head_dim=64, block_size=16)
    with pytest.raises(
        ConfigError, match="does not support a KV cache of int8 for a float32 model: set"
    ):
        backend.check_cache(torch.int8, torch.float32)


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_a_scale_that_is_not_positive_raises(tmp_path, scale):
    with pytest.raises(WeightLoadError, match=r"self_attn\.k_scale must be a positive number"):
        make_engine(with_scales(tmp_path, scale, 1.0))


def test_fp8_raises_on_unsupported_backends():
    with pytest.raises(
        ConfigError, match="attention backend cpu does not support a KV cache of fp8"
    ):
        make_engine(
            checkpoint("qwen3"), dtype="float32", attention_backend="auto", kv_cache_dtype="fp8"
        )
    options = {"device": CPU, "dtype": torch.float32, "head_dim": 64, "block_size": 16}
    make_backend("naive", **options, kv_dtype=FP8)


def test_fp8_raises_on_gpus_before_ada():
    backend = TritonBackend(device=DEVICE, dtype=torch.float32, head_dim=64, block_size=16)
    backend.arch = 80
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or newer, got 8\.0"):
        backend.check_cache(FP8, torch.float32)
    backend.arch = 89
    backend.check_cache(FP8, torch.float32)


def test_an_unknown_cache_dtype_raises():
    with pytest.raises(
        ConfigError, match="kv_cache_dtype must be one of auto, bfloat16, fp8, int8, got 'int4'"
    ):
        EngineConfig(model="m", kv_cache_dtype="int4")
