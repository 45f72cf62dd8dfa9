"""Tool calls in completions: parsers for the formats of models, and schemas that enforce calls.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Qwen, Hermes
                  the same in <tools>, in a Markdown fence or without tags    Qwen2.5-Coder
    qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    llama3_json   {"name": ..., "parameters": {...}}; {...}
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or NAME{...}
    openai        <|channel|>commentary to=functions.NAME<|message|>{...}     gpt-oss

A parser returns the tool calls and the text outside of them. An incomplete call raises ValueError;
the completion then stays text. Called by `output_parser.py`. The parsers have the names of vLLM's
`--tool-call-parser`. Source: the tests of vLLM's parsers define the calls in each text. Some of
vLLM's parsers drop text after a call; these keep it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from nanoengine.errors import RequestError
from nanoengine.settings.checks import quoted


class FunctionCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""A function's name -> the JSON schema of its arguments."""

ParsedCalls = tuple[list[FunctionCall], list[str]]
"""The result of a parser: tool calls, and the texts between them."""

ToolParser = Callable[[str, Schemas], ParsedCalls]

Choice = Literal["auto", "required", "named"]
"""The model decides; any function is required; the named function is required."""


JSON = json.JSONDecoder(strict=False)
"""Not strict, because models write newlines in strings without escapes."""

BLANKS = re.compile(r"\s*")


def join_text(pieces: Sequence[str]) -> str:
    """Joins the text outside of calls, without blanks between calls."""
    text = "".join([pieces[0], *(one for one in pieces[1:] if one.strip(" \n;"))])
    return text if text.strip() else ""


