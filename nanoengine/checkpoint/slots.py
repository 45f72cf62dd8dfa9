"""WeightSlot: where one tensor of a checkpoint goes, and MatrixPart, if it is a matrix.
TensorNames: what it is called there.

The contract between layers and the weight loader. A layer that owns parameters offers
`weight_slots(path)`: a slot for every checkpoint tensor it is made of. A fused layer simply offers
several, so packed names are known where they are packed, and the loader needs no list of special
cases: what no slot asks for is unexpected, what no file holds is missing.

Our modules are named as Llama's. A family calls some parts otherwise (`ModelConfig.tensor_names`),
and a checkpoint may put the whole model below another prefix: a text part beside a vision tower, or
a model without a head. The loader goes by `TensorNames`, so all errors name what the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

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


def whole_slots(path: str, **tensors: torch.Tensor | None) -> dict[str, WeightSlot]:
    """Slots of tensors of the module `path` that every rank holds whole; None: there is none."""
    return {
        f"{path}.{name}": WeightSlot(shape=tuple(tensor.shape), store=tensor.copy_)
        for name, tensor in tensors.items()
        if tensor is not None
    }


class MatrixPart(NamedTuple):
    """Which part of a checkpoint's matrix goes where in the matrix of a layer.

    Attributes:
        shape: of the checkpoint's, [outputs, inputs].
        part: the slice of it that this rank holds; () is all of it.
        first: the row of the layer's at which it begins.
        order: [rows] int64, which row of the part comes first, second, ...; None: they follow each
            other.
    """

    shape: tuple[int, int]
    part: tuple[slice, ...] = ()
    first: int = 0
    order: torch.Tensor | None = None


def ordered(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The rows in this order; None: as they are."""
    return rows if order is None else rows[order]


@runtime_checkable
class OwnsWeights(Protocol):
    """A module with parameters of its own."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors it is made of, by their full names; `path` is its own name in the
        model."""


PREFIXES = {
    "model.": "lm_head.",
    "": "lm_head.",
    "model.language_model.": "lm_head.",
    "backbone.": "lm_head.",
    "transformer.": "lm_head.",
    "gpt_neox.": "embed_out.",
    "model.decoder.": "lm_head.",
    "language_model.model.": "language_model.lm_head.",
}
"""What may stand for our "model." -> what stands for "lm_head." beside it."""


class TensorNames:
    """Ours -> the checkpoint's: `names("model.norm.weight")`.

    Args:
        parts: see `ModelConfig.tensor_names`.
        stored: the names in the checkpoint, by which the prefix is found; without an embedding
            among them it is ours.
    """

    def __init__(self, parts: Mapping[str, str], stored: Collection[str] = ()) -> None:
        embedding = parts.get("model.embed_tokens", "model.embed_tokens").removeprefix("model.")
        found = [prefix for prefix in PREFIXES if f"{prefix}{embedding}.weight" in stored]
        self._prefix = (found or ["model."])[0]
        self._parts = parts
        longest_first = sorted(map(re.escape, parts), key=len, reverse=True)
        self._known = re.compile(rf"(?<![^.])({'|'.join(longest_first)})(?![^.])")

    def __call__(self, name: str) -> str:
        if self._parts:
            name = self._known.sub(lambda match: self._parts[match[0]], name)
        if name.startswith("lm_head."):
            return PREFIXES[self._prefix] + name.removeprefix("lm_head.")
        return self._prefix + name.removeprefix("model.")

    def of(self, slots: Mapping[str, WeightSlot]) -> dict[str, WeightSlot]:
        """The slots, and their pieces, by the checkpoint's names."""
        return {
            self(name): replace(slot, pieces=self.of(slot.pieces)) if slot.pieces else slot
            for name, slot in slots.items()
        }
