"""The experts of a step as grouped GEMMs in Triton: correct, and without synchronizing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.kernels import cpu_experts
from nanoengine.layers import triton_experts
from nanoengine.layers.moe import Router
from nanoengine.layers.triton_experts import TritonExperts, expert_config
from nanoengine.layers.triton_linear import GemmConfig
from nanoengine.models.moe import SparseMLP
from nanoengine.models.triton import TritonKernels
from tests.support.attention_cases import DEVICE
from tests.support.emulated_gpu import CUDA, EmulatedGPU
from tests.support.engines import checkpoint, make_engine
from tests.support.model_helpers import DenseAttention, build, make_context
from tests.support.row_products import row_products  # noqa: F401

ATOL = {torch.float32: 2e-5, torch.float16: 8e-3}
# Why: the interpreter takes half a minute; tests/runner/test_gpu_paths.py has a whole model.
pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py", "nanoengine/models/moe.py", "tests/support/emulated_gpu.py"
)
NO_GPU = pytest.mark.skipif(DEVICE.type == "cuda", reason="emulates one")


@pytest.fixture
def small(monkeypatch):
    """Small tiles, so that tiny layers and experts have several."""
    config = GemmConfig(rows=16, columns=16, inputs=32, warps=4, stages=2)
    monkeypatch.setattr(triton_experts, "expert_config", lambda *shape: config)


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
def test_grouped_gemms_match_separate_experts(small, family, tokens, dtype):
    mlp, grouped = mixture(family, dtype)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    found, expected = grouped(x), mlp.experts(x, *mlp.gate(x))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL[dtype])


def test_a_token_has_the_same_bits_alone_and_in_a_batch(small, row_products):  # noqa: F811
    _, grouped = mixture("qwen3_moe", torch.float32)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits = grouped.router.logits(x)  # Why once: torch's own product may depend on the batch size

    def of(rows: slice) -> torch.Tensor:
        grouped.router.logits = lambda _: logits[rows]
        return grouped(x[rows])

    whole = of(slice(None))
    for rows in (slice(0, 1), slice(16, 17), slice(32, 33), slice(5, 30)):
        assert torch.equal(of(rows), whole[rows])


def test_weights_of_experts_are_views_of_the_stack():
    """No weight is stored twice, and the reference implementation still runs."""
    mlp, grouped = mixture("qwen3_moe", torch.float32)
    for index, expert in enumerate(mlp.experts.experts):
        assert expert.gate_up.weight.data_ptr() == grouped.gate_up.weight[index].data_ptr()
        assert expert.down.weight.data_ptr() == grouped.down.weight[index].data_ptr()


SOFTMAX = MoEConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=8, layers=())
SIGMOID = replace(SOFTMAX, score="sigmoid", norm_epsilon=1e-6)
FORMS = {
    "softmax over the selected": SOFTMAX,
    "softmax over all": replace(SOFTMAX, norm_topk_prob=False, scaling_factor=2.5),
    "one expert": replace(SOFTMAX, num_experts_per_tok=1),
    "128 experts": replace(SOFTMAX, num_experts=128, num_experts_per_tok=8),
    "512 experts": replace(SOFTMAX, num_experts=512, num_experts_per_tok=10),
    "60 experts": replace(SOFTMAX, num_experts=60, num_experts_per_tok=4),
    "sigmoid": replace(SIGMOID, num_experts=32, num_experts_per_tok=4),
    "corrected": replace(SIGMOID, num_experts=32, num_experts_per_tok=4, correction_bias=True),
    "groups": replace(
        SIGMOID, num_experts=256, num_experts_per_tok=8, correction_bias=True, num_groups=8,
        groups_per_token=4, scaling_factor=2.5,
    ),
    "groups by their best expert": replace(
        SOFTMAX, num_experts=32, num_experts_per_tok=4, num_groups=4, groups_per_token=2,
        best_of_group=1,
    ),
    "three groups of 12": replace(
        SIGMOID, num_experts=36, num_experts_per_tok=5, num_groups=3, groups_per_token=2,
    ),
}  # fmt: skip
"""The routing of the families, and sizes that are not powers of two."""


@pytest.fixture
def few_blocks(monkeypatch):
    """Few programs, so that each handles several tiles of tokens."""
    monkeypatch.setattr(triton_experts, "MAX_BLOCKS", 3)


def correction_of(moe: MoEConfig) -> torch.Tensor | None:
    bias = torch.randn(moe.num_experts, generator=torch.Generator().manual_seed(1)) / 8
    return bias.to(DEVICE) if moe.correction_bias else None


def check_tile_map(ids: torch.Tensor, tile_map: tuple[torch.Tensor, ...], experts: int) -> None:
    """The positions must match a stable sort, in tiles of 16 rows."""
    order, starts, tiles = (each.tolist() for each in tile_map)
    expected = ids.flatten().sort(stable=True)
    assert order == expected.indices.tolist()
    counts = ids.flatten().cpu().long().bincount(minlength=experts)
    assert starts == [0, *counts.cumsum(0).tolist()]
    assert tiles == [0, *(-(-counts // 16)).cumsum(0).tolist()[:-1]]


@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("form", FORMS)
def test_experts_and_weights_match_the_router(few_blocks, form, tokens):
    moe = FORMS[form]
    router = Router("gate", 8, moe, context=make_context(torch.float32))
    router.e_score_correction_bias = None
    if moe.correction_bias:
        router.e_score_correction_bias = torch.nn.Parameter(correction_of(moe), False)
    logits = torch.randn(tokens, moe.num_experts, generator=torch.Generator().manual_seed(0))
    logits = logits.to(DEVICE)
    router.logits = lambda hidden: hidden
    weights, ids, tile_map = triton_experts.route(logits, correction_of(moe), moe, 16)
    expected, experts = router(logits)
    assert torch.equal(ids.long(), experts)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    check_tile_map(ids, tile_map, moe.num_experts)


@pytest.mark.parametrize("form", ["softmax over all", "128 experts", "groups"])
def test_ties_select_the_experts_with_the_lowest_indices(few_blocks, form):
    """The CPU kernel does the same; torch does not define the order of equal scores."""
    moe, correction = FORMS[form], correction_of(FORMS[form])
    correction = None if correction is None else torch.zeros_like(correction)
    logits = torch.randn(60, moe.num_experts, generator=torch.Generator().manual_seed(0))
    logits = (2 * logits).round() / 2  # includes 0 and -0
    logits[7] = 0
    _, ids, tile_map = triton_experts.route(logits.to(DEVICE), correction, moe, 16)
    shape = 60, moe.num_experts_per_tok
    expected, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
    none = np.zeros(0, np.float32)
    routing = (
        moe.score == "sigmoid", moe.num_groups, moe.groups_per_token, moe.best_of_group,
        moe.norm_topk_prob, np.float32(moe.norm_min), np.float32(moe.norm_epsilon),
        np.float32(moe.scaling_factor),
    )  # fmt: skip
    correction = none if correction is None else correction.cpu().numpy()
    cpu_experts.route(logits.numpy(), correction, routing, expected, weights, 1)
    assert ids.tolist() == expected.tolist()
    assert ids[7].tolist() == list(range(moe.num_experts_per_tok))
    check_tile_map(ids, tile_map, moe.num_experts)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy on NaN, in the interpreter
@pytest.mark.parametrize("form", ["128 experts", "60 experts", "groups"])
def test_nan_and_infinite_scores_select_distinct_existing_experts(few_blocks, form):
    """Otherwise entries of `order` would stay unwritten. Padding tokens may have any values."""
    moe = FORMS[form]
    logits = torch.randn(40, moe.num_experts, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
        logits[row], logits[10 + row, 3], logits[20 + row, 1:] = value, value, value
    _, ids, tile_map = triton_experts.route(logits.to(DEVICE), correction_of(moe), moe, 16)
    assert all(len(set(row)) == moe.num_experts_per_tok for row in ids.tolist())
    assert ids.min() >= 0 and ids.max() < moe.num_experts
    check_tile_map(ids, tile_map, moe.num_experts)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_depend_on_the_rows_per_expert_unless_deterministic(monkeypatch, deterministic):
    """Each token uses 2 of 8 experts. Every tile size gives the results of the separate experts."""
    mlp, _ = mixture("qwen3_moe", torch.float16)
    attention, used = DenseAttention(), []
    attention.deterministic = deterministic
    kernels = TritonKernels(attention, dtype=torch.float16)
    model = build(Path(checkpoint("qwen3_moe")), torch.float16, device=DEVICE, kernels=kernels)
    grouped = model.model.layers[-1].mlp.routed
    assert isinstance(grouped, TritonExperts)

    def config(*shape: Any) -> GemmConfig:
        used.append(expert_config(*shape))
        return used[-1]

    monkeypatch.setattr(triton_experts, "expert_config", config)
    for count, rows in ((1, 16), (100, 64), (300, 128)):
        x = torch.randn(count, 64, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
        found, expected = grouped(x), mlp.experts(x, *mlp.gate(x))
        torch.testing.assert_close(found, expected, rtol=0, atol=ATOL[torch.float16])
        assert {config.rows for config in used} == {64 if deterministic else rows}
        used.clear()


@NO_GPU
@pytest.mark.parametrize(("family", "tokens", "max_launches"), [
    ("qwen3_moe", 3, 8), ("qwen3_moe", 40, 8), ("glm4_moe", 40, 12),
    ("qwen2_moe", 40, 14),
])  # fmt: skip
def test_a_layer_has_at_most_14_launches(family, tokens, max_launches):
    """The router and the experts take eight launches; a shared expert and its gate take the
    others."""
    directory = checkpoint(family)
    sizes = {"max_num_seqs": 1, "max_model_len": 16, "block_size": 16, "num_kv_blocks": 2}
    with EmulatedGPU() as gpu, torch.inference_mode():
        options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
        engine = make_engine(directory, enforce_eager=True, **options, **sizes)
        mlp = engine.executor.model.model.layers[-1].mlp
        x = torch.randn(tokens, 64).to(CUDA)
        gpu.kernels.clear()
        gpu.waits.clear()
        mlp.routed(x)
        assert gpu.kernels.total() == 8, gpu.kernels
        gpu.kernels.clear()
        mlp(x)
        assert gpu.kernels.total() <= max_launches, gpu.kernels
        assert not gpu.waits
        engine.close()


def test_the_router_may_have_another_input_than_the_experts(small):
    model = build(Path(checkpoint("gemma4_moe")), torch.float32, device=DEVICE)
    layer, generator = model.model.layers[-1], torch.Generator().manual_seed(0)
    layer.router.per_expert_scale.copy_(torch.rand(6, generator=generator))
    x, router_input = torch.randn(2, 9, 64, generator=generator).to(DEVICE)
    expected = layer.experts(x, *layer.router(router_input))
    found = TritonExperts(layer.gate, layer.experts)(x, router_input)
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL[torch.float32])
