"""Tool calls are found in the formats that models write, and nowhere else.

The formats are the same as in vLLM's parser tests; the texts are our own.
"""

from __future__ import annotations

import contextlib
import json

import pytest

from nanoengine.errors import RequestError
from nanoengine.features.tool_calls import (
    PARSERS,
    choice_of,
    constrained_calls,
    constrained_schema,
    join_text,
    schemas_of,
)

FERRY = {
    "type": "object",
    "properties": {
        "harbour": {"type": "string"},
        "cars": {"type": "integer"},
        "weight": {"type": "number"},
        "back": {"type": "boolean"},
        "cabin": {"type": "object"},
        "days": {"type": "array"},
        "deck": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "book", "parameters": FERRY}},
    {"type": "function", "function": {"name": "times"}},
]
SCHEMAS = schemas_of(TOOLS)
START, CHANNEL, MESSAGE, END = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>"

A = ("book", {"harbour": "Kiel", "cars": 1})
B = ("times", {})
C = ("book", {"harbour": 'the "old" {one}', "days": [["Mo", "Tu"], []]})


def hermes(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def coder(name, arguments):
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    given = "".join(f"<parameter={k}>\n{text}\n</parameter>\n" for k, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def llama(name, arguments):
    return json.dumps({"name": name, "parameters": arguments})


def harmony(name, arguments):
    to = f"{START}{CHANNEL}commentary to=functions.{name} <|constrain|>json"
    return f"{to}{MESSAGE}{json.dumps(arguments)}<|call|>"


CASES = [
    ("hermes", hermes(*A), [A], ""),
    ("hermes", "Sure, a moment." + hermes(*A), [A], "Sure, a moment."),
    ("hermes", hermes(*A) + "\n" + hermes(*B) + hermes(*C), [A, B, C], ""),
    ("hermes", hermes(*A).removesuffix("\n</tool_call>"), [A], ""),
    ("hermes", "Yes." + hermes(*A).removesuffix("ol_call>"), [A], "Yes."),
    ("hermes", hermes(*A) + " As you like.", [A], " As you like."),
    ("hermes", '<tool_call>{"name": "times",\n"arguments":\n{}}</tool_call>', [B], ""),
    ("hermes", '<tool_call>{"arguments": {"name": "x"}, "name": "a"}</tool_call>',
     [("a", {"name": "x"})], ""),
    # arguments as a JSON object in a string, and arguments that are a string
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>',
     [("a", {"b": 1})], ""),
    ("hermes", '<tool_call>{"name": "a", "arguments": "hello"}</tool_call>', [("a", "hello")], ""),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "two\nlines"}}</tool_call>',
     [("a", {"b": "two\nlines"})], ""),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": "</tool_call>"}}</tool_call>',
     [("a", {"b": "</tool_call>"})], ""),
    # Qwen2.5-Coder writes its calls without the tags that its template asks for
    ("hermes", json.dumps({"name": "times", "arguments": {}}), [B], ""),
    ("hermes", f"```json\n{llama(*A)}\n```", [A], ""),
    ("hermes", f"Sure:\n```\n{llama(*A)}\n{llama(*C)}\n```\nDone.", [A, C], "Sure:\n\nDone."),
    ("hermes", f"<tools>\n{llama(*A)}\n</tools>", [A], ""),
    ("hermes", f"{llama(*A)}\n{llama('unknown', {})}", [A], f"\n{llama('unknown', {})}"),
    ("hermes", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
    ("hermes", 'It is {"name": "Bob"', [], 'It is {"name": "Bob"'),
    ("qwen3_coder", coder(*A), [A], ""),
    ("qwen3_xml", coder(*A), [A], ""),
    ("qwen3_coder", "Let me book that." + coder(*A) + "\n" + coder(*B), [A, B],
     "Let me book that."),
    ("qwen3_coder", coder(*C), [C], ""),
    ("qwen3_coder", "<function=times>\n</function>", [B], ""),
    ("qwen3_coder", "<function=book><parameter=harbour>\nKiel\n<parameter=cars>1</function>",
     [A], ""),
    ("qwen3_coder", coder("book", {"weight": "3.5", "back": "True", "deck": "None", "name": "7"}),
     [("book", {"weight": 3.5, "back": True, "deck": None, "name": "7"})], ""),
    ("qwen3_coder", coder("book", {"cars": "many", "cabin": "{'a': 1}", "deck": "2", "x": "2"}),
     [("book", {"cars": "many", "cabin": "{'a': 1}", "deck": 2, "x": "2"})], ""),
    ("qwen3_coder", coder("book", {"harbour": "a\nb\n", "cars": "true"}),
     [("book", {"harbour": "a\nb\n", "cars": "true"})], ""),
    ("qwen3_coder", coder("book", {"note": "5", "name": "null", "harbour": "null"}),
     [("book", {"note": "5", "name": None, "harbour": "null"})], ""),
    ("qwen3_coder", coder("unknown", {"a": "1"}), [("unknown", {"a": "1"})], ""),
    ("llama3_json", llama(*A), [A], ""),
    ("llama3_json", "<|python_tag|>" + llama(*B), [B], ""),
    ("llama4_json", '{"name": "times", "arguments": {}}', [B], ""),
    ("llama3_json", " ; ".join([llama(*A), llama(*B), llama(*C)]), [A, B, C], ""),
    ("llama3_json", llama(*A) + " I used {book}.", [A], " I used {book}."),
    ("llama3_json", llama(*A) + ' with {"harbour": "Kiel"}', [A], ' with {"harbour": "Kiel"}'),
    ("llama3_json", '{"parameters": {}}', [], '{"parameters": {}}'),
    ("llama3_json", '{"answer": 3}', [], '{"answer": 3}'),
    ("mistral", '[TOOL_CALLS][{"name": "times", "arguments": {}}]', [B], ""),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"name": "x"}, "name": "a"}]',
     [("a", {"name": "x"})], ""),
    ("mistral", f"Yes[TOOL_CALLS] [{llama(*A)}, {llama(*C)}]", [A, C], "Yes"),
    ("mistral", '[TOOL_CALLS]times{}[TOOL_CALLS]book{"harbour": "Kiel", "cars": 1}', [B, A], ""),
    ("mistral", '[TOOL_CALLS]book[CALL_ID]a1b2[ARGS]{"harbour": "Kiel", "cars": 1}', [A], ""),
    ("openai", harmony(*A), [A], ""),
    ("openai", harmony(*A) + harmony(*B), [A, B], ""),
    ("openai", f" to=functions.times{CHANNEL}commentary json{MESSAGE}<|call|>", [B], ""),
    ("openai", harmony(*A) + "As you like.", [A], "As you like."),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "calls", "left"), CASES)
