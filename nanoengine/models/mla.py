"""MLAAttention: multi-head latent attention (MLA), with one short latent vector per token.

A token's *latent* has `rank` elements (`kv_lora_rank`). Each head has two matrices: `key_up`
projects the latent to the head's key, `value_up` to its value. Each token also has one key part of
`rope_dim` elements to which RoPE is applied; all heads share it. The KV cache stores only the
latent and this part, as one KV head.

Keys and values are never computed. The score of a query q and a latent l is q (W l) = (q W) l, with
W = `key_up`, so each query is multiplied by W once and attends to latents directly. The attention
output is a weighted sum of latents, from which `value_up` computes the head's output.

    x ─ q_a ─ norm ─ q ─┬─ nope ─ key_up ─┐
                        └─ rope ─ RoPE ───┴─ query [rank + rope_dim] ─ attention ─ value_up ─ o_proj
    x ─ kv_a ─┬─ latent ─ norm ─┐                                        │
              └─ rope ─ RoPE ───┴─ KV head [rank + rope_dim] ── cache ───┘

The value is the first `rank` elements of the key, so the cache stores only keys. `generic.py` uses
this layer if `plan.mla` is set.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.

Legend: T tokens, H query heads of this rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanoengine.attention.base import AttentionSpec, Rotation, rotate
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import MLAConfig
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.layers.attention import Attention
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.layouts import replicated_linear
from nanoengine.layers.linear import MergedLinear, RowParallelLinear
from nanoengine.layers.norm import RMSNorm
from nanoengine.models.decoder import select_rows

PANEL = 16
"""Outputs per panel in the CPU kernels."""

NORM_EPS = 1e-6
"""Epsilon of the norms of q_a and of the latent. It does not depend on the config's `rms_norm_eps`.
Source: the families' model code."""


def deinterleave_rope(linear: MergedLinear, nope_dim: int, rope_dim: int) -> None:
    """Reorders a layer's outputs from the order for interleaved RoPE, which rotates adjacent pairs:
    in each head, the last `rope_dim` dimensions become the two halves that backends rotate."""
    pairs = torch.arange(nope_dim, nope_dim + rope_dim).view(-1, 2).T.flatten()
    head = torch.cat((torch.arange(nope_dim), pairs))
    for name, size in linear.parts.items():
        rows = torch.arange(linear.shards[name].split(size, name))
        linear.orders[name] = rows.view(-1, len(head))[:, head].flatten()


class PerHeadLinear(Layer):
    """A matrix [outputs, inputs] per head, which is never quantized; heads begin at panel
    boundaries."""

    def __init__(
        self, name: str, heads: int, outputs: int, inputs: int, context: ModelContext
    ) -> None:
        super().__init__()
        self.shape, self.padded = (heads, outputs, inputs), -(-outputs // PANEL) * PANEL
        self.method = context.kernels.linear(name)
        rows = heads * self.padded
        self.method.create((rows, inputs), context.stored_dtype, context.device)

    def load(self, weight: torch.Tensor) -> None:
        """Loads [H, outputs, inputs]."""
        padding = self.padded - self.shape[1]
        self.method.load(F.pad(weight, (0, 0, 0, padding)).flatten(0, 1))

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H, inputs] -> [T, H, outputs], written to `out` if given."""
        (heads, outputs, inputs), method = self.shape, self.method
        if method.has_kernel:
            from nanoengine.layers.cpu_mla import per_head_matmul

            return per_head_matmul(x, method, self.padded)[..., :outputs]
        weight = method.weight.view(heads, self.padded, inputs)[:, :outputs].to(x.dtype)
        out = x.new_empty(len(x), heads, outputs) if out is None else out
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out


class KVUpProjection(Layer):
    """Projects latents to keys and values: `kv_b_proj` of the checkpoint, split by head.

    Attributes:
        key_up: [kv_lora_rank, qk_nope_head_dim] per head.
        value_up: [v_head_dim, kv_lora_rank] per head.
        stored: how the checkpoint quantizes the matrix; None: floats, or GGUF blocks.
    """

    def __init__(
        self, path: str, mla: MLAConfig, heads: int, context: ModelContext,
        stored: StoredQuantization | None,
    ) -> None:  # fmt: skip
        super().__init__()
        local, rank = context.shard.split(heads), mla.kv_lora_rank
        keys, values = mla.qk_nope_head_dim, mla.v_head_dim
        self.key_up = PerHeadLinear(f"{path}.key_up", local, rank, keys, context)
        self.value_up = PerHeadLinear(f"{path}.value_up", local, values, rank, context)
        self.shape = heads * (keys + values), rank
        self.part = context.shard.slice(self.shape[0], "num_attention_heads")
        self.stored, self.shard = stored, context.shard

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The slot of the checkpoint's matrix, which is dequantized if it is quantized. A GGUF file
        may have a key and a value matrix instead; its key matrix is already transposed."""
        split = {"k_b_proj": self.key_up, "v_b_proj": self.value_up}
        parent, own = path.rpartition(".")[0], self.stored and self.stored.of(path)
        pieces = {f"{parent}.{name}.weight": self._slot(linear) for name, linear in split.items()}
        if own:
            from nanoengine.layers.quantized_formats import FORMATS

            pieces = FORMATS[own.format](own).matrix_slots(
                path,
                MatrixPart(self.shape, (self.part,)),
                lambda weight, first: self.store(weight.dequantized()),
            )
        slot = WeightSlot(shape=self.shape, part=(self.part,), store=self.store, pieces=pieces)
        return {f"{path}.weight": replace(slot, pieces_only=bool(own))}

    def _slot(self, linear: PerHeadLinear) -> WeightSlot:
        """The slot of all heads' matrices, concatenated along the rows."""
        heads, outputs, inputs = linear.shape
        shape = (self.shard.world_size * heads * outputs, inputs)
        part = self.shard.slice(shape[0], "num_attention_heads")
        store = lambda rows: linear.load(rows.view(linear.shape))  # noqa: E731
        return WeightSlot(shape=shape, part=(part,), store=store)

    def store(self, stored: torch.Tensor) -> None:
        """Loads this rank's rows of the checkpoint's matrix: per head, first keys, then values."""
        heads, _, nope_dim = self.key_up.shape
        by_head = stored.view(heads, -1, stored.shape[1])
        self.key_up.load(by_head[:, :nope_dim].transpose(1, 2))
        self.value_up.load(by_head[:, nope_dim:])


