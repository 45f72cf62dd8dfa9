"""LinearMethod: how one linear layer's weight is stored and multiplied; the door of quantization.

`linear.py` builds layers on it, and `choose.py` says which method a layer gets. `UnquantizedLinear`
is the readable form of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.layer import empty_parameter
from nanoengine.layers.ops import LayerOps

Masks = Callable[[], np.ndarray | None]


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

    def argmax(
        self,
        x: torch.Tensor,
        softcap: float | None = None,
        masks: Masks | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest of `apply(x, None)` in each row of x [L, in_features] where the method finds
        it without computing all: index [L] int64, the lowest among equals, and value [L], NaN if
        any is. None: compute all.

        Args:
            softcap: bends outputs afterwards, which may make two of them equal by rounding; where
                it may have, all are to be computed.
            masks: gives the outputs that count, a bit each (`kernels/cpu_screen.py`), or None if
                they are not bits; asked only where they can be used.
        """
        return None

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a weight that was given to `create`, [T] -> [T, in_features]: the lookup of the
        embedding that it is tied to."""

    def weight_slot(
        self,
        name: str,
        *,
        shape: tuple[int, int],
        part: tuple[slice, ...],
        rows: slice,
        order: torch.Tensor | None = None,
    ) -> WeightSlot:
        """The slot of the checkpoint's matrix `name`, of which `part` goes to `rows` here; `order`
        [rows] int64 says which row of the part each of them is, None: they follow each other.

        A method that reads a matrix stored in another form overrides this.
        """
        return WeightSlot(
            shape=shape, part=part, store=lambda weight: self.load(ordered(weight, order), rows)
        )

    def finish(self) -> None:
        """Called once when all weights are loaded; a method may repack them here."""


def ordered(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The rows in this order; None: as they are."""
    return rows if order is None else rows[order]


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
