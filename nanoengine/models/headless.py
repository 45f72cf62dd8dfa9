"""A decoder without a head: hidden states go out, and no token is ever generated.

Called by `loader.py` for a checkpoint of vectors or classes, and for no other.
"""

from __future__ import annotations

import torch

from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.layer import Layer
from nanoengine.models.decoder import CausalLM


class NoHead(Layer):
    """In the place of a language head."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("this checkpoint has no language head, so it gives no logits")

    def argmax(self, *_: object) -> None:
        """There are no tokens to choose from."""


def take_head_off(model: CausalLM) -> CausalLM:
    """The model without its head, whose weights were tied and are the embedding's alone now.

    Why afterwards: so every family's model is made as it always is.
    """
    embedding = model.model.embed_tokens
    embedding.lookup, embedding.store = embedding.plain_lookup, embedding.weight.copy_
    model.lm_head = NoHead()
    return model
