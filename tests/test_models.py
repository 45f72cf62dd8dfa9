"""Every model family against transformers: same checkpoint, same tokens, same logits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from nanoengine.attention.base import AttentionSpec
from nanoengine.layers.context import ModelContext
from nanoengine.models.config import load_model_config
from nanoengine.models.decoder import CausalLM
from nanoengine.models.loader import load_model
from nanoengine.runner.batch import Batch
from tests.checkpoints import make_checkpoint

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class DenseAttention:
    """Attention over whole prompts without a cache: each sequence's keys are all in its batch."""

    name, kv_layout, default_block_size, graph_safe = "dense", "PKD", 16, False

    def prepare(self, batch: Batch) -> None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: Batch,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        assert k_cache.numel() == v_cache.numel() == 0
        out = []
        for start, end in itertools.pairwise(batch.query_start_loc.tolist()):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
            mask = (distance >= 0) & (distance < (spec.sliding_window or end))
            heads = [x[start:end].transpose(0, 1) for x in (q, k, v)]
            attended = F.scaled_dot_product_attention(
                *heads, attn_mask=mask, scale=spec.scale, enable_gqa=True
            )
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


def prefill_batch(prompts: Sequence[Sequence[int]]) -> Batch:
    """All tokens of all prompts in one step."""
    lengths = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return Batch(
        token_ids=torch.tensor(list(itertools.chain(*prompts))),
        positions=positions,
        slot_mapping=torch.zeros(1, sum(lengths), dtype=torch.int64),
        query_start_loc=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=torch.zeros(1, len(lengths), 1, dtype=torch.int32),
        logits_indices=torch.arange(sum(lengths)),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )


def build(directory: Path, dtype: torch.dtype = torch.float32, **context: Any) -> CausalLM:
    return load_model(
        load_model_config(directory),
        directory,
        context=ModelContext(
            dtype=dtype, device=CPU, attention_backend=DenseAttention(), **context
        ),
    )


def all_logits(model: CausalLM, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.inference_mode():
        return model.logits(model.forward(prefill_batch(prompts)))


def oracle(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], dtype: torch.dtype
) -> torch.Tensor:
    """Logits of transformers, prompt by prompt."""
    model = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64:
        _widen(model)
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


def _widen(model: torch.nn.Module) -> None:
    """transformers computes norms and router probabilities in float32 even in a float64 model;
    widened, it is an oracle for far more digits."""

    def norm(module: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(x: torch.Tensor) -> torch.Tensor:
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
            return module.weight * (x * scale)

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


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama head_dim": ("llama", {"head_dim": 48}),
    "llama no GQA": ("llama", {"num_key_value_heads": 4}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2 windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "qwen3 windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3 yarn": (
        "qwen3",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1000000.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe raw probabilities": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe step": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
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
