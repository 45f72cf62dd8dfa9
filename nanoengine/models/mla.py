"""MLAAttention: multi-head latent attention (MLA), with one short latent vector per token.

A token's *latent* has `rank` elements. Each head has a matrix that makes its key from the latent
(`key_up`) and another that makes its value (`value_up`). Each token also has `rope_dim` elements
with RoPE, which all heads share as they are. The KV cache holds only the latent and these elements,
as one KV head.

Keys and values are never materialized. A query q scores the key W l of a latent l by q W l, so the
query is multiplied by W once instead of all latents. Attention runs over latents, its sum is a
latent too, and `value_up` makes the value from it.

    x ─ q_a ─ norm ─ q ─┬─ nope ─ key_up ─┐
                        └─ rope ─ RoPE ───┴─ query [rank + rope_dim] ─ attention ─ value_up ─ o_proj
    x ─ kv_a ─┬─ latent ─ norm ─┐                                        │
              └─ rope ─ RoPE ───┴─ KV head [rank + rope_dim] ── cache ───┘

The value is the first `rank` elements of the key, so the cache holds only keys. `generic.py` uses
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
"""Epsilon of the inner norms, whatever the config says for the others. Source: the families'
code."""


def put_in_halves(linear: MergedLinear, still: int, turned: int) -> None:
    """Reorders the outputs of a layer whose checkpoint applies RoPE to pairs of neighbours: in each
    head, the last `turned` dimensions become the two halves that backends rotate."""
    pairs = torch.arange(still, still + turned).view(-1, 2).T.flatten()
    head = torch.cat((torch.arange(still), pairs))
    for name, size in linear.parts.items():
        rows = torch.arange(linear.shards[name].split(size, name))
        linear.orders[name] = rows.view(-1, len(head))[:, head].flatten()


class PerHeadLinear(Layer):
    """A matrix [outputs, inputs] per head, never rounded; each head begins at a panel boundary."""

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
        behind = self.padded - self.shape[1]
        self.method.load(F.pad(weight, (0, 0, 0, behind)).flatten(0, 1))

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H, inputs] -> [T, H, outputs], written to `out` if given."""
        (heads, outputs, inputs), method = self.shape, self.method
        if method.has_kernel:
            from nanoengine.layers.cpu_mla import heads_product

            return heads_product(x, method, self.padded)[..., :outputs]
        weight = method.weight.view(heads, self.padded, inputs)[:, :outputs].to(x.dtype)
        out = x.new_empty(len(x), heads, outputs) if out is None else out
        method.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out


class KVUpProjection(Layer):
    """Makes keys and values from latents: `kv_b_proj` of the checkpoint, split by head.

    Attributes:
        key_up: [kv_lora_rank, qk_nope_head_dim] per head.
        value_up: [v_head_dim, kv_lora_rank] per head.
        stored: the quantization of the stored matrices; None for floats and for GGUF blocks.
    """

    def __init__(
        self, path: str, latent: MLAConfig, heads: int, context: ModelContext,
        stored: StoredQuantization | None,
    ) -> None:  # fmt: skip
        super().__init__()
        local, rank = context.shard.split(heads), latent.kv_lora_rank
        keys, values = latent.qk_nope_head_dim, latent.v_head_dim
        self.key_up = PerHeadLinear(f"{path}.key_up", local, rank, keys, context)
        self.value_up = PerHeadLinear(f"{path}.value_up", local, values, rank, context)
        self.shape = heads * (keys + values), rank
        self.part = context.shard.slice(self.shape[0], "num_attention_heads")
        self.stored, self.shard = stored, context.shard

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """The slot of the checkpoint's matrix, which is dequantized if it is quantized. A GGUF file
        may have two matrices instead; its key matrix has this layer's order."""
        apart = {"k_b_proj": self.key_up, "v_b_proj": self.value_up}
        beside, own = path.rpartition(".")[0], self.stored and self.stored.of(path)
        pieces = {f"{beside}.{name}.weight": self._own(each) for name, each in apart.items()}
        if own:
            from nanoengine.layers.quantized_formats import FORMATS

            pieces = FORMATS[own.format](own).matrix_slots(
                path,
                MatrixPart(self.shape, (self.part,)),
                lambda weight, first: self.store(weight.dequantized()),
            )
        slot = WeightSlot(shape=self.shape, part=(self.part,), store=self.store, pieces=pieces)
        return {f"{path}.weight": replace(slot, pieces_only=bool(own))}

    def _own(self, each: PerHeadLinear) -> WeightSlot:
        """The slot of all heads' matrices, concatenated along the rows."""
        heads, outputs, inputs = each.shape
        shape = (self.shard.world_size * heads * outputs, inputs)
        part = self.shard.slice(shape[0], "num_attention_heads")
        store = lambda rows: each.load(rows.view(each.shape))  # noqa: E731
        return WeightSlot(shape=shape, part=(part,), store=store)

    def store(self, stored: torch.Tensor) -> None:
        """Loads this rank's rows of the checkpoint's matrix: per head, first keys, then values."""
        heads, _, still = self.key_up.shape
        of_heads = stored.view(heads, -1, stored.shape[1])
        self.key_up.load(of_heads[:, :still].transpose(1, 2))
        self.value_up.load(of_heads[:, still:])


