"""WeightSlot: the destination of one tensor of a checkpoint. MatrixPart: the part of a matrix that
a layer stores. TensorNames: our names -> the checkpoint's.

This is the interface between layers and the weight loader. A layer with parameters implements
`weight_slots(path)`, which returns one slot per checkpoint tensor that it loads. A fused layer
returns several, so only the layer knows how it is fused, and the loader needs no special cases: a
tensor without a slot is unexpected, and a slot without a tensor is missing.

Our modules have Llama's names. A family has other names for some parts
(`ModelConfig.tensor_names`), and a checkpoint may have the whole model under another prefix, for
example next to a vision tower or without a language head. The loader uses `TensorNames`, so all
errors have the names in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """The destination of one tensor of the checkpoint.

    Attributes:
        shape: shape of the whole tensor, as in the checkpoint.
        part: the slice that this rank stores; () is the whole tensor. Only this slice is read.
        store: stores the slice, which may be on any device.
        pieces: slots of the same weights as several tensors with other names; used if the
            checkpoint lacks this tensor.
        pieces_only: a checkpoint must have the pieces; only dummy weights use this slot.
        dtypes: allowed dtypes of the tensor in the checkpoint; () is any floating-point dtype.
        on_missing: makes the tensor optional; if it is missing, called before tensors are read.
    """

    shape: tuple[int, ...]
    store: Callable[[torch.Tensor], object]
    part: tuple[slice, ...] = ()
    pieces: Mapping[str, WeightSlot] = field(default_factory=dict)
    pieces_only: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    on_missing: Callable[[], object] | None = None


def full_slots(path: str, **tensors: torch.Tensor | None) -> dict[str, WeightSlot]:
    """Slots of tensors of the module `path` that are not sharded over ranks; None is skipped."""
    return {
        f"{path}.{name}": WeightSlot(shape=tuple(tensor.shape), store=tensor.copy_)
        for name, tensor in tensors.items()
        if tensor is not None
    }


class MatrixPart(NamedTuple):
    """A part of a matrix in the checkpoint, and its position in the matrix of a layer.

    Attributes:
        shape: shape of the matrix in the checkpoint, [outputs, inputs].
        part: the slice that this rank stores; () is the whole matrix.
        first: the first row of the part in the layer's matrix.
        order: [rows] int64, the order of the part's rows in the layer; None: unchanged.
    """

    shape: tuple[int, int]
    part: tuple[slice, ...] = ()
    first: int = 0
    order: torch.Tensor | None = None


def ordered(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Returns the rows in this order (None: unchanged)."""
    return rows if order is None else rows[order]


@runtime_checkable
class OwnsWeights(Protocol):
    """A module that has parameters itself, not only in submodules."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The slots of the checkpoint tensors that the module loads, by full name. `path` is the
        name of the module in the model."""


PREFIXES = dict.fromkeys(
    ("model.", "", "model.language_model.", "model.text_model.", "backbone."), "lm_head."
) | {"language_model.model.": "language_model.lm_head."}
"""Prefix in a checkpoint for our "model." -> its prefix for our "lm_head."."""


class TensorNames:
    """Maps our tensor names to the checkpoint's: `names("model.norm.weight")`.

    Args:
        parts: see `ModelConfig.tensor_names`.
        stored: the names in the checkpoint; the name of the embedding determines the prefix.
            Without an embedding the prefix is "model.".
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
        if name.startswith("mtp."):
            return name
        if name.startswith("lm_head."):
            return PREFIXES[self._prefix] + name.removeprefix("lm_head.")
        return self._prefix + name.removeprefix("model.")

    def of(self, slots: Mapping[str, WeightSlot]) -> dict[str, WeightSlot]:
        """The slots and their pieces, by the names in the checkpoint."""
        return {
            self(name): replace(slot, pieces=self.of(slot.pieces)) if slot.pieces else slot
            for name, slot in slots.items()
        }
