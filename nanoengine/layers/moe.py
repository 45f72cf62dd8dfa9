"""Mixture of experts: a router selects a few small MLPs for each token.

Tokens are grouped by expert, each active expert runs once over its group, and results are weighted
by the router and summed per token. With tensor parallelism every rank has a part of every expert.
This is the reference implementation: kernels compute all experts of a step in one call
(`cpu_experts.py`, `triton_experts.py`).

Source: Shazeer et al. (arXiv 1701.06538); softmax routing as in Qwen3-MoE (arXiv 2505.09388),
sigmoid routing with a correction bias and groups as in DeepSeek-V3 (arXiv 2412.19437).

Legend: T tokens, E experts, k experts per token, I intermediate size of an expert on this rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.checkpoint.quantization import MXFP4_EXPERTS
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, full_slots
from nanoengine.layers.kernels import LinearMethod, relu2
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import Linear
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import MXFP4
from nanoengine.layers.quantized_weight import QuantizedWeight


class FullPrecisionLinear(Linear):
    """A small matrix, replicated on all ranks, in the dtype of activations.

    Why not in the dtype of stored weights: a rounding error may select another expert.
    """

    def __init__(
        self, path: str, hidden_size: int, outputs: int, *, bias: bool, context: ModelContext
    ) -> None:
        exact = replace(context, weight_dtype=None)
        super().__init__(path, hidden_size, outputs, bias=bias, context=exact)
        self.shape = outputs, hidden_size

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return self.slots_of(path, MatrixPart(self.shape))


class Router(FullPrecisionLinear):
    """Scores the experts: hidden [T, hidden_size] -> (weights [T, k], expert ids [T, k])."""

    def __init__(
        self, path: str, hidden_size: int, moe: MoEConfig, *, context: ModelContext
    ) -> None:
        super().__init__(path, hidden_size, moe.num_experts, bias=moe.bias, context=context)
        wide = torch.promote_types(context.dtype, torch.float32)
        self.moe, self.e_score_correction_bias = moe, None
        if moe.correction_bias:
            self.e_score_correction_bias = context.parameter(moe.num_experts, dtype=wide)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe, wide = self.moe, torch.promote_types(hidden.dtype, torch.float32)
        logits = self.logits(hidden).to(wide)
        scores = logits.softmax(dim=-1) if moe.score == "softmax" else logits.sigmoid()
        scores_for_choice = scores
        if self.e_score_correction_bias is not None:
            scores_for_choice = scores + self.e_score_correction_bias
        if moe.num_groups > 1:
            scores_for_choice = self._mask_other_groups(scores_for_choice)
        experts = scores_for_choice.topk(moe.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.norm_topk_prob:
            total = weights.sum(dim=-1, keepdim=True).clamp(min=moe.norm_min)
            weights = weights / (total + moe.norm_epsilon)
        weights = (weights * moe.scaling_factor).to(hidden.dtype)
        return self.scale_weights(weights, experts), experts

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, E]."""
        return self.method.apply(hidden, self.bias)

    def scale_weights(self, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns the weights [T, k]; families with per-expert factors override it."""
        return weights

    def _mask_other_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores [T, E] with -inf outside a token's best groups. Groups are ranked by
        the sum of their best experts' scores."""
        groups = scores.unflatten(1, (self.moe.num_groups, -1))
        sums = groups.topk(self.moe.best_of_group, dim=-1).values.sum(-1)
        best = sums.topk(self.moe.groups_per_token).indices
        excluded = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(1)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        bias = self.e_score_correction_bias
        if self.moe.correction_bias == "row" and bias is not None:
            bias = bias.view(1, -1)
        return super().weight_slots(path) | full_slots(path, e_score_correction_bias=bias)


class Expert(Layer):
    """One small MLP; its two matrices are `LinearMethod`s, as in all linear layers. `activation`:
    see `LayerConfig.hidden_act`."""

    def __init__(
        self,
        path: str,
        hidden_size: int,
        local: int,
        activation: str,
        *,
        context: ModelContext,
    ) -> None:
        super().__init__()
        has_gate, storage = activation != "relu2", (context.stored_dtype, context.device)
        up = 2 * local if has_gate else local
        self.gate_up = context.kernels.linear(f"{path}.gate_up_proj")
        self.gate_up.create((up, hidden_size), *storage)
        self.down = context.kernels.linear(f"{path}.down_proj")
        self.down.create((hidden_size, local), *storage)
        self.activation = activation
        self.activate = partial(context.kernels.gate, activation=activation) if has_gate else relu2

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, down_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, hidden_size] -> the same; `bias` is the bias of gate and up, [2 I]."""
        return self.down.apply(self.activate(self.gate_up.apply(hidden, bias)), down_bias)


class Experts(Layer):
    """All experts; this rank has I of `intermediate_size` neurons of each.

    Checkpoints store them stacked, gate_up_proj [E, 2 I, hidden] and down_proj [E, hidden, I], or
    one by one; both are supported. gpt-oss stacks them in its own order (`MoEConfig`), in floats or
    in MXFP4.
    """

    def __init__(
        self,
        path: str,
        hidden_size: int,
        moe: MoEConfig,
        activation: str = "silu",
        *,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.moe, self.shard, self.activation = moe, context.shard, activation
        num_experts, intermediate_size = moe.num_experts, moe.intermediate_size
        self.shape = (num_experts, intermediate_size, hidden_size)
        self.part = context.shard.slice(intermediate_size, "moe_intermediate_size")
        self.local = self.part.stop - self.part.start
        self.experts = nn.ModuleList(
            Expert(f"{path}.{index}", hidden_size, self.local, activation, context=context)
            for index in range(num_experts)
        )
        self.gate_up_bias = self.down_bias = None
        if moe.bias:
            self.gate_up_bias = context.parameter(num_experts, 2 * self.local)
            self.down_bias = context.parameter(num_experts, hidden_size)
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
        for index, count in enumerate(counts):
            if not count:
                continue
            group = slice(start, start + count)
            x = hidden.index_select(0, tokens[group])
            result = self.experts[index](x, *self.biases_of(index))
            out.index_add_(0, tokens[group], result * weights[group])
            start = group.stop
        return self.all_reduce(out)

    def biases_of(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the biases that this rank adds for one expert: of gate and up, and of down."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None, None
        # Why one rank: the ranks' outputs are summed, and the bias must be added once.
        down = self.down_bias[index] if self.shard.rank == 0 else None
        return self.gate_up_bias[index], down

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        num_experts, inner, hidden = self.shape
        rows: torch.Tensor | slice = self._gate_up_rows()
        all_rows = slice(None)
        gate = MatrixPart((inner, hidden), (self.part,))
        parts = {"gate_proj": gate, "up_proj": gate._replace(first=self.local)}
        methods, name = [each.gate_up for each in self.experts], "gate_up_proj"
        if self.activation == "relu2":
            parts, name, rows = {"up_proj": gate}, "up_proj", self.part
        slots = self._stack(f"{path}.{name}", methods, parts, (rows, all_rows))
        parts = {"down_proj": MatrixPart((hidden, inner), (all_rows, self.part))}
        methods = [each.down for each in self.experts]
        slots |= self._stack(f"{path}.down_proj", methods, parts, (all_rows, self.part))
        if self.gate_up_bias is not None:
            halves = self.gate_up_bias.split(self.local, dim=1)
            store, part = self.gate_up_bias.copy_, (all_rows, self.part)
            slots[f"{path}.gate_up_proj_bias"] = WeightSlot(
                shape=(num_experts, 2 * inner),
                store=lambda stacked: store(stacked[:, rows]),
                pieces={
                    f"{path}.{name}_bias": WeightSlot(
                        shape=(num_experts, inner), part=part, store=half.copy_
                    )
                    for name, half in zip(("gate_proj", "up_proj"), halves, strict=True)
                },
            )
        return slots | full_slots(path, down_proj_bias=self.down_bias)

    def _stack(
        self,
        name: str,
        methods: list[LinearMethod],
        parts: dict[str, MatrixPart],
        rank_part: tuple[slice | torch.Tensor, slice],
    ) -> dict[str, WeightSlot]:
        """Returns the slot of a stack with one matrix per expert; `rank_part` indexes this rank's
        part of a matrix.

        Alternatively the checkpoint has a stack of 4-bit blocks, or the matrices `parts` of each
        expert.
        """
        path, count, transposed = name.rpartition(".")[0], len(methods), self.moe.inputs_first
        outputs, inputs = zip(*(part.shape for part in parts.values()), strict=True)
        shape = sum(outputs), inputs[0]

        def store(stacked: torch.Tensor) -> None:
            for method, weight in zip(methods, stacked, strict=True):
                method.load((weight.T if transposed else weight)[rank_part])

        remaining = iter(methods)

        def store_quantized(weight: QuantizedWeight) -> None:
            method, mine = next(remaining), weight.part(*rank_part)
            if isinstance(method, QuantizedLinear):
                method.load_quantized(mine)
            else:
                method.load(mine.dequantized())

        if transposed:
            pieces = MXFP4(MXFP4_EXPERTS).slots(name, shape, store_quantized, count)
            only = getattr(methods[0], "stored", None) is not None
            slot = WeightSlot(
                shape=(count, *shape[::-1]), store=store, pieces=pieces, pieces_only=only
            )
        else:
            pieces = {
                f"{path}.{index}.{part}.weight": method.weight_slot(
                    f"{path}.{index}.{part}", matrix
                )
                for index, method in enumerate(methods)
                for part, matrix in parts.items()
            }
            slot = WeightSlot(shape=(count, *shape), store=store, pieces=pieces)
        return {name: slot}

    def _gate_up_rows(self) -> torch.Tensor:
        """Indices of this rank's rows in the checkpoint's gate and up, gate first: [2 I]."""
        rows = torch.arange(2 * self.shape[1])
        halves = rows.view(-1, 2).T if self.moe.inputs_first else rows.view(2, -1)
        return halves[:, self.part].flatten()
