"""The families: one description per family, in one module per kind of model.

`dense` has Llama, and is the only one that a plain prompt loads. A family of known mechanisms is
one entry in a module's `FAMILIES`. A new mechanism is also a field of `LayerConfig`,
`LinearAttentionConfig` or `MoEConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanoengine.checkpoint.families.dense import FAMILIES
from nanoengine.checkpoint.families.family import Family

__all__ = ["FAMILIES", "Family"]


def every_family() -> Mapping[str, Family]:
    """Returns all modules' families: supported architecture -> its family."""
    from nanoengine.checkpoint.families import gemma, hybrid, mla, moe

    return {**gemma.FAMILIES, **hybrid.FAMILIES, **mla.FAMILIES, **moe.FAMILIES, **FAMILIES}


def gguf_families() -> Mapping[str, Family]:
    """Returns the families whose GGUF files are read: all, and those of `gguf_only`, which
    transformers' modules compute."""
    from nanoengine.checkpoint.families import gguf_only

    return gguf_only.FAMILIES | every_family()


ALIASES = {
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
}
"""Architecture name in published checkpoints -> name in transformers."""


def text_types() -> dict[str, str]:
    """`model_type` of a `text_config` -> the architecture of its family."""
    return {family.model_type: name for name, family in every_family().items()} | TEXT_TYPES


TEXT_PARTS = frozenset((
    "Apertus1p5ForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "Lfm3VlForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration", "MiniCPMV4_6ForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "VoxtralForConditionalGeneration",
))  # fmt: skip
"""Multimodal architectures whose `text_config` is that of a decoder."""

TEXT_TYPES = {
    "glm4v_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM", "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}  # fmt: skip
"""`model_type` of a text part -> its architecture, if no family has this `model_type`."""

TEXT_DEFAULTS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""`model_type` of a text part -> keys that its config class lacks."""

OUTER_KEYS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys of a multimodal config that take precedence over its `text_config`."""
