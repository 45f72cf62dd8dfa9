"""Rotary position embedding: default, linear, llama3 and yarn, from one table built at start.

Angles are float32 whatever the model's dtype, as the checkpoints were trained and as transformers
computes them. cos and sin are looked up once a step and shared by all layers.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX.
"""

from __future__ import annotations

import math

import torch

from nanoengine.attention.rotate import Rotation
from nanoengine.checkpoint.config import RopeConfig
from nanoengine.errors import ConfigError
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer


class RotaryEmbedding(Layer):
    """Looks up the rotation of each position: a table of [max_positions, head_dim], cos then sin.

    Raises:
        ConfigError: `context.max_positions` passes the model's longest context.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, context: ModelContext
    ) -> None:
        super().__init__()
        wanted = max_positions if context.max_positions is None else context.max_positions
        if not 1 <= wanted <= max_positions:
            raise ConfigError(
                f"max_model_len={wanted} must be in [1, {max_positions}], the model's context"
            )
        positions = torch.arange(wanted, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor
        self.register_buffer("table", table.to(context.device, context.dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions [T] -> cos, sin."""
        cos, sin = self.table[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Slows long wavelengths by `factor`, keeps short ones, blends those between.

    Source: Llama 3.1 (arXiv 2407.21783, section 3.4.2) and the model code released with it.
    """
    turns = rope.original_max_position_embeddings / (2 * math.pi / frequencies)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = blend.clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Slows by `factor` what turns less than `beta_slow` times in the original context, keeps what
    turns more than `beta_fast` times, and blends by dimension between.

    Source: YaRN (arXiv 2309.00071), section 3.2.
    """

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # Why: a blend of no width would divide by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    slowed = ((pairs - low) / width).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)
