"""RotaryEmbedding: the RoPE angles of each position, from one table built at start.

Angles are computed in float32 for every dtype of the model, as in training and in transformers. cos
and sin are looked up once per step and shared by all layers. Backends rotate the pairs (x[i], x[i +
D / 2]) of whole heads.

`rope_scaling.py` handles contexts longer than in pre-training; `layouts.py` handles partial and
interleaved RoPE, and layers without RoPE.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.layers.layer import Layer, ModelContext


class RotaryEmbedding(Layer):
    """Looks up cos and sin of each position in a table [num_positions, head_dim], cos then sin."""

    def __init__(self, rope: RopeConfig, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        num_positions = context.max_positions or config.max_position_embeddings
        table = torch.cat(self.make_table(rope, config, num_positions), dim=-1)
        self.register_buffer("table", table.to(context.device, context.dtype), persistent=False)

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        """Returns cos and sin, [num_positions, head_dim / 2] each."""
        return cos_and_sin(rope, config.head_dim, num_positions)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions [T] -> cos, sin, [T, 1, head_dim / 2] each."""
        cos, sin = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def cos_and_sin(rope: RopeConfig, size: int, num_positions: int) -> Rotation:
    """cos and sin per position and pair of `size` dimensions, [num_positions, size / 2] float32
    each."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, size, num_positions))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, size: int, num_positions: int) -> torch.Tensor:
    """Radians per position of each pair of `size` dimensions, [size / 2] float32, for an engine
    with `num_positions` positions."""
    wavelengths = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope.type == "default":
        return 1.0 / wavelengths
    from nanoengine.layers.rope_scaling import scale

    return scale(rope, wavelengths, num_positions)
