"""Logits of the model classes against transformers, on one rank and on several."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from nanoengine.errors import ConfigError
from nanoengine.layers.collectives import Shard
from nanoengine.layers.kernels import UnquantizedLinear
from nanoengine.layers.packed import PackedLinear, PrunedArgmaxHead
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.options import make_kernels
from tests.support.checkpoints import MODELS, make_checkpoint
from tests.support.model_helpers import (
    DenseAttention,
    all_logits,
    build,
    cpu_kernels,
    random_prompts,
    transformers_logits,
)


def oracle(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], dtype: torch.dtype
) -> torch.Tensor:
    """Logits of transformers, prompt by prompt."""
    model = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64:
        _to_float64(model)
    return transformers_logits(model, prompts)


def _to_float64(model: torch.nn.Module) -> None:
    """Makes a float64 transformers model compute norms and router probabilities in float64 instead
    of float32, so that more digits can be compared."""

    def norm(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        centered = type(module).__name__.startswith("Gemma")
        eps = module.eps if centered else module.variance_epsilon
        weight = 1 + module.weight if centered else module.weight

        def forward(x: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
            return weight * (x * scale)

        return forward

    def route(module: torch.nn.Module) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = F.linear(x, module.weight)
            values, indices = logits.softmax(dim=-1).topk(module.top_k, dim=-1)
            if module.norm_topk_prob:
                values = values / values.sum(dim=-1, keepdim=True)
            return logits, values, indices

        return forward

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = route(module)


CASES: dict[str, tuple[str, dict[str, Any]]] = MODELS["exact"]


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    reference = make_checkpoint(tmp_path, family, **overrides)
    prompts = random_prompts(40, 1, 23)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        expected = oracle(reference, prompts, dtype)
        got = all_logits(build(tmp_path, dtype), prompts)
        assert got.dtype == dtype
        assert (got - expected).abs().max() < tolerance
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        assert len(set(expected.argmax(-1).tolist())) > 10, "the oracle's tokens are degenerate"


class Ranks:
    """Collectives between threads that run one model: each rank waits for all ranks' tensors."""

    def __init__(self, world_size: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=30)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = tensor
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts

    def build(self, directory: Path, rank: int) -> CausalLM:
        return build(
            directory,
            torch.float64,
            shard=Shard(rank, len(self.parts)),
            all_reduce=lambda x: sum(self.exchange(rank, x)),
            all_gather=lambda x: torch.cat(self.exchange(rank, x), dim=-1),
        )


def logits_of_ranks(models: Sequence[CausalLM], prompts: list[list[int]]) -> list[torch.Tensor]:
    """The outputs of all ranks, which run at the same time."""
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(all_logits, models, [prompts] * len(models)))


@pytest.mark.parametrize(
    "case",
    ["llama attention bias", "qwen2 untied", "qwen3", "qwen3_moe", "mistral", "gemma3",
     "exaone4", "glm4", "hunyuan", "minimax_m2", "olmo2", "phi3", "qwen2_moe"],
)  # fmt: skip
def test_two_ranks_in_one_process_match_one_rank(case: str, tmp_path: Path) -> None:
    family, overrides = CASES.get(case, (case, {}))
    make_checkpoint(tmp_path, family, **overrides)
    prompts = random_prompts(17, 5)
    expected = all_logits(build(tmp_path, torch.float64), prompts)
    ranks = Ranks(2)
    models = [ranks.build(tmp_path, rank) for rank in range(2)]
    for result in logits_of_ranks(models, prompts):
        assert (result - expected).abs().max() < 1e-12
    whole = sum(p.numel() for p in build(tmp_path).parameters())
    halves = [sum(p.numel() for p in model.parameters()) for model in models]
    assert halves[0] == halves[1] < 0.6 * whole