class MLAAttention(Layer):
    """Attention over latents, with its projections; heads are split over ranks, the latent is not.

    Attributes:
        rotate_and_store_latents: the backend's kernel for norm, RoPE and store in one; None: it
            has none.
    """

    name, needs_torch, norm_weights = "self_attn", False, None

    def __init__(self, path: str, index: int, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, latent, backend = config.plan, config.plan.mla, context.kernels.attention
        assert latent is not None
        self.latent, hidden, heads = latent, config.hidden_size, config.num_attention_heads
        into, name, self.q_a = hidden, "q_proj", None
        if latent.q_lora_rank:
            self.q_a = replicated_linear(
                f"{path}.q_a_proj", hidden, latent.q_lora_rank, context, bias=plan.qkv_bias
            )
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, NORM_EPS, context=context)
            into, name = latent.q_lora_rank, "q_b_proj"
        size = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        self.q = MergedLinear(f"{path}.{name}", into, {name: size}, context=context)
        self.kv_a = replicated_linear(
            f"{path}.kv_a_proj_with_mqa", hidden, latent.size, context, bias=plan.qkv_bias
        )
        if plan.rope_interleaved:
            put_in_halves(self.q, latent.qk_nope_head_dim, latent.qk_rope_head_dim)
            put_in_halves(self.kv_a, latent.kv_lora_rank, latent.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, NORM_EPS, context=context)
        # Why exact: an 8-bit integer times its scale is not exact in 16 bits.
        stored = config.quantization
        exact = context if stored is None else replace(context, weight_dtype=None)
        read = stored if stored and stored.format != "gguf" else None
        self.kv_b_proj = KVUpProjection(f"{path}.kv_b_proj", latent, heads, exact, read)
        self.o_proj = RowParallelLinear(
            f"{path}.o_proj", heads * latent.v_head_dim, hidden, bias=plan.output_bias,
            context=context,
        )  # fmt: skip
        self.rotate_and_store_latents = getattr(backend, "rotate_and_store_latents", None)
        rope = config.ropes[index]
        growth = 1.0 if rope is None else rope.score_factor
        self.attention = Attention(
            AttentionSpec(
                num_heads=context.shard.split(heads),
                num_kv_heads=1,
                head_dim=latent.size,
                scale=(latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5 * growth,
                value_dim=latent.kv_lora_rank,
            ),
            backend,
        )

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All tokens store their vector and attend; only the outputs in `rows` are returned."""
        latent, up = self.latent, self.kv_b_proj
        queries = x if self.q_a is None else self.q_a_layernorm(self.q_a(x), None)[0]
        q = self.q(queries).view(len(x), -1, latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        vector = self.kv_a(x)
        if self.rotate_and_store_latents is None:
            attended = self._attend_by_parts(q, vector, rotation, batch)
        else:
            norm, cache = self.kv_a_layernorm, self.attention.cache
            nope = q[..., : latent.qk_nope_head_dim]
            q = self.rotate_and_store_latents(
                q, vector, rotation, norm.weight, norm.eps, cache, batch
            )
            up.key_up(nope, q[..., : latent.kv_lora_rank])
            attended = self.attention.backend.attend(q, cache, batch)
        attended = select_rows(attended, rows)
        return self.o_proj(up.value_up(attended).flatten(1))

    def _attend_by_parts(
        self, q: torch.Tensor, vector: torch.Tensor, rotation: Rotation, batch: Batch
    ) -> torch.Tensor:
        """Norm, RoPE and store in plain torch, for any backend."""
        latent, up = self.latent, self.kv_b_proj
        vector, rope = vector.split((latent.kv_lora_rank, latent.qk_rope_head_dim), dim=1)
        vector = self.kv_a_layernorm(vector.contiguous(), None)[0].unsqueeze(1)
        nope, q_rope = q.split((latent.qk_nope_head_dim, latent.qk_rope_head_dim), dim=2)
        turned = rotate(torch.cat((q_rope, rope.unsqueeze(1)), dim=1), rotation, None)
        q = torch.cat((up.key_up(nope), turned[:, :-1]), dim=2)
        kv = torch.cat((vector, turned[:, -1:]), dim=2)
        return self.attention.backend.forward(q, kv, vector, self.attention.cache, batch)
