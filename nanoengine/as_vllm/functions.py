"""Functions of vLLM's that programs import besides its classes."""

from __future__ import annotations

import gc
import logging
import uuid
from collections.abc import Callable
from typing import Any

from nanoengine.errors import ConfigError


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> Any:
    """The tokenizer of transformers, with options of its own."""
    if tokenizer_mode not in ("auto", "hf"):
        raise ConfigError(f"tokenizer_mode must be auto or hf, got {tokenizer_mode!r}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        tokenizer_name, trust_remote_code=trust_remote_code, revision=revision, **options
    )


def resolve_chat_template(
    tokenizer: Any, chat_template: str | None = None, tools: Any = None, **context: Any
) -> str | None:
    """The template that a chat takes: the given one, the tokenizer's, or None."""
    if chat_template is None and not tokenizer.chat_template:
        return None
    return tokenizer.get_chat_template(chat_template, tools=tools)


def destroy(shutdown_ray: bool = False) -> None:
    """Collects garbage: an LLM that nobody holds gives its memory back; no process groups stay."""
    gc.collect()


def init_logger(name: str) -> logging.Logger:
    """A plain logger."""
    return logging.getLogger(name)


def random_uuid() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


class Platform:
    """What this process runs on, for programs that ask."""

    @property
    def device_type(self) -> str:
        """cuda or cpu."""
        from nanoengine.checkpoint.find import resolve_device

        return resolve_device("auto").type

    def __getattr__(self, name: str) -> Callable[[], bool]:
        """`is_cuda`, `is_cpu`; also `is_rocm`, `is_tpu` and so on, which are false."""
        if not name.startswith("is_"):
            raise AttributeError(f"vLLM's current_platform.{name} is not offered by nanoengine")
        return lambda: name == f"is_{self.device_type}"


current_platform = Platform()
