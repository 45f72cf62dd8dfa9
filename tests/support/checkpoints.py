"""Tiny random checkpoints of every model family, written by transformers.

`tests/data/models.yaml` has their configs.

Weights are large enough that greedy tokens vary. Norms are not 1 and biases are not 0, because
tests would not notice if they were ignored.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)

DATA = Path(__file__).parents[1] / "data"
MODELS: dict[str, Any] = yaml.safe_load((DATA / "models.yaml").read_text(encoding="utf-8"))
COMMON: dict[str, Any] = MODELS["common"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = MODELS["families"]
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = MODELS["transformers"]
"""Families without a native model, which transformers' modules compute."""
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = MODELS["text_parts"]
EVERY = FAMILIES | TRANSFORMERS | TEXT_PARTS
"""All of them; `TEXT_PARTS` are multimodal checkpoints."""
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip

ROUTED = ("gate.weight", "router.weight", "experts.gate_up_proj", "experts.up_proj",
          "experts.down_proj")  # fmt: skip
"""Suffixes of the tensor names of a mixture of experts."""

NORMS = re.compile(r"(norm(_[12])?|\.ln_\w+)\.weight$|\.router\.scale$|per_expert_scale$")

EAGER = ("apertus1p5_vision", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "vaultgemma")
"""Families for which transformers has eager attention only."""


def make_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The config of a tiny model; `overrides` are fields of it, or of its text config."""
    kind, fields = copy.deepcopy(EVERY[family])
    if "text" not in fields:
        given = {**COMMON, **fields, **overrides}
        return getattr(transformers, kind)(**given)
    text_kind, text = copy.deepcopy(EVERY[fields.pop("text")])
    text = {**COMMON, **text, **fields.pop("keys", {}), **overrides}
    text = {key: value for key, value in text.items() if value is not None}
    default = getattr(transformers, kind)()
    part = "vision_config" if "vision_config" in default.sub_configs else "audio_config"
    other = getattr(default, part) or default.sub_configs[part]
    outer = fields.pop("outer", {})
    parts = {part: {"model_type": other.model_type, **VISION, **fields}, **outer}
    ours, kind_of_text = getattr(transformers, text_kind), default.sub_configs["text_config"]
    text |= {"model_type": (ours if kind_of_text is AutoConfig else kind_of_text).model_type}
    return getattr(transformers, kind)(text_config=text, **parts)


def make_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `family` in transformers; `overrides` are fields of its config."""
    config = make_config(family, **overrides)
    torch.manual_seed(seed)
    kind = AutoModelForMultimodalLM if family.endswith("_vision") else AutoModelForCausalLM
    model = kind.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager" if family in EAGER else "sdpa",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if NORMS.search(name):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("A_log"):  # otherwise the state would decay at once
                parameter.copy_(torch.randn_like(parameter) - 2)
            elif name.endswith((".bias", "_bias", ".D")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith(".sinks"):
                parameter.copy_(2 * torch.randn_like(parameter))
            elif name.endswith(ROUTED):
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
    """Writes a random checkpoint to `path` and returns its model.

    `max_shard_size` such as "100KB" splits it into several files with an index; `fused_experts`
    stores all experts of a layer in one tensor, as transformers 5 keeps them in memory.
    """
    model = make_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(
        path, max_shard_size=max_shard_size, save_original_format=not fused_experts
    )
    return model
