"""Qwen3, dense: each query and key head is normed before rotation; windows as in Qwen2."""

from __future__ import annotations

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.context import ModelContext
from nanoengine.models.decoder import CausalLM, SelfAttention


class Qwen3ForCausalLM(CausalLM):
    """Source: Yang et al., Qwen3 Technical Report (arXiv 2505.09388)."""

    def make_attention(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> SelfAttention:
        return SelfAttention(
            path,
            layer,
            config,
            context,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norm=True,
        )
