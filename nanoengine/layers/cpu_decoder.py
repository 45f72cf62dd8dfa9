"""FusedLayer: a decoder layer that runs as one compiled call on the CPU, or does up to its MLP.

Why: one token through a small model is hundreds of calls from Python, and they take a fifth of its
time. The plain form, `DecoderLayer.forward`, says what is computed; this gives the same bits
(`tests/layers/test_cpu_decoder.py`). Made by `models/fuse.py` once the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanoengine.attention.cpu import NO_WINDOW, CPUBackend, norm_kind
from nanoengine.attention.rotate import HeadNormWeights, Rotation
from nanoengine.batch import Batch
from nanoengine.kernels.cpu_decoder import decoder_layer
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.layers.attention import Attention
from nanoengine.layers.cpu_ops import CPUOps
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear, CPUWeightOnlyLinear
from nanoengine.layers.linear import MergedLinear, QKVLinear, RowParallelLinear
from nanoengine.layers.linear_method import LinearMethod
from nanoengine.layers.norm import RMSNorm
from nanoengine.layers.packed import PackedLinear

NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a decoder layer is made of: norms before attention and MLP, behind them, or both;
    `scale` is the factor on what either adds. `rest` is what computes an MLP without a kernel, and
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
    rest: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def linears(self) -> list[MergedLinear | RowParallelLinear]:
        found = self.qkv, self.o, self.gate_up, self.down
        return [linear for linear in found if linear is not None]

    @property
    def norms(self) -> list[RMSNorm]:
        found = self.norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm
        return [norm for norm in found if norm is not None]


class FusedLayer:
    """Called like a `DecoderLayer`; overwrites both of its inputs."""

    @staticmethod
    def takes(parts: LayerParts) -> bool:
        """Whether a kernel exists for each part: packed weights on one rank, plain norms."""
        return (
            isinstance(parts.attention.backend, CPUBackend)
            and all(type(norm) is RMSNorm for norm in parts.norms)
            and all(isinstance(norm.ops, CPUOps) for norm in parts.norms)
            and all(linear.shard.world_size == 1 for linear in parts.linears)
            and all(has_kernel(linear.method) for linear in parts.linears)
        )

    def __init__(self, parts: LayerParts) -> None:
        self.attention, spec = parts.attention, parts.attention.spec
        backend = parts.attention.backend
        assert isinstance(backend, CPUBackend)
        self.backend = backend
        head_norm, kind, real = parts.head_norm, norm_kind(parts.head_norm), np.float32
        if head_norm is None:
            head_norm = HeadNormWeights(
                weight=torch.ones(spec.num_heads + spec.num_kv_heads, spec.head_dim), eps=0.0
            )
        qkv, o, *of_mlp = (linear.method.operands(linear.bias) for linear in parts.linears)
        any_norm = parts.norms[0]
        before, behind = parts.norm is not None, parts.attention_output_norm is not None
        self.rest, mlp = parts.rest, ()

        def weight_of(norm: RMSNorm | None) -> np.ndarray:
            return (norm or any_norm).weight.detach().numpy()

        window = NO_WINDOW if spec.sliding_window is None else spec.sliding_window
        heads_and_dims = spec.num_heads, spec.num_kv_heads, spec.head_dim, backend.block_size
        self.first: tuple[Any, ...] = (
            (
                weight_of(parts.norm),
                qkv,
                head_norm.weight.detach().numpy(),
                backend.operand,
                backend.sinks(spec),
            ),
            (heads_and_dims, window, kind, before),
            (real(any_norm.eps), real(head_norm.eps), real(spec.scale), real(spec.softcap or 0)),
        )
        if parts.gate_up is not None:
            inner = sum(parts.gate_up.parts.values()) // 2
            mlp = *of_mlp, weight_of(parts.mlp_output_norm), inner, GATES[parts.activation]
        self.second: tuple[Any, ...] = (
            (o, weight_of(parts.attention_output_norm), weight_of(parts.mlp_norm)),
            mlp,
            (real(any_norm.eps), behind, real(parts.scale)),
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotation: Rotation,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            x, residual = torch.zeros_like(x), x
        values, attention, workers = x.numpy(), self.attention, batch.attention.num_workers
        before, on, results = residual.numpy(), None, (x, residual)
        if rows is not None:  # Why arrays of their own: more rows may go on than have come in.
            on, shape = rows.numpy(), (len(rows), x.shape[1])
            results = (torch.empty(shape), torch.empty(shape))
        step = (
            self.backend.step_arrays(rotation, batch, attention.spec, values.dtype, on),
            *self.backend.cache_arrays(attention.cache),
        )
        decoder_layer(
            values, before, on is None, NO_ROWS if on is None else on,
            *(result.numpy() for result in results), *step,
            self.first, self.second, workers,
        )  # fmt: skip
        if self.rest is None:
            return results
        return self.rest(results[0]), results[1]


def has_kernel(method: LinearMethod) -> bool:
    """Whether compiled code multiplies by this weight, in its own order of inputs."""
    if isinstance(method, CPUQuantizedLinear):
        return method.is_packed and method.order is None
    if isinstance(method, CPUWeightOnlyLinear):
        return method.order is None
    return isinstance(method, PackedLinear)
