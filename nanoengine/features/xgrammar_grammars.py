"""Grammars by xgrammar: `grammar_backend="xgrammar"`. No other file imports it.

A schema takes some 25 ms to compile, a mask a few us, because most of it is computed ahead. What
the library does not enforce of JSON Schema it ignores, so `require_enforced` refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from nanoengine.errors import RequestError
from nanoengine.settings.checks import shown
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer


class XGrammar:
    """The library's tables for one tokenizer; a `GrammarLibrary`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        tables = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.backend, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self.compiler = xgrammar.GrammarCompiler(tables, cache_enabled=False)

    def compile(self, asked: StructuredOutputs) -> XGrammarGrammar:
        """The grammar at the start of a text.

        Raises:
            RequestError: it can't be compiled, or a keyword is not enforced.
        """
        try:
            compiled = self._compile(asked)
        except RequestError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RequestError(f"structured_outputs can't be compiled: {error}") from error
        return XGrammarGrammar(xgrammar.GrammarMatcher(compiled), self.eos_token_ids)

    def _compile(self, asked: StructuredOutputs) -> xgrammar.CompiledGrammar:
        if asked.schema is not None:
            require_enforced(json.loads(asked.schema))
            return self.compiler.compile_json_schema(
                asked.schema,
                any_whitespace=asked.whitespace,
                separators=None if asked.whitespace else (",", ":"),
            )
        if asked.regex is not None:
            return self.compiler.compile_regex(asked.regex)
        if asked.choice is not None:
            choices = " | ".join(map(json.dumps, asked.choice))
            return self.compiler.compile_grammar(f"root ::= {choices}")
        return self.compiler.compile_grammar(asked.grammar or "")

    def fill(self, grammars: Sequence[XGrammarGrammar], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        for i, grammar in enumerate(grammars):
            grammar.matcher.fill_next_token_bitmask(masks, i)


ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
ENFORCED: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"format"},
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": set(),
    "null": set(),
}
"""By type: the keywords whose random texts were all valid. Beside them, `$ref`, `anyOf`, `enum` and
`const` stand alone; an enum or const may say its type."""


def require_enforced(schema: Any) -> None:
    """Raises RequestError for what the library would compile and not obey."""
    if not isinstance(schema, dict):
        return
    inner = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    keys = schema.keys() - ANNOTATIONS - inner.keys()
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    alone = keys & {"$ref", "anyOf", "enum", "const"}
    if alone:
        typed = values and isinstance(kind, str) and all(_is_of(kind, one) for one in values)
        wrong = keys - {min(alone)} - ({"type"} if typed else set())
    elif isinstance(kind, str):
        wrong = keys - {"type"} - ENFORCED.get(kind, set())
        wrong |= {"required"} if set(schema.get("required", ())) - schema.get(
            "properties", {}
        ).keys() else set()  # fmt: skip
    else:
        wrong = keys
    if wrong:
        raise RequestError(
            "structured_outputs can't be compiled: xgrammar does not enforce"
            f" {', '.join(sorted(wrong))} here: {shown(schema)}; llguidance may"
        )
    for named in (*inner.values(), schema.get("properties", {})):
        for one in named.values():
            require_enforced(one)
    for one in (
        schema.get("items"),
        schema.get("additionalProperties"),
        *schema.get("prefixItems", ()),
        *schema.get("anyOf", ()),
    ):
        require_enforced(one)


def _is_of(kind: str, value: Any) -> bool:
    types = {"string": str, "integer": int, "number": int | float, "boolean": bool}
    return isinstance(value, types.get(kind, type(None))) and (
        isinstance(value, bool) == (kind == "boolean")
    )


class XGrammarGrammar:
    """A place in a text; a `Grammar`."""

    __slots__ = ("eos_token_ids", "matcher")

    def __init__(self, matcher: xgrammar.GrammarMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self.matcher, self.eos_token_ids = matcher, eos_token_ids

    def accept(self, token_id: int) -> None:
        if token_id not in self.eos_token_ids and not self.matcher.accept_token(token_id):
            raise RequestError(f"structured_outputs: the grammar does not allow token {token_id}")

    def fork(self) -> XGrammarGrammar:
        return XGrammarGrammar(self.matcher.fork(), self.eos_token_ids)
