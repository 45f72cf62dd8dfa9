"""Compiles grammars with llguidance, the library for `structured_outputs`.

A schema compiles lazily in a few milliseconds; a mask takes about 10 to 80 us. The library rejects
JSON Schema keywords that it does not enforce, and names them. No other file imports it.

Its limits have messages that assume knowledge of the library. It does not limit the text of
terminals, which are inlined wherever another terminal uses them: ten lines that each double one
expand to gigabytes. `_require_small` counts this text before the library is called.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from nanoengine.errors import RequestError
from nanoengine.features.gbnf import to_lark
from nanoengine.settings.structured import MAX_CHARS, StructuredOutputs
from nanoengine.text.tokenizer import Tokenizer

LIMITS = LLParserLimits(step_lexer_fuel=50_000, max_items_in_row=50_000, verbose_errors=False)
"""Fuel per mask, and total number of items. Patterns of all Unicode letters take 20,000 of fuel
with 150,000 tokens."""

USER_MESSAGES = {
    r"NoExtensionBias": "no text matches it",
    r"Too many items|Current row has":
        "too many rules apply at one position: use fewer alternatives there, or longer terminals",
    r"too many expressions|too big|fuel exhausted|precomputation|symbols\.len":
        "it is too large: use fewer or simpler patterns",
    r"recursion depth": "it is nested too deeply, or refers to itself in a cycle",
    r"oneOf constraints":
        "the alternatives of a oneOf must exclude one another: give all of them the same property"
        " with different const values, or use anyOf",
}  # fmt: skip
"""Regular expressions for the library's messages -> their meaning for users."""

MAX_INLINED_CHARS = 65_536
"""Maximum number of characters of a grammar's terminals when all are inlined."""

MAX_DIGITS = 16
"""Maximum number of consecutive digits in a JSON number, as in llama.cpp's grammar. Why: a weak
model may write digits until max_tokens. A token of several digits may exceed it."""

BLANKS = r"[\r\n]{0,2}[ \t]{0,40}"
"""Whitespace between JSON tokens, if it is allowed. Why a limit: as for digits."""

MIN_PARALLEL_ROWS = 4
"""Number of rows from which on masks are filled by threads."""


