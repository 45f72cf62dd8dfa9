"""Grammars by llguidance, the library behind `structured_outputs`.

A schema compiles in a few milliseconds, lazily; a mask takes some 10 to 80 us. What the library
does not enforce of JSON Schema it refuses, by keyword. No other file imports it.

It has limits of its own, whose messages are for who knows it inside. What it does not limit is the
text of terminals, each of which is written out where another one names it: ten lines that double
one make gigabytes. `_require_small` counts it before the library is asked.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from nanoengine.errors import RequestError
from nanoengine.features.gbnf import to_lark
from nanoengine.settings.structured import MOST_CHARS, StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer

LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_items_in_row=50_000, verbose_errors=False)
"""Per mask, and as many items in all. Patterns of all letters of Unicode take 20,000 of fuel over
150,000 tokens."""

MEANINGS = {
    r"NoExtensionBias": "no text matches it",
    r"Too many items|Current row has":
        "too many rules apply at one place: have fewer alternatives there, or larger terminals",
    r"too many expressions|too big|fuel exhausted|precomputation|symbols\.len":
        "it is too large: have fewer or simpler patterns",
    r"recursion depth": "it nests too deep, or names itself in a circle",
}  # fmt: skip
"""What parts of the library's messages mean."""

MOST_WRITTEN_OUT = 65_536
"""Characters of all terminals of a grammar, when each stands for each of its names."""

MANY = 4
"""Rows from which on masks are filled by threads."""


class LLGuidance:
    """The library's tables for one tokenizer; a `GrammarLibrary`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        known = json.loads(tokenizer.definition())
        # Why: a padding token, say, was added behind what the model has logits for.
        known["added_tokens"] = [one for one in known["added_tokens"] if one["id"] < vocab_size]
        self.tables = LLTokenizer(
            json.dumps(known), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self.threads = LLExecutor(torch.get_num_threads())

    def compile(self, asked: StructuredOutputs) -> LLGuidanceGrammar:
        """The grammar at the start of a text.

        Raises:
            RequestError: it can't be compiled, or a keyword is not enforced.
        """
        try:
            matcher = LLMatcher(self.tables, _source(asked), log_level=0, limits=LIMITS)
            matcher.compute_bitmask()  # Why: it tells much of what would fail while a row runs.
            error = matcher.get_error()
        except (RecursionError, ValueError) as raised:
            error = str(raised)
        if error:
            raise RequestError(f"structured_outputs can't be compiled: {_meaning(error)}")
        return LLGuidanceGrammar(matcher, self.eos_token_ids)

    def fill(self, grammars: Sequence[LLGuidanceGrammar], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        if len(grammars) < MANY:
            for i, grammar in enumerate(grammars):
                fill_next_token_bitmask(grammar.matcher, masks, i)
        else:
            matchers = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
            fill_next_token_bitmask_par(self.threads, matchers, masks)
        for grammar in grammars:
            grammar.require()  # Why: the mask of one that has failed would end the text.


class LLGuidanceGrammar:
    """A place in a text; a `Grammar`."""

    __slots__ = ("eos_token_ids", "matcher")

    def __init__(self, matcher: LLMatcher, eos_token_ids: tuple[int, ...]) -> None:
        self.matcher, self.eos_token_ids = matcher, eos_token_ids

    def accept(self, token_id: int) -> None:
        if token_id not in self.eos_token_ids and not self.matcher.consume_token(token_id):
            self.require()

    def require(self) -> None:
        """Raises RequestError if the text has left the grammar, or passed the library's limits."""
        if self.matcher.is_error():
            raise RequestError(f"structured_outputs: {_meaning(self.matcher.get_error())}")

    def fork(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.matcher.deep_copy(), self.eos_token_ids)

    def forced_tokens(self) -> list[int]:
        """See `RowState`. No EOS id: what follows the last draft is sampled in the same step."""
        return list(self.matcher.compute_ff_tokens())


def _meaning(error: str) -> str:
    """The library's message for who wrote the grammar."""
    found = (meaning for part, meaning in MEANINGS.items() if re.search(part, error))
    return next(found, error.partition("<backtrace>")[0].strip())


def _source(asked: StructuredOutputs) -> str:
    """What was asked for as the library's own description of a grammar.

    Raises:
        ValueError: it is too large, or holds what the library would not obey.
    """
    if asked.schema is not None:
        _require_exact(json.loads(asked.schema))
        options = {"whitespace_flexible": asked.whitespace, "lenient": False}
        return LLMatcher.grammar_from_json_schema(asked.schema, overrides=options)
    if asked.choice is not None:
        # Why not rules: the library takes thousands of them in one place for too many.
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, asked.choice)))
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    lark = to_lark(asked.grammar or "")
    _require_small(lark)
    return LLMatcher.grammar_from_lark(lark)


def _require_exact(schema: Any) -> None:
    """Raises ValueError for integers of `const` and `enum` that the library would round, and for
    patterns that would be too long for a regex alone."""
    patterns, left = 0, [(schema, False)]
    while left:
        one, is_value = left.pop()
        if isinstance(one, dict):
            left += [(inner, is_value or name in ("const", "enum")) for name, inner in one.items()]
            texts = (one.get("pattern"), *(one.get("patternProperties") or ()))
            patterns += sum(len(text) for text in texts if isinstance(text, str))
        elif isinstance(one, list):
            left += [(inner, is_value) for inner in one]
        elif is_value and isinstance(one, int) and abs(one) > 2**53:
            # Why: the library reads numbers as float64.
            raise ValueError(f"const and enum hold integers up to 2**53, got {one}")
    if patterns > MOST_CHARS["regex"]:
        raise ValueError(
            f"the patterns of a schema must have at most {MOST_CHARS['regex']:,} characters"
            f" together, got {patterns:,}"
        )


RULE = re.compile(
    r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\n]*\]|\.-?\d+)?(?:\s|//[^\n]*)*:", re.MULTILINE
)
NO_NAME = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|/(?:\\.|[^/\\\n])+/')


def _require_small(lark: str) -> None:
    """Raises ValueError if a grammar's terminals, written out, are too long, and RecursionError if
    they name one another too deep."""
    _, *parts = RULE.split(lark)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))

    @functools.cache
    def size(name: str) -> int:
        inner = re.findall(r"\b[A-Z_][A-Z0-9_]*\b", NO_NAME.sub("", bodies[name]))
        return len(bodies[name]) + sum(size(one) for one in inner if one in bodies)

    largest = max(map(size, filter(str.isupper, bodies)), default=0)
    if largest > MOST_WRITTEN_OUT:
        raise ValueError(
            f"a terminal, with all that it names, must have at most {MOST_WRITTEN_OUT:,}"
            f" characters, got {largest:,}"
        )
