"""WeightSlot: where one tensor of a checkpoint goes.

The contract between layers and the weight loader. A layer that owns parameters offers
`weight_slots(path)`: a slot for every checkpoint tensor it is made of. A fused layer simply offers
several, so packed names are known where they are packed, and the loader needs no list of special
cases: what no slot asks for is unexpected, what no file holds is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One tensor of the checkpoint.

    Attributes:
        shape: of the whole tensor, as every checkpoint stores it.
        part: the slice of it that this rank holds; () is all of it. Only this part is read.
        store: takes that part, on any device.
        pieces: the same weights under other names; used if the checkpoint lacks this one.
        pieces_only: a checkpoint must hold the pieces; this one is for weights that are made up.
        dtypes: of the stored tensor; () is any floating one.
        absent: makes the tensor optional; called before any is read if the checkpoint lacks it.
    """

    shape: tuple[int, ...]
    store: Callable[[torch.Tensor], object]
    part: tuple[slice, ...] = ()
    pieces: Mapping[str, WeightSlot] = field(default_factory=dict)
    pieces_only: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    absent: Callable[[], object] | None = None


@runtime_checkable
class OwnsWeights(Protocol):
    """A module with parameters of its own."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors it is made of, by their full names; `path` is its own name in the
        model."""
