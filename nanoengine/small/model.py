"""Llama, Qwen2 and Qwen3: from token ids to logits, with a dictionary of weights.

    x = embedding[token_ids]
    each layer:   x += attention(norm(x))      x += mlp(norm(x))
    logits = norm(x) @ head

Qwen2 is Llama with a bias in its query, key and value projections. Qwen3 is Llama with QK norm:
each query and key head is normed before RoPE.

Legend: T tokens of the step, L tokens that need logits, E hidden size, H query heads, K key and
value heads, D head dimension, V vocabulary size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nanoengine.errors import UnsupportedModelError
from nanoengine.small.batch import Attention, Batch

SUPPORTED_CONFIG = {
    "quantization_config": (None,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "rope_type": ("default",),
}
"""Config keys that change the formulas, and the values that this file supports."""


class Llama:
    """A dense decoder. Source: Grattafiori et al., The Llama 3 Herd of Models (2024).

    Args:
        directory: a checkpoint in the Hugging Face format.
        device: device of the weights.
        dtype: dtype of weights and computation.

    Raises:
        UnsupportedModelError: the config needs a feature that is not implemented here.
    """

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config = read_config(directory)
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            for name, weight in load_file(file).items():
                self.weights[name] = weight.to(device, dtype)
        if config.get("tie_word_embeddings", False):
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.attentions = [Attention() for _ in range(config["num_hidden_layers"])]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [L, V] of the tokens in `batch.logits_indices`."""
        x = self.weights["model.embed_tokens.weight"][batch.token_ids]  # [T, E]
        for index, attention in enumerate(self.attentions):
            layer = f"model.layers.{index}"
            y = self.norm(x, f"{layer}.input_layernorm")
            x = x + self.attend(y, f"{layer}.self_attn", attention, batch)
            y = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.mlp(y, f"{layer}.mlp")
        return self.linear(self.norm(x[batch.logits_indices], "model.norm"), "lm_head")

    def attend(self, x: torch.Tensor, name: str, layer: Attention, batch: Batch) -> torch.Tensor:
        """Self-attention, [T, E] -> [T, E]."""
        query = self.linear(x, f"{name}.q_proj").unflatten(-1, (self.num_heads, -1))  # [T, H, D]
        key = self.linear(x, f"{name}.k_proj").unflatten(-1, (self.num_kv_heads, -1))  # [T, K, D]
        value = self.linear(x, f"{name}.v_proj").unflatten(-1, (self.num_kv_heads, -1))
        query = self.rotate(self.norm_heads(query, f"{name}.q_norm"), batch.positions)
        key = self.rotate(self.norm_heads(key, f"{name}.k_norm"), batch.positions)
        return self.linear(layer.forward(query, key, value, batch), f"{name}.o_proj")

    def norm_heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """QK norm of [T, heads, D]; Llama has none."""
        return x

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The gated feed-forward network, [T, E] -> [T, E]."""
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(F.silu(gate) * up, f"{name}.down_proj")

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Applies RoPE to [T, heads, D].

        The pair (x[i], x[i + D / 2]) is rotated by the angle position * theta ** (-2 i / D), so the
        product of a query and a key depends only on their distance.
        Source: Su et al., RoFormer (2021).
        """
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequencies = (self.config["rope_theta"] ** -powers).to(x.device)  # [D / 2]
        angles = (positions[:, None] * frequencies)[:, None]  # [T, 1, D / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x times the transposed weight, plus the bias if the checkpoint has one."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


class Qwen3(Llama):
    """Llama with QK norm. Source: Yang et al., Qwen3 Technical Report (2025)."""

    def norm_heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Norms each head over its D elements."""
        return self.norm(x, name)


MODELS = {"LlamaForCausalLM": Llama, "Qwen2ForCausalLM": Llama, "Qwen3ForCausalLM": Qwen3}


def load_model(directory: Path, device: torch.device, dtype: torch.dtype) -> Llama:
    """The model of a checkpoint directory."""
    return MODELS[read_config(directory)["architectures"][0]](directory, device, dtype)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, with `rope_theta` at its top level.

    Raises:
        UnsupportedModelError: it needs a feature that is not implemented here.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
    needed = {**config, "architecture": config["architectures"][0], **rope}
    for key, allowed in {"architecture": tuple(MODELS), **SUPPORTED_CONFIG}.items():
        if (value := needed.get(key, allowed[0])) not in allowed:
            raise UnsupportedModelError(
                f"the small engine supports {key} {' or '.join(map(repr, allowed))}, but the"
                f" checkpoint has {value!r}: use nanoengine.LLM"
            )
    return config
