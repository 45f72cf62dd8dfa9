"""Chats: conversations, lists of messages whose contents are strings or lists of parts.

`prompt_forms.py` finds a conversation in a prompt, and has it checked here. The PromptReader has it
rendered by a chat template, its contents in the form that the template takes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoengine.errors import RequestError
from nanoengine.text.ends import turn_ends
from nanoengine.text.tokenizer import Tokenizer

MAX_TEMPLATES = 64
"""Chat templates of which it is remembered whether they take lists of parts."""

MARK = "nanoengine-marks-this-text"
"""What `takes_parts` looks for in a rendered conversation."""


class Chats:
    """Renders conversations by the templates of one tokenizer, or by those that come with them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._takes_parts: dict[tuple[str | None, bool], bool] = {}  # by template
        self.ends = functools.lru_cache(MAX_TEMPLATES)(functools.partial(turn_ends, tokenizer))

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt of a conversation; parts of text reach the template in the form it takes."""
        variables = options.pop("chat_template_kwargs", {})
        render = self._tokenizer.render_chat
        if has_parts(messages):
            kind = {key: options[key] for key in ("chat_template", "tools") if key in options}
            key = (kind.get("chat_template"), bool(kind.get("tools")))
            if key not in self._takes_parts:
                if len(self._takes_parts) >= MAX_TEMPLATES:
                    self._takes_parts.clear()
                self._takes_parts[key] = takes_parts(lambda m: render(m, **kind, **variables))
            if not self._takes_parts[key]:
                messages = join_parts(messages)
        return render(messages, **options, **variables)


def parse_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"a conversation must be a list of messages, got {messages!r}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"a message must be a dict with 'role' and 'content', got {message!r}"
            )
    return [_with_text_parts(i, message) for i, message in enumerate(messages)]


def _with_text_parts(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message; a content of several parts becomes a list of parts of text."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{index}]: a content part must be {{'type': 'text', 'text': ...}}, as"
                f" this engine takes text alone; got one of type {kind!r}"
            )
    return {**message, "content": [dict(part) for part in parts]}


def has_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if the content of a parsed message is a list of parts."""
    return any(isinstance(message.get("content"), list) for message in messages)


def join_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each list of text parts as one string, a part a line, as vLLM has it."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def takes_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """True if a chat template takes lists of parts; `render` applies it to a conversation.

    A template that takes strings alone fails, leaves the text out, or prints the list with the text
    in quotes.
    """
    part = {"type": "text", "text": MARK}
    try:
        shown = render([{"role": "user", "content": [part]}])
    except RequestError:
        return False
    return MARK in shown and repr(MARK) not in shown and json.dumps(MARK) not in shown
