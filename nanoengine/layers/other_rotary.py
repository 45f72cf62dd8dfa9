"""Rotations beside the plain one: of a part of a head, of neighbours, or of nothing.

Pairs that are not turned have the angle 0. Where neighbours are turned, or a part of a head, the
loader puts query and key dimensions in the order that backends turn (`head_order`). Scores don't
change, because queries and keys are reordered alike. Called by `models/variants.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.layers.rotary import RotaryEmbedding, cos_and_sin


class PartialRotary(RotaryEmbedding):
    """Turns the first `plan.rotary_dim` dimensions of a head."""

    def make_table(
        self, rope: RopeConfig, config: ModelConfig, num_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = config.plan.rotary_dim
        assert size is not None
        cos, sin = cos_and_sin(rope, size, num_positions)
        still = (0, (config.head_dim - size) // 2)
        return F.pad(cos, still, value=1.0), F.pad(sin, still)


class NoRotary(RotaryEmbedding):
    """Turns nothing, whatever the position."""

    def make_table(
        self, rope: RopeConfig, config: ModelConfig, num_positions: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1, config.head_dim // 2), torch.zeros(1, config.head_dim // 2)

    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(torch.zeros_like(positions))


def head_order(config: ModelConfig) -> torch.Tensor | None:
    """Which dimension of a checkpoint's head each of ours is, [D] int64, so that those turned
    together are i and i + D / 2; None: they are so already."""
    head_dim, interleaved = config.head_dim, config.plan.interleaved
    size = config.plan.rotary_dim or head_dim
    if size == head_dim and not interleaved:
        return None
    turned = torch.arange(size)
    pairs = turned.view(-1, 2).T if interleaved else turned.view(2, -1)
    still = torch.arange(size, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()
