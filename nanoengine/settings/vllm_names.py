"""The meaning of vLLM's names in nanoengine, where it is not exactly the same.

vllm.json lists the names per class, with vLLM's default and the meaning under one of these keys.

    "alias"      another name of a field here
    "no effect"  accepted with a warning; values that "only" does not list raise
    "refused"    an error with the reason; None, False, and values in "unless" are ignored
    "values"     a field here: pairs of a vLLM value and ours; without ours, our default.
                 "reported": warn that the value has no effect here

`translate` applies a table to a user's options. `checks.checked` calls it only if one of them is
not a field or has a value of a wrong type. So a name in a table must not be a field, and a value in
"values" must not have the field's type. `checked` rejects names that are neither in a table nor a
field. docs/moving_from_vllm.md shows the tables to users; a test compares the two.
Source: vLLM's `LLM`, `EngineArgs`, `SamplingParams` and `BeamSearchParams`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.settings.checks import quoted, to_python

Table = Mapping[str, Mapping[str, Any]]

FILE = Path(__file__).with_name("vllm.json")
NAMES: dict[str, Table] = json.loads(FILE.read_text(encoding="utf-8"))

LLM_OPTIONS, SAMPLING_PARAMS = (
    {name: entry for name, entry in NAMES[owner].items() if entry.keys() - {"default"}}
    for owner in ("LLM", "SamplingParams")
)
"""Names that differ from a field here in name or values."""

LLM_METHODS = NAMES["methods"]
"""Attributes of vLLM's `LLM` that this one lacks, with the reason or a replacement."""


def translate(options: dict[str, Any], table: Table, error: type[Exception]) -> dict[str, Any]:
    """A user's options with our names and values; one warning lists those without effect.

    Raises:
        error: an option is not supported, or is given together with its alias.
    """
    found: dict[str, Any] = {}
    no_effect: list[str] = []
    for name, value in options.items():
        meaning, value = table.get(name, {}), to_python(value)
        match meaning:
            case {"alias": field}:
                if field in options:
                    raise error(f"{name} is another name of {field}: set only one of them")
                found[field] = value
            case {"values": pairs}:
                hits = (to for old, *to in pairs if _equal(old, value) or old == quoted(value))
                ours = next(hits, [value])
                if ours:
                    found[name] = ours[0]
                if "reported" in meaning and ours != [value]:
                    no_effect.append(f"{name}={quoted(value)}")
            case {"no effect": why}:
                if "only" in meaning and _nonzero_counts(value) not in meaning["only"]:
                    raise error(f"{name}={quoted(value)} is not supported: {why}")
                no_effect.append(f"{name} ({why})")
            case {"refused": why}:
                if not any(_equal(v, value) for v in meaning.get("unless", (None, False))):
                    raise error(f"{name}={quoted(value)} is not supported: {why}")
            case _:
                found[name] = value
    if no_effect:
        warn_no_effect(", ".join(no_effect))
    return found


def warn_no_effect(what: str) -> None:
    """Warns of options without effect, at the first caller outside this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("nanoengine."):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"no effect in nanoengine: {what}", stacklevel=level)


def _equal(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _nonzero_counts(value: Any) -> Any:
    """A dict without counts of 0, which have no effect; any other value as is."""
    if isinstance(value, Mapping):
        return {name: count for name, count in value.items() if count != 0}
    return value
