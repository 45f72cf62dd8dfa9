"""Kernels: what a model computes with between its tensors; here in plain torch, on any device.

A *kernel set* is one object for one device: attention, norms, gates, how linear layers store and
multiply their weights, and what may run as fewer calls once all weights are loaded. `Kernels` is
the set of `attention_backend="naive"`, the readable form that every other set is tested against.
Layers reach theirs through `ModelContext.kernels`; `runner/numerics.py` chooses it.

The dtype of a norm's weight says where to round: a weight of x's dtype is multiplied after the norm
was rounded to it, a wider one before, as the checkpoints' own code does. Statistics are float32 or
wider.

Special: `models/cpu.py` and `models/triton.py`, a set each; `quantized.py`, weights in whole
numbers.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467); Shazeer, "GLU
Variants Improve Transformer" (arXiv 2002.05202).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.attention.base import AttentionBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.layers.collectives import Shard

Masks = Callable[[], np.ndarray]

ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate", ".router", ".key_up", ".value_up")
"""Ends of the names of small layers that are never rounded. Why: they choose among experts, and
another choice is another result, not one that is a little off; or they are factors of what all
queries and values of latent attention are made of."""


class Kernels:
    """Plain torch, in any dtype.

    Attributes:
        attention: serves all attention layers.
        linear: makes the method of one linear layer, given its full name, say
            "model.layers.0.mlp.down_proj": how its weights are stored and multiplied.
        embedding: the same for an embedding that is stored quantized; None: it is floats.
        products: on a GPU how many matrices are multiplied in which way, a line a kind, once fused.
    """

    embedding: Callable[[str], LinearMethod] | None = None
    products: tuple[str, ...] = ()

    def __init__(
        self,
        attention: AttentionBackend,
        linear: Callable[[str], LinearMethod] | None = None,
    ) -> None:
        self.attention, self.linear = attention, linear or UnquantizedLinear

    def dtypes(
        self, config: ModelConfig, dtype: torch.dtype, shard: Shard
    ) -> tuple[torch.dtype, torch.dtype]:
        """What a model of `dtype` has between two products, and what its embeddings and matrices
        are stored in."""
        return dtype, dtype

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, whose size is weight's: [T, N]."""
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps)
        return (normed * weight).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the norm of x + residual, x + residual), both [T, N]; either input may be
        overwritten."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up of [T, 2 I], gate first: [T, I]. `activation` is a key of `GATES`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return GATES[activation](gate, up)

    def quantized_kind(self) -> Callable[..., LinearMethod | None] | None:
        """What makes methods of weights of 4 and 8 bits on a GPU, for `quantized_linears`; None:
        the set has no such kernel."""
        return None

    def place(self, model: nn.Module) -> None:
        """Called once when the model is made; a set may move its parameters, not loaded yet."""

    def fuse(self, model: nn.Module) -> None:
        """Called once when all weights are loaded; a set may put calls of its own in place of
        readable forms, with the same results."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), of a gate up to 7 and an up from -7 to 7.

    Source: the model code of gpt-oss.
    """
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate).mul_(up),
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up),
    "clamped_swiglu": clamped_swiglu,
}
"""`LayerPlan.activation` -> the function of gate and up, which every set computes."""


class LinearMethod(nn.Module, ABC):
    """How one linear layer's weight is stored and multiplied; the door of quantization. One
    instance serves one layer.

    A subclass registers its tensors as parameters or buffers, so that they are counted and found.

    Attributes:
        num_weights: of the model, that are kept in another form than parameters.
        has_kernel: compiled code multiplies by this weight, in the inputs' own order.
        product: on a GPU what multiplies by it, for people; "": floats, by torch.
        bmm: torch.bmm, or one that such methods have instead.
    """

    num_weights, has_kernel, product, bmm = 0, False, "", staticmethod(torch.bmm)

    def __init__(self, name: str) -> None:
        """`name` is the layer's full name."""
        super().__init__()

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocates storage for this rank's [out_features, in_features]."""
        self.hold(empty_parameter(shape, dtype, device))

    @abstractmethod
    def hold(self, weight: torch.Tensor) -> None:
        """Takes storage that is there already.

        Called in place of `create` where the weight is another layer's (a tied embedding), which
        gives all of its rows to `load`.
        """

    @abstractmethod
    def load(self, weight: torch.Tensor, first: int = 0) -> None:
        """Stores rows of a checkpoint, [rows, in_features] of any floating dtype, from `first` on.

        Once all rows are there, others may come in their place: in the same memory, which compiled
        calls and CUDA graphs read.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], the dtype of x."""

    def apply_gated(self, x: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
        """[T, in_features] -> act(gate) * up [T, out_features / 2], where the outputs are gate,
        then up; a method may fuse the two."""
        return kernels.gate(self.apply(x, None), activation)

    def argmax(
        self, x: torch.Tensor, softcap: float | None = None, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The largest of `apply(x, None)` in each row of x [L, in_features] where the method finds
        it without computing all: index [L] int64, the lowest among equals, and value [L], NaN if
        any is. None: compute all.

        Args:
            softcap: bends outputs afterwards, which may make two of them equal by rounding; where
                it may have, all are to be computed.
            masks: gives the outputs that count, a bit each (`kernels/cpu_screen.py`); called only
                where they can be used.
        """
        return None

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a weight that was given to `hold`, [T] -> [T, in_features]: the lookup of the
        embedding that it is tied to."""

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        """The slot of the checkpoint's matrix `name`.

        A method that reads a matrix stored in another form overrides this.
        """

        def store(weight: torch.Tensor) -> None:
            self.load(ordered(weight, matrix.order), matrix.first)

        return WeightSlot(shape=matrix.shape, part=matrix.part, store=store)

    def finish(self) -> None:
        """Called when all weights are loaded, and when new ones are; a method may repack them."""


class UnquantizedLinear(LinearMethod):
    """A weight of the model's dtype; the readable form of all methods that store it exactly."""

    def hold(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def load(self, weight: torch.Tensor, first: int = 0) -> None:
        self.weight[first : first + len(weight)].copy_(weight)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def empty_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> nn.Parameter:
    """An uninitialised parameter for inference; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
