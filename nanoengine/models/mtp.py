"""MTP: the layer for multi-token prediction, which drafts the token after the next one.

    token i + 1 ─ embed_tokens ─ enorm ─┐
                                        ├─ eh_proj ─ decoder layer ─ norm ─ head ─ token i + 2
    hidden state of token i ──── hnorm ─┘                              │
                                                     the hidden state for the next draft

Embedding and head are the model's, and the hidden states are those that its head gets. `loader.py`
adds the layer if `ModelConfig.mtp` is set.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from __future__ import annotations

import torch

from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear
from nanoengine.layers.norms import make_norm
from nanoengine.models.decoder import Decoder
from nanoengine.models.generic import GenericLayer


class MTP(Decoder):
    """A decoder of one layer, whose input is a projection of embeddings and hidden states.

    Args:
        decoder: the model's decoder.
        config: see `ModelConfig.mtp`.
    """

    def __init__(self, decoder: Decoder, config: ModelConfig, context: ModelContext) -> None:
        Layer.__init__(self)
        hidden = config.hidden_size
        self.enorm, self.hnorm, self.norm = (make_norm(config, context) for _ in range(3))
        index = config.num_hidden_layers - 1
        self.eh_proj = MergedLinear(
            f"model.layers.{index}.eh_proj", 2 * hidden, {"eh_proj": hidden}, context=context
        )
        rotation = list(dict.fromkeys(config.ropes)).index(config.ropes[index])
        layer = GenericLayer(index, rotation, config, context)
        decoder.layers.append(layer)  # Why there: so it has the name of the checkpoint's layer
        # Why tuples: their members are submodules of the model already.
        self.shared, self.layers, self.executed_layers = (decoder,), (layer,), [layer]

    def forward(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """Stores the layer's keys and values, each at the position of its hidden state.

        Args:
            batch: `token_ids` are the tokens that follow the positions.
            hidden: [T, hidden_size].

        Returns:
            Hidden states for the head, of the tokens `batch.logits_indices`.
        """
        (decoder,) = self.shared
        embedded = self.enorm(decoder.embed_tokens(batch.token_ids), None)[0]
        x = self.eh_proj(torch.cat((embedded, self.hnorm(hidden, None)[0]), dim=1))
        return self.forward_layers(x, decoder.rotary(batch.positions), batch)
