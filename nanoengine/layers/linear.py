"""Linear layers: checkpoint matrices fused into one GEMM and split over ranks.

    MergedLinear, QKVLinear   outputs split   each rank has some rows of every fused matrix
    RowParallelLinear         inputs split    each rank has some columns; results are summed

A `LinearMethod` defines how a weight is stored and multiplied. Used by the models; does not depend
on checkpoint files or attention.

`layouts.py` handles checkpoints that store fused matrices, or heads in another order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.layers.collectives import Shard
from nanoengine.layers.layer import Layer, ModelContext


class Linear(Layer):
    """This rank's matrix [out_features, in_features] and bias; the base class of the others.

    Attributes:
        method: how the matrix is stored and multiplied.
        bias: [out_features], or None.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, *, bias: bool, context: ModelContext
    ) -> None:
        super().__init__()
        self.shard = context.shard
        self.method = context.kernels.linear(name)
        self.method.create((out_features, in_features), context.stored_dtype, context.device)
        self.bias = context.parameter(out_features) if bias else None

    def slots_of(self, name: str, matrix: MatrixPart) -> dict[str, WeightSlot]:
        """Slots of the checkpoint's matrix `name` and its bias; see `LinearMethod.weight_slot`."""
        shape, part, first, order = matrix
        slots = {f"{name}.weight": self.method.weight_slot(name, matrix)}
        if self.bias is not None:
            own_bias = self.bias[first:]

            def store(bias: torch.Tensor) -> None:
                rows = ordered(bias, order)
                own_bias[: len(rows)].copy_(rows)

            slots[f"{name}.bias"] = WeightSlot(shape=shape[:1], part=part[:1], store=store)
        return slots


class MergedLinear(Linear):
    """Several matrices of the same input as one, for example gate_proj and up_proj; outputs are
    split over ranks.

    The output is [..., sum of this rank's parts], part after part. `parts` maps the name of each
    matrix, next to this layer in the checkpoint, to its number of outputs over all ranks. `shards`
    maps each matrix to its Shard; None: all have `context.shard`.

    Attributes:
        orders: per matrix, the order of this rank's outputs: int64 indices. A matrix without an
            entry keeps the checkpoint's order.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        context: ModelContext,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        shards = shards or dict.fromkeys(parts, context.shard)
        out_features = sum(shards[part].split(size, part) for part, size in parts.items())
        super().__init__(name, in_features, out_features, bias=bias, context=context)
        self.in_features, self.parts, self.shards = in_features, dict(parts), shards
        self.orders: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.bias)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        parent, slots, first = path.rpartition(".")[0], {}, 0
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            count, shape = part.stop - part.start, (size, self.in_features)
            matrix = MatrixPart(shape, (part,), first, self.orders.get(name))
            slots |= self.slots_of(f"{parent}.{name}", matrix)
            first += count
        return slots


class QKVLinear(MergedLinear):
    """The query, key and value projections as one: [..., (H + 2 K) * D] for this rank's heads.

    A rank has whole heads; `check_ranks` has rejected numbers of ranks that don't divide them. If
    there are more ranks than KV heads, several ranks have the same KV head. `gates` is the number
    of additional outputs per query head.
    """

    def __init__(
        self, name: str, config: ModelConfig, context: ModelContext, gates: int = 0
    ) -> None:
        q = config.num_attention_heads * (config.head_dim + gates)
        kv = config.num_key_value_heads * config.head_dim
        shared = context.shard.for_kv_heads(config.num_key_value_heads)
        super().__init__(
            name,
            config.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=config.plan.qkv_bias,
            context=context,
            shards={"q_proj": context.shard, "k_proj": shared, "v_proj": shared},
        )


class RowParallelLinear(Linear):
    """A matrix whose inputs are split over ranks; `context.all_reduce` sums the ranks' results."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        context: ModelContext,
    ) -> None:
        local = context.shard.split(in_features, name)
        super().__init__(name, local, out_features, bias=bias, context=context)
        self.shape, self.all_reduce = (out_features, in_features), context.all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Why one rank: the ranks' results are summed, and the bias must be added once.
        bias = self.bias if self.shard.rank == 0 else None
        return self.all_reduce(self.method.apply(x, bias))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        columns = self.shard.slice(self.shape[1], path)
        return self.slots_of(path, MatrixPart(self.shape, (slice(None), columns)))
