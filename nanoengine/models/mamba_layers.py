"""Layers of hybrid Mamba models that are not one mixer followed by an MLP.

    FalconH1Layer    Mamba and attention in parallel, each with multipliers (Falcon-H1)
    NemotronHLayer   one norm and one block: Mamba, attention, MLP or experts (Nemotron-H)

`loader.py` uses them for configs of these families.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.norms import make_norm
from nanoengine.models.decoder import select_rows
from nanoengine.models.generic import (
    GenericAttention,
    GenericDecoder,
    GenericLayer,
    GenericLM,
    make_mixer,
    make_mlp,
)


class FalconH1Layer(GenericLayer):
    """A layer that adds the outputs of Mamba and attention, which have the same input."""

    def __init__(
        self, index: int, rotation: int, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(index, rotation, config, context)
        path = f"model.layers.{index}.self_attn"
        self.self_attn = GenericAttention(path, index, config, context)
        del self.mixer  # Mamba, which is also `self.mamba`
        self.mixer, self.multipliers = self.mamba_and_attention, config.plan.falcon_h1

    def mamba_and_attention(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer's mixer."""
        scale = self.multipliers
        ssm_out = self.mamba(x * scale.ssm_in_multiplier, rotation, batch, rows)
        attended = self.self_attn(x * scale.attention_in_multiplier, rotation, batch, rows)
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


class MambaLM(GenericLM):
    """Falcon-H1 or Nemotron-H."""

    def make_decoder(self, config: ModelConfig, context: ModelContext) -> GenericDecoder:
        layer = NemotronHLayer if config.plan.falcon_h1 is None else FalconH1Layer
        return GenericDecoder(config, context, layer)
