"""PackedLinear: float32 weights in oneDNN's blocked layout, the faster way to multiply on a CPU.

A row-major weight is repacked by every call of `F.linear`; packed once at load, a decode step reads
memory and multiplies, nothing else. Chosen by `linear_method_for`, which the runner calls.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from nanoengine.layers.linear import LinearMethod, UnquantizedLinear
from nanoengine.layers.weights import empty_parameter


def linear_method_for(device: torch.device, dtype: torch.dtype) -> type[LinearMethod]:
    """The fastest method that stores weights exactly: packed for float32 on a CPU with oneDNN."""
    if device.type != "cpu" or dtype != torch.float32:
        return UnquantizedLinear
    if not torch.backends.mkldnn.is_available():
        warnings.warn("torch has no oneDNN: linear layers run unpacked, slower", stacklevel=2)
        return UnquantizedLinear
    return PackedLinear


class PackedLinear(LinearMethod):
    """A float32 weight on the CPU, packed once all of its rows are loaded.

    A tied weight is packed as a second copy: the embedding still looks up rows of the plain one.

    Perf: a step of 8 rows through 95M parameters takes 53 ms of one Zen 3 core, 81 ms unpacked;
    32 rows 115 and 151 ms, 1 row the same 31 ms.
    Source: the ops are those that torch's Inductor emits for frozen linear layers.
    """

    def create(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight: torch.Tensor | None = None,
    ) -> None:
        assert dtype == torch.float32, dtype
        assert device.type == "cpu", device
        self.tied, self.rows_left = weight, out_features
        if weight is None:
            self.weight = empty_parameter((out_features, in_features), dtype, device)
        else:
            self.register_buffer("weight", None)  # a copy, so no parameter of the model

    def load(self, weight: torch.Tensor, rows: slice) -> None:
        self.weight[rows].copy_(weight)
        self.rows_left -= rows.stop - rows.start
        if not self.rows_left:  # Why here: packing layer by layer keeps one plain weight at a time
            self.weight = nn.Parameter(_pack(self.weight), requires_grad=False)

    def finish(self) -> None:
        if self.tied is not None:
            self.weight = _pack(self.tied)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
