"""Conversations: lists of messages, whose contents are strings or lists of parts.

Called by `prompt_forms.py`, which finds a conversation in a prompt, and by `prompts.py`, which
gives its parts to the template in the form that the template takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanoengine.errors import RequestError

MARK = "nanoengine-marks-this-text"
"""What `takes_parts` looks for in a rendered conversation."""


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