@pytest.mark.parametrize(("kv_heads", "ranks"), [(1, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "olmo2", "phi3"])
def test_more_ranks_than_kv_heads_share_them(
    family: str, kv_heads: int, ranks: int, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, num_key_value_heads=kv_heads)
    prompts = random_prompts(17, 5)
    expected = all_logits(build(tmp_path, torch.float64), prompts)
    group = Ranks(ranks)
    models = [group.build(tmp_path, rank) for rank in range(ranks)]
    assert [model.attention_layers[0].spec.num_kv_heads for model in models] == [1] * ranks
    for result in logits_of_ranks(models, prompts):
        assert (result - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("field", "value", "ranks", "overrides"),
    [
        ("num_attention_heads", 4, 3, {}),
        ("num_key_value_heads", 4, 6, {"num_attention_heads": 12, "vocab_size": 258}),
        ("intermediate_size", 97, 2, {}),
        ("vocab_size", 255, 2, {}),
        ("moe_intermediate_size", 31, 2, {}),
    ],
)
def test_ranks_that_do_not_divide_the_model_raise(
    field: str, value: int, ranks: int, overrides: dict[str, int], tmp_path: Path
) -> None:
    make_checkpoint(
        tmp_path, "qwen3_moe", **{"moe_intermediate_size": 36, **overrides, field: value}
    )
    with pytest.raises(ConfigError) as error:
        build(tmp_path, shard=Shard(0, ranks))
    assert f"tensor_parallel_size={ranks} must divide {field}={value}" in str(error.value)


def test_a_sequence_has_the_same_logits_alone_and_in_a_batch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    model = build(tmp_path, torch.float64)
    first, second, third = random_prompts(9, 21, 4)
    together = all_logits(model, [first, second, third])
    alone = all_logits(model, [second])
    assert (together[9:30] - alone).abs().max() < 1e-12


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_bfloat16_logits_are_close_and_stay_bfloat16(family: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    prompts = random_prompts(30)
    expected = oracle(reference, prompts, torch.bfloat16)
    got = all_logits(build(tmp_path, torch.bfloat16), prompts)
    assert got.dtype == torch.bfloat16
    exact = oracle(reference, prompts, torch.float32)
    error = (got.float() - exact).abs().max()
    assert error < 2 * (expected.float() - exact).abs().max()


def test_more_positions_than_the_context_raise_at_start(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(
        ConfigError, match="max_model_len must be at most the model's context of 512, got 513"
    ):
        build(tmp_path, max_positions=513)
    short = build(tmp_path, max_positions=20)
    assert short.model.rotary.table.shape == (20, 16)
    prompts = random_prompts(20)
    assert torch.equal(all_logits(short, prompts), all_logits(build(tmp_path), prompts))


def test_attention_layers_are_in_order_and_bind_their_cache(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        "qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    )
    layers = build(tmp_path).attention_layers
    assert [layer.spec.sliding_window for layer in layers] == [None, None, 8]
    assert [layer.spec.group for layer in layers] == [0, 0, 0]
    assert (layers[0].spec.num_heads, layers[0].spec.num_kv_heads) == (4, 2)
    assert layers[0].spec.scale == 16**-0.5
    k_cache, v_cache = torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)
    layers[2].bind(k_cache, v_cache, 1)
    assert layers[2].cache.k_cache is k_cache
    assert layers[2].cache.v_cache is v_cache
    assert [layer.spec.group for layer in layers] == [0, 0, 1]


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3 bias", "qwen3_moe"])
def test_packed_weights_give_the_same_logits(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    reference = make_checkpoint(tmp_path, family, **overrides)
    prompts = random_prompts(40, 1, 23)
    model = build(tmp_path, kernels=cpu_kernels())
    methods = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert all(m.is_packed for m in methods), "a weight was left unpacked"
    plain = build(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())
    got = all_logits(model, prompts)
    assert (got - oracle(reference, prompts, torch.float32)).abs().max() < 1e-4
    with torch.inference_mode():
        assert model.logits(torch.empty(0, 64)).shape == (0, 256)


def test_packed_weights_are_for_float32_on_a_cpu() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    methods = [cpu_kernels().linear(name) for name in ("lm_head", "o_proj")]
    assert [type(method) for method in methods] == [PrunedArgmaxHead, PackedLinear]
    for device, dtype in ((cpu, torch.float64), (cpu, torch.bfloat16), (cuda, torch.float32)):
        kernels = make_kernels(DenseAttention(), device=device, dtype=dtype)
        assert type(kernels.linear("o_proj")) is UnquantizedLinear
