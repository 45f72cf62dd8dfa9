"""RMSNorm, over the hidden size and over each head: the weights, and how checkpoints name them.

The arithmetic is `LayerOps.rms_norm`; where a weight's dtype is wider than the model's, it is
multiplied before rounding.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import overload

import torch

from nanoengine.attention.rotate import HeadNormWeights
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.context import ModelContext
from nanoengine.layers.layer import Layer, empty_parameter


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, context: ModelContext) -> None:
        super().__init__()
        self.size, self.eps, self.ops = size, eps, context.ops
        self.weight = empty_parameter((size,), context.dtype, context.device)

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
            return self.ops.rms_norm(x, self.weight, self.eps)
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return {f"{path}.weight": WeightSlot(shape=(self.size,), store=self.weight.copy_)}


class HeadNorm(Layer):
    """The weights of the norm of each query and key head, which the attention backend applies.

    One for all query and one for all key heads, `q_norm` and `k_norm` beside this module in the
    checkpoint, kept repeated for every head: [H + K, D].
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, context: ModelContext
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = num_heads, head_dim, eps
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = empty_parameter(shape, context.dtype, context.device)

    @cached_property
    def weights(self) -> HeadNormWeights:
        return HeadNormWeights(weight=self.weight, eps=self.eps)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside, shape = path.rpartition(".")[0], (self.head_dim,)
        q, k = self.weight[: self.num_heads], self.weight[self.num_heads :]
        return {
            f"{beside}.q_norm.weight": WeightSlot(shape=shape, store=q.copy_),
            f"{beside}.k_norm.weight": WeightSlot(shape=shape, store=k.copy_),
        }


class CenteredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight): the checkpoint stores how far the factor is from 1.

    The factor is kept in float32 or wider, and multiplied before the result is rounded to the
    model's dtype, as the checkpoints' own code does.
    """

    def __init__(self, size: int, eps: float, *, context: ModelContext) -> None:
        super().__init__(size, eps, context=context)
        self.weight = empty_parameter((size,), wide(context.dtype), context.device)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slot = WeightSlot(
            shape=(self.size,), store=lambda weight: self.weight.copy_(weight).add_(1)
        )
        return {f"{path}.weight": slot}


class CenteredHeadNorm(HeadNorm):
    """HeadNorm with factors of 1 + weight, kept as in `CenteredRMSNorm`."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, context: ModelContext
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, eps, context=context)
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = empty_parameter(shape, wide(context.dtype), context.device)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        slots = super().weight_slots(path)

        def centered(store: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
            # Why float32 first: 1 + weight has more digits than 16 bits hold.
            return lambda weight: store(weight.to(self.weight.dtype) + 1)

        return {name: replace(slot, store=centered(slot.store)) for name, slot in slots.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)
