"""Layers of Mamba models that are not one mixer followed by an MLP.

    FalconH1Layer    Mamba and attention in parallel, each with multipliers (Falcon-H1)
    NemotronHLayer   one norm and one of Mamba, attention, MLP or experts (Nemotron-H)

`loader.py` uses them for a config that needs either.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import FalconH1Multipliers
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.norms import make_norm
from nanoengine.models.decoder import select_rows
from nanoengine.models.generic import (
    GenericAttention,
    GenericLayer,
    GenericLM,
    make_mixer,
    make_mlp,
)


class FalconH1Layer(GenericLayer):
    """A layer in which Mamba and attention have the same input, and their outputs are added."""

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(index, rotation, config, context)
        assert config.plan.falcon_h1 is not None
        path = f"model.layers.{index}.self_attn"
        self.self_attn = GenericAttention(path, index, config, context)
        self.mixer = ParallelMixer(self.mixer, self.self_attn, config.plan.falcon_h1)


class ParallelMixer(Layer):
    """The mixer of a `FalconH1Layer`."""

    needs_torch = True

    def __init__(self, mamba: Layer, attention: Layer, factors: FalconH1Multipliers) -> None:
        super().__init__()
        # Why a tuple: in a checkpoint they are parts of the layer, under names of their own.
        self.parts, self.factors = (mamba, attention), factors

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        by, (mamba, attention) = self.factors, self.parts
        kept = mamba(x * by.ssm_in_multiplier, rotation, batch, rows)
        attended = attention(x * by.attention_in_multiplier, rotation, batch, rows)
        return kept * by.ssm_out_multiplier + attended * by.attention_out_multiplier


class NemotronHLayer(GenericLayer):
    """A layer with a single block after one norm."""

    needs_torch = True

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        Layer.__init__(self)
        assert config.plan.layers_block_type is not None
        self.rotation, path = rotation, f"model.layers.{index}"
        self.mixer = self.mlp = None
        if config.plan.layers_block_type[index] in ("mlp", "moe"):
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
            return self.mlp(select_rows(x, rows)), select_rows(residual, rows)
        return self.mixer(x, rotations[self.rotation], batch, rows), select_rows(residual, rows)


class FalconH1LM(GenericLM):
    """Falcon-H1."""

    layer = FalconH1Layer


class NemotronHLM(GenericLM):
    """Nemotron-H."""

    layer = NemotronHLayer
