"""ScaledRouter: a router that norms its input. Used by `models/gemma4.py`.

What differs from `Router` is plain torch, on a GPU too. Nothing here may synchronize with the host,
because CUDA graphs capture it.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, full_slots
from nanoengine.layers.layer import ModelContext
from nanoengine.layers.moe import Router


class ScaledRouter(Router):
    """Norms its input, and multiplies weights by one learned factor per expert. Source: Gemma 4."""

    def __init__(
        self, path: str, hidden: int, moe: MoEConfig, config: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(path, hidden, moe, context=context)
        self.eps, self.hidden = config.rms_norm_eps, hidden
        self.scale = context.parameter(hidden)
        self.per_expert_scale = context.parameter(moe.num_experts)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(hidden, (self.hidden,), None, self.eps)
        return super().logits(normed * self.scale * self.hidden**-0.5)

    def scale_weights(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return weights * self.per_expert_scale[experts]

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        scales = {"scale": self.scale, "per_expert_scale": self.per_expert_scale}
        return self.slots_of(f"{path}.proj", MatrixPart(self.shape)) | full_slots(path, **scales)
