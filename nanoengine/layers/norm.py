"""RMSNorm, and HeadNorm, the weights of a QK norm.

`Kernels.rms_norm` computes RMSNorm; attention backends apply the QK norm before they store keys.

`norms.py` has RMSNorm with 1 + weight, and QK norms over all heads.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).

Legend: N size of a row, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from functools import partial

import torch

from nanoengine.attention.base import AttentionSpec, HeadNormWeights
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.layer import Layer, ModelContext


class RMSNorm(Layer):
    """x / rms(x) * weight over the last dimension; `dtype` is the weight's, None: the model's."""

    def __init__(
        self, size: int, eps: float, *, context: ModelContext, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps, self.kernels = eps, context.kernels
        self.weight = context.parameter(size, dtype=dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual), x + residual); without a residual (norm(x), x).

        A pre-norm decoder needs both at each norm.
        """
        return self.kernels.rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return {f"{path}.weight": WeightSlot(shape=tuple(self.weight.shape), store=self.store)}

    def store(self, stored: torch.Tensor) -> None:
        """Loads the checkpoint's weight [N]."""
        self.weight.copy_(stored)


class HeadNorm(Layer):
    """The weights of the QK norm per head, which the attention backend applies.

    The checkpoint has one weight for all query heads and one for all key heads, `q_norm` and
    `k_norm` next to this module. They are repeated for every head: [H + K, D].
    """

    def __init__(
        self,
        spec: AttentionSpec,
        eps: float,
        *,
        context: ModelContext,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, shape = spec.num_heads, (spec.num_heads + spec.num_kv_heads, spec.head_dim)
        self.weight = context.parameter(*shape, dtype=dtype)
        self.weights = HeadNormWeights(weight=self.weight, eps=eps)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        parent, parts = path.rpartition(".")[0], self.weight.tensor_split([self.num_heads])
        return {
            f"{parent}.{name}.weight": WeightSlot(
                shape=tuple(rows.shape[1:]), store=partial(self.store, rows)
            )
            for name, rows in zip(("q_norm", "k_norm"), parts, strict=True)
        }

    def store(self, rows: torch.Tensor, stored: torch.Tensor) -> None:
        """Loads the checkpoint's weight [D] for the heads of `rows`."""
        rows.copy_(stored)
