"""Tiny random checkpoints of every model family, written by transformers: the oracle's own files.

Weights are wide enough that greedy tokens vary, and norms and biases are not the ones and zeros
that would hide a forgotten one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
    ),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}


def make_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `family` in transformers; `overrides` are fields of its config."""
    config_class, defaults = FAMILIES[family]
    config = config_class(**{**COMMON, **defaults, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith(("mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")):
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.to(dtype).requires_grad_(False)


def make_checkpoint(
    path: str | Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    fused_experts: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Writes a random checkpoint to `path` and returns the model it was made from.

    `max_shard_size` such as "100KB" splits it into several files with an index; `fused_experts`
    stores all experts of a layer in one tensor, as transformers 5 keeps them in memory.
    """
    model = make_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(
        path, max_shard_size=max_shard_size, save_original_format=not fused_experts
    )
    return model
