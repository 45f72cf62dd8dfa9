"""Tool calls in answers: parsers for the formats of models, and schemas that enforce calls.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>    Qwen, Hermes
                  the same in <tools>, in a Markdown fence or without tags    Qwen2.5-Coder
    qwen3_coder   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
    llama3_json   {"name": ..., "parameters": {...}}; {...}
    mistral       [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or NAME{...}
    openai        <|channel|>commentary to=functions.NAME<|message|>{...}     gpt-oss

A parser returns the tool calls and the text outside of them. An incomplete call raises ValueError;
the answer then stays text. Called by `output_parser.py`. The names are the same as for vLLM's
`--tool-call-parser`. Source: the tests of vLLM's parsers define the calls in each text. Text after
a call, which some of these parsers drop, is kept here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from nanoengine.errors import RequestError
from nanoengine.settings.checks import repr_short


class FunctionCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""A function's name -> the JSON schema of its arguments."""

Read = tuple[list[FunctionCall], list[str]]
"""The result of a parser: tool calls, and the texts between them."""

Reader = Callable[[str, Schemas], Read]

Choice = Literal["auto", "required", "named"]
"""The model decides; any function is required; the named function is required."""


JSON = json.JSONDecoder(strict=False)
"""Not strict, because models write newlines in strings without escapes."""

BLANKS = re.compile(r"\s*")


def rest(pieces: Sequence[str]) -> str:
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


