"""Structured outputs: complete outputs are valid, and no feature changes them."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine import (
    LLM,
    DiskTier,
    HostTier,
    RequestError,
    SamplingParams,
    StructuredOutputs,
)
from nanoengine.core.plan import AdmittedSequence
from nanoengine.core.sequence import Request
from nanoengine.features import structured
from nanoengine.jobs.rows import RowOptions, RowReader
from nanoengine.jobs.source import Input, Line
from nanoengine.layers import packed
from nanoengine.text.prompt_forms import Row
from nanoengine.text.tokenizer import Tokenizer
from tests.support.engines import make_engine, random_prompts, run, tokens
from tests.support.grammars import (
    EOS,
    VOCAB_SIZE,
    AnyText,
    Rows,
    make_grammar_processor,
    text_checkpoint,
    text_tokenizer,
)

# --- without a grammar's library ---------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json_object": False}, "got none"),
        ({"json": "{"}, "json must be a schema, got '{'"),
        ({"json": "3"}, "json must be a schema that is a JSON object"),
        ({"json": {"enum": [{1}]}}, "json must be a schema"),
        ({"json": {"a": float("nan")}}, "json must be a schema"),
        ({"json": {"a": "\ud800"}}, "json must be a schema"),
        ({"choice": []}, "choice must contain at least one string"),
        ({"choice": [3]}, r"choice\[0\] must be a string"),
        ({"regex": "a", "whitespace": True}, "whitespace needs json or json_object, got regex"),
        ({"jsn": {}}, "did you mean 'json'"),
        ({"json": {"enum": ["a" * 131_072]}}, "json must have at most 131,072 characters, got"),
        ({"regex": "a?" * 8193}, "at most 16,384 characters, got 16,386; .* use choice"),
        ({"choice": ["a" * 9] * 100_001}, "choice must have at most 1,000,000 characters, got"),
        ({"grammar": "start: a\n" * 4096}, "grammar must have at most 32,768 characters"),
    ],
)
def test_structured_outputs_are_validated_when_created(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(**fields)
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=fields)


def test_structured_outputs_compare_by_value_and_contradictions_raise() -> None:
    one = StructuredOutputs(json={"type": "integer"})
    assert one == StructuredOutputs(json='{ "type":"integer"}')
    assert hash(one) == hash(StructuredOutputs(json='{"type": "integer"}'))
    assert SamplingParams(structured_outputs={"choice": ["a"]}) == SamplingParams(
        structured_outputs=StructuredOutputs(choice=("a",))
    )
    with pytest.raises(RequestError, match="ignore_eos must be False"):
        SamplingParams(structured_outputs=one, ignore_eos=True)


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        (None, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}},
            StructuredOutputs(json={"type": "null"}),
        ),
    ],
)
def test_a_response_format_becomes_structured_outputs(response_format: Any, expected: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    line = Line(0, Input(name="x", form="jsonl"), 1, row)
    task = RowReader(RowOptions()).task(line, "chat")
    assert task.error is None
    assert task.params.structured_outputs == expected
    simple = Line(0, Input(name="x", form="jsonl"), 1, {"prompt": "x", "structured_outputs": None})
    assert RowReader(RowOptions()).task(simple).params.structured_outputs is None


def test_structured_outputs_without_a_tokenizer_raise() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a"]})
    engine = make_engine(text_checkpoint(), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        engine.add_request("a", [5], params)


class Slow(AnyText):
    """Compiles a form; for one that contains "slow", it first waits until `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end, self.has_ended = (threading.Event() for _ in range(3))

    def compile(self, spec: StructuredOutputs) -> AnyText:
        if "slow" in (spec.regex or ""):
            self.has_begun.set()
            assert self.may_end.wait(10), "other sequences do not run while this compiles"
        self.has_ended.set()
        return self


def form(text: str) -> SamplingParams:
    return SamplingParams(max_tokens=9, structured_outputs={"regex": text})


@pytest.mark.parametrize("is_first", [False, True])
def test_other_sequences_continue_while_a_grammar_compiles(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, steps = Slow(), []

    def on_step(*of_step: object) -> None:
        steps.append(1)
        if len(steps) == 5:
            library.may_end.set()

    monkeypatch.setattr(structured, "_library", lambda *args: library)
    prompts = [Row([5], sampling_params=SamplingParams(max_tokens=20)), Row([6])]
    if is_first:  # a stream also continues while nothing runs yet
        prompts.reverse()
        threading.Timer(5 * structured.QUICK_WAIT_S, library.may_end.set).start()
    with LLM(text_checkpoint(), kv_cache_gib=0.01) as llm:
        llm.engine.observers.append(SimpleNamespace(on_step=on_step))
        outputs = list(llm.stream(iter(prompts), form("slow")))
    assert [output.error for output in outputs] == [None, None]
    assert len(steps) >= 20


def test_a_compilation_that_takes_too_long_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Slow()
    processor = structured.Structured(lambda: library, VOCAB_SIZE, (EOS,))
    monkeypatch.setattr(structured, "COMPILE_S", 0.02)
    for _ in range(2):  # the second call fails immediately
        with pytest.raises(RequestError, match=r"takes longer than 0\.02 s"):
            processor.check(form("slow"))
    assert processor.is_ready(form("slow")), "there is nothing to wait for"
    processor.check(form("quick"))
    library.may_end.set()
    for one in processor._jobs.values():
        one.wait(10)
    processor.check(form("slow"))


def test_ctrl_c_interrupts_the_wait_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    class NativeCode(Slow):
        def compile(self, spec: StructuredOutputs) -> AnyText:
            # Why: the main thread can't handle signals while it runs a library's native code.
            assert threading.current_thread() is not threading.main_thread()
            return super().compile(form("slow").structured_outputs)

    library = NativeCode()
    processor = structured.Structured(lambda: library, VOCAB_SIZE, (EOS,))

    def interrupt() -> None:
        library.has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        processor.check(form("a"))
    assert not library.has_ended.is_set()
    library.may_end.set()
    processor.check(form("a"))


def test_ctrl_c_just_before_the_wait_is_handled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal did not wake the waiting thread, so it polls."""
    library, waits = Slow(), []
    processor = structured.Structured(lambda: library, VOCAB_SIZE, (EOS,))

    def wait(compiled: structured.CompileJob, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(structured.CompileJob, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        processor.check(form("slow"))
    library.may_end.set()
    assert max(waits) <= structured.POLL_S


# --- complete texts are valid ---------------------------------------------------------------------

NAMES = ["a", "b", "name", "the", "x y", 'q"', "é"]
EXACT = st.integers(-(2**53), 2**53)
BOUNDS = st.integers(-30, 60)


def ranges(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    def bounded(pair: tuple[int, int], exclusive: bool) -> dict[str, Any]:
        low, high = min(pair), max(pair) + 3
        names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
        return {"type": kind, names[0]: low, names[1]: high}

    return st.builds(bounded, st.tuples(BOUNDS, BOUNDS), st.booleans())


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer"}),
    st.just({"type": ["string", "null"], "maxLength": 5}),
    ranges("integer"),
    ranges("number"),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3), st.integers(0, 5),
    ),
    st.sampled_from(["^[a-c]+$", "^x?[0-9]{2}$", "ab", "^(yes|no)$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from(["date", "time", "uuid", "ipv4"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(
        st.one_of(st.none(), st.booleans(), EXACT, st.text(max_size=4)),
        min_size=1, max_size=4,
    ).map(lambda values: {"enum": values}),
    st.one_of(EXACT, st.text(max_size=3)).map(lambda value: {"const": value}),
)  # fmt: skip


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(fields: dict[str, Any], required: list[str], rest: Any) -> dict[str, Any]:
        found = {
            "type": "object",
            "properties": fields,
            "required": [name for name in fields if name in required],
        }
        return found if rest is None else {**found, "additionalProperties": rest}

    return st.builds(
        made,
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
        st.lists(st.sampled_from(NAMES)),
        st.one_of(st.none(), st.just(False), st.just(False), inner),
    )


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    plain = st.builds(
        lambda items, low, more: {
            "type": "array", "items": items, "minItems": low, "maxItems": low + more,
        },
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    pairs = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {
            "type": "array", "prefixItems": items, "items": False, "minItems": len(items),
        }
    )  # fmt: skip
    return plain | pairs


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda ways: {"anyOf": ways}),
    ),
    max_leaves=5,
)
ROWS = 8
ENDS = {EOS: 6.0} | {
    i: 3.0 for entry, i in text_tokenizer().get_vocab().items() if entry[-1] in '"}]'
}
"""Tokens that complete a text."""


def check_schemas(schemas: list[dict[str, Any]], whitespace: bool, seed: int) -> int:
    """Samples one text per schema, validates the complete ones, and returns their number."""
    import jsonschema

    params = [
        SamplingParams(
            temperature=[0.0, 1.0][i % 2],
            max_tokens=120,
            structured_outputs=StructuredOutputs(json=schema, whitespace=whitespace),
        )
        for i, schema in enumerate(schemas)
    ]
    rows = Rows(params, seed)
    while rows.running:
        rows.step(ENDS)
    assert not rows.errors
    complete = 0
    for row, schema in enumerate(schemas):
        text = rows.text(row)
        if text is not None:
            value = json.loads(text)
            jsonschema.Draft202012Validator(schema).validate(value)
            compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            assert whitespace or len(text) <= 8 * len(compact), "escapes alone may be longer"
            complete += 1
    return complete


def test_a_tokenizer_may_have_tokens_that_the_model_has_no_logits_for() -> None:
    tokenizer = copy.deepcopy(text_tokenizer())
    tokenizer.add_tokens(["<pad>", "yes"])
    processor = make_grammar_processor(Tokenizer(tokenizer))
    params = SamplingParams(structured_outputs={"choice": ["yes"]})
    processor.check(params)
    grammar = processor.admit(AdmittedSequence(0, 0, [EOS + 1], 1, 0, params, seed=0))
    assert grammar is not None
    (mask,) = processor.masks([grammar])
    may_come = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert {text_tokenizer().decode([i]) for i in may_come} == {"y"}
    assert all(token_id < VOCAB_SIZE for token_id in grammar.forced_tokens())


def test_every_complete_text_of_hundreds_of_schemas_is_valid() -> None:
    counts = []

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(SCHEMAS, min_size=ROWS, max_size=ROWS), st.booleans(), st.integers(0, 99))
    def check(schemas: list[dict[str, Any]], whitespace: bool, seed: int) -> None:
        counts.append(check_schemas(schemas, whitespace, seed))

    check()
    assert len(counts) * ROWS >= 300
    assert sum(counts) > len(counts) * ROWS * 0.8, "most were meant to be complete"


FORMS = {
    "json": ({"json": {"type": "array", "items": {"enum": ["a", "the", 12]}, "minItems": 1}},
             r'\[("a"|"the"|12)(,("a"|"the"|12))*\]'),
    "whitespace": ({"json": {"enum": [[1, 2]]}, "whitespace": True}, r"\[\s*1\s*,\s*2\s*\]"),
    "json_object": ({"json_object": True}, r"(?s)\{.*\}"),
    "regex": ({"regex": "(the|an?d) [0-9]{2,5}"}, r"(the|an?d) [0-9]{2,5}"),
    "choice": ({"choice": ["yes", "no", 'q" and\n', "é"]}, '(?s)yes|no|q" and\n|é'),
    "lark": ({"grammar": 'start: "x" y\ny: "abc" | "def"+'}, "x(abc|(def)+)"),
    "gbnf": ({"grammar": 'root ::= "x" ("abc" | ("def")+)'}, "x(abc|(def)+)"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_kind_of_grammar_ends_validly_also_after_preemptions(form: str) -> None:
    fields, pattern = FORMS[form]
    params = [
        SamplingParams(temperature=temperature, max_tokens=80, structured_outputs=fields)
        for temperature in (0.0, 1.0, 1.0, 2.0)
    ]
    straight, broken = Rows(params, seed=3), Rows(params, seed=3)
    for rows in (straight, broken):
        while rows.running:
            rows.step(ENDS)
            if rows is broken:
                for row in rows.running[::2]:
                    rows.admit(row)  # as after a preemption
    assert straight.outputs == broken.outputs
    texts = [text for row in range(len(params)) if (text := straight.text(row)) is not None]
    assert len(texts) > 1
    assert not straight.errors
    for text in texts:
        assert re.fullmatch(pattern, text), text
        if "json" in form:
            json.loads(text)


def fits(schema: dict[str, Any], text: str, whitespace: bool = False) -> bool:
    """Whether a text is complete and every token is allowed by the masks."""
    processor = make_grammar_processor()
    spec = StructuredOutputs(json=schema, whitespace=whitespace)
    grammar = processor._compile(spec).fork()
    for token_id in Tokenizer(text_tokenizer()).encode(text, add_special_tokens=False):
        (mask,) = processor.masks([grammar])
        if not mask[token_id // 32] >> token_id % 32 & 1:
            return False
        grammar.accept(token_id)
    (mask,) = processor.masks([grammar])
    return bool(mask[EOS // 32] >> EOS % 32 & 1)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "3" * 16, True),
        ({"type": "integer"}, "3" * 17, False),
        ({"type": "number"}, "0." + "3" * 16, True),
        ({"type": "number"}, "0." + "3" * 17, False),
        ({"type": "number"}, "6.02e23", True),
        ({"type": "array", "items": {"type": "number"}}, f"[{'3' * 16},{'4' * 16}]", True),
        ({"type": "object"}, '{"a":' + "3" * 17 + "}", False),
        ({"type": "string"}, f'"{"3" * 40}"', True),
        ({"type": "string", "pattern": "^[0-9]{20}$"}, f'"{"3" * 20}"', True),
        ({"type": "integer", "minimum": 10**17}, "3" * 18, True),
        ({"type": "array"}, json.dumps([1, 2], indent=8), True),
        ({"type": "array"}, f"[{' ' * 50}1]", False),
        ({"type": "array"}, "[\n\n\n1]", False),
    ],
)
def test_numbers_and_whitespace_are_limited_and_strings_are_not(
    schema: dict[str, Any], text: str, expected: bool
) -> None:
    assert fits(schema, text, whitespace=schema == {"type": "array"}) is expected


def tagged(**constants: str) -> dict[str, Any]:
    """Returns the schema of an object with default tags and a count, as pydantic writes it."""
    tags = {name: {"const": value, "default": value} for name, value in constants.items()}
    return {"type": "object", "properties": {**tags, "n": {"type": "integer"}}, "required": ["n"]}


def refer(*names: str) -> list[dict[str, str]]:
    return [{"$ref": f"#/$defs/{name}"} for name in names]


UNIONS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a tag": (
        {
            "oneOf": refer("cat", "dog"),
            "discriminator": {"propertyName": "kind"},
            "$defs": {"cat": tagged(kind="cat"), "dog": tagged(kind="dog")},
        },
        ['{"kind":"cat","n":1}', '{"kind":"dog","n":1}'],
        ['{"n":1}', '{"kind":"cow","n":1}'],
    ),
    "unions with other tags": (
        {
            "oneOf": [{"oneOf": refer("red", "blue")}, *refer("dog")],
            "$defs": {
                "red": tagged(kind="fish", color="red"),
                "blue": tagged(kind="fish", color="blue"),
                "dog": tagged(kind="dog"),
            },
        },
        ['{"kind":"fish","color":"blue","n":1}', '{"kind":"dog","n":1}'],
        ['{"kind":"fish","n":1}'],
    ),
    "a union or nothing, which holds itself": (
        {
            "anyOf": [{"oneOf": refer("leaf", "node")}, {"type": "null"}],
            "$defs": {
                "leaf": tagged(kind="leaf"),
                "node": {
                    "type": "object",
                    "properties": {
                        "kind": {"const": "node", "default": "node"},
                        "next": {"oneOf": refer("leaf", "node")},
                    },
                    "required": ["next"],
                },
            },
        },
        ['{"kind":"node","next":{"kind":"leaf","n":1}}', "null"],
        ['{"next":{"kind":"leaf","n":1}}'],
    ),
    "constants": ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, ["1", '"a"', "null"], ["2"]),
}


@pytest.mark.parametrize("name", UNIONS)
def test_one_of_alternatives_with_different_constants_compile(name: str) -> None:
    schema, right, wrong = UNIONS[name]
    before = copy.deepcopy(schema)
    assert [fits(schema, text) for text in right] == [True] * len(right)
    assert [fits(schema, text) for text in wrong] == [False] * len(wrong)
    assert schema == before, "the caller's schema was modified"


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"enum": [1, 2]}, {"type": "integer"}],
        [{"enum": ["a", "b"]}, {"const": "b"}],
        [tagged(kind="cat"), tagged(kind="cat", name="Tom")],
        [{"oneOf": [tagged(kind="cat")], "required": ["x"]}, tagged(kind="dog")],
        [{"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}}],
    ],
)
def test_ambiguous_one_of_alternatives_raise_in_terms_of_json_schema(
    alternatives: list[dict[str, Any]],
) -> None:
    with pytest.raises(RequestError, match="alternatives of a oneOf must exclude") as caught:
        make_grammar_processor()._compile(StructuredOutputs(json={"oneOf": alternatives}))
    assert "coerce" not in str(caught.value)


GBNF = {
    r"""
        root ::= statement
        statement ::= "SELECT " column " from " table # no more
            | "DROP " table
        column ::= "col_1" | "col_2"
        table ::=
            [a-z_]+ ("." [a-z0-9\-]{1,3})?
    """: ["SELECT col_1 from a.b-c", "DROP the"],
    'root ::= word "s"\nword ::= [a-z]+': ["dogs", "ss"],
    'root ::= "a" [a-z]* "end"': ["aend", "aendend"],
    'root ::= "(" inner ")"\ninner ::= "x" | root': ["((x))"],
    r'root ::= [\u0041\^\]] "\u00e9\x41\"" [^\0-\x1f\-]?': ['^éA"', 'AéA"+'],
    'root ::= ""': [""],
}


@pytest.mark.parametrize("text", GBNF)
def test_gbnf_accepts_the_texts_of_its_rules(text: str) -> None:
    for expected in GBNF[text]:
        processor = make_grammar_processor()
        params = SamplingParams(structured_outputs={"grammar": text})
        processor.check(params)
        ids = text_tokenizer().encode(expected)
        row = processor.admit(AdmittedSequence(0, 0, [EOS + 1, *ids], 1, 0, params, seed=0))
        (mask,) = processor.masks([row])
        assert mask[EOS // 32] >> EOS % 32 & 1, "the text may end here"


def test_an_invalid_grammar_is_an_error_of_its_prompt_only() -> None:
    bad = SamplingParams(max_tokens=3, structured_outputs={"json": {"uniqueItems": True}})
    good = SamplingParams(max_tokens=9, structured_outputs={"choice": ["the"]})
    with LLM(text_checkpoint(), kv_cache_gib=0.01) as llm:
        first, second = llm.generate(["x", "x"], [bad, good], use_tqdm=False, on_error="record")
        with pytest.raises(RequestError, match=r"^prompt 0: .*uniqueItems"):
            llm.generate("x", bad, use_tqdm=False)
    assert "uniqueItems" in str(first.error)
    assert (second.outputs[0].text, second.outputs[0].finish_reason) == ("the", "stop")


def doubled(levels: int, leaf: str) -> str:
    """Returns a grammar with a terminal that repeats another one 2**levels times."""
    names = [f"T{i}: T{i + 1} T{i + 1}" for i in range(levels)]
    return "\n".join(["start: T0", *names, f"T{levels}: {leaf}"])


def chain(rule: str, num_rules: int) -> str:
    rules = [rule.format(i, i + 1) for i in range(num_rules)]
    return "\n".join(["start: " + rule.partition("{")[0] + "0", *rules, rule.format(num_rules, 0)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": {"type": "sting"}}, "sting"),
        ({"json": {"$ref": "#/$defs/a"}}, "a"),
        ({"regex": "(("}, "parse|Regex"),
        ({"grammar": "start: x"}, "x"),
        ({"grammar": "root ::= x"}, "not valid GBNF: Rule 'x' not found"),
        ({"grammar": "start: start"}, "no text matches it"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        ({"regex": r"[^\s\S]"}, "no text matches it"),
        (
            {"grammar": doubled(20, '"x"?')},
            "including the terminals it uses",
        ),
        (
            {"grammar": 'start: A\nA: "a" B\nB: A "b"'},
            "it is nested too deeply",
        ),
        ({"grammar": chain('T{}: "a" T{}', 999)}, "it is nested too deeply"),
        ({"grammar": "start: " + '("a"* "b"*)* ' * 2500}, "too many rules apply at one position"),
        ({"json": {"type": "integer", "multipleOf": 10**9 + 7}}, "it is too large: use fewer"),
        ({"json": {"pattern": "ab" * 9000, "type": "string"}}, "patterns .* at most 16,384 .*18,0"),
        ({"json": {"patternProperties": {"ab" * 9000: {}}}}, "patterns .* at most 16,384 .*18,0"),
        ({"json": {"const": [2**53 + 1]}}, r"const and enum support integers up to 2\*\*53"),
        ({"grammar": "root ::= " + "(" * 9999}, "nested too deeply"),
    ],
)
def test_the_error_explains_why_a_grammar_cant_be_compiled(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs can't be compiled: .*({message})"):
        make_grammar_processor().check(SamplingParams(structured_outputs=fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": chain("a{}:a{}", 2700).replace("a0\n", 'a0 | "x"\n', 1)},
        {"json": {"$ref": "#/$defs/0", "$defs": {
            str(i): {"anyOf": [{"items": {"$ref": f"#/$defs/{i + 1}"}}]} if i < 1900 else {}
            for i in range(1901)}}},
        {"choice": [f"{i * i}.{i}" for i in range(20_000)]},
        {"grammar": "start: IF NAME\nIF: \"IF\" // NAME \"\nNAME: /[A-Z]+ IF/ | IF~3"},
    ],
)  # fmt: skip
def test_large_and_deep_grammars_compile(fields: dict[str, Any]) -> None:
    """Deep forms need more stack than a thread has; the process would crash."""
    processor, params = make_grammar_processor(), SamplingParams(structured_outputs=fields)
    processor.check(params)
    row = processor.admit(AdmittedSequence(0, 0, [EOS + 1], 1, 0, params, seed=0))
    assert row is not None
    for _ in range(4):
        (mask,) = processor.masks([row])
        row.accept(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1]))


def test_a_grammar_that_fails_while_it_runs_is_an_error_without_a_logged_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    too_many = SamplingParams(structured_outputs={"grammar": 'start: "a"{1000000}'})
    with LLM(text_checkpoint(), kv_cache_gib=0.01) as llm:
        (output,) = llm.generate("x", too_many, use_tqdm=False)
    assert output.error is not None
    assert output.error.startswith("structured_outputs: too many rules apply at one position")
    assert not any(record.exc_info for record in caplog.records)


def test_other_parameters_choose_within_the_grammar() -> None:
    vocab = text_tokenizer().get_vocab()
    yes_or_no = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
    cases: list[tuple[dict[str, Any], str | None, str | None]] = [
        ({"logit_bias": {vocab["n"]: 100.0}}, "no", "stop"),
        ({"bad_words": ["y"], "temperature": 0}, "no", "stop"),
        ({"min_tokens": 9, "logit_bias": {vocab["y"]: 100.0}}, "yes", "stop"),
        ({"stop": "e", "logit_bias": {vocab["y"]: 100.0}}, "y", "stop"),
        ({"max_tokens": 2, "logit_bias": {vocab["y"]: 100.0}}, "ye", "length"),
        ({"allowed_token_ids": [5]}, None, "error"),
    ]
    params = [SamplingParams(**yes_or_no | fields) for fields, _, _ in cases]
    with LLM(text_checkpoint(), kv_cache_gib=0.01) as llm:
        outputs = llm.generate(["a"] * len(cases), params, use_tqdm=False)
        for output, (_, text, reason) in zip(outputs, cases, strict=True):
            completion = output.outputs[0]
            assert completion.finish_reason == reason
            assert completion.text == (text or "")
            assert (output.error is not None) == (reason == "error")
        assert len(outputs[2].outputs[0].token_ids) == len("yes") + 1, "no more EOS ids"


# --- features don't change the output -------------------------------------------------------------

OBJECT = {
    "type": "object",
    "properties": {
        "the name": {"enum": ["Tom", "the dog", "and"]},
        "and": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3},
    },
    "required": ["the name", "and"],
    "additionalProperties": False,
}
PROMPTS = random_prompts(6, [1, 9, 20, 33], vocab_size=VOCAB_SIZE)


def work() -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=40,
            seed=i,
            n=2 if i % 3 == 2 else 1,
            temperature=0.0 if i % 3 == 0 else 1.0,
            structured_outputs={"json": OBJECT} if i % 2 else {"regex": "(the|and| )+[a-z]{3}"},
        )
        for i in range(len(PROMPTS))
    ]


def check_texts(requests: list[Request]) -> None:
    import jsonschema

    complete = 0
    for request in requests:
        spec = request.params.structured_outputs
        for seq in request.sequences:
            assert seq.finish_reason in ("stop", "length")
            if seq.finish_reason == "stop":
                text = text_tokenizer().decode(seq.output_token_ids[:-1])
                complete += 1
                if spec.json is not None:
                    jsonschema.validate(json.loads(text), OBJECT)
                else:
                    assert re.fullmatch(spec.regex, text)
    assert complete >= 3


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_chunks_tiers_and_overlap_do_not_change_structured_outputs(
    overlap: bool, tmp_path: Any
) -> None:
    options: dict[str, Any] = {"block_size": 8}
    expected = run(make_engine(text_checkpoint(), **options), PROMPTS, work())
    check_texts(expected)
    tiers = [HostTier(gib=0.0005, policy="load"), DiskTier(tmp_path, gib=0.01, policy="load")]
    for others in ({"num_kv_blocks": 13}, {"num_kv_blocks": 13, "kv_tiers": tiers}):
        engine = make_engine(
            text_checkpoint(), overlap=overlap, long_prefill_threshold=7, **options, **others
        )
        assert tokens(run(engine, PROMPTS, work())) == tokens(expected)
        assert engine.stats().preemptions > 0
        engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_structured_sequences_do_not_need_all_logits(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head gets bit masks, and its tokens equal the argmax of masked logits."""
    options = {"attention_backend": "cpu", "dtype": "float32", "overlap": overlap, "block_size": 8}
    params = [replace(one, n=1, temperature=0.0) for one in work()]
    expected = run(make_engine(text_checkpoint(), **options), PROMPTS, params)
    monkeypatch.setattr(packed, "MIN_PRUNED_BYTES", 0)
    argmax, found = packed.PrunedArgmaxHead.argmax, []

    def recording_argmax(self: Any, x: Any, softcap: Any = None, masks: Any = None) -> Any:
        found.append((masks is not None, argmax(self, x, softcap, masks)))
        return found[-1][1]

    monkeypatch.setattr(packed.PrunedArgmaxHead, "argmax", recording_argmax)
    for pool in ({}, {"num_kv_blocks": 13}):
        engine = make_engine(text_checkpoint(), **options, **pool)
        assert tokens(run(engine, PROMPTS, params)) == tokens(expected)
    seqs = [seq for request in expected for seq in request.sequences]
    assert [seq.finish_reason for seq in seqs].count("stop") > 1
    assert all(masked for masked, _ in found)
    assert sum(tokens is not None for _, tokens in found) > 40
