"""FusedLatents: decoder layers with latent attention as one compiled call on the CPU.

`models/latent.py` says what is computed, `tests/layers/test_cpu_latent.py` compares the two. Made
by `models/cpu.py` once the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.kernels.cpu_latent_layer import heads_times_matrices, latent_layers
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.cpu_decoder import FusedLayers, LayerParts
from nanoengine.layers.kernels import LinearMethod


class LatentParts(LayerParts):
    """What a layer with a `LatentAttention` is made of.

    Attributes:
        mixer: the latter.
    """

    def projections(self, attention: Any) -> list[Any]:
        self.mixer = attention
        first = [] if attention.q_a is None else [attention.q_a]
        return [*first, attention.q, attention.kv_a, attention.o_proj]


class FusedLatents(FusedLayers):
    """`FusedLayers` of layers with latent attention."""

    def operands_of(self, parts: LayerParts) -> tuple[Any, ...]:
        assert isinstance(parts, LatentParts)
        mixer, latent, spec = parts.mixer, parts.mixer.latent, parts.attention.spec
        linears = [linear.method.operands(linear.bias) for linear in parts.linears]
        of_mlp = [linears.pop(), linears.pop()][::-1] if parts.gated else []
        query, kv_a, o = linears[-3:]
        norm, mlp_norm = (norm.weight.detach().numpy() for norm in parts.before)
        inner_norm, up, real = mixer.kv_a_layernorm, mixer.kv_b_proj, norm.dtype.type
        query_a: tuple[Any, ...] = ()
        if mixer.q_a is not None:
            query_a = linears[0], mixer.q_a_layernorm.weight.detach().numpy()
        first = (
            (
                norm, query_a, query, kv_a, inner_norm.weight.detach().numpy(),
                up.key_up.method.operands(None), up.value_up.method.operands(None),
                self.backend.sinks(spec),
            ),
            (latent.nope_dim, latent.value_dim, up.key_up.padded, up.value_up.padded),
            (spec.num_heads, spec.head_dim, spec.value_dim, self.backend.block_size),
            (
                real(parts.before[0].eps), real(inner_norm.eps), real(spec.scale),
                real(parts.scale),
            ),
        )  # fmt: skip
        mlp: tuple[Any, ...] = ()
        if parts.gated is not None:
            inner = sum(parts.gated.gate_up_proj.parts.values()) // 2
            mlp = *of_mlp, mlp_norm, inner, GATES[parts.gated.activation]
        return first, (o, mlp_norm, mlp)

    def compute(self, *arguments: Any) -> None:
        latent_layers(*arguments)


def heads_product(x: torch.Tensor, method: LinearMethod, outputs: int) -> torch.Tensor:
    """[T, H, inputs] times each head's matrix, which are stacked: [T, H, outputs]."""
    rows = x.float().transpose(0, 1).contiguous().numpy()
    out = np.empty((*rows.shape[:2], outputs), np.float32)
    heads_times_matrices(rows, method.operands(None), out, num_workers())
    return torch.from_numpy(out).transpose(0, 1)
