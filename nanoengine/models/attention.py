"""SelfAttention: the attention of a decoder layer, from hidden states to hidden states.

Legend: T tokens, L rows of logits, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

import torch

from nanoengine.attention.base import AttentionSpec
from nanoengine.attention.batch import Batch
from nanoengine.attention.rotate import HeadNormWeights, Rotation, rotate
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.attention import Attention
from nanoengine.layers.kernels import empty_parameter
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import QKVLinear, RowParallelLinear
from nanoengine.layers.norm import HeadNorm, WidthNorm
from nanoengine.layers.rotary import head_order


def taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The rows [L] of x [T, ...]; None: all of them, without a copy."""
    return x if rows is None else x.index_select(0, rows)


class SelfAttention(Layer):
    """Projects to heads, norms them where the family does, rotates, attends, projects back."""

    name = "self_attn"
    """Of the module in a checkpoint's layer."""

    def __init__(self, path: str, layer: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, self.head_dim = config.plan, config.head_dim
        order = head_order(config.head_dim, plan.rotary_dim, interleaved=plan.interleaved)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = QKVLinear(
            f"{path}.qkv_proj",
            config.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            bias=plan.qkv_bias,
            merged=plan.merged,
            head_order=order,
            gated=plan.output_gate,
            context=context,
        )
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj",
            heads * config.head_dim,
            config.hidden_size,
            bias=plan.output_bias,
            context=context,
        )
        self.num_heads = context.shard.split(heads)
        self.num_kv_heads = context.shard.of_heads(kv_heads).split(kv_heads)
        norm = config.head_dim, config.rms_norm_eps, plan.norm, order
        self.head_norm = self.width_norm = None
        if plan.head_norm == "width":
            self.width_norm = WidthNorm(heads, kv_heads, *norm, context=context)
        elif plan.head_norm:
            self.head_norm = HeadNorm(self.num_heads, self.num_kv_heads, *norm, context=context)
        self.norm_is_last = plan.head_norm == "rotated"
        self.sinks = None
        if plan.sinks:
            wide = torch.promote_types(context.dtype, torch.float32)
            self.sinks = empty_parameter((self.num_heads,), wide, context.device)
            self.all_sinks = (heads,), (context.shard.slice(heads, "num_attention_heads"),)
        self.is_gated = plan.output_gate
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            scale=plan.attention_scale or config.head_dim**-0.5,
            sliding_window=config.sliding_windows[layer],
            softcap=plan.attention_softcap,
            sinks=self.sinks,
        )
        self.attention = Attention(spec, context.kernels.attention)
        rope = config.ropes[layer]
        self.growth = rope.llama_4_scaling_beta if rope else 0.0
        self.original_len = rope.original_max_position_embeddings if rope else 0

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        if self.sinks is None:
            return {}
        shape, part = self.all_sinks
        return {f"{path}.sinks": WeightSlot(shape=shape, part=part, store=self.sinks.copy_)}

    @property
    def needs_torch(self) -> bool:
        """Between projection and attention stands what no backend does."""
        between = self.width_norm is not None and self.width_norm.ranks > 1
        return between or self.norm_is_last or self.is_gated or self.growth != 0

    @property
    def backend_norm(self) -> HeadNormWeights | None:
        """What the backend norms heads with; None: nothing."""
        if self.width_norm is not None:
            return self.width_norm.weights if self.width_norm.ranks == 1 else None
        return None if self.head_norm is None else self.head_norm.weights

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All rows store keys and values and attend; those that `rows` names come out."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2 K, D]
        gates = None
        if self.is_gated:
            gates, heads = heads[:, : self.num_heads], heads[:, self.num_heads :].contiguous()
        if self.width_norm is not None and self.width_norm.ranks > 1:
            heads = self.width_norm(heads)
        if self.growth:
            heads[:, : self.num_heads] *= self._query_scale(batch.positions).to(heads.dtype)
        if self.norm_is_last:
            attended = self._attend_normed_last(heads, rotation, batch)
        else:
            attended = self.attention(heads, rotation, self.backend_norm, batch)
        attended = taken(attended, rows)
        if gates is not None:
            attended = attended * taken(gates, rows).sigmoid()
        return self.o_proj(attended.flatten(1))

    def _attend_normed_last(
        self, heads: torch.Tensor, rotation: Rotation, batch: Batch
    ) -> torch.Tensor:
        """Heads are turned in plain torch, then normed, stored and attended."""
        assert self.head_norm is not None
        counts = self.num_heads, self.num_kv_heads
        qk, v = heads.split((sum(counts), self.num_kv_heads), dim=1)
        q, k = self.head_norm(rotate(qk, rotation, None)).split(counts, dim=1)
        return self.attention.backend.forward(q, k, v, self.attention.cache, batch)

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        """How much queries grow with their positions: [T] -> [T, 1, 1]. Source: Llama 4."""
        periods = torch.floor(positions / self.original_len)
        return (1 + self.growth * torch.log(1 + periods)).view(-1, 1, 1)
