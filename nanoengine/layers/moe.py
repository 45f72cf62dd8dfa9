"""Mixture of experts: a router picks a few small MLPs for each token.

Tokens are grouped by expert, each active expert runs once over its group, and the results are added
back with the router's weights. Under tensor parallelism every rank holds a part of every expert.

Source: Shazeer et al. (arXiv 1701.06538); softmax routing as in Qwen3-MoE (arXiv 2505.09388),
sigmoid routing with a correction bias and groups as in DeepSeek-V3 (arXiv 2412.19437).

Legend: T tokens, E experts, k experts of a token, I inner size of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.checkpoint.plan import MoEConfig
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer, empty_parameter


class Router(Layer):
    """Scores the experts: hidden [T, hidden_size] -> (weights [T, k], expert ids [T, k])."""

    def __init__(self, hidden_size: int, moe: MoEConfig, *, context: ModelContext) -> None:
        super().__init__()
        self.moe = moe
        self.weight = empty_parameter((moe.num_experts, hidden_size), context.dtype, context.device)
        wide = torch.promote_types(context.dtype, torch.float32)
        self.e_score_correction_bias = (
            empty_parameter((moe.num_experts,), wide, context.device)
            if moe.correction_bias
            else None
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe, wide = self.moe, torch.promote_types(hidden.dtype, torch.float32)
        logits = F.linear(hidden, self.weight).to(wide)
        scores = logits.softmax(dim=-1) if moe.score == "softmax" else logits.sigmoid()
        preferred = scores
        if self.e_score_correction_bias is not None:
            preferred = scores + self.e_score_correction_bias
        if moe.num_groups > 1:
            preferred = self._best_groups(preferred)
        experts = preferred.topk(moe.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return (weights * moe.scaling_factor).to(hidden.dtype), experts

    def _best_groups(self, preferred: torch.Tensor) -> torch.Tensor:
        """The scores [T, E], -inf in all groups but a token's best, by the sum of their two best
        experts."""
        groups = preferred.unflatten(1, (self.moe.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.moe.groups_per_token).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        tensors = {"weight": self.weight, "e_score_correction_bias": self.e_score_correction_bias}
        return {
            f"{path}.{name}": WeightSlot(shape=tuple(tensor.shape), store=tensor.copy_)
            for name, tensor in tensors.items()
            if tensor is not None
        }


class Expert(Layer):
    """One small gated MLP, whose two matrices are `LinearMethod`s as those of all linear layers."""

    def __init__(self, path: str, hidden_size: int, local: int, *, context: ModelContext) -> None:
        super().__init__()
        where = {"dtype": context.stored_dtype, "device": context.device}
        self.gate_up = context.linear_method_factory(f"{path}.gate_up_proj")
        self.gate_up.create(hidden_size, 2 * local, **where)
        self.down = context.linear_method_factory(f"{path}.down_proj")
        self.down.create(local, hidden_size, **where)
        self.ops = context.ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down.apply(self.gate_up.apply_gated(hidden, "silu", self.ops), None)


class Experts(Layer):
    """All experts; of each one this rank holds I of `intermediate_size`.

    Checkpoints hold them stacked, gate_up_proj [E, 2 I, hidden] and down_proj [E, hidden, I], or
    expert by expert; both are read.
    """

    def __init__(
        self,
        path: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.shape = (num_experts, intermediate_size, hidden_size)
        self.part = context.shard.slice(intermediate_size, "moe_intermediate_size")
        self.local = self.part.stop - self.part.start
        self.experts = nn.ModuleList(
            Expert(f"{path}.{index}", hidden_size, self.local, context=context)
            for index in range(num_experts)
        )
        self.all_reduce = context.all_reduce

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        """hidden [T, hidden_size], weights and expert ids [T, k] -> [T, hidden_size]."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        tokens, weights = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
        out = torch.zeros_like(hidden)
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            group = slice(start, start + count)
            result = expert(hidden.index_select(0, tokens[group])) * weights[group]
            out.index_add_(0, tokens[group], result)
            start = group.stop
        return self.all_reduce(out)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        num_experts, inner, hidden = self.shape
        gate_up_pieces, down_pieces = {}, {}
        for index, expert in enumerate(self.experts):
            name, first = f"{path}.{index}", 0
            for matrix in ("gate_proj", "up_proj"):
                gate_up_pieces[f"{name}.{matrix}.weight"] = expert.gate_up.weight_slot(
                    f"{name}.{matrix}",
                    shape=(inner, hidden),
                    part=(self.part,),
                    rows=slice(first, first + self.local),
                )
                first += self.local
            down_pieces[f"{name}.down_proj.weight"] = expert.down.weight_slot(
                f"{name}.down_proj",
                shape=(hidden, inner),
                part=(slice(None), self.part),
                rows=slice(0, hidden),
            )
        return {
            f"{path}.gate_up_proj": WeightSlot(
                shape=(num_experts, 2 * inner, hidden),
                store=self._store_gate_up,
                pieces=gate_up_pieces,
            ),
            f"{path}.down_proj": WeightSlot(
                shape=(num_experts, hidden, inner),
                part=(slice(None), slice(None), self.part),
                store=self._store_down,
                pieces=down_pieces,
            ),
        }

    def _store_gate_up(self, stacked: torch.Tensor) -> None:
        # Why whole: this rank's rows of gate and of up are two slices, and a slot cuts one.
        for expert, weight in zip(self.experts, stacked, strict=True):
            for half, matrix in enumerate(weight.chunk(2)):
                rows = slice(half * self.local, (half + 1) * self.local)
                expert.gate_up.load(matrix[self.part], rows)

    def _store_down(self, stacked: torch.Tensor) -> None:
        for expert, weight in zip(self.experts, stacked, strict=True):
            expert.down.load(weight, slice(0, len(weight)))
