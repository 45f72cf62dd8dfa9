"""Further norms: RMSNorm with 1 + weight, and QK norms over all heads.

If a family rounds after it multiplies by the weight, the weight has a wider dtype than the model.
Called by `models/generic.py` and `models/gemma4.py`.

Source: OLMo 2 (arXiv 2501.00656).

Legend: T tokens, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanoengine.attention.base import AttentionSpec, HeadNormWeights
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import NormKind
from nanoengine.checkpoint.slots import WeightSlot, ordered
from nanoengine.layers.layer import ModelContext
from nanoengine.layers.layouts import head_order
from nanoengine.layers.norm import HeadNorm, RMSNorm


def make_norm(config: ModelConfig, context: ModelContext) -> RMSNorm:
    """Makes the family's norm over the hidden size."""
    kind, dtype = config.plan.norm, norm_dtype(config.plan.norm, context.dtype)
    norm = CenteredNorm if kind == "one_plus_weight" else RMSNorm
    return norm(config.hidden_size, config.rms_norm_eps, context=context, dtype=dtype)


def norm_dtype(kind: NormKind, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm's weight: float32 or wider if the family multiplies by it before it
    rounds."""
    return dtype if kind == "rms" else torch.promote_types(dtype, torch.float32)


class CenteredNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as in Gemma.

    Why in the wider dtype: 16 bits don't represent 1 + weight exactly.
    """

    def store(self, stored: torch.Tensor) -> None:
        self.weight.copy_(stored.to(self.weight.dtype) + 1)


class ReorderedHeadNorm(HeadNorm):
    """The QK norm per head, with the kind of norm of the family and a head's dimensions ordered by
    `head_order`."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        dtype = norm_dtype(config.plan.norm, context.dtype)
        super().__init__(spec, config.rms_norm_eps, context=context, dtype=dtype)
        self.kind, self.order = config.plan.norm, head_order(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norms each head, for layers whose backend does not: [T, H + K, D] -> the same."""
        wide = x.to(self.weight.dtype)
        normed = F.rms_norm(wide, self.weight.shape[1:], None, self.weights.eps)
        return (normed * self.weight).to(x.dtype)

    def store(self, rows: torch.Tensor, stored: torch.Tensor) -> None:
        factors = stored.to(rows.dtype) + 1 if self.kind == "one_plus_weight" else stored
        rows.copy_(ordered(factors, self.order))


class AllHeadsNorm(ReorderedHeadNorm):
    """QK norm over all query heads together, and over all key heads together. Its weights are
    `q_norm` and `k_norm` next to this module in the checkpoint, [H * D] and [K * D] over all ranks.

    Attributes:
        weights: for the backend, which applies the norm; None: heads are split over ranks, and
            `forward` applies it.

    Source: OLMo 2 (arXiv 2501.00656), section 3.3.
    """

    weights: HeadNormWeights | None

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(spec, config, context)
        self.ranks, self.all_reduce = context.shard.world_size, context.all_reduce
        self.eps, self.counts = config.rms_norm_eps, (spec.num_heads, spec.num_kv_heads)
        self.weights = None
        if self.ranks == 1:
            self.weights = HeadNormWeights(weight=self.weight, eps=self.eps, all_heads=self.counts)
        heads, head_dim = (config.num_attention_heads, config.num_key_value_heads), config.head_dim
        self.whole = [(n * head_dim, context.shard.for_kv_heads(n)) for n in heads]

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Norms queries and keys that are split over ranks: QKV [T, H + 2 K, D] -> the same."""
        q, k, v = heads.split((*self.counts, self.counts[1]), dim=1)
        weights = self.weight.split(self.counts)
        return torch.cat((self._normed(q, weights[0]), self._normed(k, weights[1]), v), dim=1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = self.all_reduce(wide.square().sum((1, 2), keepdim=True))
        # Why this works for KV heads that ranks share: total and size count them equally often.
        size = weight.numel() * self.ranks
        normed = (wide * torch.rsqrt(total / size + self.eps)).to(weight.dtype)
        return (normed * weight).to(x.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return {
            name: replace(slot, shape=(size,), part=(shard.slice(size, name),))
            for (name, slot), (size, shard) in zip(
                super().weight_slots(path).items(), self.whole, strict=True
            )
        }

    def store(self, rows: torch.Tensor, stored: torch.Tensor) -> None:
        rows.copy_(ordered(stored.view(rows.shape).T, self.order).T)
