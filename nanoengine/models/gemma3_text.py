"""Gemma 3, text: five layers with a sliding window, then one that sees everything, and so on.

    ─ input_layernorm ─ self_attn ─ post_attention_layernorm ─ + residual
    ─ pre_feedforward_layernorm ─ mlp ─ post_feedforward_layernorm ─ + residual

Every norm is centered: its factor is 1 + weight. Embeddings are scaled by sqrt(hidden_size).
Sliding layers turn by a RoPE base of their own.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from nanoengine.attention.rotate import Rotation
from nanoengine.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.context import ModelContext
from nanoengine.layers.norm import CenteredHeadNorm, CenteredRMSNorm
from nanoengine.layers.rotary import RotaryEmbedding
from nanoengine.models.decoder import CausalLM, Decoder, DecoderLayer, SelfAttention, taken


class Gemma3Layer(DecoderLayer):
    """A layer with a norm before and behind attention and MLP."""

    def __init__(
        self,
        self_attn: SelfAttention,
        mlp: torch.nn.Module,
        config: ModelConfig,
        context: ModelContext,
    ) -> None:
        super().__init__(self_attn, mlp, config, context)
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ):
            norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
            setattr(self, name, norm)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, rotation, batch, rows))
        x, residual = self.pre_feedforward_layernorm(x, taken(residual, rows))
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3Decoder(Decoder):
    """The stack with scaled embeddings and a rotation for each kind of layer."""

    def __init__(
        self, layers: list[DecoderLayer], config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(layers, config, context)
        assert config.local_rope is not None
        self.local_rotary = RotaryEmbedding(
            config.local_rope, config.head_dim, config.max_position_embeddings, context=context
        )
        self.norm = CenteredRMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        # Why rounded: the checkpoints' code keeps the factor in the model's dtype.
        self.scale = torch.tensor(config.hidden_size**0.5).to(context.dtype).item()
        self.is_local = [window is not None for window in config.sliding_windows]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(token_ids) * self.scale

    def rotations(self, positions: torch.Tensor) -> list[Rotation]:
        everywhere, local = self.rotary(positions), self.local_rotary(positions)
        return [local if is_local else everywhere for is_local in self.is_local]


class Gemma3ForCausalLM(CausalLM):
    """Source: Gemma Team, Gemma 3 Technical Report (arXiv 2503.19786)."""

    layer_class: ClassVar[type[DecoderLayer]] = Gemma3Layer
    decoder_class: ClassVar[type[Decoder]] = Gemma3Decoder

    def make_attention(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> SelfAttention:
        attention = SelfAttention(
            path,
            layer,
            config,
            context,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            head_norm=False,
        )
        attention.head_norm = CenteredHeadNorm(
            attention.num_heads,
            attention.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            context=context,
        )
        return attention
