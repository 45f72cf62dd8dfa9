"""FusedLayers: neighbouring decoder layers that run as one compiled call on the CPU.

Why: one token through a small model is hundreds of calls from Python, and they take a third of its
time. The plain form, `DecoderLayer.forward`, says what is computed; this gives the same bits
(`tests/layers/test_cpu_decoder.py`). Made by `models/cpu.py` once the weights are loaded. A layer
whose MLP has no kernel is the last of its call, which ends before that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
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
from nanoengine.layers.norm import RMSNorm

NO_ROWS = np.empty(0, np.int64)


class LayerParts:
    """What a decoder layer is made of. What only variants have is asked for by name, so that their
    file is loaded for them alone.

    Attributes:
        before, behind: the norms of attention and of the MLP, before them and behind; None: none.
        gated: the MLP, where it is a gated one; else `rest` is what computes it without a kernel,
            and what stands behind it.
        scale: the factor on what attention and MLP add.
        rotation: which of the model's rotations the layer has; None: there is one.
    """

    def __init__(self, layer: Any) -> None:
        """`layer` is a `DecoderLayer`."""
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.head_norm = attention.attention, attention.norm_weights
        self.before = layer.input_layernorm, layer.post_attention_layernorm
        behind = "attention_output_norm", "mlp_output_norm"
        self.behind = tuple(getattr(layer, name, None) for name in behind)
        self.norms = [norm for norm in (*self.before, *self.behind) if norm is not None]
        self.gated = mlp if hasattr(mlp, "gate_up_proj") else None
        self.rest = None if self.gated else layer.mlp_part
        self.linears = self.projections(attention)
        if self.gated:
            self.linears += [mlp.gate_up_proj, mlp.down_proj]
        self.scale = getattr(layer, "scale", 1.0)
        self.rotation = getattr(layer, "rotation", None)

    def projections(self, attention: Any) -> list[Any]:
        """The linear layers of attention."""
        return [attention.qkv_proj, attention.o_proj]


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
        self._operands.append(self.operands_of(parts))

    def operands_of(self, parts: LayerParts) -> tuple[Any, ...]:
        """What the kernel takes of a layer behind its caches."""
        return _operands(parts, self.backend)

    def compute(self, *arguments: Any) -> None:
        """Calls the kernel."""
        decoder_layers(*arguments)

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

        def run(
            call: _FusedCall,
            layers: tuple[int, int],
            results: tuple[np.ndarray, np.ndarray],
            rows: np.ndarray | None,
        ) -> None:
            step = self.backend.step_arrays(rotation, batch, call.spec, given[0].dtype, rows)
            self.compute(
                *given, rows is None, NO_ROWS if rows is None else rows, *results, step,
                call.operands, *layers, batch.attention.num_workers,
            )  # fmt: skip

        for call in calls:
            last = len(call.operands) - (rows is not None and call is calls[-1])
            if last:
                run(call, (0, last), given, None)
        if rows is not None:  # Why arrays of their own: more rows may go on than have come in.
            shape, count = (len(rows), x.shape[1]), len(calls[-1].operands)
            x, residual = torch.empty(shape), torch.empty(shape)
            run(calls[-1], (count - 1, count), (x.numpy(), residual.numpy()), rows.numpy())
        return (x if self.rest is None else self.rest(x)), residual

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
    (norm, mlp_norm), (output_norm, mlp_output_norm) = parts.before, parts.behind

    def weight_of(norm: RMSNorm | None) -> np.ndarray:
        return (norm or any_norm).weight.detach().numpy()

    window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
    heads_and_dims = spec.num_heads, spec.num_kv_heads, spec.head_dim, backend.block_size
    of_heads = head_norm.weight.detach().numpy()
    first = (
        (weight_of(norm), qkv, of_heads, backend.operand, backend.sinks(spec)),
        (heads_and_dims, window, kind, norm is not None),
        (real(any_norm.eps), real(head_norm.eps), real(spec.scale), real(spec.softcap or 0)),
    )
    mlp: tuple[Any, ...] = ()
    if parts.gated is not None:
        inner = sum(parts.gated.gate_up_proj.parts.values()) // 2
        mlp = *of_mlp, weight_of(mlp_output_norm), inner, GATES[parts.gated.activation]
    second = (
        (o, weight_of(output_norm), weight_of(mlp_norm)),
        mlp,
        (real(any_norm.eps), output_norm is not None, real(parts.scale)),
    )
    return first, second
