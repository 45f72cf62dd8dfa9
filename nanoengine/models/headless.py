"""Removes the LM head of a model that returns hidden states and generates no tokens.

`loader.py` uses it only for checkpoints of embedding models and classifiers.
"""

from __future__ import annotations

import torch

from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.layer import Layer
from nanoengine.models.decoder import CausalLM


class NoHead(Layer):
    """A placeholder for the LM head."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("this checkpoint has no language head: it generates no tokens")

    def argmax(self, *_: object) -> None:
        """Returns None: there are no logits."""


def strip_lm_head(model: CausalLM) -> CausalLM:
    """Replaces the model's head by `NoHead`. The head's weights were tied, so now only the
    embedding uses them.

    Why after the model is built: every family's model is built in the same way.
    """
    embedding = model.model.embed_tokens
    embedding.lookup, embedding.store = embedding.plain_lookup, embedding.weight.copy_
    model.lm_head = NoHead()
    return model
