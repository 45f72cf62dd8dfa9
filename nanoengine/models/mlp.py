"""The MLP of a decoder layer, gated or plain."""

from __future__ import annotations

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.kernels import ACTIVATIONS
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, RowParallelLinear


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x)), with the `act` that the plan names; `inner` is its inner size."""

    def __init__(self, path: str, inner: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden = config.plan, config.hidden_size
        self.activation, self.kernels = plan.activation, context.kernels
        self.gate_up_proj = MergedLinear(
            f"{path}.gate_up_proj",
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=plan.mlp_bias,
            merged=plan.merged or plan.merged_gate,
            context=context,
        )
        self.down_proj = RowParallelLinear(
            f"{path}.down_proj", inner, hidden, bias=plan.mlp_bias, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj.gated(x, self.activation, self.kernels))


class PlainMLP(Layer):
    """down(act(up(x)))."""

    def __init__(self, path: str, inner: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden = config.plan, config.hidden_size
        self.activation = ACTIVATIONS[plan.activation]
        self.up_proj = MergedLinear(
            f"{path}.up_proj", hidden, {"up_proj": inner}, bias=plan.mlp_bias, context=context
        )
        self.down_proj = RowParallelLinear(
            f"{path}.down_proj", inner, hidden, bias=plan.mlp_bias, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))
