"""FoldedLayer: a plain decoder layer whose norms are a part of what follows them, on a GPU.

    x ─ qkv ─ (1 / rms of x) rotate, store ─ attend ─ o, added to x in its product
    x ─ gate and up ─ (1 / rms of x) gate ─ down, added to x in its product

An RMSNorm is a factor a column and one over the rms of a row. The factors are multiplied into the
columns of the next weight when it is loaded, rounded once; what a row is divided by commutes with
the product, and the kernel behind it finds it. So a layer has two kernels less, and x is rounded
once where it was twice. The readable form is `models/decoder.py::DecoderLayer`.

`models/triton.py` makes them; the kernels know such rows as `Unnormed`. They have run in Triton's
interpreter and been compiled ahead of time; they have not run on a GPU yet.

Source: torch's CUDA `addmm` is one cuBLAS call where it adds in place, else a copy comes first.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.attention.triton import TritonBackend
from nanoengine.errors import EngineDeadError
from nanoengine.kernels.launch import next_power_of_2
from nanoengine.kernels.triton_layers import Unnormed
from nanoengine.layers.kernels import UnquantizedLinear
from nanoengine.layers.linear import MergedLinear
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.triton_linear import GatedLinear, arch_of, gate, gate_config, multiply

WIDTH = 2048
"""Numbers of a row that a program squares at a time: 16 a thread, two loads of 16 bytes."""


class FoldedLinear(UnquantizedLinear):
    """A weight [O, N] whose columns are multiplied by a norm's factors [N].

    Attributes:
        folded: the factors that are in the weight.
        ends: of its matrices' rows; fresh: those of matrices that came since it was folded.
    """

    product = "floats with a norm's factors, by torch; gates of up to 64 rows by Triton"

    def __init__(self, linear: MergedLinear, norm: RMSNorm) -> None:
        super().__init__("")
        self.hold(linear.method.weight)
        self.factors, self.folded = norm.weight, norm.weight.detach()
        self.ends = list(itertools.accumulate(linear.parts.values()))
        self.fresh = set(self.ends)
        self.fold()

    def load(self, weight: torch.Tensor, first: int = 0) -> None:
        super().load(weight, first)
        self.fresh.add(first + len(weight))

    def fold(self) -> None:
        """Before a step runs: multiplies matrices that came by the factors; if these came without
        some of them, the others by what has changed."""
        changed = not torch.equal(self.factors, self.folded)
        if changed and self.fresh != set(self.ends):
            if torch.any((self.folded == 0) & (self.factors != 0)):
                raise EngineDeadError(
                    "a norm's weight, 0 before, came without the matrices behind it, which were"
                    " multiplied by that: make a new LLM, and give a norm with its matrices"
                )
            warnings.warn(
                "a norm's weight came without a matrix behind it, into which it is multiplied: this"
                " is rounded once more; give both to keep all digits",
                stacklevel=2,
            )
        ratio = self.factors.float() / self.folded.float()
        ratio = torch.where(self.factors == self.folded, 1.0, ratio)
        for first, end in itertools.pairwise([0, *self.ends]):
            if end in self.fresh:
                self.weight[first:end].mul_(self.factors)
            elif changed:
                self.weight[first:end].mul_(ratio)
        self.folded = self.factors.detach().clone()
        self.fresh.clear()


class FoldedLayer:
    """Called like a `DecoderLayer`; x is the sum of all that was added so far, which it adds to in
    place, and there is no residual beside it."""

    @staticmethod
    def takes(layer: Any) -> bool:
        """Whether all of a layer can be done so: plain products on one rank, and no bias but that
        of heads."""
        attention, mlp = layer.self_attn, layer.mlp
        linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
        return (
            isinstance(attention.attention.backend, TritonBackend)
            and all(type(one.method) in (UnquantizedLinear, GatedLinear) for one in linears)
            and all(one.shard.world_size == 1 for one in linears)
            and all(one.bias is None for one in linears[1:])
        )

    def __init__(self, layer: Any) -> None:
        mixer, mlp = layer.self_attn, layer.mlp
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        for linear, norm in ((mixer.qkv_proj, first), (mlp.gate_up_proj, second)):
            linear.method = FoldedLinear(linear, norm)
        self.attention, self.head_norm = mixer.attention, mixer.norm_weights
        self.bias, self.gate_up = mixer.qkv_proj.bias, mlp.gate_up_proj.method.weight
        self.qkv, self.gate_up_t = mixer.qkv_proj.method.weight.T, self.gate_up.T
        self.o, self.down = mixer.o_proj.method.weight.T, mlp.down_proj.method.weight.T
        self.head_dim, self.activation = mixer.head_dim, mlp.activation
        self.inner, self.arch = len(self.gate_up) // 2, arch_of(self.gate_up.device)
        size = len(first.weight)
        width = min(next_power_of_2(size), WIDTH)
        self.of_heads = Unnormed(size, width, first.eps, self.bias is not None)
        self.of_gates = Unnormed(size, width, second.eps)

    def __call__(
        self,
        x: torch.Tensor,
        residual: None,
        rotation: Rotation,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        cache, backend = self.attention.cache, self.attention.backend
        heads = torch.mm(x, self.qkv).view(len(x), -1, self.head_dim)
        q = backend.rotate_and_store(
            heads, rotation, self.head_norm, cache, batch, x, self.of_heads, self.bias
        )
        attended = backend.attend(q, cache, batch).flatten(1)
        if rows is not None:
            x, attended = x.index_select(0, rows), attended.index_select(0, rows)
        x.addmm_(attended, self.o)
        return x.addmm_(self.gated(x), self.down), None

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """act(gate) * up of the rows of x, normed: [T, I]."""
        config = gate_config(self.arch, len(x), self.inner, x.dtype)
        if config is not None:
            return multiply(x, self.gate_up, None, self.activation, config, self.of_gates.eps)
        return gate(torch.mm(x, self.gate_up_t), self.activation, x, self.of_gates)