class MLAAttention(Layer):
    """Attention over latents, with its projections; heads are split over ranks, the latent is not.

    Attributes:
        rotate_and_store_latents: the backend's fused kernel for norm, RoPE and store; None: it has
            none, and `_attend_unfused` does the same in plain torch.
    """

    name, needs_torch, norm_weights = "self_attn", False, None

    def __init__(self, path: str, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, mla, backend = config.plan, config.plan.mla, context.kernels.attention
        assert mla is not None
        self.mla, hidden, heads = mla, config.hidden_size, config.num_attention_heads
        q_inputs, name, self.q_a = hidden, "q_proj", None
        if mla.q_lora_rank:
            self.q_a = replicated_linear(
                f"{path}.q_a_proj", hidden, mla.q_lora_rank, context, bias=plan.qkv_bias
            )
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, NORM_EPS, context=context)
            q_inputs, name = mla.q_lora_rank, "q_b_proj"
        size = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        self.q = MergedLinear(f"{path}.{name}", q_inputs, {name: size}, context=context)
        self.kv_a = replicated_linear(
            f"{path}.kv_a_proj_with_mqa", hidden, mla.size, context, bias=plan.qkv_bias
        )
        if plan.rope_interleaved:
            deinterleave_rope(self.q, mla.qk_nope_head_dim, mla.qk_rope_head_dim)
            deinterleave_rope(self.kv_a, mla.kv_lora_rank, mla.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, NORM_EPS, context=context)
        # Why not 16 bits: they cannot represent an 8-bit integer times its scale exactly.
        stored = config.quantization
        exact_context = context if stored is None else replace(context, weight_dtype=None)
        read = stored if stored and stored.format != "gguf" else None
        self.kv_b_proj = KVUpProjection(f"{path}.kv_b_proj", mla, heads, exact_context, read)
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj", heads * mla.v_head_dim, hidden, bias=plan.output_bias,
            context=context,
        )  # fmt: skip
        self.rotate_and_store_latents = getattr(backend, "rotate_and_store_latents", None)
        rope = config.ropes[index]
        score_factor = 1.0 if rope is None else rope.score_factor
        self.attention = Attention(
            AttentionSpec(
                num_heads=context.shard.split(heads),
                num_kv_heads=1,
                head_dim=mla.size,
                scale=(mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5 * score_factor,
                value_dim=mla.kv_lora_rank,
            ),
            backend,
        )

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Stores all tokens' latents and attends; returns the outputs of `rows` only."""
        mla, up = self.mla, self.kv_b_proj
        queries = x if self.q_a is None else self.q_a_layernorm(self.q_a(x), None)[0]
        q = self.q(queries).view(len(x), -1, mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        kv = self.kv_a(x)
        if self.rotate_and_store_latents is None:
            attended = self._attend_unfused(q, kv, rotation, batch)
        else:
            norm, cache = self.kv_a_layernorm, self.attention.cache
            nope = q[..., : mla.qk_nope_head_dim]
            q = self.rotate_and_store_latents(q, kv, rotation, norm.weight, norm.eps, cache, batch)
            up.key_up(nope, q[..., : mla.kv_lora_rank])
            attended = self.attention.backend.attend(q, cache, batch)
        attended = select_rows(attended, rows)
        return self.o_proj(up.value_up(attended).flatten(1))

    def _attend_unfused(
        self, q: torch.Tensor, kv: torch.Tensor, rotation: Rotation, batch: Batch
    ) -> torch.Tensor:
        """Applies norm and RoPE, stores, and attends, in plain torch on top of any backend."""
        mla, up = self.mla, self.kv_b_proj
        latent, rope = kv.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=1)
        latent = self.kv_a_layernorm(latent.contiguous(), None)[0].unsqueeze(1)
        nope, q_rope = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=2)
        rotated = rotate(torch.cat((q_rope, rope.unsqueeze(1)), dim=1), rotation, None)
        q = torch.cat((up.key_up(nope), rotated[:, :-1]), dim=2)
        kv = torch.cat((latent, rotated[:, -1:]), dim=2)
        return self.attention.backend.forward(q, kv, latent, self.attention.cache, batch)
