"""Kernels: a model's operations on its tensors; here in plain torch, on any device.

A *kernel set* is one object per device type: attention, norms, gates, how linear layers store
weights and multiply by them, and which layers are fused after loading. `Kernels` is the set of
`attention_backend="naive"`, the reference implementation against which all other sets are tested.
Layers use their set through `ModelContext.kernels`; `runner/options.py` selects it.

The dtype of a norm's weight determines the rounding: if the weight has x's dtype, the normalized x
is rounded before it is multiplied by the weight; if the weight's dtype is wider, after. This is
what the families' model code does. Statistics are float32 or wider.

`models/cpu.py` and `models/triton.py` define the other sets; `quantized.py` has integer weights.

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
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.layers.collectives import Shard

Factory = Callable[..., "LinearMethod | None"]
"""Makes the method of a quantized layer: see `quantized_linears`."""

Masks = Callable[[], np.ndarray]
"""Returns the allowed outputs per row, one bit per output; see `kernels/cpu_argmax.py`."""

ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate", ".router", ".key_up", ".value_up", ".eh_proj")
"""Name endings of small layers that are never quantized. Why: a rounding error in a router may
select other experts, which changes the result far more than the error itself; the MLA matrices
multiply all queries and values; checkpoints keep MTP's eh_proj in floats."""


class Kernels:
    """Plain torch, in any dtype.

    Attributes:
        attention: the backend of all attention layers.
        linear: makes the `LinearMethod` of a layer from its full name, for example
            "model.layers.0.mlp.down_proj".
        embedding: the same for an embedding that is quantized in the checkpoint; None: it is
            floats.
        products: set by `fuse` on a GPU: one line per kernel with the number of its matrices.
    """

    embedding: Callable[[str], LinearMethod] | None = None
    products: tuple[str, ...] = ()

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.linear: Callable[[str], LinearMethod] = UnquantizedLinear

    def dtypes(
        self, config: ModelConfig, dtype: torch.dtype, shard: Shard
    ) -> tuple[torch.dtype, torch.dtype]:
        """Returns, for a model of `dtype`: the dtype of activations between linear layers, and the
        dtype in which embeddings and matrices are stored."""
        return dtype, dtype

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual), x + residual), both [T, N]; either input may be
        overwritten. Without a residual (norm(x), x), and x is kept. The norm is x / rms(x) * weight
        over the last dimension, weight [N]."""
        x = x if residual is None else x + residual
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps)
        return (normed * weight).to(x.dtype), x

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up: [T, 2 I], gate first -> [T, I]. `activation` is a key of `GATES`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return GATES[activation](gate, up)

    def quantized_linear_factory(self, quantization: Quantization | None = None) -> Factory | None:
        """Returns the function that makes methods for weights with this quantization; None: this
        set has no kernel for them. Quantization None: as stored, with float activations."""
        return None

    def place(self, model: nn.Module) -> None:
        """Called once, after the model is built and before loading; may move its parameters."""

    def fuse(self, model: nn.Module) -> None:
        """Called once, after all weights are loaded; may replace reference implementations by
        kernels."""


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most 7 and up to -7 ... 7.

    Source: the model code of gpt-oss.
    """
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """relu(x) ** 2, the activation of an MLP without a gate."""
    return F.relu(x).square_()


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda gate, up: F.silu(gate).mul_(up),
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up),
    "clamped_swiglu": clamped_swiglu,
}
"""`LayerConfig.hidden_act` -> the function of gate and up. Every kernel set supports all of
them."""


class LinearMethod(nn.Module, ABC):
    """How a linear layer stores its weight and multiplies by it; each quantization is a subclass.
    One instance per layer.

    A subclass registers its tensors as parameters or buffers, so that they are counted and moved.

    Attributes:
        num_weights: number of weights that are not stored as parameters.
        has_kernel: a compiled kernel multiplies by this weight, with inputs in their original
            order.
        product: on a GPU, a description of the kernel that multiplies by it; "": torch, in floats.
    """

    num_weights, has_kernel, product = 0, False, ""

    def __init__(self, name: str) -> None:
        """`name` is the layer's full name."""
        super().__init__()

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Allocates storage for this rank's [out_features, in_features]."""
        self.set_weight(empty_parameter(shape, dtype, device))

    @abstractmethod
    def set_weight(self, weight: torch.Tensor) -> None:
        """Uses an existing tensor as weight.

        Called instead of `create` for a tied head. The embedding then passes all rows that it loads
        to `load`.
        """

    @abstractmethod
    def load(self, weight: torch.Tensor, first: int = 0) -> None:
        """Stores rows of a checkpoint, [rows, in_features] of any floating dtype, from `first` on.

        After all rows are loaded, rows may be replaced. The memory must stay the same, because
        compiled calls and CUDA graphs read it.
        """

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in x's dtype."""

    def argmax(
        self, x: torch.Tensor, softcap: float | None = None, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Finds the largest output of `apply(x, None)` in each row of x [L, in_features] without
        computing all.

        Args:
            softcap: applied to the outputs afterwards. Its rounding may make two outputs equal;
                then all must be computed.
            masks: returns the allowed outputs; called only if the method uses them.

        Returns:
            Indices [L] int64, the lowest among equals, and values [L], NaN if any output is NaN. Or
            None: not supported, so compute all outputs.
        """
        return None

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] -> rows of the weight, [T, in_features]: the lookup of the tied embedding."""

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        """The slot of the checkpoint's matrix `name`.

        Methods for quantized checkpoints override it.
        """

        def store(weight: torch.Tensor) -> None:
            self.load(ordered(weight, matrix.order), matrix.first)

        return WeightSlot(shape=matrix.shape, part=matrix.part, store=store)

    def finish(self) -> None:
        """Called after all weights are loaded, and after an update; may repack them."""


class UnquantizedLinear(LinearMethod):
    """A float weight, multiplied by torch; the reference implementation of all methods that do not
    quantize."""

    def set_weight(self, weight: torch.Tensor) -> None:
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
