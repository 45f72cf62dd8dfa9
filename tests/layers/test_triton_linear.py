"""Deterministic linear layers, and a whole model: correct, with equal bits in any batch."""

import pytest
import torch
import torch.nn.functional as F

from nanoengine.attention import triton as attention
from nanoengine.attention.triton import KernelConfig
from nanoengine.attention.triton_kernels import TileConfig
from nanoengine.errors import ConfigError
from nanoengine.layers import triton_linear
from nanoengine.layers.triton_linear import GemmConfig, TritonLinear, gemm_config
from nanoengine.settings.params import SamplingParams
from tests.support.attention_cases import DEVICE
from tests.support.engines import checkpoint, make_engine, random_prompts, run
from tests.support.row_products import row_products  # noqa: F401

pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py",
    "nanoengine/attention/*.py",
    "nanoengine/layers/kernels.py",
    "tests/support/row_products.py",
)

ATOL = {torch.float32: 2e-5, torch.float16: 4e-3}


@pytest.fixture
def small(monkeypatch):
    """Small tiles, so that tiny layers have several."""
    config = GemmConfig(rows=16, columns=16, inputs=32, warps=4, stages=2)
    monkeypatch.setattr(triton_linear, "gemm_config", lambda *shape: config)


def layer(in_features, out_features, dtype):
    method = TritonLinear("layer").to(DEVICE)
    method.create((out_features, in_features), dtype, DEVICE)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator) * in_features**-0.5
    method.load(weight)
    return method


def inputs(rows, size, dtype):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 48), (80, 20)])
def test_products_match_torch_with_and_without_bias(small, sizes, dtype):
    method, x = layer(*sizes, dtype), inputs(19, sizes[0], dtype)
    bias = inputs(1, sizes[1], dtype)[0]
    for b in (None, bias):
        out, wide = method.apply(x, b), None if b is None else b.float()
        expected = F.linear(x.float(), method.weight.float(), wide)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=ATOL[dtype])


@pytest.mark.usefixtures("row_products")
def test_a_row_has_the_same_bits_in_any_batch(small):
    method, x = layer(64, 48, torch.float32), inputs(40, 64, torch.float32)
    many = method.apply(x, None)
    for rows in (slice(0, 1), slice(21, 22), slice(9, 30)):
        assert torch.equal(method.apply(x[rows], None), many[rows])


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
def test_tiles_fit_into_shared_memory(arch):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for out_features in (64, 1024, 4096, 151936):
            config = gemm_config(arch, out_features, dtype)
            tiles = config.rows + config.columns
            in_flight = tiles * config.inputs * dtype.itemsize * (config.stages - 1)
            assert min(config.rows, config.columns, config.inputs) >= 16
            assert in_flight < 99 * 1024


@pytest.fixture
def deterministic_engine(monkeypatch, row_products):  # noqa: F811
    """Creates engines that run every operation of the GPU in the interpreter, with small tiles."""
    tile = TileConfig(rows=16, keys=16, warps=4, stages=2)
    monkeypatch.setattr(attention, "kernel_config", lambda *shape: KernelConfig(tile, tile))

    def make(**options):
        directory = checkpoint("qwen3", head_dim=16, num_hidden_layers=1, vocab_size=64)
        return make_engine(
            directory, dtype="float32", attention_backend="triton", block_size=16,
            deterministic=True, num_kv_blocks=24, max_num_seqs=8, **options,
        )  # fmt: skip

    return make


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")
def test_a_model_has_the_same_bits_alone_in_chunks_and_after_a_cache_hit(deterministic_engine):
    """Log-probabilities are compared, because equal tokens could hide differences."""
    prompts = random_prompts(2, [37, 20], vocab_size=64)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0)

    def logprobs(engine, which):
        requests = run(engine, which, params)
        return [[found[0].logprob for found in r.sequences[0].extras.logprobs] for r in requests]

    engine = deterministic_engine()
    together = logprobs(engine, prompts)
    after_a_hit = logprobs(engine, prompts[:1])
    engine.close()
    assert after_a_hit == together[:1]
    engine = deterministic_engine(long_prefill_threshold=13, enable_prefix_caching=False)
    assert logprobs(engine, prompts[:1]) == together[:1]
    engine.close()


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("qwen3", {"attention_backend": "naive"}, "needs attention_backend='triton'"),
        ("qwen3", {"attention_backend": "triton", "dtype": "float64"}, "float64"),
        ("qwen3_moe", {"attention_backend": "triton"}, "is not supported for mixtures of experts"),
        (
            "qwen3", {"attention_backend": "triton", "quantization": "int8"},
            "is not supported for quantized weights",
        ),
    ],
)  # fmt: skip
def test_unsupported_options_raise_with_deterministic(family, options, words):
    options = {"dtype": "float32", "block_size": 16} | options
    with pytest.raises(ConfigError, match=words):
        make_engine(checkpoint(family), deterministic=True, **options)
