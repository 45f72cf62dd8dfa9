"""Linear layers: checkpoint matrices fused into one multiplication and split over ranks.

    MergedLinear, QKVLinear   outputs split   each rank holds some rows of every fused matrix
    RowParallelLinear         inputs split    each rank holds some columns; results are summed

How a weight is stored and multiplied is a `LinearMethod`, the door of quantization. Used by the
models; knows neither checkpoint files nor attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.layers.layer import Layer
from nanoengine.layers.weights import WeightSlot, empty_parameter

if TYPE_CHECKING:
    from nanoengine.layers.context import ModelContext
    from nanoengine.layers.ops import LayerOps


class LinearMethod(nn.Module, ABC):
    """How one linear layer's weight is stored and multiplied. One instance serves one layer.

    A subclass registers its tensors as parameters or buffers, so that they are counted and found.
    """

    def __init__(self, name: str) -> None:
        """`name` is the layer's full name, so that a factory may choose by it."""
        super().__init__()

    @abstractmethod
    def create(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Allocates storage for this rank's [out_features, in_features].

        A given `weight` belongs to another layer (a tied embedding), which also loads it: then
        `load` is never called, and a method that stores weights in another form converts it in
        `finish`.
        """

    @abstractmethod
    def load(self, weight: torch.Tensor, rows: slice) -> None:
        """Stores [rows, in_features] of a checkpoint, of any floating dtype."""

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], the dtype of x."""

    def apply_gated(self, x: torch.Tensor, activation: str, ops: LayerOps) -> torch.Tensor:
        """[T, in_features] -> act(gate) * up [T, out_features / 2], where the outputs are gate,
        then up; a method may fuse the two."""
        return ops.gate(self.apply(x, None), activation)

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest of `apply(x, None)` in each row of x [L, in_features] where the method finds
        it without computing all: index [L] int64, the lowest among equals, and value [L], NaN if
        any is. None: compute all."""
        return None

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a weight that was given to `create`, [T] -> [T, in_features]: the lookup of the
        embedding that it is tied to."""

    def weight_slot(
        self, name: str, *, shape: tuple[int, int], part: tuple[slice, ...], rows: slice
    ) -> WeightSlot:
        """The slot of the checkpoint's matrix `name`, of which `part` goes to `rows` here.

        A method that reads a matrix stored in another form overrides this.
        """
        return WeightSlot(shape=shape, part=part, store=lambda weight: self.load(weight, rows))

    def finish(self) -> None:
        """Called once when all weights are loaded; a method may repack them here."""


class UnquantizedLinear(LinearMethod):
    """A weight of the model's dtype."""

    def create(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight: torch.Tensor | None = None,
    ) -> None:
        if weight is None:
            weight = empty_parameter((out_features, in_features), dtype, device)
        self.weight = weight

    def load(self, weight: torch.Tensor, rows: slice) -> None:
        self.weight[rows].copy_(weight)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class MergedLinear(Layer):
    """Several matrices of the same input as one, e.g. gate_proj and up_proj; outputs split over
    ranks.

    The output is [..., sum of this rank's parts], part after part. `parts` maps each matrix's name
    beside this layer in the checkpoint to its full number of outputs.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.in_features, self.parts, self.shard = in_features, dict(parts), context.shard
        out_features = sum(self.shard.split(size, part) for part, size in parts.items())
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
            part = self.shard.slice(size, name)
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

    A rank holds whole heads; `CausalLM` has refused rank counts that don't divide them.
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
        super().__init__(name, hidden_size, parts, bias=bias, context=context)


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
