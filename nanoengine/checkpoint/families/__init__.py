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
    from nanoengine.checkpoint.families import falcon, gemma, hybrid, mla, moe

    return {
        **falcon.FAMILIES, **gemma.FAMILIES, **hybrid.FAMILIES, **mla.FAMILIES, **moe.FAMILIES,
        **FAMILIES,
    }  # fmt: skip


ALIASES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
}
"""Architecture name in published checkpoints -> name in transformers."""

TEXT_PARTS: dict[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}
"""Multimodal architecture -> the `model_type` of its `text_config` -> the architecture of its text
part."""

OUTER_KEYS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys of a multimodal config that take precedence over its `text_config`."""
