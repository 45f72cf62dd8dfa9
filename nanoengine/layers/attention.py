"""Attention: the connection between a model and the paged KV cache.

The runner sizes the cache after it has loaded the model, and then binds each layer's slices of it.
Until then a layer has empty slices.

`kv_scales.py` has the scales of an fp8 cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nanoengine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    HeadNormWeights,
    LayerCache,
    Rotation,
)
from nanoengine.attention.batch import Batch
from nanoengine.layers.layer import Layer


class Attention(Layer):
    """One layer's attention: a backend, and the cache that it reads and writes.

    Attributes:
        cache: what the layer computes (`spec`), and its blocks, which are empty until `bind`.
    """

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend
        self.cache = LayerCache(torch.empty(0), torch.empty(0), spec)

    @property
    def spec(self) -> AttentionSpec:
        """Heads, scale, window and KV group of this rank's part of the layer."""
        return self.cache.spec

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, group: int) -> None:
        """Gives the layer its slices of the KV cache, and the KV group whose block tables it
        reads."""
        self.cache = LayerCache(k_cache, v_cache, replace(self.spec, group=group))

    def forward(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        norm: HeadNormWeights | None,
        batch: Batch,
    ) -> torch.Tensor:
        """Projected query, key and value heads, [T, H + 2 K, D] -> [T, H, D].

        Applies QK norm and RoPE, and stores keys and values.
        """
        q = self.backend.rotate_and_store(heads, rotation, norm, self.cache, batch)
        return self.backend.attend(q, self.cache, batch)
