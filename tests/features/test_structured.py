"""Structured outputs: what is complete is valid, and no feature shows in it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoengine import MissingDependencyError, RequestError, SamplingParams, StructuredOutputs
from nanoengine.jobs.rows import RowOptions, RowReader
from nanoengine.jobs.source import Input, Line
from tests.support.engines import make_engine, run
from tests.support.grammars import EOS, Rows, text_checkpoint, text_tokenizer

llguidance = pytest.mark.extra
LIBRARIES = ["llguidance", "xgrammar"]


def needs(library: str) -> None:
    pytest.importorskip(library, reason="see the extra `structured`")


# --- without a library ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": {}, "regex": "a"}, "got json, regex"),
        ({"json_object": False}, "got none"),
        ({"json": "{"}, "json must be a JSON schema, got '{'"),
        ({"json": "3"}, "json must be a schema that is an object"),
        ({"json": {"enum": [{1}]}}, "json must be a JSON schema"),
        ({"json": {"a": float("nan")}}, "json must be a JSON schema"),
        ({"json": {"a": "\ud800"}}, "json must be a JSON schema"),
        ({"choice": []}, "choice must hold at least one string"),
        ({"choice": [3]}, r"choice\[0\] must be a string"),
        ({"regex": "a", "whitespace": True}, "whitespace is for json and json_object, got regex"),
        ({"jsn": {}}, "did you mean 'json'"),
    ],
)
def test_a_form_is_checked_when_it_is_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        StructuredOutputs(**fields)
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=fields)


def test_equal_forms_are_equal_and_goals_that_contradict_are_refused() -> None:
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
def test_a_response_format_of_a_body_is_a_form(response_format: Any, expected: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    line = Line(0, Input(name="x", form="jsonl"), 1, row)
    task = RowReader(RowOptions()).task(line, "chat")
    assert task.error is None
    assert task.params.structured_outputs == expected
    simple = Line(0, Input(name="x", form="jsonl"), 1, {"prompt": "x", "structured_outputs": None})
    assert RowReader(RowOptions()).task(simple).params.structured_outputs is None


def test_a_missing_library_names_the_extra_and_tables_are_not_built_without_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("llguidance", "xgrammar"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"nanoengine.features.{name}_grammars", raising=False)
        engine = make_engine(text_checkpoint(), grammar_backend=name)
        params = SamplingParams(max_tokens=2, structured_outputs={"choice": ["a"]})
        with pytest.raises(MissingDependencyError, match=rf"{name}: pip.*nanoengine\[structured\]"):
            engine.add_request("a", [5], params)
        run(engine, [[5]], replace(params, structured_outputs=None))


def test_without_tokenizer_or_eos_there_is_no_structured_output() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a"]})
    engine = make_engine(text_checkpoint(), skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        engine.add_request("a", [5], params)


# --- what is complete is valid --------------------------------------------------------------------

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
"""Tokens that bring a text to its end."""


def check_schemas(library: str, schemas: list[dict[str, Any]], whitespace: bool, seed: int) -> int:
    """Random texts of the schemas, of which the complete ones must be valid; their number."""
    import jsonschema

    params = [
        SamplingParams(
            temperature=[0.0, 1.0][i % 2],
            max_tokens=120,
            structured_outputs=StructuredOutputs(json=schema, whitespace=whitespace),
        )
        for i, schema in enumerate(schemas)
    ]
    rows = Rows(params, library, seed)
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


@pytest.mark.extra
def test_every_complete_text_of_hundreds_of_schemas_is_valid() -> None:
    needs("llguidance")
    needs("jsonschema")
    counts = []

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(SCHEMAS, min_size=ROWS, max_size=ROWS), st.booleans(), st.integers(0, 99))
    def check(schemas: list[dict[str, Any]], whitespace: bool, seed: int) -> None:
        counts.append(check_schemas("llguidance", schemas, whitespace, seed))

    check()
    assert len(counts) * ROWS >= 300
    assert sum(counts) > len(counts) * ROWS * 0.8, "most were meant to be complete"
