"""A value other than the default for each field of SamplingParams with simple values."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from nanoengine.settings.params import SamplingParams

SAMPLES: dict[Any, Any] = {
    int: 2, float: 0.5, tuple[str, ...]: ("a", "b"), tuple[int, ...]: (3, 4),
    dict[int, float]: {5: 1.5},
}  # fmt: skip
OBJECTS = {"structured_outputs", "logits_processors", "extra_args"}


def sample_values() -> dict[str, Any]:
    """Returns name -> value, by the type of each field; a new field needs no change here."""
    values = {}
    for field in dataclasses.fields(SamplingParams):
        if field.name not in OBJECTS:
            kinds = typing.get_args(typing.get_type_hints(SamplingParams)[field.name] | None)
            kind = next((kind for kind in SAMPLES if kind in kinds), bool)
            values[field.name] = SAMPLES.get(kind, not field.default)
    return values
