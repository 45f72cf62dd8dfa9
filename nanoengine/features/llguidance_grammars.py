"""Grammars by llguidance, the library behind `structured_outputs` unless another is asked for.

A schema compiles in a few milliseconds, lazily; a mask takes some 10 to 80 us. What the library
does not enforce of JSON Schema it refuses, by keyword. No other file imports it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from nanoengine.errors import RequestError
from nanoengine.settings.structured import StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer

LIMITS = LLParserLimits(verbose_errors=False)
MOST_EXACT = 2**53
"""The library reads numbers as float64."""
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
            error = matcher.get_error()
        except RequestError:
            raise
        except ValueError as raised:
            error = str(raised)
        if error:
            raise RequestError(f"structured_outputs can't be compiled: {error.strip()}")
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
            raise RequestError(f"structured_outputs: {self.matcher.get_error().strip()}")

    def fork(self) -> LLGuidanceGrammar:
        return LLGuidanceGrammar(self.matcher.deep_copy(), self.eos_token_ids)

    def forced_tokens(self) -> list[int]:
        """See `RowState`. No EOS id: what follows the last draft is sampled in the same step."""
        return list(self.matcher.compute_ff_tokens())


def _require_exact(schema: Any, is_value: bool = False) -> None:
    """Raises RequestError for integers of `const` and `enum` that the library would round."""
    if isinstance(schema, dict):
        for name, inner in schema.items():
            _require_exact(inner, is_value or name in ("const", "enum"))
    elif isinstance(schema, list):
        for inner in schema:
            _require_exact(inner, is_value)
    elif is_value and isinstance(schema, int) and abs(schema) > MOST_EXACT:
        raise RequestError(
            f"structured_outputs can't be compiled: const and enum hold integers up to 2**53, got"
            f" {schema}; grammar_backend='xgrammar' takes larger ones"
        )


def _source(asked: StructuredOutputs) -> str:
    """What was asked for as the library's own description of a grammar."""
    if asked.schema is not None:
        _require_exact(json.loads(asked.schema))
        options = {"whitespace_flexible": asked.whitespace, "lenient": False}
        return LLMatcher.grammar_from_json_schema(asked.schema, overrides=options)
    if asked.regex is not None:
        return grammar_from("regex", asked.regex)
    if asked.choice is not None:
        return grammar_from("choice", json.dumps(asked.choice))
    return grammar_from("grammar", asked.grammar or "")
