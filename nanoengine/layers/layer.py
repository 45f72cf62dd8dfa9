"""Layer and ModelContext: what every layer of a model is, and what each is made with.

Nothing here is global, so two engines, or two ranks of one model, live in one process.

Special: `collectives.py`, a model on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanoengine.layers.collectives import Shard
from nanoengine.layers.kernels import Kernels, empty_parameter


class Layer(nn.Module):
    """An `nn.Module` whose call is its forward: hooks are not run.

    Why: a call and an attribute of `nn.Module` go through several Python functions, and one token
    through a small model makes hundreds of each. Perf: 1.1 and 0.8 us, against 0.3 and 0.07 us (one
    Zen 3 core).
    """

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


def pin_attributes(model: nn.Module) -> None:
    """Puts each module's parts and tensors beside its plain attributes, where Python finds them at
    once. For a model that is loaded whole; assigning one of them later takes its pin away."""
    for module in model.modules():
        for named in (module._modules, module._parameters, module._buffers):
            vars(module).update(named)


def one_rank(tensor: torch.Tensor) -> torch.Tensor:
    """The collective of a single rank: the tensor itself."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """How and where a model is built. Made by the runner, given to all layers.

    Attributes:
        dtype, device: of activations, and of parameters but for those below.
        kernels: what computes on that device.
        weight_dtype: of embeddings and the matrices of linear layers; None: `dtype`. Kernels on a
            CPU make float32 of 16-bit weights as they read them.
        keeps_weights: `weight_dtype` must hold what the checkpoint does, exactly; where it does
            not, weights are stored in `dtype`.
        shard: the part of the model that this rank holds.
        all_reduce: sums a tensor over the ranks, in place or not, and returns it.
        all_gather: joins the ranks' tensors along the last dimension, in rank order.
        max_positions: positions that rotary tables cover; None: the model's longest context.
        int8_cache: the KV cache is int8.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    shard: Shard = field(default_factory=Shard)
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = one_rank
    all_gather: Callable[[torch.Tensor], torch.Tensor] = one_rank
    max_positions: int | None = None
    weight_dtype: torch.dtype | None = None
    keeps_weights: bool = True
    int8_cache: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        """What embeddings and the matrices of linear layers are stored in."""
        return self.weight_dtype or self.dtype

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """One of a layer, uninitialised; `dtype` None: that of activations."""
        return empty_parameter(shape, dtype or self.dtype, self.device)