class LLGuidance:
    """The library's tables for one tokenizer; a `GrammarLibrary`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_ids = tuple(eos_token_ids)
        known = json.loads(tokenizer.definition())
        # Why: added tokens, such as padding, may have ids above the model's logits.
        known["added_tokens"] = [t for t in known["added_tokens"] if t["id"] < vocab_size]
        self.tables = LLTokenizer(
            json.dumps(known), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self.threads = LLExecutor(torch.get_num_threads())
        vocab = known["model"]["vocab"]
        names = vocab if isinstance(vocab, dict) else {name: i for i, (name, _) in enumerate(vocab)}
        # Tokens that end with digits: id -> name.
        self.numerals = {i: name for name, i in names.items() if name[-1:].isdecimal()}
        digits = [i for name, i in names.items() if name[:1].isdecimal() and i < vocab_size]
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[digits] = 1
        self.digits = np.packbits(bits, bitorder="little").view(np.int32)
        bits[:] = 0
        bits[[names[name] for name in ('"', "a") if name in names]] = 1
        self.text = np.packbits(bits, bitorder="little").view(np.int32)

    def compile(self, spec: StructuredOutputs) -> LLGuidanceGrammar:
        """The grammar at the start of a text.

        Raises:
            RequestError: it can't be compiled, or a keyword is not enforced.
        """
        matcher = _matcher(self.tables, spec)
        return LLGuidanceGrammar(matcher, self.eos_token_ids, self.numerals if spec.schema else {})

    def fill(self, grammars: Sequence[LLGuidanceGrammar], masks: np.ndarray) -> None:
        """See `GrammarLibrary`."""
        if len(grammars) < MIN_PARALLEL_ROWS:
            for i, grammar in enumerate(grammars):
                fill_next_token_bitmask(grammar.matcher, masks, i)
        else:
            matchers = [(grammar.matcher, i) for i, grammar in enumerate(grammars)]
            fill_next_token_bitmask_par(self.threads, matchers, masks)
        for grammar, mask in zip(grammars, masks, strict=False):
            # Why not in strings: they may have any number of digits.
            is_long = grammar.num_digits >= MAX_DIGITS and not (mask & self.text).any()
            if is_long and (mask & ~self.digits).any():
                mask &= ~self.digits


class LLGuidanceGrammar:
    """The state of one text in a grammar; a `Grammar`."""

    __slots__ = ("eos_token_ids", "matcher", "num_digits", "numerals")

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: tuple[int, ...],
        numerals: Mapping[int, str],
        num_digits: int = 0,
    ) -> None:
        self.matcher, self.eos_token_ids = matcher, eos_token_ids
        self.numerals, self.num_digits = numerals, num_digits

    def accept(self, token_id: int) -> None:
        run = self.numerals.get(token_id, "")
        before = run.rstrip("0123456789")
        self.num_digits = len(run) - len(before) + (self.num_digits if run and not before else 0)
        if token_id in self.eos_token_ids or self.matcher.consume_token(token_id):
            return
        if error := self.error:
            raise error

    @property
    def error(self) -> RequestError | None:
        """Set if the text does not match the grammar, or exceeds the library's limits."""
        if not self.matcher.is_error():
            return None
        return RequestError(f"structured_outputs: {_user_message(self.matcher.get_error())}")

    def fork(self) -> LLGuidanceGrammar:
        copy = self.matcher.deep_copy()
        return LLGuidanceGrammar(copy, self.eos_token_ids, self.numerals, self.num_digits)

    def forced_tokens(self) -> list[int]:
        """See `RowState`. Without EOS ids: the token after the drafts is sampled in this step."""
        return list(self.matcher.compute_ff_tokens())


def require_valid(spec: StructuredOutputs) -> None:
    """Compiles a request without a model's tokenizer.

    Raises:
        RequestError: it can't be compiled with any tokenizer.
    """
    _matcher(LLTokenizer("byte"), spec)


