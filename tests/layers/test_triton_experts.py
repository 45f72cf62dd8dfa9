"""The experts of a step as grouped products in Triton: right, without a wait, in a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoengine.layers import triton_experts
from nanoengine.layers.triton_experts import TritonExperts
from nanoengine.layers.triton_linear import GemmConfig
from nanoengine.models.moe import SparseMLP
from tests.support.attention_cases import DEVICE
from tests.support.emulated_gpu import EmulatedGPU
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens
from tests.support.model_helpers import build
from tests.support.row_products import row_products  # noqa: F401

ATOL = {torch.float32: 2e-5, torch.float16: 8e-3}
# Why: the interpreter takes half a minute; tests/runner/test_gpu_paths.py has a whole model.
pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py", "nanoengine/models/moe.py", "tests/support/emulated_gpu.py"
)
NO_GPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one")


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that tiny layers have several, and experts' rows too."""
    config = GemmConfig(rows=16, columns=16, inputs=32, warps=4, stages=2)
    monkeypatch.setattr(triton_experts, "gemm_config", lambda *shape: config)
    monkeypatch.setattr(triton_experts, "ADDED_WIDTH", 32)


def mixture(family: str, dtype: torch.dtype) -> tuple[SparseMLP, TritonExperts]:
    model = build(Path(checkpoint(family)), dtype, device=DEVICE)
    mlp = model.model.layers[-1].mlp
    assert isinstance(mlp, SparseMLP)
    assert not mlp.graph_safe
    return mlp, TritonExperts(mlp.gate, mlp.experts)


@pytest.mark.parametrize("dtype", ATOL)
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_grouped_products_give_what_experts_give_one_by_one(small, family, tokens, dtype):
    mlp, grouped = mixture(family, dtype)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    found, expected = grouped(x), mlp.experts(x, *mlp.gate(x))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL[dtype])


def test_a_token_has_the_same_bits_alone_and_among_others(small, row_products):  # noqa: F811
    _, grouped = mixture("qwen3_moe", torch.float32)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights, ids = grouped.router(x)  # Why once: torch's own product may depend on the rows

    def of(rows: slice) -> torch.Tensor:
        grouped.router = lambda _: (weights[rows], ids[rows])
        return grouped(x[rows])

    whole = of(slice(None))
    for rows in (slice(0, 1), slice(16, 17), slice(32, 33), slice(5, 30)):
        assert torch.equal(of(rows), whole[rows])


def test_each_expert_keeps_its_weights_in_the_stack():
    """Nothing is there twice, and the readable form still runs."""
    mlp, grouped = mixture("qwen3_moe", torch.float32)
    for index, expert in enumerate(mlp.experts.experts):
        assert expert.gate_up.weight.data_ptr() == grouped.gate_up[index].data_ptr()
        assert expert.down.weight.data_ptr() == grouped.down[index].data_ptr()


@NO_GPU
def test_a_mixture_of_experts_runs_in_graphs_and_waits_for_nothing():
    prompts, params = random_prompts(3, (5, 9, 3)), greedy(4)
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 16, "num_kv_blocks": 20}
    directory = checkpoint("qwen3_moe")
    engine = make_engine(directory, dtype="float32", attention_backend="naive", **sizes)
    expected = tokens(run(engine, prompts, params))
    with EmulatedGPU() as gpu:
        options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
        engine = make_engine(directory, **options, **sizes)
        gpu.waits.clear()
        assert tokens(run(engine, prompts, params)) == expected
        assert set(gpu.waits) == {"event.synchronize, runner/transfers.py wait"}
        assert gpu.num_replayed
        engine.close()
        assert not gpu.disorder


@NO_GPU
def test_a_step_may_be_a_chunk_of_a_prompt_alone():
    """Its rows give no logits, so none goes into the last layer's experts."""
    directory, prompts, params = checkpoint("qwen2_moe"), random_prompts(5, (40,)), greedy(2)
    sizes = {"max_num_seqs": 2, "max_model_len": 64, "block_size": 16, "num_kv_blocks": 8}
    sizes |= {"dtype": "float32", "max_num_batched_tokens": 16}
    engine = make_engine(directory, attention_backend="naive", **sizes)
    expected = tokens(run(engine, prompts, params))
    with EmulatedGPU():
        options = {"device": "cuda", "attention_backend": "triton", "enforce_eager": True}
        engine = make_engine(directory, **options, **sizes)
        assert tokens(run(engine, prompts, params)) == expected
        engine.close()
