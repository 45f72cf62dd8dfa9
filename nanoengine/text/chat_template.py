"""Chat templates: a conversation as the text that a model was trained on.

A template is a program out of a checkpoint or a row of a file, in Jinja. It runs in the library's
sandbox and within a limit of time, and what would take for ever in one call into C is refused.
Called by `Tokenizer.render_chat`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanoengine.errors import RequestError
from nanoengine.text.time_limit import call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RENDER_S = 5.0
"""Longest time that a chat template may take. A real one takes less than a millisecond."""


@functools.lru_cache
def _refuse_powers(template: str) -> None:
    """Refuses `x ** y` of a chat template, which none needs and which may take for ever in one
    call into C. `**` that hands on arguments is left alone."""
    import jinja2

    before = ""
    for _, kind, value in jinja2.Environment().lex(template):
        if value == "**" and kind == "operator" and before not in ("(", ","):
            raise ValueError("a template may not compute powers")
        if kind != "whitespace":
            before = value


def render_conversation(
    backend: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    *,
    chat_template: str | None,
    tools: list[Any] | None,
    **options: Any,
) -> str:
    """The prompt that a chat template makes of a conversation; see `Tokenizer.render_chat`."""
    if chat_template is None and not backend.chat_template:
        raise RequestError(
            "this model's tokenizer has no chat template: pass chat_template=..., or call"
            " generate() with the prompt as text"
        )

    def render() -> object:
        _refuse_powers(backend.get_chat_template(chat_template, tools))
        return backend.apply_chat_template(
            list(messages), tools=tools, chat_template=chat_template, tokenize=False, **options
        )

    try:
        text = call_within(RENDER_S, render)
    except Exception as error:  # Why: templates are programs; jinja2 and they raise anything.
        raise RequestError(f"the chat template refused the conversation: {error}") from error
    return str(text)
