"""Chats: checks conversations, and renders them in a form that the chat template supports.

A conversation is a list of messages whose contents are strings or lists of parts. `prompt_forms.py`
calls this module to check a conversation, and the PromptReader to render it. Forms differ in:

    contents     lists of text parts, or their texts joined; no content, or an empty string
    arguments    of tool calls: objects, or their JSON as a string
    developer    this role becomes `system` if the template does not mention it

No message is dropped silently. For each new shape of a conversation (its roles, and the keys of its
messages), a copy with marks instead of texts is rendered in each form. The form is used in which
the marks of most messages are in the prompt. A message whose mark is missing raises an error,
unless the prompt depends on its content in another way.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from nanoengine.errors import RequestError
from nanoengine.settings.checks import quoted, truncate
from nanoengine.text.end_tokens import turn_end_ids
from nanoengine.text.tokenizer import Tokenizer

MAX_FORMS = 256
"""Maximum number of shapes of conversations whose form is cached."""

MARK = "nanoengine-marks-text-{}-"
"""Replaces the text of a message; {} is the index of the message."""

OPTIONAL = {"role", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking"}
"""Keys of a message that a chat template need not use."""

DEVELOPER = re.compile(r"""\\?['"]developer\\?['"]""")

Messages = Sequence[Mapping[str, Any]]


class ChatForm(NamedTuple):
    """The form in which a conversation is passed to its template.

    Attributes:
        objects: arguments of tool calls are objects; otherwise JSON strings.
        nulls: contents may be None; otherwise "".
        parts: contents may be lists of parts; otherwise strings.
        dropped: indices of messages whose marks are missing in the prompt.
    """

    objects: bool
    nulls: bool
    parts: bool
    dropped: tuple[int, ...] = ()


class Chats:
    """Renders conversations with the template of a tokenizer, or of a request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._forms: dict[Any, ChatForm] = {}  # by template and shape
        self.ends = functools.lru_cache(MAX_FORMS)(functools.partial(turn_end_ids, tokenizer))

    def render(self, messages: Messages, options: dict[str, Any]) -> str:
        """The prompt of a conversation, in a form that the template supports.

        Raises:
            RequestError: the template raises an error or drops a message.
        """
        variables = options.pop("chat_template_kwargs", {})
        chat_template, roles = options.get("chat_template"), [m["role"] for m in messages]
        if "developer" in roles:
            template = str(chat_template or self._tokenizer.backend.chat_template)
            known = "developer" if DEVELOPER.search(template) else "system"
            roles = [known if role == "developer" else role for role in roles]
            messages = [{**m, "role": role} for m, role in zip(messages, roles, strict=True)]

        def render(messages: Messages, form: ChatForm, **changed: Any) -> str:
            arguments = {**options, **changed, **variables}
            return self._tokenizer.render_chat(in_form(messages, form), **arguments)

        def is_dropped(index: int) -> bool:
            try:
                return render(marked(messages, {index}), form) == text
            except RequestError:  # The error depends on the content, so it was read.
                return False

        switches = frozenset((name, value is True) for name, value in variables.items())
        key = chat_template, bool(options.get("tools")), switches, shape_of(messages)
        if key not in self._forms:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            # Why: with continue_final_message, a template may drop the text of the last message.
            probe = functools.partial(render, continue_final_message=False)
            self._forms[key] = find_form(messages, probe)
        form = self._forms[key]
        text = render(messages, form)
        for index in filter(is_dropped, form.dropped):
            keys = truncate(" and ".join(text_keys(messages[index])))
            raise RequestError(
                f"the chat template drops the {keys} of messages[{index}] with role"
                f" {quoted(roles[index])}: change the role, position or keys of the message, or"
                " give another chat template"
            )
        return text


def parse_messages(messages: object) -> list[dict[str, Any]]:
    """Copies messages, and parses the arguments of their tool calls.

    Raises:
        RequestError: they are not a list of messages, a content is not text, or arguments are not
            JSON.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"a conversation must be a list of messages, got {quoted(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"a message must be a dict with 'role' and 'content', got {quoted(message)}"
            )
    return [
        with_arguments(_with_text_parts(i, message), functools.partial(_decoded, i))
        for i, message in enumerate(messages)
    ]


