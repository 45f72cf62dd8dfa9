"""MLAParts: decoder layers with MLA (multi-head latent attention) as one compiled call on the
CPU.

`models/mla.py` is the reference implementation; `tests/layers/test_fused_layers.py` compares the
two. `models/cpu.py` installs it after the weights are loaded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.kernels.cpu_mla_layer import MLAAttention, heads_times_matrices
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.cpu_decoder import LayerParts
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.linear import Linear


class MLAParts(LayerParts):
    """The submodules of a layer with an `MLAAttention`.

    Attributes:
        mixer: the `MLAAttention`.
    """

    def collect_mixer(self, layer: Any) -> list[Linear]:
        mixer = self.mixer = layer.self_attn
        self.attention, self.backend = mixer.attention, mixer.attention.backend
        first = [] if mixer.q_a is None else [mixer.q_a]
        return [*first, mixer.q, mixer.kv_a, mixer.o_proj]

    def mixer_operands(self, projections: list[Any]) -> MLAAttention:
        *query_a, query, kv_a = projections
        mixer, mla, spec, f32 = self.mixer, self.mixer.mla, self.attention.spec, np.float32
        inner_norm, up = mixer.kv_a_layernorm, mixer.kv_b_proj
        if query_a:
            query_a.append(self.weight_of(mixer.q_a_layernorm))
        return MLAAttention(
            query_a=tuple(query_a),
            query=query,
            kv_a=kv_a,
            kv_norm=self.weight_of(inner_norm),
            key_up=up.key_up.method.operands(None),
            value_up=up.value_up.method.operands(None),
            no_sinks=self.backend.sinks(spec),
            nope_dim=mla.qk_nope_head_dim,
            value_size=mla.v_head_dim,
            padded_key=up.key_up.padded,
            padded_value=up.value_up.padded,
            sizes=(spec.num_heads, spec.head_dim, spec.value_dim, self.backend.block_size),
            eps=f32(inner_norm.eps),
            scale=f32(spec.scale),
        )


def per_head_matmul(x: torch.Tensor, method: LinearMethod, outputs: int) -> torch.Tensor:
    """Multiplies x [T, H, inputs] by one matrix per head, stacked in one weight: [T, H,
    outputs]."""
    rows = x.float().transpose(0, 1).contiguous().numpy()
    out = np.empty((*rows.shape[:2], outputs), np.float32)
    heads_times_matrices(rows, method.operands(None), out, num_workers())
    return torch.from_numpy(out).transpose(0, 1)
