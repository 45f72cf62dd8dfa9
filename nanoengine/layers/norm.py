"""Norms over the hidden size and of heads: the weights, and how checkpoints name them.

The arithmetic of RMSNorm is `Kernels.rms_norm`; where a weight's dtype is wider than the model's,
it is multiplied before rounding.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); Ba et al.,
"Layer Normalization" (arXiv 1607.06450).

Legend: T tokens, N size of a row, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from functools import cached_property
from typing import overload

import torch
import torch.nn.functional as F

from nanoengine.attention.rotate import HeadNormWeights
from nanoengine.checkpoint.plan import NormKind
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.kernels import empty_parameter, ordered
from nanoengine.layers.layer import Layer, ModelContext


def norm_dtype(kind: NormKind, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm's weight: float32 or wider where the norm is rounded behind it."""
    return dtype if kind == "rms" else torch.promote_types(dtype, torch.float32)


def weight_of(kind: NormKind, stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The factor that a stored weight means: a "centered" one is how far it is from 1.

    Why `dtype`, the one it is kept in: 1 + weight has more digits than 16 bits hold.
    """
    return stored.to(dtype) + 1 if kind == "centered" else stored


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension."""

    def __init__(
        self, size: int, eps: float, *, context: ModelContext, kind: NormKind = "rms"
    ) -> None:
        super().__init__()
        self.size, self.eps, self.kernels, self.kind = size, eps, context.kernels, kind
        self.weight = empty_parameter((size,), norm_dtype(kind, context.dtype), context.device)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x, or with a residual (the norm of x + residual, x + residual).

        The pair is what a pre-norm decoder needs at each norm, so the sum lives in one place.
        """
        if residual is None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        def store(weight: torch.Tensor) -> None:
            self.weight.copy_(weight_of(self.kind, weight, self.weight.dtype))

        return {f"{path}.weight": WeightSlot(shape=(self.size,), store=store)}


class LayerNorm(Layer):
    """(x - mean(x)) / std(x) * weight, plus a bias where the checkpoint has one; in plain torch."""

    def __init__(self, size: int, eps: float, *, bias: bool, context: ModelContext) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        dtype = norm_dtype("layer", context.dtype)
        self.weight = empty_parameter((size,), dtype, context.device)
        self.bias = empty_parameter((size,), dtype, context.device) if bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm.forward`."""
        total = x if residual is None else x + residual
        wide = total.to(self.weight.dtype)
        normed = F.layer_norm(wide, (self.size,), self.weight, self.bias, self.eps).to(x.dtype)
        return normed if residual is None else (normed, total)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        tensors = {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        return {
            f"{path}.{name}": WeightSlot(shape=(self.size,), store=tensor.copy_)
            for name, tensor in tensors.items()
        }


def make_norm(
    kind: NormKind, size: int, eps: float, *, bias: bool, context: ModelContext
) -> RMSNorm | LayerNorm:
    """The norm over the hidden size that a family has."""
    if kind == "layer":
        return LayerNorm(size, eps, bias=bias, context=context)
    return RMSNorm(size, eps, context=context, kind=kind)


class HeadNorm(Layer):
    """The weights of the norm of each query and key head, which the attention backend applies.

    One for all query and one for all key heads, `q_norm` and `k_norm` beside this module in the
    checkpoint, kept repeated for every head: [H + K, D].

    Args:
        order: of a head's dimensions, [D], as `QKVLinear` has them; None: the checkpoint's.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        kind: NormKind = "rms",
        order: torch.Tensor | None = None,
        *,
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = num_heads, head_dim, eps
        self.kind, self.order = kind, order
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = empty_parameter(shape, norm_dtype(kind, context.dtype), context.device)

    @cached_property
    def weights(self) -> HeadNormWeights:
        return HeadNormWeights(weight=self.weight, eps=self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D] -> the same, each head normed, where no backend does it."""
        normed = F.rms_norm(x.to(self.weight.dtype), (self.head_dim,), None, self.eps)
        return (normed * self.weight).to(x.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside, heads = path.rpartition(".")[0], self.num_heads
        return {
            f"{beside}.q_norm.weight": self._slot(self.weight[:heads]),
            f"{beside}.k_norm.weight": self._slot(self.weight[heads:]),
        }

    def _slot(self, rows: torch.Tensor) -> WeightSlot:
        def store(weight: torch.Tensor) -> None:
            factors = weight_of(self.kind, weight, rows.dtype)
            rows.copy_(ordered(factors, self.order))

        return WeightSlot(shape=(self.head_dim,), store=store)


class WidthNorm(Layer):
    """RMSNorm over all query heads together, and over all key heads: `q_norm` and `k_norm` beside
    this module in the checkpoint, [H * D] and [K * D] of all ranks.

    Source: OLMo 2 (arXiv 2501.00656), section 3.3.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        kind: NormKind,
        order: torch.Tensor | None,
        *,
        context: ModelContext,
    ) -> None:
        """`num_heads` and `num_kv_heads` are those of all ranks."""
        super().__init__()
        self.ranks, self.all_reduce = context.shard.world_size, context.all_reduce
        self.eps, self.head_dim, self.order = eps, head_dim, order
        self.heads = {"q_norm": num_heads, "k_norm": num_kv_heads}
        self.shards = [context.shard.of_heads(heads) for heads in self.heads.values()]
        self.counts = [
            shard.split(heads)
            for shard, heads in zip(self.shards, self.heads.values(), strict=True)
        ]
        dtype = norm_dtype(kind, context.dtype)
        self.weight = empty_parameter((sum(self.counts), head_dim), dtype, context.device)

    @cached_property
    def weights(self) -> HeadNormWeights:
        """What backends norm with, where one rank has all heads."""
        together = self.counts[0], self.counts[1]
        return HeadNormWeights(weight=self.weight, eps=self.eps, together=together)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, H + 2 K, D] -> the same, value heads as they were; for heads split over ranks."""
        q, k, v = heads.split((*self.counts, self.counts[1]), dim=1)
        weights = self.weight.split(self.counts)
        return torch.cat((self._normed(q, weights[0]), self._normed(k, weights[1]), v), dim=1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = self.all_reduce(wide.square().sum((1, 2), keepdim=True))
        # Why it holds for heads that several ranks share: they count as often in both.
        size = weight.numel() * self.ranks
        normed = (wide * torch.rsqrt(total / size + self.eps)).to(weight.dtype)
        return (normed * weight).to(x.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside, slots = path.rpartition(".")[0], {}
        parts = self.weight.split(self.counts)
        for (name, heads), shard, rows in zip(self.heads.items(), self.shards, parts, strict=True):
            size = heads * self.head_dim

            def store(weight: torch.Tensor, rows: torch.Tensor = rows) -> None:
                by_head = weight.view(rows.shape)
                rows.copy_(by_head if self.order is None else by_head[:, self.order])

            slots[f"{beside}.{name}.weight"] = WeightSlot(
                shape=(size,), part=(shard.slice(size, name),), store=store
            )
        return slots
