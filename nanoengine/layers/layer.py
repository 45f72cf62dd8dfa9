"""Layer and ModelContext: the base class of all layers, and the context that they are built with.

Nothing here is global, so two engines, or two ranks of one model, can share a process.

`collectives.py` splits a model over several ranks.
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
    """Copies each module's submodules and tensors into its `__dict__`, where Python finds them
    without calling `nn.Module.__getattr__`. For a completely loaded model; assigning one of them
    later removes its copy."""
    for module in model.modules():
        for named in (module._modules, module._parameters, module._buffers):
            vars(module).update(named)


def identity(tensor: torch.Tensor) -> torch.Tensor:
    """All-reduce or all-gather of a single rank: returns the tensor itself."""
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Dtypes, device, kernels and shard of a model. Made by the runner and passed to all layers.

    Attributes:
        dtype, device: of activations, and of all other parameters.
        kernels: the kernel set for that device.
        weight_dtype: the dtype of embeddings and of the matrices of linear layers; None: `dtype`.
            CPU kernels convert 16-bit weights to float32 as they read them.
        keeps_weights: use `weight_dtype` only if it represents all of the checkpoint's weights
            exactly; otherwise store them in `dtype`.
        shard: the part of the model that this rank holds.
        all_reduce: sums a tensor over the ranks, in place or not, and returns it.
        all_gather: concatenates the ranks' tensors along the last dimension, in rank order.
        max_positions: positions in the RoPE tables; None: all of the model's context.
        int8_cache: the KV cache is int8.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    shard: Shard = field(default_factory=Shard)
    all_reduce: Callable[[torch.Tensor], torch.Tensor] = identity
    all_gather: Callable[[torch.Tensor], torch.Tensor] = identity
    max_positions: int | None = None
    weight_dtype: torch.dtype | None = None
    keeps_weights: bool = True
    int8_cache: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        """The stored dtype of embeddings and of the matrices of linear layers."""
        return self.weight_dtype or self.dtype

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Makes an uninitialised parameter of a layer; `dtype` None: the activations' dtype."""
        return empty_parameter(shape, dtype or self.dtype, self.device)
