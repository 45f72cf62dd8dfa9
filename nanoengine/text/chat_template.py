"""Renders a conversation with a chat template to the prompt format that a model was trained on.

A template is a Jinja program from a checkpoint or a row of a file; `rendering.py` runs it.
`Tokenizer.render_chat` calls this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanoengine.errors import RequestError
from nanoengine.settings.checks import MAX_ERROR_CHARS, truncate
from nanoengine.text.rendering import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATS = Renderer("chat")


def render_conversation(
    backend: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    chat_template: str | None = None,
    tools: list[dict[Any, Any] | Callable[..., Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> str:
    """Renders a conversation; see `Tokenizer.render_chat`."""
    if chat_template is None and not backend.chat_template:
        raise RequestError(
            "this model's tokenizer has no chat template: give chat_template (--chat-template), or"
            " pass the prompt as text"
        )
    from transformers import PreTrainedTokenizerBase

    options |= {"tools": tools and list(map(_to_schema, tools)), "chat_template": chat_template}
    options["add_generation_prompt"] = add_generation_prompt
    is_standard = type(backend).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    try:
        if not is_standard:  # Why: a tokenizer with its own method has no Jinja template.
            return str(backend.apply_chat_template(list(messages), tokenize=False, **options))
        special = backend.special_tokens_map
        return CHATS.render(backend.chat_template, special, list(messages), options)
    except Exception as error:  # Why all: templates are programs, and raise anything.
        why = truncate(str(error), MAX_ERROR_CHARS)
        raise RequestError(f"the chat template refused the conversation: {why}") from error


def _to_schema(tool: Any) -> Any:
    """Converts a function to its JSON schema, which can be sent to another process."""
    from transformers.utils import get_json_schema

    return get_json_schema(tool) if inspect.isroutine(tool) else tool
