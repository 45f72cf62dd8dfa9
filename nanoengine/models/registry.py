"""The choice of a model class by architecture. Its module is imported only when it is chosen."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from nanoengine.checkpoint.config import ARCHITECTURES
from nanoengine.errors import UnsupportedModelError

if TYPE_CHECKING:
    from nanoengine.models.decoder import CausalLM


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements `architecture`, in the module named by its model_type.

    Raises:
        UnsupportedModelError: unknown architecture; the message lists the supported ones.
    """
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"unsupported architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    module = importlib.import_module(f"nanoengine.models.{ARCHITECTURES[architecture]}")
    return getattr(module, architecture)
