"""A decoder without a language head: it returns hidden states and generates no tokens.

`loader.py` uses it only for checkpoints of embedding models and classifiers.
"""

from __future__ import annotations

import torch

from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.layer import Layer
from nanoengine.models.decoder import CausalLM


class NoHead(Layer):
    """A placeholder for the language head."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("this checkpoint has no language head, so it gives no logits")

    def argmax(self, *_: object) -> None:
        """Returns None: there are no logits."""


def strip_lm_head(model: CausalLM) -> CausalLM:
    """Removes the model's head; its weights were tied, so the embedding alone uses them from now
    on.

    Why afterwards: every family's model is built in the same way.
    """
    embedding = model.model.embed_tokens
    embedding.lookup, embedding.store = embedding.plain_lookup, embedding.weight.copy_
    model.lm_head = NoHead()
    return model
