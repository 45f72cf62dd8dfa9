"""Gemma4FusedLayers: adjacent layers of Gemma 4 as one compiled call on the CPU.

`models/gemma4.py` is the reference implementation; `tests/layers/test_fused_layers.py` compares the
two. `models/cpu.py` installs it after the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.layers.cpu_decoder import FusedLayers, LayerParts
from nanoengine.layers.linear import Linear

NO_LAYER_INPUTS = np.empty((0, 0, 0), np.float32)


class Gemma4Parts(LayerParts):
    """The parts of a `Gemma4Layer` without experts.

    Attributes:
        mixer: the layer's attention.
        input_projections: the two linear layers of the per-layer input, or none.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.layer = layer
        if self.input_projections:
            self.norms.append(layer.post_per_layer_input_norm)

    def collect_mixer(self, layer: Any) -> list[Linear]:
        mixer = self.mixer = layer.mixer
        self.attention, self.head_norm = mixer.attention, mixer.head_norm.weights
        self.backend, self.input_projections = self.attention.backend, []
        if hasattr(layer, "per_layer_input_gate"):
            self.input_projections = [layer.per_layer_input_gate, layer.per_layer_projection]
        return [*self.input_projections, mixer.qkv_proj, mixer.o_proj]

    def step(self, rotation: Rotation, batch: Batch, spec: Any, *rows: Any) -> tuple[Any, ...]:
        return *super().step(rotation, batch, spec, *rows), batch.attention.layer_inputs

    def operands(self) -> tuple[Any, ...]:
        norm, mixer, tail, _ = super().operands()
        layer, inputs = self.layer, [x.method.operands(x.bias) for x in self.input_projections]
        if inputs:
            inputs += self.weight_of(self.norms[-1]), layer.index, GATES[layer.mlp.activation]
        factor = layer.layer_scalar.detach().numpy()
        return norm, mixer, tail, (tuple(inputs), factor, tail.eps)

    def mixer_operands(self, projections: list[Any]) -> Any:
        attention, size = super().mixer_operands(projections[-1:]), self.attention.spec.head_dim
        norm = np.ones(size, np.float32), np.float32(self.norms[0].eps)
        stored = 0 if self.mixer.is_kv_shared else attention.stored_heads
        return attention._replace(value_norm=norm, stored_heads=stored)


class Gemma4FusedLayers(FusedLayers):
    """Called like a `Gemma4Layer`; overwrites x."""

    def can_join(self, parts: LayerParts) -> bool:
        shared = [each.mixer.is_kv_shared for each in (self.layers[-1], parts)]  # type: ignore[attr-defined]
        return super().can_join(parts) and shared[0] == shared[1]

    def __call__(  # type: ignore[override]
        self,
        x: torch.Tensor,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        batch.attention.layer_inputs = NO_LAYER_INPUTS if inputs is None else inputs.numpy()
        return super().__call__(x, None, rotations, batch, rows)[1]
