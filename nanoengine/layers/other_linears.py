"""Linear layers whose checkpoints store rows otherwise: fused already, or heads in another order.

Called by `models/variants.py` and `models/states.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.kernels import ordered
from nanoengine.layers.layer import ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear


class OneTensor(MergedLinear):
    """Matrices that the checkpoint holds as one tensor, of this layer's own name."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.row_order(name, len(rows))))
            first += size
        picked = torch.cat(found)
        return self.slots_of(path, first, slice(0, first), slice(0, len(picked)), picked)

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """Which of the `num_rows` outputs that this rank has of a matrix comes first, second, ...:
        [num_rows] int64; None: they stay in the checkpoint's order."""
        return None


class OtherQKV(QKVLinear):
    """The query, key and value projections, with the dimensions of heads in another order.

    Args:
        head_order: how the dimensions of a query or key head are ordered here, [D]; see
            `other_rotary.head_order`. None: as in the checkpoint.
        gated: the checkpoint holds a gate behind each query head; here all gates come first, before
            the queries: [..., (2 H + 2 K) * D].
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        head_order: torch.Tensor | None,
        gated: bool,
        context: ModelContext,
        **options: Any,
    ) -> None:
        super().__init__(
            name,
            hidden_size,
            num_heads=num_heads * (1 + gated),
            head_dim=head_dim,
            context=context,
            **options,
        )
        self.head_order, self.head_dim, self.gated = head_order, head_dim, gated

    def slots_of(
        self, name: str, size: int, part: slice, rows: slice, order: torch.Tensor | None = None
    ) -> dict[str, WeightSlot]:
        if order is None:
            order = self.row_order(name.rpartition(".")[2], rows.stop - rows.start)
        return super().slots_of(name, size, part, rows, order)

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """As `OneTensor.row_order`."""
        gated, order = self.gated and name == "q_proj", self.head_order
        if name == "v_proj" or (order is None and not gated):
            return None
        heads = torch.arange(num_rows).view(-1, self.head_dim)
        queries = heads[::2] if gated else heads
        queries = queries if order is None else queries[:, order]
        return torch.cat((heads[1::2], queries) if gated else (queries,)).flatten()


class OneTensorQKV(OtherQKV, OneTensor):
    """Both at once."""
