"""SparseMLP: a mixture of experts in place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.moe import Experts, FullPrecisionLinear, Router
from nanoengine.models.decoder import GatedMLP


class SparseMLP(Layer):
    """A router (`gate` in the checkpoint), its experts, and a shared expert that all tokens use.

    Args:
        shared_class: the class of the shared expert.

    Attributes:
        routed: computes router and experts, [T, hidden_size] -> the same. After loading, a fused
            kernel may replace it, which may also add the shared expert (`adds_shared`).
    """

    def __init__(
        self,
        path: str,
        config: ModelConfig,
        context: ModelContext,
        shared_class: type[Layer] = GatedMLP,
    ) -> None:
        super().__init__()
        moe, hidden = config.moe, config.hidden_size
        assert moe is not None
        self.gate = Router(f"{path}.gate", hidden, moe, context=context)
        self.experts = Experts(
            f"{path}.experts", hidden, moe, config.plan.hidden_act, context=context
        )
        self.shared_experts = self.shared_expert_gate = None
        if moe.shared_size:
            name = f"{path}.shared_experts"
            self.shared_experts = shared_class(name, moe.shared_size, config, context)
        if moe.shared_gate:
            self.shared_expert_gate = FullPrecisionLinear(
                f"{path}.shared_expert_gate", hidden, 1, bias=False, context=context
            )
        self.routed: Callable[[torch.Tensor], torch.Tensor] = self._sequential_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.routed(x)
        if self.shared_experts is None or getattr(self.routed, "adds_shared", False):
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is None:
            return out + shared
        return torch.addcmul(out, shared, self.shared_expert_gate.method.apply(x, None).sigmoid())

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph can capture it. `_sequential_experts` reads the number of tokens per
        expert on the host."""
        return getattr(self.routed, "graph_safe", False)

    def _sequential_experts(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.gate(x))


def moe_layers(model: nn.Module) -> list[Any]:
    """Modules whose `routed` a kernel may replace; they have a `gate` and `experts` too."""
    return [module for module in model.modules() if hasattr(module, "routed")]