def _matcher(tables: LLTokenizer, spec: StructuredOutputs) -> LLMatcher:
    try:
        matcher = LLMatcher(tables, _source(spec), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # Why: reports most errors that would occur while a row runs.
        error = matcher.get_error()
    except (RecursionError, ValueError) as raised:
        error = str(raised)
    if error:
        raise RequestError(f"structured_outputs can't be compiled: {_user_message(error)}")
    return matcher


def _user_message(error: str) -> str:
    """The library's message in terms of the user's grammar."""
    found = (meaning for part, meaning in USER_MESSAGES.items() if re.search(part, error))
    return next(found, error.partition("<backtrace>")[0].strip())


def _source(spec: StructuredOutputs) -> str:
    """Converts a request to the library's own description of a grammar.

    Raises:
        ValueError: it is too large, or contains what the library does not enforce.
    """
    if spec.schema is not None:
        schema = json.loads(spec.schema)
        _require_exact(schema)
        _one_of_to_any_of(schema, schema)
        options: Any = {"whitespace_flexible": spec.whitespace, "lenient": False}
        if spec.whitespace:
            options["whitespace_pattern"] = BLANKS
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if spec.choice is not None:
        # Why not rules: the library limits their number in one place.
        return LLMatcher.grammar_from_regex("|".join(map(re.escape, spec.choice)))
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    lark = to_lark(spec.grammar or "")
    _require_small(lark)
    return LLMatcher.grammar_from_lark(lark)


def _one_of_to_any_of(node: Any, root: Any) -> None:
    """Replaces each `oneOf` by `anyOf` if its alternatives exclude one another by constants.

    Properties that are constants in several alternatives become required. Why: pydantic omits them
    from `required` if they have a default, and a value without them would match several
    alternatives. The library itself recognises other differences, but neither constants nor
    differences of alternatives that contain the `oneOf` itself.
    """
    if not isinstance(node, dict):
        for inner in node if isinstance(node, list) else ():
            _one_of_to_any_of(inner, root)
        return
    for name, inner in node.items():
        if name not in ("const", "enum", "default", "examples"):
            _one_of_to_any_of(inner, root)
    if not isinstance(node.get("oneOf"), list):
        return
    found: list[Any] = []
    for each in node["oneOf"]:  # Why: pydantic nests unions whose tags are different properties.
        inner = _resolved(each, root)
        is_union = "anyOf" in inner and inner.keys() <= {"anyOf", "discriminator", "title"}
        found += inner["anyOf"] if is_union else [each]
    alternatives = [_resolved(each, root) for each in found]
    constants = [_constants(each, root) for each in alternatives]
    uses = Counter(name for names in constants for name in names)
    for each, names in zip(alternatives, constants, strict=True):
        if tags := {name for name in names if name is not None and uses[name] > 1}:
            each["required"] = sorted({*each.get("required", ()), *tags})
    pairs = itertools.combinations(constants, 2)
    if "anyOf" not in node and all(
        any(a[t].isdisjoint(b[t]) for t in a if t in b) for a, b in pairs
    ):
        del node["oneOf"]
        node["anyOf"] = found


def _resolved(schema: Any, root: Any) -> dict[str, Any]:
    """The schema that a `$ref` path in the root refers to; the schema itself without a `$ref`."""
    path = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(path, str) and path.startswith("#/"):
        schema = root
        for key in path[2:].split("/"):
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _constants(schema: dict[str, Any], root: Any) -> dict[str | None, set[str]]:
    """The constant properties of an object, or under None a schema that is a constant: their values
    as JSON."""
    members: dict[str | None, Any] = {None: schema}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        members = schema["properties"]
    found = {}
    for name, member in members.items():
        known = _resolved(member, root)
        values = [known["const"]] if "const" in known else known.get("enum")
        if isinstance(values, list):
            found[name] = {json.dumps(value, sort_keys=True) for value in values}
    return found


def _require_exact(schema: Any) -> None:
    """Raises ValueError for integers in `const` and `enum` that the library would round, and for
    patterns that together exceed the limit of a regex."""
    num_chars, stack = 0, [(schema, False)]
    while stack:
        node, is_value = stack.pop()
        if isinstance(node, dict):
            stack += [(x, is_value or name in ("const", "enum")) for name, x in node.items()]
            texts = (node.get("pattern"), *(node.get("patternProperties") or ()))
            num_chars += sum(len(text) for text in texts if isinstance(text, str))
        elif isinstance(node, list):
            stack += [(inner, is_value) for inner in node]
        elif is_value and isinstance(node, int) and abs(node) > 2**53:
            # Why: the library reads numbers as float64.
            raise ValueError(f"const and enum support integers up to 2**53, got {node}")
    if num_chars > MAX_CHARS["regex"]:
        raise ValueError(
            f"the patterns of a schema must have at most {MAX_CHARS['regex']:,} characters"
            f" together, got {num_chars:,}"
        )


RULE = re.compile(
    r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\n]*\]|\.-?\d+)?(?:\s|//[^\n]*)*:", re.MULTILINE
)
NON_NAMES = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|/(?:\\.|[^/\\\n])+/')


def _require_small(lark: str) -> None:
    """Raises ValueError if a grammar's terminals are too long after inlining, and RecursionError if
    they are nested too deeply."""
    _, *parts = RULE.split(lark)
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))

    @functools.cache
    def size(name: str) -> int:
        inner = re.findall(r"\b[A-Z_][A-Z0-9_]*\b", NON_NAMES.sub("", bodies[name]))
        return len(bodies[name]) + sum(size(each) for each in inner if each in bodies)

    largest = max(map(size, filter(str.isupper, bodies)), default=0)
    if largest > MAX_INLINED_CHARS:
        raise ValueError(
            f"a terminal, including the terminals it uses, must have at most {MAX_INLINED_CHARS:,}"
            f" characters, got {largest:,}"
        )
