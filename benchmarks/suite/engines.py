"""Creates engines from configs."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.llm import LLM


def open_llm(config: EngineConfig) -> LLM:
    """An LLM with these settings; the caller closes it."""
    from nanoengine.llm import LLM

    return LLM(**config_options(config))


def config_options(config: EngineConfig) -> dict[str, Any]:
    """A config as the keywords of `LLM`."""
    return {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
