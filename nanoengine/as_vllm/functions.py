"""Functions of vLLM's that programs import besides its classes."""

from __future__ import annotations

import gc
from typing import Any

from nanoengine.errors import ConfigError


def get_tokenizer(tokenizer_name: str, *, tokenizer_mode: str = "auto", **options: Any) -> Any:
    """The tokenizer of transformers, with options of its own."""
    if tokenizer_mode not in ("auto", "hf"):
        raise ConfigError(f"tokenizer_mode must be auto or hf, got {tokenizer_mode!r}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: Any = None, **context: Any
) -> Any:
    """The template that a chat takes: the given one, the tokenizer's, or None."""
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)


def destroy(shutdown_ray: bool = False) -> None:
    """Collects garbage: an LLM that nobody holds gives its memory back; no process groups stay."""
    gc.collect()


def print_embeddings(embeds: list[Any], prefix: str = "Embeddings") -> None:
    """Prints the first numbers of a vector, or rows of several, and how many there are."""
    shown = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
