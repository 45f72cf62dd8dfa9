"""Qwen3-MoE: Qwen3 whose MLP is a mixture of experts in the layers that `config.moe.layers` names.

A window, if `use_sliding_window`, holds for all layers.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer
from nanoengine.layers.moe import Experts, Router
from nanoengine.models.qwen3 import Qwen3ForCausalLM


class SparseMLP(Layer):
    """A router (`gate` in the checkpoint) and its experts."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.gate = Router(
            config.hidden_size,
            moe.num_experts,
            top_k=moe.num_experts_per_tok,
            norm_topk_prob=moe.norm_topk_prob,
            context=context,
        )
        self.experts = Experts(
            moe.num_experts, config.hidden_size, moe.intermediate_size, context=context
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.gate(x))


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Source: Yang et al., Qwen3 Technical Report (arXiv 2505.09388)."""

    # Why: the loop over experts needs the group sizes on the host.
    graph_safe: ClassVar[bool] = False

    def make_mlp(
        self, path: str, layer: int, config: ModelConfig, context: ModelContext
    ) -> nn.Module:
        if config.moe is not None and layer in config.moe.layers:
            return SparseMLP(config, context)
        return super().make_mlp(path, layer, config, context)
