"""What each name of vLLM's offline API means here, where it is not simply the same.

vllm.json has the names by class: vLLM's default, and what the name means, by one of these keys.

    "alias"      another name of a field here
    "no effect"  accepted, which a warning says; values that "only" lacks are refused
    "refused"    an error that says why; None, False, or what "unless" has, ask for nothing
    "values"     a field here: pairs of a value of vLLM's and ours; without ours our default.
                 "reported": the value asks for something that has no effect here

`translate` applies a table to a user's options, and `checks.checked` calls it only where one of
them is not a field or has a value of a wrong type. So a name in a table must not be a field, and a
value in "values" must not be of the field's type. A name that is neither in a table nor a field is
refused by `checked`. docs/moving_from_vllm.md shows the tables to users; a test holds the two
together. Source: vLLM's `LLM`, `EngineArgs`, `SamplingParams` and `BeamSearchParams`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.settings.checks import plain, shown

Table = Mapping[str, Mapping[str, Any]]

FILE = Path(__file__).with_name("vllm.json")
NAMES: dict[str, Table] = json.loads(FILE.read_text(encoding="utf-8"))

LLM_OPTIONS, SAMPLING_PARAMS = (
    {name: entry for name, entry in NAMES[owner].items() if entry.keys() - {"default"}}
    for owner in ("LLM", "SamplingParams")
)
"""Those that have not simply the name and the values of a field here."""

LLM_METHODS = NAMES["methods"]
"""Attributes of vLLM's `LLM` that this one lacks, and why or what to write instead."""


def translate(options: dict[str, Any], table: Table, error: type[Exception]) -> dict[str, Any]:
    """A user's options with our names and values; says in one warning what has no effect.

    Raises:
        error: an option that is refused, or given together with its alias.
    """
    found: dict[str, Any] = {}
    idle: list[str] = []
    for name, value in options.items():
        meaning, value = table.get(name, {}), plain(value)
        match meaning:
            case {"alias": field}:
                if field in options:
                    raise error(f"{name} is another name of {field}: give one of them")
                found[field] = value
            case {"values": pairs}:
                same = (to for one, *to in pairs if _equal(one, value) or one == shown(value))
                ours = next(same, [value])
                if ours:
                    found[name] = ours[0]
                if "reported" in meaning and ours != [value]:
                    idle.append(f"{name}={shown(value)}")
            case {"no effect": why}:
                if "only" in meaning and _asked(value) not in meaning["only"]:
                    raise error(f"{name}={shown(value)} can't be obeyed: {why}")
                idle.append(f"{name} ({why})")
            case {"refused": why}:
                if not any(_equal(one, value) for one in meaning.get("unless", (None, False))):
                    raise error(f"{name}={shown(value)} can't be obeyed: {why}")
            case _:
                found[name] = value
    if idle:
        warn_idle(", ".join(idle))
    return found


def warn_idle(what: str) -> None:
    """Warns of options without effect, at the first line outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("nanoengine."):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"no effect in nanoengine: {what}", stacklevel=level)


def _equal(one: object, value: object) -> bool:
    return type(one) is type(value) and one == value


def _asked(value: Any) -> Any:
    """A dict without counts of 0, which ask for nothing; any other value as it is."""
    if isinstance(value, Mapping):
        return {name: one for name, one in value.items() if one != 0}
    return value
