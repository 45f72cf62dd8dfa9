"""FusedLayers: adjacent decoder layers that run as one compiled call on the CPU.

Why: one token through a small model makes hundreds of calls from Python, which take a third of its
time. The reference implementation is `DecoderLayer.forward`; results have the same bits
(`tests/layers/test_fused_layers.py`). `models/cpu.py` fuses layers after the weights are loaded.
"""

from __future__ import annotations

import operator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoengine.attention.base import AttentionSpec, HeadNormWeights, Rotation
from nanoengine.attention.batch import Batch
from nanoengine.attention.cpu import CPUBackend, norm_kind, window_of
from nanoengine.kernels.argument_table import ArgumentTable, type_of
from nanoengine.kernels.cpu_decoder import Attention, ExpertMLP, GatedMLP, LayerTail, decoder_layers
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.kernels.cpu_linear import BF16_DOTS
from nanoengine.kernels.gemm import PANEL
from nanoengine.layers.linear import Linear
from nanoengine.layers.norm import RMSNorm

NO_ROWS = np.empty(0, np.int64)


class LayerParts:
    """The submodules of a decoder layer whose weights the kernel reads. Attributes that only some
    families have are looked up with getattr, so that no module is imported for other families.

    Attributes:
        pre_norms, post_norms: of attention and of the MLP, two each; None: the layer has none.
        gated: the MLP, if it is a gated one.
        experts: the arguments of `cpu_experts.mixture` after x, if it computes the MLP.
        scale: the factor on the outputs of attention and MLP.
        rotation: index of the layer's RoPE configuration; None: the model has only one.
    """

    def __init__(self, layer: Any) -> None:
        """`layer` is a `DecoderLayer`."""
        mlp, self.linears = layer.mlp, self.collect_mixer(layer)
        self.pre_norms = layer.input_layernorm, layer.post_attention_layernorm
        names = "attention_output_norm", "mlp_output_norm"
        self.post_norms = tuple(getattr(layer, name, None) for name in names)
        self.norms = [norm for norm in (*self.pre_norms, *self.post_norms) if norm is not None]
        self.gated = mlp if hasattr(mlp, "gate_up_proj") else None
        routed = getattr(mlp, "routed", None)
        whole = getattr(mlp, "shared_experts", None) is None or getattr(routed, "adds_shared", 0)
        self.experts: tuple[Any, ...] | None = getattr(routed, "arguments", None) if whole else None
        if self.gated:
            self.linears += [mlp.gate_up_proj, mlp.down_proj]
        self.scale = getattr(layer, "scale", 1.0)
        self.rotation = getattr(layer, "rotation", None)

    def collect_mixer(self, layer: Any) -> list[Linear]:
        """Sets `mixer`, its attention and its backend; returns its linear layers, the output
        projection last."""
        attention = self.mixer = layer.self_attn
        self.attention, self.head_norm = attention.attention, attention.norm_weights
        self.backend = self.attention.backend
        return [attention.qkv_proj, attention.o_proj]

    @property
    def cache(self) -> Any:
        """The cache that the layer is bound to."""
        return self.attention.cache

    def spec_and_arrays(self) -> tuple[AttentionSpec | None, tuple[Any, ...]]:
        """The attention spec, which all layers of one call must share, and the cache's arrays."""
        return self.cache.spec, self.backend.cache_arrays(self.cache)

    def step(self, rotation: Rotation, batch: Batch, spec: Any, *rows: Any) -> tuple[Any, ...]:
        """The arguments of `decoder_layers` that depend on the step."""
        return self.backend.step_arrays(rotation, batch, spec, *rows)

    def operands(self) -> tuple[Any, ...]:
        """The layer's arguments for `decoder_layers`, after the arrays of its cache."""
        projections, tail = self.projections_and_tail()
        return self.weight_of(self.pre_norms[0]), self.mixer_operands(projections), tail, ()

    def mixer_operands(self, projections: list[Any]) -> Any:
        """The operands of the mixer's kernel, including the weights of its first projections."""
        (qkv,), spec, f32 = projections, self.attention.spec, np.float32
        head_norm, kind = self.head_norm, norm_kind(self.head_norm)
        if head_norm is None:
            head_norm = HeadNormWeights(
                weight=torch.ones(spec.num_heads + spec.num_kv_heads, spec.head_dim), eps=0.0
            )
        gates = getattr(self.mixer, "num_gates", 0)
        return Attention(
            qkv=qkv,
            head_norm=head_norm.weight.detach().numpy(),
            operand=self.backend.operand,
            sinks=self.backend.sinks(spec),
            gates=(gates,) if gates else (),
            value_norm=(),
            sizes=(spec.num_heads, spec.num_kv_heads, spec.head_dim, self.backend.block_size),
            columns=sum(self.mixer.qkv_proj.parts.values()),
            stored_heads=spec.num_kv_heads,
            window=window_of(spec),
            norm_kind=kind,
            norm_eps=f32(head_norm.eps or 0),
            scale=f32(spec.scale),
            softcap=f32(spec.softcap or 0),
        )

    def projections_and_tail(self) -> tuple[list[Any], LayerTail]:
        """The weights of the mixer's projections except the output projection, which is in the
        LayerTail with everything after it."""
        operands = [linear.method.operands(linear.bias) for linear in self.linears]
        mlp_operands = [operands.pop() for _ in range(2 * (self.gated is not None))][::-1]
        o, output_norm = operands.pop(), self.weight_of(self.post_norms[1])
        mlp: Any = ExpertMLP(self.experts, output_norm)
        if self.gated is not None:
            inner = sum(self.gated.gate_up_proj.parts.values()) // 2
            gate, in_pairs = GATES[self.gated.activation], BF16_DOTS and inner % PANEL == 0
            in_pairs &= all(weight[0].dtype == np.uint32 for weight in mlp_operands)
            operand = np.empty(0, np.uint32 if in_pairs else np.float32)
            mlp = GatedMLP(*mlp_operands, output_norm, operand, inner, gate)
        return operands, LayerTail(
            o=o,
            attention_output_norm=self.weight_of(self.post_norms[0]),
            mlp_norm=self.weight_of(self.pre_norms[1]),
            mlp=mlp,
            eps=np.float32(self.norms[0].eps),
            norms_before=self.pre_norms[0] is not None,
            norms_after=self.post_norms[0] is not None,
            scale=np.float32(self.scale),
        )

    def weight_of(self, norm: RMSNorm | None) -> np.ndarray:
        """A norm's weight; for None any array of the same type, which the kernel ignores."""
        return (norm or self.norms[0]).weight.detach().numpy()


