"""Layers of hybrid Mamba models that are not one mixer followed by an MLP.

    FalconH1Layer    Mamba and attention in parallel, each with multipliers (Falcon-H1)
    NemotronHLayer   one norm and one block: Mamba, attention, MLP or experts (Nemotron-H)

`GenericDecoder` uses them for configs of these families.
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
    make_mixer,
    make_mlp,
)


class FalconH1Layer(GenericLayer):
    """A layer that adds the outputs of Mamba and attention, which have the same input."""

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

    def __init__(self, mamba: Layer, attention: Layer, multipliers: FalconH1Multipliers) -> None:
        super().__init__()
        # Why a tuple: they are submodules of the layer already, under the checkpoint's names.
        self.mixers, self.multipliers = (mamba, attention), multipliers

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        scale, (mamba, attention) = self.multipliers, self.mixers
        ssm_out = mamba(x * scale.ssm_in_multiplier, rotation, batch, rows)
        attended = attention(x * scale.attention_in_multiplier, rotation, batch, rows)
        return ssm_out * scale.ssm_out_multiplier + attended * scale.attention_out_multiplier


class NemotronHLayer(GenericLayer):
    """A layer with one norm and one block: a mixer, or an MLP."""

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
