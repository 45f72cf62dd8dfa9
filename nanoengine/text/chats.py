"""Chats: conversations rendered by a chat template, their contents in the form that it takes.

Called by the PromptReader for prompts that are conversations.
"""

from __future__ import annotations

from typing import Any

from nanoengine.text.conversations import has_parts, join_parts, takes_parts
from nanoengine.text.tokenizer import Tokenizer

MAX_TEMPLATES = 64
"""Chat templates of which it is remembered whether they take lists of parts."""


class Chats:
    """Renders conversations by the templates of one tokenizer, or by those that come with them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._takes_parts: dict[tuple[str | None, bool], bool] = {}  # by template

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
