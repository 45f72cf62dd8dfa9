"""ModelContext: what every layer needs besides the model's config, as one value.

Built by the runner, given to layers and models at construction. Nothing here is global, so two
engines, or two ranks of one model, live in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nanoengine.layers.linear_method import LinearMethod, UnquantizedLinear
from nanoengine.layers.ops import LayerOps, TorchOps
from nanoengine.layers.shard import Shard

if TYPE_CHECKING:
    from nanoengine.attention.base import AttentionBackend


def one_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The collective of a single rank: the tensor itself."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """How and where a model is built.

    Attributes:
        dtype, device: of activations, and of parameters but for those below.
        weight_dtype: of embeddings and the matrices of linear layers; None: `dtype`. Kernels on a
            CPU make float32 of 16-bit weights as they read them.
        keeps_weights: `weight_dtype` must hold what the checkpoint does, exactly; where it does
            not, weights are stored in `dtype`.
        attention_backend: serves all attention layers.
        ops: norms and gates, plain or fused.
        shard: the part of the model that this rank holds.
        linear_method_factory: makes the method of one linear layer, given its full name, say
            "model.layers.0.mlp.down_proj": how its weights are stored and multiplied.
        all_reduce: sums a tensor over the ranks, in place or not, and returns it.
        all_gather: joins the ranks' tensors along the last dimension, in rank order.
        max_positions: positions that rotary tables cover; None: the model's longest context.
    """

    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend
    ops: LayerOps = field(default_factory=TorchOps)
    shard: Shard = field(default_factory=Shard)
    linear_method_factory: Callable[[str], LinearMethod] = UnquantizedLinear
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = one_rank
    all_gather: Callable[[torch.Tensor], torch.Tensor] = one_rank
    max_positions: int | None = None
    weight_dtype: torch.dtype | None = None
    keeps_weights: bool = True

    @property
    def stored_dtype(self) -> torch.dtype:
        """What embeddings and the matrices of linear layers are stored in."""
        return self.weight_dtype or self.dtype
