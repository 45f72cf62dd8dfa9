"""Attention: the place where a model meets the paged KV cache.

The runner binds each layer's slice of the cache after it has sized it; until then, and for models
that are only profiled, the layer has none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanoengine.batch import Batch
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.errors import WeightLoadError
from nanoengine.layers.layer import Layer

if TYPE_CHECKING:
    from nanoengine.attention.base import AttentionBackend, AttentionSpec
    from nanoengine.attention.rotate import HeadNormWeights, Rotation


class Attention(Layer):
    """One layer's attention: what it computes (`spec`), by whom (`backend`), over which cache.

    Attributes:
        spec: heads, scale and window of this rank's part of the layer.
        k_cache, v_cache: this layer's blocks, in the backend's layout; empty until `bind`.
    """

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.spec, self.backend = spec, backend
        self.k_cache = self.v_cache = torch.empty(0)

    def bind(self, k_cache: torch.Tensor, v_cache: torch.Tensor, group: int) -> None:
        """Gives the layer its slices of the KV cache and the KV group whose block tables it
        reads."""
        self.k_cache, self.v_cache = k_cache, v_cache
        self.spec = replace(self.spec, group=group)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The scales of an fp8 cache, beside this module in the checkpoint; 1 if it has none.

        Raises:
            WeightLoadError: a scale is not a positive number.
        """
        beside = path.rpartition(".")[0]

        def store(name: str, scale: torch.Tensor) -> None:
            value = scale.item()
            if not 0 < value < float("inf"):
                raise WeightLoadError(f"{beside}.{name} must be a positive number, got {value}")
            self.spec = replace(self.spec, **{name: value})

        return {
            f"{beside}.{name}": WeightSlot(
                shape=(1,),
                store=partial(store, name),
                absent=partial(store, name, torch.ones(1)),
            )
            for name in ("k_scale", "v_scale")
        }

    def forward(
        self,
        heads: torch.Tensor,
        rotation: Rotation,
        norm: HeadNormWeights | None,
        batch: Batch,
    ) -> torch.Tensor:
        """Projected query, key and value heads, [T, H + 2 K, D] -> [T, H, D].

        Queries and keys are normed and rotated, keys and values stored, on the way.
        """
        caches = self.k_cache, self.v_cache
        q = self.backend.rotate_and_store(heads, rotation, norm, *caches, batch, self.spec)
        return self.backend.attend(q, *caches, batch, self.spec)
