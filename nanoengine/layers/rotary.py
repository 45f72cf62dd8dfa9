"""Rotary position embedding: each kind of angles, from one table built at start.

Angles are float32 whatever the model's dtype, as the checkpoints were trained and as transformers
computes them. cos and sin are looked up once a step and shared by all layers of a kind.

Backends turn pairs (x[i], x[i + D / 2]) of whole heads. Families that turn neighbours, or only a
part of a head, need nothing else: the loader puts their query and key dimensions in that order
(`head_order`), and pairs that are not turned have the angle 0. Scores don't change, because queries
and keys are reordered alike.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from nanoengine.attention.rotate import Rotation
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.errors import ConfigError
from nanoengine.layers.layer import Layer, ModelContext


class RotaryEmbedding(Layer):
    """Looks up the rotation of each position: a table of [max_positions, head_dim], cos then sin.

    Args:
        rope: None: heads are not turned.
        rotary_dim: how many dimensions of a head are.

    Raises:
        ConfigError: `context.max_positions` passes the model's longest context.
    """

    def __init__(
        self,
        rope: RopeConfig | None,
        head_dim: int,
        max_positions: int,
        *,
        rotary_dim: int | None = None,
        context: ModelContext,
    ) -> None:
        super().__init__()
        wanted = max_positions if context.max_positions is None else context.max_positions
        if not 1 <= wanted <= max_positions:
            raise ConfigError(
                f"max_model_len={wanted} must be in [1, {max_positions}], the model's context"
            )
        # Why one row: positions make no difference.
        cos, sin = torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)
        self.turns = rope is not None
        if rope is not None:
            size = rotary_dim or head_dim
            positions = torch.arange(wanted, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies(rope, size, wanted))
            still = (head_dim - size) // 2
            cos = F.pad(angles.cos() * rope.attention_factor, (0, still), value=1.0)
            sin = F.pad(angles.sin() * rope.attention_factor, (0, still))
        table = torch.cat((cos, sin), dim=-1)
        self.register_buffer("table", table.to(context.device, context.dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions [T] -> cos, sin."""
        rows = positions if self.turns else torch.zeros_like(positions)
        cos, sin = self.table.index_select(0, rows).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def head_order(head_dim: int, rotary_dim: int | None, *, interleaved: bool) -> torch.Tensor | None:
    """Which dimension of a checkpoint's head each of ours is, [D] int64, so that those turned
    together are i and i + D / 2; None: they are so already.

    Args:
        rotary_dim: how many of the first dimensions are turned; None: all.
        interleaved: neighbours are turned together; else the halves of `rotary_dim`.
    """
    size = rotary_dim or head_dim
    if size == head_dim and not interleaved:
        return None
    turned = torch.arange(size)
    pairs = turned.view(-1, 2).T if interleaved else turned.view(2, -1)
    still = torch.arange(size, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


def inverse_frequencies(rope: RopeConfig, size: int, max_positions: int) -> torch.Tensor:
    """Radians per position of each pair of `size` dimensions: [size / 2] float32.

    Args:
        max_positions: positions of this engine, which choose longrope's factors. Why not each
            prompt's length: keys in the cache would have been turned by others.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    if rope.type == "longrope":
        is_long = max_positions > rope.original_max_position_embeddings
        slowed = torch.tensor(rope.long_factor if is_long else rope.short_factor)
        return 1.0 / (slowed * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, size)
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
