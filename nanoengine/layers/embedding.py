"""Embedding and OutputHead: token ids in, logits out, with the vocabulary split over ranks.

`models/generic.py` has scaled embeddings, and scaled or capped logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.layers.kernels import Masks
from nanoengine.layers.layer import Layer, ModelContext

NAME = "model.embed_tokens"
"""The embedding's full name."""


class Embedding(Layer):
    """Token ids [T] -> [T, hidden_size]. Each rank has some rows of the vocabulary.

    Attributes:
        lookup: ids [T] -> rows of the weight. A tied head replaces it, because the head may pack
            the weight.
        store: loads this rank's rows of the checkpoint; replaced by a tied head too.
        method: has the weight if it is quantized in the checkpoint; otherwise None, and `weight`
            has it.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, context: ModelContext) -> None:
        super().__init__()
        self.shape, self.shard = (vocab_size, hidden_size), context.shard
        self.all_reduce = context.all_reduce
        self.rows = self.shard.slice(vocab_size, "vocab_size")
        local = self.rows.stop - self.rows.start
        self.dtype, self.method = context.dtype, None
        if context.kernels.embedding is not None:
            self.method = context.kernels.embedding(NAME)
            self.method.create((local, hidden_size), context.stored_dtype, context.device)
            self.lookup: Callable[[torch.Tensor], torch.Tensor] = self.method.rows
            return
        self.weight = context.parameter(local, hidden_size, dtype=context.stored_dtype)
        self.lookup = self.plain_lookup
        self.store: Callable[[torch.Tensor], object] = self.weight.copy_

    def plain_lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] -> rows of `weight`."""
        return F.embedding(ids, self.weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.shard.world_size == 1:
            return self.lookup(token_ids).to(self.dtype)
        # A rank returns zeros for tokens of other ranks; the sum over ranks is the embedding.
        mine = (token_ids >= self.rows.start) & (token_ids < self.rows.stop)
        local_ids = torch.where(mine, token_ids - self.rows.start, 0)
        rows = self.lookup(local_ids).to(self.dtype)
        return self.all_reduce(rows * mine.unsqueeze(-1))

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        if self.method is not None:
            slot = self.method.weight_slot(path, MatrixPart(self.shape, (self.rows,)))
        else:
            slot = WeightSlot(shape=self.shape, part=(self.rows,), store=self.store)
        return {f"{path}.weight": slot}


class OutputHead(Layer):
    """Hidden states [L, hidden_size] -> logits [L, vocab_size] on every rank.

    A tied head uses the embedding's weight and has no tensor in the checkpoint.
    """

    def __init__(self, name: str, embedding: Embedding, *, tied: bool, context: ModelContext):
        super().__init__()
        self.shape, self.rows, self.tied = embedding.shape, embedding.rows, tied
        self.all_gather, self.ranks = context.all_gather, context.shard.world_size
        if tied and embedding.method is not None:
            self.method = embedding.method
            return
        self.method = context.kernels.linear(name)
        if tied:
            self.method.set_weight(embedding.weight)
            embedding.lookup, embedding.store = self.method.rows, self.method.load
        else:
            local = self.rows.stop - self.rows.start
            self.method.create((local, self.shape[1]), context.stored_dtype, context.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.all_gather(self.method.apply(hidden, None))

    def argmax(
        self, hidden: torch.Tensor, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The most likely token of each row [L] and its logit [L], if they can be found without all
        logits; else None. See `LinearMethod.argmax`."""
        return self.method.argmax(hidden, None, masks) if self.ranks == 1 else None

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        if self.tied:
            return {}
        slot = self.method.weight_slot(path, MatrixPart(self.shape, (self.rows,)))
        return {f"{path}.weight": slot}
