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
from nanoengine.layers.kernels import Kernels, empty_parameter, ordered
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.shard import Shard


class MergedLinear(Layer):
    """Several matrices of the same input as one, e.g. gate_proj and up_proj; outputs split over
    ranks.

    The output is [..., sum of this rank's parts], part after part. `parts` maps the name of each
    matrix, beside this layer in the checkpoint, to its number of outputs over all ranks. `shards`
    names the matrices that are split in another way than by rank, each with its Shard.

    Args:
        merged: the checkpoint holds them as one tensor, of this layer's own name.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        merged: bool = False,
        context: ModelContext,
        shards: Mapping[str, Shard] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.shard = in_features, dict(parts), context.shard
        self.merged = merged
        self.shards = shards or dict.fromkeys(parts, self.shard)
        out_features = sum(self.shards[part].split(size, part) for part, size in parts.items())
        self.method = context.kernels.linear(name)
        self.method.create(
            in_features, out_features, dtype=context.stored_dtype, device=context.device
        )
        self.bias = (
            empty_parameter((out_features,), context.dtype, context.device) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(x, self.bias)

    def gated(self, x: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
        """act(first part) * second part, of two parts: [T, in_features] -> [T, I]."""
        if self.bias is not None:
            return kernels.gate(self.method.apply(x, self.bias), activation)
        return self.method.apply_gated(x, activation, kernels)

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Which of the `num_rows` outputs that this rank has of a matrix comes first, second, ...:
        [num_rows] int64; None: they stay in the checkpoint's order."""
        return None

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside = path.rpartition(".")[0]
        if self.merged:
            rows = slice(0, sum(self.shards[part].split(size) for part, size in self.parts.items()))
            whole = sum(self.parts.values())
            return self._slots(path, whole, slice(0, whole), rows, self._merged_order())
        slots, start = {}, 0
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = slice(start, start + part.stop - part.start)
            order = self.row_order(name, rows.stop - rows.start)
            slots |= self._slots(f"{beside}.{name}", size, part, rows, order)
            start = rows.stop
        return slots

    def _merged_order(self) -> torch.Tensor:
        """Which rows of the one tensor this rank has: a part of each matrix."""
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.row_order(name, len(rows))))
            first += size
        return torch.cat(found)

    def _slots(
        self, name: str, size: int, part: slice, rows: slice, order: torch.Tensor | None
    ) -> dict[str, WeightSlot]:
        """Slots of one tensor of `size` outputs, of which `part` goes to `rows`, and its bias."""
        slots = {
            f"{name}.weight": self.method.weight_slot(
                name, shape=(size, self.in_features), part=(part,), rows=rows, order=order
            )
        }
        if self.bias is not None:
            store = self.bias[rows].copy_
            slots[f"{name}.bias"] = WeightSlot(
                shape=(size,), part=(part,), store=lambda bias: store(ordered(bias, order))
            )
        return slots


class QKVLinear(MergedLinear):
    """The query, key and value projections as one: [..., (H + 2 K) * D] of this rank's heads.

    A rank holds whole heads; `CausalLM` has refused rank counts that don't divide them. Where ranks
    are more than KV heads, several hold the same one.

    Args:
        head_order: how the dimensions of a query or key head are ordered here, [D]; see
            `rotary.head_order`. None: as in the checkpoint.
        gated: the checkpoint holds a gate behind each query head; here all gates come first, before
            the queries: [..., (2 H + 2 K) * D].
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
        merged: bool = False,
        head_order: torch.Tensor | None = None,
        gated: bool = False,
    ) -> None:
        parts = {
            "q_proj": num_heads * head_dim * (1 + gated),
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        kv = context.shard.of_heads(num_kv_heads)
        shards = {"q_proj": context.shard, "k_proj": kv, "v_proj": kv}
        super().__init__(
            name, hidden_size, parts, bias=bias, merged=merged, context=context, shards=shards
        )
        self.head_order, self.head_dim, self.gated = head_order, head_dim, gated

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        gated, order = self.gated and name == "q_proj", self.head_order
        if name == "v_proj" or (order is None and not gated):
            return None
        heads = torch.arange(num_rows).view(-1, self.head_dim)
        queries = heads[::2] if gated else heads
        queries = queries if order is None else queries[:, order]
        return torch.cat((heads[1::2], queries) if gated else (queries,)).flatten()


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
        self.method = context.kernels.linear(name)
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
