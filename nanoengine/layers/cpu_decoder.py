"""FusedLayers: neighbouring decoder layers that run as one compiled call on the CPU.

Why: one token through a small model is hundreds of calls from Python, and they take a third of its
time. The plain form, `DecoderLayer.forward`, says what is computed; this gives the same bits
(`tests/layers/test_cpu_decoder.py`). Made by `models/fuse.py` once the weights are loaded. A layer
whose MLP has no kernel is the last of its call, which ends before that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoengine.attention.base import AttentionSpec, HeadNormWeights, LayerCache, Rotation
from nanoengine.attention.batch import Batch
from nanoengine.attention.cpu import NO_WINDOW, CPUBackend, norm_kind
from nanoengine.kernels.cpu_decoder import decoder_layers
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.kernels.held import Held, type_of
from nanoengine.layers.attention import Attention
from nanoengine.layers.linear import MergedLinear, QKVLinear, RowParallelLinear
from nanoengine.layers.norm import RMSNorm

NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a decoder layer is made of: norms before attention and MLP, behind them, or both;
    `scale` is the factor on what either adds; `rotation` says which of the model's rotations the
    layer has, None: there is one. `rest` is what computes an MLP without a kernel, and
    what stands behind it; the gated one has `gate_up` and `down` instead."""

    norm: RMSNorm | None
    qkv: QKVLinear
    head_norm: HeadNormWeights | None
    attention: Attention
    o: RowParallelLinear
    attention_output_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    gate_up: MergedLinear | None = None
    down: RowParallelLinear | None = None
    mlp_output_norm: RMSNorm | None
    activation: str
    scale: float
    rotation: int | None = None
    rest: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def linears(self) -> list[MergedLinear | RowParallelLinear]:
        found = self.qkv, self.o, self.gate_up, self.down
        return [linear for linear in found if linear is not None]

    @property
    def norms(self) -> list[RMSNorm]:
        found = self.norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm
        return [norm for norm in found if norm is not None]


class _FusedCall(NamedTuple):
    """Layers that one call runs: what is the same for all of them, and what each has of its own."""

    spec: AttentionSpec
    operands: Held


class FusedLayers:
    """Called like a `DecoderLayer`; overwrites both of its inputs.

    Attributes:
        layers: in order. Behind one that has a `rest` there is no other.
    """

    @staticmethod
    def takes(parts: LayerParts) -> bool:
        """Whether a kernel exists for each part: packed weights on one rank, plain norms."""
        return (
            isinstance(parts.attention.backend, CPUBackend)
            and all(isinstance(norm, RMSNorm) for norm in parts.norms)
            and all(linear.shard.world_size == 1 for linear in parts.linears)
            and all(linear.method.has_kernel for linear in parts.linears)
        )

    def __init__(self, first: LayerParts) -> None:
        backend = first.attention.backend
        assert isinstance(backend, CPUBackend)
        self.backend, self.rotation = backend, first.rotation
        self.layers: list[LayerParts] = []
        self._operands: list[tuple[Any, ...]] = []
        self._caches: list[LayerCache] = []
        self._calls: list[_FusedCall] = []
        self.append(first)

    @property
    def rest(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What the last layer has behind the kernel."""
        return self.layers[-1].rest

    def may_precede(self, parts: LayerParts) -> bool:
        """Whether this layer may run in the same call."""
        return self.rest is None and self.rotation == parts.rotation

    def append(self, parts: LayerParts) -> None:
        """Another layer behind the others."""
        self.layers.append(parts)
        self._operands.append(_operands(parts, self.backend))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation | list[Rotation],
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rotation is not None:
            rotation = rotation[self.rotation]
        if residual is None:
            x, residual = torch.zeros_like(x), x
        given, calls = (x.numpy(), residual.numpy()), self._bound()
        for call in calls:
            last = len(call.operands) - (rows is not None and call is calls[-1])
            if last:
                self._run(call, 0, last, given, given, rotation, batch, None)
        if rows is not None:  # Why arrays of their own: more rows may go on than have come in.
            shape, count = (len(rows), x.shape[1]), len(calls[-1].operands)
            x, residual = torch.empty(shape), torch.empty(shape)
            results = x.numpy(), residual.numpy()
            self._run(calls[-1], count - 1, count, given, results, rotation, batch, rows.numpy())
        return (x if self.rest is None else self.rest(x)), residual

    def _run(
        self,
        call: _FusedCall,
        first: int,
        last: int,
        given: tuple[np.ndarray, np.ndarray],
        results: tuple[np.ndarray, np.ndarray],
        rotation: Rotation,
        batch: Batch,
        rows: np.ndarray | None,
    ) -> None:
        """Layers first ... last - 1 of a call."""
        step = self.backend.step_arrays(rotation, batch, call.spec, given[0].dtype, rows)
        decoder_layers(
            *given, rows is None, NO_ROWS if rows is None else rows, *results, step, call.operands,
            first, last, batch.attention.num_workers,
        )  # fmt: skip

    def _bound(self) -> list[_FusedCall]:
        """The calls that run all layers: one, unless their attention differs (the KV group, the
        window) or the types of their weights. Made when the layers are bound to a cache."""
        caches = [parts.attention.cache for parts in self.layers]
        if len(caches) != len(self._caches) or not all(map(operator.is_, caches, self._caches)):
            layers = [
                (cache.spec, (*self.backend.cache_arrays(cache), *operands))
                for cache, operands in zip(caches, self._operands, strict=True)
            ]
            self._caches, self._calls = caches, []
            for (spec, _), alike in groupby(layers, lambda it: (it[0], type_of(it[1]))):
                operands = [of_layer for _, of_layer in alike]
                self._calls.append(_FusedCall(spec, Held(operands)))
        return self._calls


def _operands(parts: LayerParts, backend: CPUBackend) -> tuple[Any, Any]:
    """What `decoder_layers` calls first and second."""
    spec, real = parts.attention.spec, np.float32
    head_norm, kind = parts.head_norm, norm_kind(parts.head_norm)
    if head_norm is None:
        head_norm = HeadNormWeights(
            weight=torch.ones(spec.num_heads + spec.num_kv_heads, spec.head_dim), eps=0.0
        )
    qkv, o, *of_mlp = (linear.method.operands(linear.bias) for linear in parts.linears)
    any_norm = parts.norms[0]
    before, behind = parts.norm is not None, parts.attention_output_norm is not None

    def weight_of(norm: RMSNorm | None) -> np.ndarray:
        return (norm or any_norm).weight.detach().numpy()

    window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
    heads_and_dims = spec.num_heads, spec.num_kv_heads, spec.head_dim, backend.block_size
    of_heads = head_norm.weight.detach().numpy()
    first = (
        (weight_of(parts.norm), qkv, of_heads, backend.operand, backend.sinks(spec)),
        (heads_and_dims, window, kind, before),
        (real(any_norm.eps), real(head_norm.eps), real(spec.scale), real(spec.softcap or 0)),
    )
    mlp: tuple[Any, ...] = ()
    if parts.gate_up is not None:
        inner = sum(parts.gate_up.parts.values()) // 2
        mlp = *of_mlp, weight_of(parts.mlp_output_norm), inner, GATES[parts.activation]
    second = (
        (o, weight_of(parts.attention_output_norm), weight_of(parts.mlp_norm)),
        mlp,
        (real(any_norm.eps), behind, real(parts.scale)),
    )
    return first, second
