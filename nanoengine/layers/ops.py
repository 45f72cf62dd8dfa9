"""LayerOps: the element-wise work between matrix multiplications, a door for fused kernels.

`TorchOps` is the plain version that every other one is tested against; `make_ops` chooses. Layers
reach their ops through `ModelContext.ops`. What happens between the projection and attention
belongs to the attention backend, since it ends in the KV cache.

The dtype of a norm's weight says where to round: a weight of x's dtype is multiplied after the norm
was rounded to it, a wider one before, as the checkpoints' own code does. Statistics are float32 or
wider.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); Shazeer, "GLU
Variants Improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F


class LayerOps(Protocol):
    """What stands between the matrix multiplications of a decoder layer. Stateless."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, whose size is weight's: [T, N]."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the norm of x + residual, x + residual), both [T, N]; either input may be
        overwritten."""

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up of [T, 2 I], gate first: [T, I]. `activation` is a key of `GATES`."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), of a gate up to 7 and an up from -7 to 7.

    Source: the model code of gpt-oss.
    """
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square_(),
}
"""`hidden_act` of a config -> the function of an MLP without a gate, in plain torch everywhere."""

GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: ACTIVATIONS["silu"](gate).mul_(up),
    "gelu_pytorch_tanh": lambda gate, up: ACTIVATIONS["gelu_pytorch_tanh"](gate).mul_(up),
    "clamped_swiglu": clamped_swiglu,
}
"""`LayerPlan.activation` -> the function of gate and up, which every `LayerOps` computes."""


class TorchOps:
    """Plain torch on any device, in any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps)
        return (normed * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return GATES[activation](gate, up)