def test_tool_calls_and_the_text_around_them_are_parsed(reader, text, calls, left):
    found, pieces = PARSERS[reader](text, SCHEMAS)
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
    assert (join_text(pieces) if found else text) == left


@pytest.mark.parametrize("reader", PARSERS)
def test_a_text_without_a_call_has_no_calls(reader):
    for text in ("Just text.", "", "  two\n\nlines ", "1 < 2 and {3} [4]"):
        assert PARSERS[reader](text, SCHEMAS)[0] == []


UNREADABLE = [
    ("hermes", '<tool_call>\n{"name": "book", "arguments": {"harbour": "Kiel"}'),
    ("hermes", '<tool_call>{"name": "book"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"b": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a", "arguments": ' + '{"a":' * 100_000),
    ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```'),
    ("hermes", '{"name": "book", "arguments": {"harbour": "Ki'),
    ("hermes", '{"name": "book", "parameters": {harbour}}'),
    ("qwen3_coder", "<tool_call><function=book>\n<parameter=harbour>\nKi"),
    ("llama3_json", '{"name": "book", "parameters": {harbour}'),
    ("llama3_json", '{"name": "book"}'),
    ("mistral", "[TOOL_CALLS] not a call"),
    ("mistral", '[TOOL_CALLS]book{"harbour": "Kiel"'),
    ("openai", f"{START}{CHANNEL}commentary to=functions.book{MESSAGE}Kiel<|call|>"),
    ("openai", f"{START}{CHANNEL}commentary to=functions.book{MESSAGE}{{}} and more<|call|>"),
]


@pytest.mark.parametrize(("reader", "text"), UNREADABLE)
def test_an_incomplete_call_raises(reader, text):
    with pytest.raises((ValueError, RecursionError), match=r"\w"):
        PARSERS[reader](text, SCHEMAS)


def test_a_call_of_an_unknown_tool_raises():
    with pytest.raises(ValueError, match="'fly' is not one of the tools"):
        PARSERS["hermes"](llama("fly", {}), SCHEMAS)


@pytest.mark.parametrize("reader", PARSERS)
def test_repeated_markers_take_linear_time(reader):
    """A parser with quadratic time would block a job at an output that repeats a marker."""
    for mark in (
        "<tool_call>",
        "<function=",
        "[TOOL_CALLS]",
        '{"',
        "<|channel|>",
        "<|start|>",
        "<",
    ):
        with contextlib.suppress(ValueError, RecursionError):
            PARSERS[reader](mark * 20_000, SCHEMAS)


# --- choices -------------------------------------------------------------------------------------


def test_tool_choice_is_parsed():
    named = {"type": "function", "function": {"name": "times"}}
    assert choice_of(None, {}) == choice_of("none", SCHEMAS) == (None, None)
    assert choice_of(None, SCHEMAS) == choice_of("auto", SCHEMAS) == ("auto", None)
    assert choice_of("required", SCHEMAS) == ("required", None)
    assert choice_of(named, SCHEMAS) == ("named", "times")


@pytest.mark.parametrize("given", ["any", "required", {"type": "function"}, 3, {"name": "times"}])
def test_a_tool_choice_without_its_tool_raises(given):
    with pytest.raises(RequestError, match="tool_choice must be"):
        choice_of(given, {} if given == "required" else SCHEMAS)


@pytest.mark.parametrize("tool", ["f", {}, {"function": {}}, {"function": {"name": 3}}])
def test_an_invalid_tool_raises(tool):
    with pytest.raises(RequestError, match="a tool must be"):
        schemas_of([tool])


def test_definitions_of_tools_move_to_the_root():
    def tool(name, definition):
        part = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": definition}
        return {"function": {"name": name, "parameters": part}}

    one, other = {"A": {"type": "integer"}}, {"A": {"type": "string"}}
    schema = constrained_schema(None, schemas_of([tool("f", one), tool("g", one)]))
    assert schema["$defs"] == one
    assert "$defs" not in json.dumps(schema["items"]).replace("#/$defs", "")
    with pytest.raises(RequestError, match="'A'"):
        constrained_schema(None, schemas_of([tool("f", one), tool("g", other)]))
    assert constrained_schema("f", schemas_of([tool("f", one)]))["$defs"] == one


def test_constrained_calls_are_parsed():
    text = json.dumps([{"name": "times", "parameters": {}}, {"name": "book", "parameters": A[1]}])
    assert [(name, json.loads(given)) for name, given in constrained_calls(None, text)] == [B, A]
    assert constrained_calls("book", '{"cars": 1}') == [("book", '{"cars": 1}')]
    for name, cut in ((None, text[:-9]), ("book", '{"cars": ')):
        with pytest.raises(ValueError, match=r"\w"):
            constrained_calls(name, cut)