class _FusedCall(NamedTuple):
    """Layers that one call runs: the parts of the first, their spec, and the operands of each."""

    parts: LayerParts
    spec: AttentionSpec | None
    operands: ArgumentTable


class FusedLayers:
    """Called like a `DecoderLayer`; overwrites both of its inputs.

    Attributes:
        layers: the fused layers in order.
    """

    @staticmethod
    def supports(parts: LayerParts) -> bool:
        """Whether a kernel supports each part: packed weights on one rank, and the MLP."""
        return (
            isinstance(parts.backend, CPUBackend)
            and bool(parts.gated or parts.experts)
            and all(linear.shard.world_size == 1 for linear in parts.linears)
            and all(linear.method.has_kernel for linear in parts.linears)
        )

    def __init__(self, first: LayerParts) -> None:
        self.rotation = first.rotation
        self.layers: list[LayerParts] = []
        self._operands: list[tuple[Any, ...]] = []
        self._caches: list[Any] = []
        self._calls: list[_FusedCall] = []
        self.append(first)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def can_join(self, parts: LayerParts) -> bool:
        """Whether this layer can run in the same call, after the others."""
        return self.rotation == parts.rotation

    def append(self, parts: LayerParts) -> None:
        """Adds a layer after the others."""
        self.layers.append(parts)
        self._operands.append(parts.operands())

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
            x, residual = torch.from_numpy(np.zeros(x.shape, x.numpy().dtype)), x
        inputs, calls = (x.numpy(), residual.numpy()), self._bound()

        def run(call: _FusedCall, layers: Any, results: Any, rows: Any) -> None:
            step = call.parts.step(rotation, batch, call.spec, inputs[0].dtype, rows)
            decoder_layers(
                *inputs, rows is None, NO_ROWS if rows is None else rows, *results, step,
                call.operands, *layers, batch.attention.num_workers,
            )  # fmt: skip

        for call in calls:
            last = len(call.operands) - (rows is not None and call is calls[-1])
            if last:
                run(call, (0, last), inputs, None)
        if rows is not None:  # Why new arrays: `rows` may have more entries than the input.
            shape, count = (len(rows), x.shape[1]), len(calls[-1].operands)
            x, residual = torch.empty(shape), torch.empty(shape)
            run(calls[-1], (count - 1, count), (x.numpy(), residual.numpy()), rows.numpy())
        return x, residual

    def _bound(self) -> list[_FusedCall]:
        """The calls that run all layers: one, unless their attention specs (KV group, window) or
        the types of their weights differ. They are rebuilt after layers are bound to another
        cache."""
        caches = [parts.cache for parts in self.layers]
        if len(caches) != len(self._caches) or not all(map(operator.is_, caches, self._caches)):
            layers = []
            for parts, operands in zip(self.layers, self._operands, strict=True):
                spec, arrays = parts.spec_and_arrays()
                layers.append((parts, spec, (arrays, *operands)))
            self._caches, self._calls = caches, []
            for _, alike in groupby(layers, lambda it: (it[1], type_of(it[2]))):
                group = list(alike)
                parts, spec, _ = group[0]
                self._calls.append(_FusedCall(parts, spec, ArgumentTable([it[2] for it in group])))
        return self._calls
