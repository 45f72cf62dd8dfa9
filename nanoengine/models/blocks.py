"""Layers of models with Mamba that are no mixer and MLP behind each other.

    SideBySide   the mixer is Mamba and attention, each with factors (Falcon-H1)
    LoneBlock    one norm and one of Mamba, attention, MLP or experts (Nemotron-H)

Taken by `loader.py` for a config that asks for either.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import Factors
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.variants import make_norm
from nanoengine.models.decoder import taken
from nanoengine.models.variants import (
    VariantAttention,
    VariantLayer,
    VariantLM,
    make_mixer,
    make_mlp,
)


class SideBySide(VariantLayer):
    """A layer in which Mamba and attention see the same, and what they say is added."""

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(index, rotation, config, context)
        assert config.plan.factors is not None
        path = f"model.layers.{index}.self_attn"
        self.self_attn = VariantAttention(path, index, config, context)
        self.mixer = Both(self.mixer, self.self_attn, config.plan.factors)


class Both(Layer):
    """The mixer of such a layer."""

    needs_torch = True

    def __init__(self, mamba: Layer, attention: Layer, factors: Factors) -> None:
        super().__init__()
        # Why a tuple: a checkpoint has them as parts of the layer, under names of their own.
        self.parts, self.factors = (mamba, attention), factors

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        f, (mamba, attention) = self.factors, self.parts
        kept = mamba(x * f.mamba_in, rotation, batch, rows) * f.mamba_out
        return kept + attention(x * f.attention_in, rotation, batch, rows) * f.attention_out


class LoneBlock(VariantLayer):
    """A layer that is one thing, behind one norm."""

    needs_torch = True

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        Layer.__init__(self)
        assert config.plan.blocks is not None
        self.rotation, path = rotation, f"model.layers.{index}"
        self.mixer = self.mlp = None
        if config.plan.blocks[index] in ("mlp", "moe"):
            self.mlp = make_mlp(f"{path}.mlp", index, config, context)
        else:
            mixer = make_mixer(path, index, config, context)
            setattr(self, mixer.name, mixer)
            self.mixer = mixer
        self.input_layernorm = make_norm(config, context)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_layernorm(x, residual)
        if self.mixer is None:
            return self.mlp(taken(x, rows)), taken(residual, rows)
        return self.mixer(x, rotations[self.rotation], batch, rows), taken(residual, rows)


class SideBySideLM(VariantLM):
    """Falcon-H1."""

    layer = SideBySide


class LoneBlockLM(VariantLM):
    """Nemotron-H."""

    layer = LoneBlock
