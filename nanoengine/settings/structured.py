"""StructuredOutputs: the required format of an output. Any file may import this one.

    json          '{"type": "object", ...}' or the same as a dict: JSON that matches a schema
    json_object   any JSON object
    regex         text that matches as a whole
    choice        one of some strings
    grammar       text of a context-free grammar

The form is checked when it is created. Whether it compiles is checked with the prompt
(`features/structured.py`). The names are the same as in vLLM's `StructuredOutputsParams`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.settings.checks import checked, quoted

KINDS = ("json", "json_object", "regex", "choice", "grammar")

MAX_CHARS = {"json": 131_072, "regex": 16_384, "choice": 1_000_000, "grammar": 32_768}
"""Maximum number of characters per kind; a choice counts one more per string. Why: the compiler's
time and memory grow quadratically, and its stack grows, too."""


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    from nanoengine.settings.vllm_names import NAMES, translate

    return translate(options, NAMES["StructuredOutputsParams"], RequestError)


@checked(RequestError, _translate)
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """One output format; exactly one of the first five fields. Equal ones are compiled once.

    Attributes:
        json: a JSON schema, as text or dict; kept as text. Properties are in the schema's order.
        json_object: True: any JSON object.
        regex: a regular expression that the whole output matches.
        choice: the output is one of these strings.
        grammar: a grammar, in the notation of Lark or GBNF.
        whitespace: allow blanks and newlines between JSON's tokens. Without them JSON is compact;
            with them, a small model may fill its output with blanks.

    Raises:
        RequestError: none or several are formats; a schema that is not a JSON object; a text above
            MAX_CHARS.

    >>> StructuredOutputs(json={"type": "integer"}).json
    '{"type": "integer"}'
    >>> StructuredOutputs(regex="a+", choice=["a"])
    Traceback (most recent call last):
    nanoengine.errors.RequestError: structured_outputs must have exactly one of json, json_object, \
regex, choice, grammar, got regex, choice
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    whitespace: bool = False

    def __post_init__(self) -> None:
        formats = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(formats) != 1:
            allowed, got = ", ".join(KINDS), ", ".join(formats) or "none of them"
            raise RequestError(f"structured_outputs must have exactly one of {allowed}, got {got}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None and not self.choice:
            raise RequestError("choice must contain at least one string")
        _require_short(formats[0], getattr(self, formats[0]))
        if self.whitespace and self.schema is None:
            raise RequestError(f"whitespace needs json or json_object, got {formats[0]}")

    @property
    def schema(self) -> str | None:
        """The JSON schema, with a default for any object; None if the output is not JSON."""
        return '{"type": "object"}' if self.json_object else self.json  # type: ignore[return-value]


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


def _require_short(kind: str, value: Any) -> None:
    size = sum(map(len, value), len(value)) if kind == "choice" else len(str(value))
    if size > MAX_CHARS.get(kind, size):
        hint = "; for a list of strings, use choice" if kind == "regex" else ""
        raise RequestError(
            f"{kind} must have at most {MAX_CHARS[kind]:,} characters, got {size:,}{hint}"
        )


def _schema_text(schema: str | dict[str, Any]) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json must be a schema, got {quoted(schema)}: {error}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"json must be a schema that is a JSON object, got {quoted(schema)}")
    return text
