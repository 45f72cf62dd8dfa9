"""Mixture of experts: a router picks a few small MLPs for each token.

Tokens are grouped by expert, each active expert runs once over its group, and the results are added
back with the router's weights. Under tensor parallelism every rank holds a part of every expert.

Source: Shazeer et al. (arXiv 1701.06538); the routing is Qwen3-MoE's (arXiv 2505.09388).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer, empty_parameter


class Router(Layer):
    """Scores the experts: hidden [T, hidden_size] -> (weights [T, k], expert ids [T, k])."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int,
        norm_topk_prob: bool,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.weight = empty_parameter((num_experts, hidden_size), context.dtype, context.device)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden, self.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, experts = logits.softmax(dim=-1, dtype=wide).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(hidden.dtype), experts

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        shape = tuple(self.weight.shape)
        return {f"{path}.weight": WeightSlot(shape=shape, store=self.weight.copy_)}


class Experts(Layer):
    """All experts' weights, stacked: gate_up_proj [E, 2 I, hidden], down_proj [E, hidden, I]; I is
    this rank's part.

    Checkpoints hold them stacked or expert by expert; both are read.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, *, context: ModelContext
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        self.part = context.shard.slice(intermediate_size, "moe_intermediate_size")
        local, where = self.part.stop - self.part.start, (context.dtype, context.device)
        self.gate_up_proj = empty_parameter((num_experts, 2 * local, hidden_size), *where)
        self.down_proj = empty_parameter((num_experts, hidden_size, local), *where)
        self.all_reduce, self.ops = context.all_reduce, context.ops

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, hidden_size], weights and expert ids [T, k] -> [T, hidden_size]."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()
        tokens, weights = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
        out = torch.zeros_like(hidden)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            group = slice(start, start + count)
            inputs = hidden.index_select(0, tokens[group])
            gated = self.ops.gate(F.linear(inputs, self.gate_up_proj[expert]), "silu")
            result = F.linear(gated, self.down_proj[expert]) * weights[group]
            out.index_add_(0, tokens[group], result)
            start = group.stop
        return self.all_reduce(out)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        one, stacked = (self.intermediate_size, self.hidden_size), self.num_experts
        gate_up_pieces, down_pieces = {}, {}
        for expert in range(self.num_experts):
            gate, up = self.gate_up_proj[expert].chunk(2)
            for name, rows in (("gate_proj", gate), ("up_proj", up)):
                gate_up_pieces[f"{path}.{expert}.{name}.weight"] = WeightSlot(
                    shape=one, part=(self.part,), store=rows.copy_
                )
            down_pieces[f"{path}.{expert}.down_proj.weight"] = WeightSlot(
                shape=one[::-1], part=(slice(None), self.part), store=self.down_proj[expert].copy_
            )
        return {
            f"{path}.gate_up_proj": WeightSlot(
                shape=(stacked, 2 * one[0], one[1]),
                store=self._store_gate_up,
                pieces=gate_up_pieces,
            ),
            f"{path}.down_proj": WeightSlot(
                shape=(stacked, *one[::-1]),
                part=(slice(None), slice(None), self.part),
                store=self.down_proj.copy_,
                pieces=down_pieces,
            ),
        }

    def _store_gate_up(self, weight: torch.Tensor) -> None:
        # Why whole: this rank's rows of gate and of up are two slices, and a slot cuts one.
        for mine, whole in zip(self.gate_up_proj.chunk(2, 1), weight.chunk(2, 1), strict=True):
            mine.copy_(whole[:, self.part])