def decode(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at a position, after blanks, and its end.

    Raises:
        ValueError: there is none.
        RecursionError: it is nested too deeply.
    """
    return JSON.raw_decode(text, BLANKS.match(text, start).end())  # type: ignore[union-attr]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _to_call(value: Any) -> FunctionCall:
    """The tool call that a JSON object describes.

    Raises:
        ValueError: it does not describe a call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a tool call must have a name, got {quoted(value)}")
    name = next((key for key in ("arguments", "parameters") if key in value), None)
    if name is None:
        raise ValueError(f"the tool call {value['name']!r} has no arguments")
    arguments = value[name]
    if isinstance(arguments, str):  # Why: some models write the arguments as a JSON string.
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(arguments)
            arguments = found if isinstance(found, dict) else arguments
    return FunctionCall(value["name"], as_json(arguments))


CLOSE_TAG = re.compile(r"(?:\s*</tool_call>)?")


def hermes(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses objects in tags; the last closing tag may be missing."""
    opened = "<tool_call>"
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    while (start := text.find(opened, end)) >= 0:
        pieces.append(text[end:start])
        value, end = decode(text, start + len(opened))
        calls.append(_to_call(value))
        end = CLOSE_TAG.match(text, end).end()  # type: ignore[union-attr]
    if not calls:
        return untagged(text, schemas)
    # Why: max_tokens may cut the last tag.
    is_cut = bool(calls) and "</tool_call>".startswith(text[end:].strip())
    return calls, [*pieces, "" if is_cut else text[end:]]


OPEN_FENCE, CLOSE_FENCE = re.compile(r"(?:<tools>|```\w*)\s*\Z"), re.compile(r"\s*(?:</tools>|```)")
NAMED_OBJECT = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')


def untagged(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses objects that call one of the tools: untagged, in `<tools>` or in a Markdown fence.

    Raises:
        ValueError: there is no complete call of a tool, but an incomplete or unknown one.
    """
    calls, pieces, end, problem = list[FunctionCall](), list[str](), 0, ""
    for match in NAMED_OBJECT.finditer(text):
        if match.start() < end:
            continue
        try:
            value, value_end = decode(text, match.start())
            call = _to_call(value) if value.keys() & {"arguments", "parameters"} else None
        except (ValueError, RecursionError):
            if match[1] in schemas:
                problem = problem or f"the tool call {quoted(match[1])} is incomplete"
            continue
        if call and call.name in schemas:
            pieces.append(OPEN_FENCE.sub("", text[end : match.start()]))
            closed = CLOSE_FENCE.match(text, value_end)
            calls, end = [*calls, call], closed.end() if closed else value_end
        elif call:
            unknown = f"{quoted(call.name)} is not one of the tools {', '.join(schemas)}"
            problem = problem or unknown
    if problem and not calls:
        raise ValueError(problem)
    return calls, [*pieces, text[end:]]


def llama3_json(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses objects with a name and parameters anywhere in a text; other objects are text."""
    text = text.replace("<|python_tag|>", "")
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    for match in re.finditer(r'\{\s*"', text):
        if match.start() < end:
            continue
        try:
            value, value_end = decode(text, match.start())
            call = _to_call(value)
        except (ValueError, RecursionError):
            continue
        pieces.append(text[end : match.start()])
        calls.append(call)
        end = value_end
    if not calls and re.match(r'\s*\{\s*"name"', text):
        raise ValueError("it begins like a tool call, but can't be parsed as one")
    return calls, [*pieces, text[end:]]


MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses a list of objects after the tag; since tokenizer version 11, a name and arguments."""
    first, *parts = text.split("[TOOL_CALLS]")
    calls, pieces = list[FunctionCall](), [first]
    for part in parts:
        named = MISTRAL_NAME.match(part)
        value, end = decode(part, named.end() if named else 0)
        if named:
            calls.append(FunctionCall(named[1], as_json(value)))
        else:
            calls += map(_to_call, value if isinstance(value, list) else [value])
        pieces.append(part[end:])
    return calls, pieces


def qwen3_coder(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses tags for a function and its parameters; the schema defines their types."""
    first, *parts = text.split("<function=")
    calls, pieces = list[FunctionCall](), [first]
    for part in parts:
        name, _, rest = part.partition(">")
        body, closed, after = rest.partition("</function>")
        if not closed:
            raise ValueError(f"the tool call {quoted(name)} has no </function>")
        properties = schemas.get(name.strip(), {}).get("properties")
        arguments = {}
        for parameter in body.split("<parameter=")[1:]:
            key, _, value = parameter.partition(">")
            value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = _to_value(value, schema)
        calls.append(FunctionCall(name.strip(), as_json(arguments)))
        pieces.append(after)
    tags = re.compile(r"</?tool_call>\s*")
    return calls, [tags.sub("", piece) if calls else piece for piece in pieces]


JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int, "number": (int, float), "float": (int, float), "boolean": bool,
    "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def _to_value(text: str, schema: Any) -> Any:
    """A parameter's value: a string, unless its schema has other types that the text matches.

    With several types the first one is used, or null if the text is null.
    """
    types = list(_types(schema))
    if next((one for one in types if one != "null"), "string") == "string":
        types = ["null"] * ("null" in types)
    plain = {"True": "true", "False": "false", "None": "null", "Null": "null"}.get(text, text)
    try:
        value, end = decode(plain)
    except (ValueError, RecursionError):
        return text
    is_whole = not plain[end:].strip()
    for kind in (JSON_TYPES.get(name, ()) for name in types):
        if is_whole and isinstance(value, kind) and (not isinstance(value, bool) or kind is bool):
            return value
    return text


def _types(schema: Any) -> Iterable[str]:
    """The type names in a schema, including its alternatives."""
    if isinstance(schema, str):
        yield schema
    elif isinstance(schema, list):
        for one in schema:
            yield from _types(one)
    elif isinstance(schema, Mapping):
        for name in ("type", "anyOf", "oneOf"):
            yield from _types(schema.get(name))


MESSAGE = re.compile(
    r"(?:(?:<\|start\|>|\A)([^<]*))?<\|channel\|>((?:[^<]|<\|constrain\|>)*)<\|message\|>"
    r"(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>|<\|channel\|>)|\Z)",
    re.DOTALL,
)
"""Sender and recipient, channel, and content."""

RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def recipient(message: re.Match[str]) -> str | None:
    """The function that a message is addressed to, named before or after its channel."""
    named = RECIPIENT.search(f"{message[1] or ''} {message[2]}")
    return named and named[1]


def openai(text: str, schemas: Schemas) -> ParsedCalls:
    """Parses messages to functions in the channels of gpt-oss."""
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    for message in MESSAGE.finditer(text):
        name = recipient(message)
        if name is None:
            continue
        value, value_end = decode(message[3] if message[3].strip() else "{}")
        if message[3][value_end:].strip():
            raise ValueError(f"the arguments of {name!r} are not valid JSON")
        pieces.append(text[end : message.start()])
        calls.append(FunctionCall(name, as_json(value)))
        end = message.end()
    return calls, [*pieces, text[end:]]


PARSERS: dict[str, ToolParser] = {
    "hermes": hermes,
    "qwen3_coder": qwen3_coder,
    "qwen3_xml": qwen3_coder,
    "llama3_json": llama3_json,
    "llama4_json": llama3_json,
    "mistral": mistral,
    "openai": openai,
}

# --- enforced calls -----------------------------------------------------------------------------


def schemas_of(tools: Sequence[Any]) -> Schemas:
    """The functions in descriptions of tools, with their schemas.

    Raises:
        RequestError: a tool is not a description of a function.
    """
    found = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                "a tool must be {'type': 'function', 'function': {'name': ..., 'parameters':"
                f" {{...}}}}}}, got {quoted(tool)}"
            )
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise RequestError(f"parameters of a tool must be a JSON schema, got {quoted(schema)}")
        found[function["name"]] = schema
    return found


def choice_of(tool_choice: Any, schemas: Schemas) -> tuple[Choice | None, str | None]:
    """The request's choice, and the function that it names; None: no calls.

    Raises:
        RequestError: the value is invalid, or there is no such function.
    """
    match tool_choice:
        case None | "auto":
            return "auto" if schemas else None, None
        case "none":
            return None, None
        case "required" if schemas:
            return "required", None
        case {"type": "function", "function": {"name": str(name)}} if name in schemas:
            return "named", name
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required' or {'type': 'function', 'function':"
        f" {{'name': ...}}}} with the name of a tool ({', '.join(schemas) or 'tools is empty'}),"
        f" got {quoted(tool_choice)}"
    )


def constrained_schema(name: str | None, schemas: Schemas) -> dict[str, Any]:
    """The JSON schema of enforced tool calls: a list of calls, or the arguments of one function.

    Raises:
        RequestError: two functions define the same name differently.
    """
    if name is not None:
        return dict(schemas[name])
    definitions: dict[str, Any] = {}
    variants = []
    for function, schema in schemas.items():
        inner = dict(schema)
        for key, value in dict(inner.pop("$defs", {})).items():
            if definitions.setdefault(key, value) != value:
                raise RequestError(f"two tools define {key!r} in $defs differently: rename one")
        properties = {"name": {"const": function}, "parameters": inner}
        call = {"type": "object", "properties": properties, "additionalProperties": False}
        variants.append(call | {"required": ["name", "parameters"]})
    items = {"type": "array", "minItems": 1, "items": {"anyOf": variants}}
    return items | {"$defs": definitions} if definitions else items


def constrained_calls(name: str | None, text: str) -> list[FunctionCall]:
    """The calls in a completion that follows the schema.

    Raises:
        ValueError: it is incomplete.
    """
    value, _ = decode(text)
    return list(map(_to_call, value)) if name is None else [FunctionCall(name, as_json(value))]
