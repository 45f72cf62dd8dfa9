"""Llama 2 and 3.x: the plain decoder. Biases in attention where the config says so; no windows."""

from __future__ import annotations

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.context import ModelContext
from nanoengine.models.decoder import CausalLM, SelfAttention


class LlamaForCausalLM(CausalLM):
    """Source: Grattafiori et al., The Llama 3 Herd of Models (arXiv 2407.21783)."""

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
            head_norm=False,
        )
