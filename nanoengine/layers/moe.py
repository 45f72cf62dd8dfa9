"""Mixture of experts: a router picks a few small MLPs for each token.

Tokens are grouped by expert, each active expert runs once over its group, and the results are added
back with the router's weights. Under tensor parallelism every rank holds a part of every expert.
This is the readable form: kernels compute all experts of a step in one call (`cpu_experts.py`,
`triton_experts.py`).

Source: Shazeer et al. (arXiv 1701.06538); softmax routing as in Qwen3-MoE (arXiv 2505.09388),
sigmoid routing with a correction bias and groups as in DeepSeek-V3 (arXiv 2412.19437).

Legend: T tokens, E experts, k experts of a token, I inner size of an expert.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoengine.checkpoint.plan import MoEConfig
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.kernels import LinearMethod, empty_parameter
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import mxfp4_slots
from nanoengine.layers.quantized_weight import QuantizedWeight


class Router(Layer):
    """Scores the experts: hidden [T, hidden_size] -> (weights [T, k], expert ids [T, k])."""

    def __init__(
        self, path: str, hidden_size: int, moe: MoEConfig, *, context: ModelContext
    ) -> None:
        super().__init__()
        self.moe, self.shape = moe, (moe.num_experts, hidden_size)
        # Why not the dtype that weights are stored in: a rounding here is another expert there.
        self.method = context.kernels.linear(path)
        self.method.create(hidden_size, moe.num_experts, dtype=context.dtype, device=context.device)
        self.bias = (
            empty_parameter((moe.num_experts,), context.dtype, context.device)
            if moe.router_bias
            else None
        )
        wide = torch.promote_types(context.dtype, torch.float32)
        self.e_score_correction_bias = (
            empty_parameter((moe.num_experts,), wide, context.device)
            if moe.correction_bias
            else None
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        moe, wide = self.moe, torch.promote_types(hidden.dtype, torch.float32)
        logits = self.method.apply(hidden, self.bias).to(wide)
        scores = logits.softmax(dim=-1) if moe.score == "softmax" else logits.sigmoid()
        preferred = scores
        if self.e_score_correction_bias is not None:
            preferred = scores + self.e_score_correction_bias
        if moe.num_groups > 1:
            preferred = self._best_groups(preferred)
        experts = preferred.topk(moe.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + moe.norm_epsilon)
        return (weights * moe.scaling_factor).to(hidden.dtype), experts

    def _best_groups(self, preferred: torch.Tensor) -> torch.Tensor:
        """The scores [T, E], -inf in all groups but a token's best, by the sum of their two best
        experts."""
        groups = preferred.unflatten(1, (self.moe.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.moe.groups_per_token).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        biases = {"bias": self.bias, "e_score_correction_bias": self.e_score_correction_bias}
        slots = {
            f"{path}.{name}": WeightSlot(shape=tuple(tensor.shape), store=tensor.copy_)
            for name, tensor in biases.items()
            if tensor is not None
        }
        rows = slice(0, self.shape[0])
        slots[f"{path}.weight"] = self.method.weight_slot(
            path, shape=self.shape, part=(), rows=rows
        )
        return slots


class Expert(Layer):
    """One small gated MLP, whose two matrices are `LinearMethod`s as those of all linear layers."""

    def __init__(
        self, path: str, hidden_size: int, local: int, activation: str, *, context: ModelContext
    ) -> None:
        super().__init__()
        where = {"dtype": context.stored_dtype, "device": context.device}
        self.gate_up = context.kernels.linear(f"{path}.gate_up_proj")
        self.gate_up.create(hidden_size, 2 * local, **where)
        self.down = context.kernels.linear(f"{path}.down_proj")
        self.down.create(local, hidden_size, **where)
        self.activation, self.ops = activation, context.kernels

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, down_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, hidden_size] -> the same; `bias` [2 I] is that of gate and up."""
        if bias is None:
            gated = self.gate_up.apply_gated(hidden, self.activation, self.ops)
        else:
            gated = self.ops.gate(self.gate_up.apply(hidden, bias), self.activation)
        return self.down.apply(gated, down_bias)


