"""Linear layers: checkpoint matrices fused into one multiplication and split over ranks.

    MergedLinear, QKVLinear   outputs split   each rank holds some rows of every fused matrix
    RowParallelLinear         inputs split    each rank holds some columns; results are summed

How a weight is stored and multiplied is a `LinearMethod`. Used by the models; knows neither
checkpoint files nor attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer, empty_parameter
from nanoengine.layers.ops import LayerOps
from nanoengine.parallel.shard import Shard


class MergedLinear(Layer):
    """Several matrices of the same input as one, e.g. gate_proj and up_proj; outputs split over
    ranks.

    The output is [..., sum of this rank's parts], part after part. `parts` maps each matrix's name
    beside this layer in the checkpoint to its full number of outputs, `shards` those to their shard
    that are split in another way than by rank.
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
        super().__init__()
        self.in_features, self.parts, self.shard = in_features, dict(parts), context.shard
        self.shards = shards or dict.fromkeys(parts, self.shard)
        out_features = sum(self.shards[part].split(size, part) for part, size in parts.items())
        self.method = context.linear_method_factory(name)
        self.method.create(
            in_features, out_features, dtype=context.stored_dtype, device=context.device
        )
        self.bias = (
            empty_parameter((out_features,), context.dtype, context.device) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.bias)

    def gated(self, x: torch.Tensor, activation: str, ops: LayerOps) -> torch.Tensor:
        """act(first part) * second part, of two parts without bias: [T, in_features] -> [T, I]."""
        return self.method.apply_gated(x, activation, ops)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots, start = {}, 0
        beside = path.rpartition(".")[0]
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = slice(start, start + part.stop - part.start)
            slots[f"{beside}.{name}.weight"] = self.method.weight_slot(
                f"{beside}.{name}", shape=(size, self.in_features), part=(part,), rows=rows
            )
            if self.bias is not None:
                slots[f"{beside}.{name}.bias"] = WeightSlot(
                    shape=(size,), part=(part,), store=self.bias[rows].copy_
                )
            start = rows.stop
        return slots


class QKVLinear(MergedLinear):
    """The query, key and value projections as one: [..., (H + 2 K) * D] of this rank's heads.

    A rank holds whole heads; `CausalLM` has refused rank counts that don't divide them. Where ranks
    are more than KV heads, several hold the same one.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        context: ModelContext,
    ) -> None:
        parts = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        kv = context.shard.of_heads(num_kv_heads)
        shards = {"q_proj": context.shard, "k_proj": kv, "v_proj": kv}
        super().__init__(name, hidden_size, parts, bias=bias, context=context, shards=shards)


class RowParallelLinear(Layer):
    """A matrix whose inputs are split over ranks; the ranks' results are summed by
    `context.all_reduce`."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.shape, self.shard = (out_features, in_features), context.shard
        self.all_reduce = context.all_reduce
        self.method = context.linear_method_factory(name)
        self.method.create(
            self.shard.split(in_features, name),
            out_features,
            dtype=context.stored_dtype,
            device=context.device,
        )
        self.bias = (
            empty_parameter((out_features,), context.dtype, context.device) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Why: the bias belongs to the sum, so only one rank adds it.
        bias = self.bias if self.shard.rank == 0 else None
        return self.all_reduce(self.method.apply(x, bias))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        rows, columns = slice(0, self.shape[0]), self.shard.slice(self.shape[1], path)
        slots = {
            f"{path}.weight": self.method.weight_slot(
                path, shape=self.shape, part=(slice(None), columns), rows=rows
            )
        }
        if self.bias is not None:
            slots[f"{path}.bias"] = WeightSlot(shape=self.shape[:1], store=self.bias.copy_)
        return slots
