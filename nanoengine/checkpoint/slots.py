"""WeightSlot: the destination of one tensor of a checkpoint. MatrixPart: the part of a matrix that
a layer holds. TensorNames: our names -> the checkpoint's.

This is the contract between layers and the weight loader. A layer that owns parameters offers
`weight_slots(path)`: one slot per checkpoint tensor it is made of. A fused layer simply offers
several, so only the layer knows about its fusion, and the loader needs no list of special cases: a
tensor without a slot is unexpected, a slot without a tensor is missing.

Our modules have Llama's names. A family has other names for some parts
(`ModelConfig.tensor_names`), and a checkpoint may put the whole model under another prefix: a text
part next to a vision tower, or a model without a head. The loader uses `TensorNames`, so all errors
have the names in the files.
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
        store: stores that part, from any device.
        pieces: the same weights under other names; used if the checkpoint lacks this one.
        pieces_only: a checkpoint must have the pieces; only dummy weights use this slot.
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
        shape: of the checkpoint's matrix, [outputs, inputs].
        part: the slice of it that this rank holds; () is all of it.
        first: the row of the layer's matrix at which it begins.
        order: [rows] int64, the order of the part's rows; None: unchanged.
    """

    shape: tuple[int, int]
    part: tuple[slice, ...] = ()
    first: int = 0
    order: torch.Tensor | None = None


def ordered(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows in this order; None: unchanged."""
    return rows if order is None else rows[order]


@runtime_checkable
class OwnsWeights(Protocol):
    """A module with parameters of its own."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The slots of the checkpoint tensors it is made of, by full name; `path` is its name in
        the model."""


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
"""Prefix that a checkpoint has for our "model." -> its prefix for "lm_head."."""


class TensorNames:
    """Maps our names to the checkpoint's: `names("model.norm.weight")`.

    Args:
        parts: see `ModelConfig.tensor_names`.
        stored: the names in the checkpoint, which determine the prefix; without an embedding among
            them it is "model.".
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