class Experts(Layer):
    """All experts; of each one this rank holds I of `intermediate_size`.

    Checkpoints hold them stacked, gate_up_proj [E, 2 I, hidden] and down_proj [E, hidden, I], or
    expert by expert; both are read. gpt-oss stacks them in its own order (`MoEConfig`), in floats
    or in MXFP4.
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
        self.moe, self.shard = moe, context.shard
        num_experts, intermediate_size = moe.num_experts, moe.intermediate_size
        self.shape = (num_experts, intermediate_size, hidden_size)
        self.part = context.shard.slice(intermediate_size, "moe_intermediate_size")
        self.local = self.part.stop - self.part.start
        self.experts = nn.ModuleList(
            Expert(f"{path}.{index}", hidden_size, self.local, activation, context=context)
            for index in range(num_experts)
        )
        self.gate_up_bias = self.down_bias = None
        if moe.expert_bias:
            where = context.dtype, context.device
            self.gate_up_bias = empty_parameter((num_experts, 2 * self.local), *where)
            self.down_bias = empty_parameter((num_experts, hidden_size), *where)
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
            result = self.experts[index](
                hidden.index_select(0, tokens[group]), *self.biases_of(index)
            )
            out.index_add_(0, tokens[group], result * weights[group])
            start = group.stop
        return self.all_reduce(out)

    def biases_of(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of gate and up and of down that this rank adds for one expert."""
        if self.gate_up_bias is None or self.down_bias is None:
            return None, None
        # Why: what ranks have of down is summed, so only one adds its bias.
        down = self.down_bias[index] if self.shard.rank == 0 else None
        return self.gate_up_bias[index], down

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        num_experts, inner, hidden = self.shape
        gate_up, down = (2 * inner, hidden), (hidden, inner)
        pieces = self._mxfp4_pieces(path) if self.moe.inputs_first else self._pieces(path)
        stored_in_4_bits = isinstance(self.experts[0].down, QuantizedLinear) and (
            self.experts[0].down.stored is not None
        )
        slots = {}
        for name, shape, store in (
            ("gate_up_proj", gate_up, self._store_gate_up),
            ("down_proj", down, self._store_down),
        ):
            stacked = shape[::-1] if self.moe.inputs_first else shape
            slots[f"{path}.{name}"] = WeightSlot(
                shape=(num_experts, *stacked),
                store=store,
                pieces=pieces[name],
                pieces_only=self.moe.inputs_first and stored_in_4_bits,
            )
        if self.gate_up_bias is not None and self.down_bias is not None:
            slots |= self._bias_slots(path, self.gate_up_bias, self.down_bias)
        return slots

    def _pieces(self, path: str) -> dict[str, dict[str, WeightSlot]]:
        """The matrices expert by expert, by the name of the stack that they make up."""
        _, inner, hidden = self.shape
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
        return {"gate_up_proj": gate_up_pieces, "down_proj": down_pieces}

    def _mxfp4_pieces(self, path: str) -> dict[str, dict[str, WeightSlot]]:
        """The stacks in blocks of 4 bits and their scales."""
        num_experts, inner, hidden = self.shape

        def gate_up(index: int, weight: QuantizedWeight) -> None:
            store_quantized(self.experts[index].gate_up, weight.in_order(self._gate_up_rows()))

        def down(index: int, weight: QuantizedWeight) -> None:
            store_quantized(self.experts[index].down, weight.part(slice(None), self.part))

        return {
            "gate_up_proj": mxfp4_slots(
                f"{path}.gate_up_proj", (num_experts, 2 * inner, hidden), gate_up
            ),
            "down_proj": mxfp4_slots(f"{path}.down_proj", (num_experts, hidden, inner), down),
        }

    def _bias_slots(
        self, path: str, gate_up: torch.Tensor, down: torch.Tensor
    ) -> dict[str, WeightSlot]:
        num_experts, inner, hidden = self.shape
        return {
            f"{path}.gate_up_proj_bias": WeightSlot(
                shape=(num_experts, 2 * inner),
                store=lambda stacked: gate_up.copy_(stacked[:, self._gate_up_rows()]),
            ),
            f"{path}.down_proj_bias": WeightSlot(shape=(num_experts, hidden), store=down.copy_),
        }

    def _gate_up_rows(self) -> torch.Tensor:
        """Which rows of a checkpoint's gate and up this rank has, gate first: [2 * local]."""
        rows = torch.arange(2 * self.shape[1])
        halves = rows.view(-1, 2).T if self.moe.interleaved else rows.view(2, -1)
        return halves[:, self.part].flatten()

    def _store_gate_up(self, stacked: torch.Tensor) -> None:
        rows = self._gate_up_rows()
        for expert, weight in zip(self.experts, stacked, strict=True):
            matrix = weight.T if self.moe.inputs_first else weight
            expert.gate_up.load(matrix[rows], slice(0, 2 * self.local))

    def _store_down(self, stacked: torch.Tensor) -> None:
        for expert, weight in zip(self.experts, stacked, strict=True):
            matrix = weight.T if self.moe.inputs_first else weight
            expert.down.load(matrix[:, self.part], slice(0, len(matrix)))


def store_quantized(method: LinearMethod, weight: QuantizedWeight) -> None:
    """Gives a method all rows of its matrix: as they are where it holds such, else as floats."""
    rows = slice(0, len(weight.values))
    if isinstance(method, QuantizedLinear):
        method.load_quantized(weight, rows)
    else:
        method.load(weight.dequantized(), rows)
