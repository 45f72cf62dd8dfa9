"""Chat templates: a conversation as the text that a model was trained on.

A template is a program out of a checkpoint or a row of a file, in Jinja; `rendering.py` runs it.
Called by `Tokenizer.render_chat`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanoengine.errors import RequestError
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
    """The prompt that a chat template makes of a conversation; see `Tokenizer.render_chat`."""
    if chat_template is None and not backend.chat_template:
        raise RequestError(
            "this model's tokenizer has no chat template: pass chat_template=..., or call"
            " generate() with the prompt as text"
        )
    from transformers import PreTrainedTokenizerBase

    options |= {"tools": tools and list(map(_described, tools)), "chat_template": chat_template}
    options["add_generation_prompt"] = add_generation_prompt
    known = type(backend).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    try:
        if not known:  # Why: one with a way of its own has no template of Jinja.
            return str(backend.apply_chat_template(list(messages), tokenize=False, **options))
        special = backend.special_tokens_map
        return CHATS.render(backend.chat_template, special, list(messages), options)
    except Exception as error:  # Why: templates are programs; jinja2 and they raise anything.
        raise RequestError(f"the chat template refused the conversation: {error}") from error


def _described(tool: Any) -> Any:
    """A function as a dict that describes it, which a process can be sent."""
    from transformers.utils import get_json_schema

    return get_json_schema(tool) if inspect.isroutine(tool) else tool
