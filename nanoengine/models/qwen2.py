"""Qwen2 and Qwen2.5: biases on q, k and v only; windows from layer `max_window_layers` on if
`use_sliding_window`."""

from __future__ import annotations

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.context import ModelContext
from nanoengine.models.decoder import CausalLM, SelfAttention


class Qwen2ForCausalLM(CausalLM):
    """Source: Yang et al., Qwen2 Technical Report (arXiv 2407.10671)."""

    def make_attention(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> SelfAttention:
        return SelfAttention(
            path, layer, config, context, qkv_bias=True, output_bias=False, head_norm=False
        )