def _call(value: Any) -> FunctionCall:
    """The tool call that a JSON object describes.

    Raises:
        ValueError: it does not describe a call.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f"a call needs a name, got {repr_short(value)}")
    name = next((key for key in ("arguments", "parameters") if key in value), None)
    if name is None:
        raise ValueError(f"the call of {value['name']!r} has no arguments")
    given = value[name]
    if isinstance(given, str):  # Why: some models write the arguments as a JSON string.
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(given)
            given = found if isinstance(found, dict) else given
    return FunctionCall(value["name"], as_json(given))


CLOSED = re.compile(r"(?:\s*</tool_call>)?")


def hermes(text: str, schemas: Schemas) -> Read:
    """Parses objects in tags; the last closing tag may be missing."""
    opened = "<tool_call>"
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    while (start := text.find(opened, end)) >= 0:
        pieces.append(text[end:start])
        value, end = decode(text, start + len(opened))
        calls.append(_call(value))
        end = CLOSED.match(text, end).end()  # type: ignore[union-attr]
    if not calls:
        return bare(text, schemas)
    # Why: max_tokens may cut the last tag.
    is_cut = bool(calls) and "</tool_call>".startswith(text[end:].strip())
    return calls, [*pieces, "" if is_cut else text[end:]]


OPENED, CLOSED_AGAIN = re.compile(r"(?:<tools>|```\w*)\s*\Z"), re.compile(r"\s*(?:</tools>|```)")
NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')


def bare(text: str, schemas: Schemas) -> Read:
    """Parses objects that call one of the tools, bare, in `<tools>` or in a Markdown fence.

    Raises:
        ValueError: there is none, and a call is incomplete or names an unknown tool.
    """
    calls, pieces, end, problem = list[FunctionCall](), list[str](), 0, ""
    for match in NAMED.finditer(text):
        if match.start() < end:
            continue
        try:
            value, behind = decode(text, match.start())
            call = _call(value) if value.keys() & {"arguments", "parameters"} else None
        except (ValueError, RecursionError):
            if match[1] in schemas:
                problem = problem or f"the call of {repr_short(match[1])} is cut"
            continue
        if call and call.name in schemas:
            pieces.append(OPENED.sub("", text[end : match.start()]))
            closed = CLOSED_AGAIN.match(text, behind)
            calls, end = [*calls, call], closed.end() if closed else behind
        elif call:
            problem = (
                problem or f"{repr_short(call.name)} is none of the tools {', '.join(schemas)}"
            )
    if problem and not calls:
        raise ValueError(problem)
    return calls, [*pieces, text[end:]]


def llama3_json(text: str, schemas: Schemas) -> Read:
    """Parses objects with a name and parameters anywhere in a text; other objects are text."""
    text = text.replace("<|python_tag|>", "")
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    for match in re.finditer(r'\{\s*"', text):
        if match.start() < end:
            continue
        try:
            value, behind = decode(text, match.start())
            call = _call(value)
        except (ValueError, RecursionError):
            continue
        pieces.append(text[end : match.start()])
        calls.append(call)
        end = behind
    if not calls and re.match(r'\s*\{\s*"name"', text):
        raise ValueError("it begins as a call does, and is none")
    return calls, [*pieces, text[end:]]


MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def mistral(text: str, schemas: Schemas) -> Read:
    """Parses a list of objects after the tag; since tokenizer version 11, a name and arguments."""
    first, *parts = text.split("[TOOL_CALLS]")
    calls, pieces = list[FunctionCall](), [first]
    for part in parts:
        named = MISTRAL_NAME.match(part)
        value, end = decode(part, named.end() if named else 0)
        if named:
            calls.append(FunctionCall(named[1], as_json(value)))
        else:
            calls += map(_call, value if isinstance(value, list) else [value])
        pieces.append(part[end:])
    return calls, pieces


def qwen3_coder(text: str, schemas: Schemas) -> Read:
    """Parses tags for a function and its parameters; the schema defines their types."""
    first, *parts = text.split("<function=")
    calls, pieces = list[FunctionCall](), [first]
    for part in parts:
        name, _, rest = part.partition(">")
        body, closed, behind = rest.partition("</function>")
        if not closed:
            raise ValueError(f"the call of {repr_short(name)} has no end")
        properties = schemas.get(name.strip(), {}).get("properties")
        arguments = {}
        for parameter in body.split("<parameter=")[1:]:
            key, _, value = parameter.partition(">")
            value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            arguments[key] = _typed(value, schema)
        calls.append(FunctionCall(name.strip(), as_json(arguments)))
        pieces.append(behind)
    tags = re.compile(r"</?tool_call>\s*")
    return calls, [tags.sub("", piece) if calls else piece for piece in pieces]


JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int, "number": (int, float), "float": (int, float), "boolean": bool,
    "object": dict, "array": list, "null": type(None),
}  # fmt: skip


def _typed(text: str, schema: Any) -> Any:
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


def openai(text: str, schemas: Schemas) -> Read:
    """Parses messages to functions in the channels of gpt-oss."""
    calls, pieces, end = list[FunctionCall](), list[str](), 0
    for message in MESSAGE.finditer(text):
        name = recipient(message)
        if name is None:
            continue
        value, behind = decode(message[3] if message[3].strip() else "{}")
        if message[3][behind:].strip():
            raise ValueError(f"the arguments of {name!r} are no JSON")
        pieces.append(text[end : message.start()])
        calls.append(FunctionCall(name, as_json(value)))
        end = message.end()
    return calls, [*pieces, text[end:]]


READERS: dict[str, Reader] = {
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
                f" {{...}}}}}}, got {repr_short(tool)}"
            )
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(schema, Mapping):
            raise RequestError(
                f"parameters of a tool must be a JSON schema, got {repr_short(schema)}"
            )
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
        f" {{'name': ...}}}} with a name of tools, which has {', '.join(schemas) or 'none'}; got"
        f" {repr_short(tool_choice)}"
    )


def forced_schema(name: str | None, schemas: Schemas) -> dict[str, Any]:
    """The JSON schema of an answer that must be calls: a list, or the arguments of one function.

    Raises:
        RequestError: two functions define the same name differently.
    """
    if name is not None:
        return dict(schemas[name])
    definitions: dict[str, Any] = {}
    forms = []
    for function, schema in schemas.items():
        inner = dict(schema)
        for key, value in dict(inner.pop("$defs", {})).items():
            if definitions.setdefault(key, value) != value:
                raise RequestError(f"two tools define {key!r} in $defs: give one another name")
        properties = {"name": {"const": function}, "parameters": inner}
        form = {"type": "object", "properties": properties, "additionalProperties": False}
        forms.append(form | {"required": ["name", "parameters"]})
    items = {"type": "array", "minItems": 1, "items": {"anyOf": forms}}
    return items | {"$defs": definitions} if definitions else items


def forced_calls(name: str | None, text: str) -> list[FunctionCall]:
    """The calls in an answer that follows the schema.

    Raises:
        ValueError: it is incomplete.
    """
    value, _ = decode(text)
    return list(map(_call, value)) if name is None else [FunctionCall(name, as_json(value))]
