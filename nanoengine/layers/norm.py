"""RMSNorm, over the hidden size and over each head.

Statistics are float32 or wider, and the weight is multiplied in the model's dtype after rounding,
as the checkpoints' own code does: tokens stay equal to it. float64 stays float64.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.layers.weights import WeightSlot, empty_parameter

if TYPE_CHECKING:
    from nanoengine.layers.context import ModelContext


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, context: ModelContext) -> None:
        super().__init__()
        self.size, self.eps = size, eps
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
            return self._norm(x)
        residual = x + residual
        return self._norm(residual), residual

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.size,), None, self.eps) * self.weight

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return {f"{path}.weight": WeightSlot(shape=(self.size,), store=self.weight.copy_)}


class HeadNorm(nn.Module):
    """RMSNorm of each query and key head, with one weight for all query and one for all key heads.

    Queries and keys lie side by side in [T, H + K, D] and are normed in one go; the two weights of
    the checkpoint, `q_norm` and `k_norm` beside this module, are kept repeated for every head.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, context: ModelContext
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.eps = num_heads, head_dim, eps
        shape = (num_heads + num_kv_heads, head_dim)
        self.weight = empty_parameter(shape, context.dtype, context.device)

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D] -> [T, H + K, D]."""
        return F.rms_norm(qk, (self.head_dim,), None, self.eps) * self.weight

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside, shape = path.rpartition(".")[0], (self.head_dim,)
        q, k = self.weight[: self.num_heads], self.weight[self.num_heads :]
        return {
            f"{beside}.q_norm.weight": WeightSlot(shape=shape, store=q.copy_),
            f"{beside}.k_norm.weight": WeightSlot(shape=shape, store=k.copy_),
        }
