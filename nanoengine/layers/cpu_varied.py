"""VariedLayers: neighbouring layers of Gemma 4 as one compiled call on the CPU.

`models/varied.py` says what is computed, `tests/layers/test_cpu_varied.py` compares the two. Made
by `models/cpu.py` once the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.kernels.cpu_varied import varied_layers
from nanoengine.layers.cpu_decoder import FusedLayers, LayerParts
from nanoengine.layers.linear import Linear

NO_INPUTS = np.empty((0, 0, 0), np.float32)


class VariedParts(LayerParts):
    """What a `VariedLayer` without experts is made of.

    Attributes:
        mixer: its attention.
        of_input: what takes in the layer's input: two linear layers; none: it has none.
    """

    kernel = staticmethod(varied_layers)

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.layer = layer
        if self.of_input:
            self.norms.append(layer.post_per_layer_input_norm)

    def of_mixer(self, layer: Any) -> list[Linear]:
        mixer = self.mixer = layer.mixer
        self.attention, self.head_norm = mixer.attention, mixer.head_norm.weights
        self.backend, self.num_gates, self.of_input = self.attention.backend, 0, []
        if hasattr(layer, "per_layer_input_gate"):
            self.of_input = [layer.per_layer_input_gate, layer.per_layer_projection]
        return [*self.of_input, mixer.qkv_proj, mixer.o_proj]

    def step(self, rotation: Rotation, batch: Batch, spec: Any, *rows: Any) -> tuple[Any, ...]:
        step: Any = batch.attention
        return *super().step(rotation, batch, spec, *rows), *step.arrays[()]

    def operands(self) -> tuple[Any, ...]:
        """What `varied_layers` has behind the caches."""
        (weights, *numbers), second = super().operands()
        norm, *of_input, qkv, of_heads, operand, sinks = weights
        layer, mixer, spec = self.layer, self.mixer, self.attention.spec
        own: tuple[Any, ...] = ()
        if of_input:
            activation = GATES[layer.mlp.activation]
            own = *of_input, self.weight_of(self.norms[-1]), layer.index, activation
        of_values = (
            0 if mixer.is_shared else spec.num_kv_heads, mixer.keys_are_values,
            np.ones(spec.head_dim, np.float32),
        )  # fmt: skip
        first = ((norm, qkv, of_heads, operand, sinks), *numbers, of_values)
        return first, second, (own, layer.layer_scalar.detach().numpy())


class VariedLayers(FusedLayers):
    """Called like a `VariedLayer`; overwrites x."""

    def may_precede(self, parts: LayerParts) -> bool:
        shared = [of.mixer.is_shared for of in (self.layers[-1], parts)]  # type: ignore[attr-defined]
        return super().may_precede(parts) and shared[0] == shared[1]

    def __call__(  # type: ignore[override]
        self,
        x: torch.Tensor,
        rotations: list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
        inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        step: Any = batch.attention
        step.arrays[()] = (NO_INPUTS if inputs is None else inputs.numpy(),)
        return super().__call__(x, None, rotations, batch, rows)[1]
