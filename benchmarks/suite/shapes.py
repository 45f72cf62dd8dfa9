"""Models by size. Random weights measure speed as well as trained ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4_096,
    },
    "small": {
        "hidden_size": 640,
        "intermediate_size": 1_920,
        "num_hidden_layers": 16,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
    "qwen3-0.6b": {
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "torch_dtype": "bfloat16",
    },
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}


def write_shape(name: str, directory: Path) -> None:
    """Writes the config.json of a shape: all that `load_format="dummy"` reads."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **SHAPES[name],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