def _with_text_parts(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a message; a content that is a sequence becomes a list of text parts."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{index}]: a content part must be {{'type': 'text', 'text': ...}},"
                f" because only text is supported; got one of type {quoted(kind)}"
            )
    return {**message, "content": [dict(part) for part in parts]}


def _decoded(index: int, arguments: Any) -> Any:
    """Parses the arguments of a tool call: JSON as in OpenAI's API, or "" for no arguments."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}", strict=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"messages[{index}]: the arguments of a tool call must be an object or its JSON, got"
            f" {quoted(arguments)}"
        ) from error


def with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Copies a message; `change` converts the arguments of its tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    calls = [{**call} if isinstance(call, Mapping) else call for call in calls]
    for call in calls:
        if isinstance(call, dict) and isinstance(function := call.get("function"), Mapping):
            call["function"] = {**function, "arguments": change(function.get("arguments"))}
    return {**message, "tool_calls": calls}


# --- forms ----------------------------------------------------------------------------------------


def shape_of(messages: Messages) -> tuple[Any, ...]:
    """What the branches of a template may depend on: roles, and keys with the sizes of values."""
    return tuple((m["role"], *((key, type(v), _size(v)) for key, v in m.items())) for m in messages)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else bool(value)


def find_form(messages: Messages, render: Callable[[Messages, ChatForm], str]) -> ChatForm:
    """The first form in which the marks of most messages are in the rendered text.

    Forms for which the template raises an error are skipped; the last one is returned if all do.
    """
    contents = [message.get("content") for message in messages]
    has_parts = any(isinstance(content, list) for content in contents)
    varies = any(m.get("tool_calls") for m in messages), None in contents, has_parts
    copy = marked(messages, range(len(messages)))
    found: list[ChatForm] = []
    for choice in itertools.product(*([True, False] if v else [False] for v in varies)):
        form = ChatForm(*choice)  # type: ignore[arg-type]
        try:
            text = render(copy, form)
        except RequestError:
            continue
        dropped = (i for i, m in enumerate(copy) if not _leaves_mark(i, m, text, form))
        found.append(form._replace(dropped=tuple(dropped)))
        if not found[-1].dropped:
            break
    return min(found, key=lambda form: len(form.dropped), default=form)


def in_form(messages: Messages, form: ChatForm) -> list[dict[str, Any]]:
    """Converts messages to this form."""
    as_json = functools.partial(json.dumps, ensure_ascii=False)
    found = [dict(m) if form.objects else with_arguments(m, as_json) for m in messages]
    for message in found:
        content = message.get("content")
        if content is None and not form.nulls:
            message["content"] = ""
        elif isinstance(content, list) and not form.parts:
            # Why line breaks: as in vLLM.
            message["content"] = "\n".join(part["text"] for part in content)
    return found


def text_keys(message: Mapping[str, Any]) -> list[str]:
    """The keys with the text of a message: content and tool calls, or else its other keys."""
    keys = [key for key in ("content", "tool_calls") if message.get(key)]
    if not keys and "content" not in message:
        keys = [k for k, v in message.items() if k not in OPTIONAL and v and isinstance(v, str)]
    return keys


def _as_object(mark: str, arguments: Any) -> dict[str, str]:
    return {mark: mark}


def marked(messages: Messages, indices: Collection[int]) -> list[dict[str, Any]]:
    """Copies messages; the texts of messages at `indices` are replaced by marks."""
    copy = [dict(message) for message in messages]
    for index in indices:
        message, mark = copy[index], MARK.format(index)
        for key in text_keys(message):
            if key == "tool_calls":
                message |= with_arguments(message, functools.partial(_as_object, mark))
            elif isinstance(message[key], list):
                message[key] = [{"type": "text", "text": mark}]
            else:
                message[key] = mark
    return copy


def _leaves_mark(index: int, message: Mapping[str, Any], text: str, form: ChatForm) -> bool:
    """Whether the mark of a message is in the text, or the message has no mark.

    Quoted marks do not count: a template without support for lists of parts prints them with quoted
    texts, and a template without support for objects prints their Python representation.
    """
    mark = MARK.format(index)
    quoted = [str({mark: mark})]
    if form.parts and isinstance(message.get("content"), list):
        quoted += [repr(mark), json.dumps(mark)]
    return mark not in str(message) or (mark in text and not any(q in text for q in quoted))
