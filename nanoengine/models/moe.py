"""SparseMLP: the mixture of experts that replaces a layer's MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.moe import Experts, FullPrecisionLinear, Router
from nanoengine.models.decoder import GatedMLP


class SharedGate(FullPrecisionLinear):
    """Each token's weight for the shared expert: [T, hidden_size] -> [T, 1]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, None).sigmoid()


class SparseMLP(Layer):
    """A router (`gate` in the checkpoint), its experts, and an MLP shared by all tokens.

    Args:
        shared: the class of the shared MLP.
        plain: the activation of experts without a gate.

    Attributes:
        routed: computes router and experts, [T, hidden_size] -> the same. After loading, one call
            may replace the two; it may include the shared MLP.
    """

    def __init__(
        self,
        path: str,
        config: ModelConfig,
        context: ModelContext,
        shared: type[Layer] = GatedMLP,
        plain: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        moe, hidden = config.moe, config.hidden_size
        assert moe is not None
        router = Router
        if moe.score == "sparsemixer":
            from nanoengine.layers.routers import SparseMixer as router
        self.gate = router(f"{path}.gate", hidden, moe, context=context)
        self.experts = Experts(
            f"{path}.experts", hidden, moe, config.plan.hidden_act, plain, context=context
        )
        self.shared_experts = self.shared_expert_gate = None
        if moe.shared_size:
            self.shared_experts = shared(f"{path}.shared_experts", moe.shared_size, config, context)
        if moe.shared_gate:
            name = f"{path}.shared_expert_gate"
            self.shared_expert_gate = SharedGate(name, hidden, 1, bias=False, context=context)
        self.routed: Callable[[torch.Tensor], torch.Tensor] = self._one_by_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.routed(x)
        if self.shared_experts is None or getattr(self.routed, "adds_shared", False):
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is None:
            return out + shared
        return torch.addcmul(out, shared, self.shared_expert_gate(x))

    @property
    def graph_safe(self) -> bool:
        """Whether it decides nothing on the host. Computing experts one by one does: it needs the
        number of rows per expert."""
        return getattr(self.routed, "graph_safe", False)

    def _one_by_one(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.gate(x))


def mixtures(model: nn.Module) -> list[Any]:
    """The model's mixtures that kernels may compute: each has a `gate`, `experts` and `routed`."""
    return [module for module in model.modules() if hasattr(module, "routed")]
