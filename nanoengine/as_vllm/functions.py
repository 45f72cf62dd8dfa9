"""vLLM functions that programs import in addition to its classes."""

from __future__ import annotations

import gc
from typing import Any

from nanoengine.errors import ConfigError


def get_tokenizer(tokenizer_name: str, *, tokenizer_mode: str = "auto", **options: Any) -> Any:
    """The transformers tokenizer, with its own options."""
    if tokenizer_mode not in ("auto", "hf"):
        raise ConfigError(f"tokenizer_mode must be auto or hf, got {tokenizer_mode!r}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name, **options)


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: Any = None, **context: Any
) -> Any:
    """The chat template to use: the given one, the tokenizer's, or None."""
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)


def destroy(shutdown_ray: bool = False) -> None:
    """Collects garbage, which frees unreferenced LLMs; there are no process groups to destroy."""
    gc.collect()


def print_embeddings(embeds: list[Any], prefix: str = "Embeddings") -> None:
    """Prints the first elements of a vector, or rows of several, and their number."""
    shown = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")
