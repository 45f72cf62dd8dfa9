"""What other families have in place of the plain linear layers, norms and rotations.

    rotations   of a part of a head, of neighbours, or of nothing
    linears     matrices that the checkpoint stores fused, or with heads in another order
    norms       with factors rounded or counted otherwise, with a mean, or over all heads together

Pairs that are not turned have the angle 0. Where neighbours are turned, or a part of a head, the
loader puts query and key dimensions in the order that backends turn (`head_order`). Scores don't
change, because queries and keys are reordered alike. Where the dtype of a norm's weight is wider
than the model's, it is multiplied before rounding.

Called by `models/variants.py` and `models/states.py`.

Source: Ba et al., "Layer Normalization" (arXiv 1607.06450); OLMo 2 (arXiv 2501.00656).

Legend: T tokens, N size of a row, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from nanoengine.attention.base import AttentionSpec, HeadNormWeights, Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import LayerPlan, NormKind
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered, whole_slots
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear
from nanoengine.layers.norm import HeadNorm, RMSNorm
from nanoengine.layers.rotary import RotaryEmbedding, cos_and_sin

# --- rotations ------------------------------------------------------------------------------------


class PartialRotary(RotaryEmbedding):
    """Turns the first `plan.rotary_dim` dimensions of a head; of latents these come alone."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        size, plan = config.plan.rotary_dim, config.plan
        assert size is not None
        cos, sin = cos_and_sin(rope, size, num_positions)
        still = (0, 0 if plan.latent else (config.head_dim - size) // 2)
        return F.pad(cos, still, value=1.0), F.pad(sin, still)


class NoRotary(RotaryEmbedding):
    """Turns nothing, whatever the position."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        return torch.ones(1, config.head_dim // 2), torch.zeros(1, config.head_dim // 2)

    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(torch.zeros_like(positions))


def head_order(config: ModelConfig) -> torch.Tensor | None:
    """Which dimension of a checkpoint's head each of ours is, [D] int64, so that those turned
    together are i and i + D / 2; None: they are so already."""
    head_dim, plan = config.head_dim, config.plan
    size = plan.rotary_dim or head_dim
    if size == head_dim and not plan.interleaved and not plan.backwards:
        return None
    turned = torch.arange(size)
    pairs = turned.view(-1, 2).T if plan.interleaved else turned.view(2, -1)
    pairs = pairs.flip(0) if plan.backwards else pairs
    still = torch.arange(size, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


# --- linear layers --------------------------------------------------------------------------------


class OneTensor(MergedLinear):
    """Matrices that the checkpoint holds as one tensor, of this layer's own name."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.row_order(name, len(rows))))
            first += size
        matrix = MatrixPart((first, self.in_features), order=self.stored_rows(torch.cat(found)))
        return self.slots_of(path, matrix)

    def stored_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the checkpoint has these rows of the matrices behind each other."""
        return rows


def whole_linear(
    path: str, inputs: int, outputs: int, context: ModelContext, *, bias: bool = False
) -> MergedLinear:
    """A matrix that every rank holds whole."""
    name = path.rpartition(".")[2]
    shards = {name: context.shard.of_heads(1)}
    return MergedLinear(path, inputs, {name: outputs}, bias=bias, context=context, shards=shards)


class OtherQKV(QKVLinear):
    """The query, key and value projections, with rows in the order that the layer reads them.

    Dimensions of query and key heads are ordered as `head_order` says. Gates come first here,
    before the queries, wherever the checkpoint holds them: [..., G + (H + 2 K) * D], G being
    H * D, or H where a head has one.
    """

    def __init__(self, name: str, config: ModelConfig, context: ModelContext) -> None:
        where = config.plan.output_gate
        gates = 1 if where == "per_head" else config.head_dim if where else 0
        super().__init__(name, config, context, gates)
        self.head_order, self.head_dim = head_order(config), config.head_dim
        self.gated = where == "q_proj"
        if where in ("gate_proj", "per_head"):
            size = config.num_attention_heads * gates
            self.parts = {"gate_proj": size, **self.parts, "q_proj": self.parts["q_proj"] - size}
            self.shards = {"gate_proj": context.shard, **self.shards}

    def row_order(self, name: str, num_rows: int) -> torch.Tensor | None:
        gated, order = self.gated and name == "q_proj", self.head_order
        if name in ("v_proj", "gate_proj") or (order is None and not gated):
            return None
        heads = torch.arange(num_rows).view(-1, self.head_dim)
        queries = heads[::2] if gated else heads
        queries = queries if order is None else queries[:, order]
        return torch.cat((heads[1::2], queries) if gated else (queries,)).flatten()


class OneTensorQKV(OtherQKV, OneTensor):
    """Both at once."""


class HeadByHeadQKV(OneTensorQKV):
    """Of each KV head its queries, its key and its value, then those of the next."""

    def stored_rows(self, rows: torch.Tensor) -> torch.Tensor:
        kv_heads = self.parts["k_proj"] // self.head_dim
        stored = torch.arange(sum(self.parts.values())).view(kv_heads, -1, self.head_dim)
        parts = stored[:, :-2], stored[:, -2], stored[:, -1]
        return torch.cat([part.flatten() for part in parts])[rows]


def as_stored(slots: Mapping[str, WeightSlot], plan: LayerPlan) -> dict[str, WeightSlot]:
    """The slots of a model whose norms have no weight, which are 1 then, or whose checkpoint has
    the matrices of layers as [inputs, outputs]."""
    found = dict(slots)
    for name, slot in slots.items():
        if plan.norm.startswith("bare") and name.endswith("norm.weight"):
            found[name] = replace(slot, absent=partial(slot.store, torch.ones(slot.shape)))
        elif plan.inputs_first and ".layers." in name and len(slot.shape) == 2:
            part = (*slot.part, slice(None), slice(None))[1::-1]
            store = slot.store
            found[name] = replace(
                slot, shape=slot.shape[::-1], part=part, store=lambda m, store=store: store(m.T)
            )
    return found


class Positions(Layer):
    """The learned vectors of positions [T], [T, hidden_size]."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.before = config.plan.positions or 0
        rows = config.max_position_embeddings + self.before
        self.weight = context.parameter(rows, config.hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.before, self.weight)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return whole_slots(path, weight=self.weight)


class XIELU(Layer):
    """a x^2 + b x, for x above 0; below, c (e^x - 1 - x) + b x. a and c are a layer's own.

    Attributes:
        alpha_p, alpha_n, beta, eps: as checkpoints have them: a is softplus(alpha_p), c is beta +
            softplus(alpha_n), b is beta; x counts as at most eps in e^x.

    Source: Huang and Schlag (arXiv 2411.13010).
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = context.parameter(1), context.parameter(1)
        self.beta, self.eps = context.parameter(), context.parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above, below = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        bent = torch.expm1(torch.minimum(x, self.eps)) - x
        return torch.where(x > 0, above * x * x, bent * below) + self.beta * x

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return whole_slots(path, **dict(self.named_parameters()))


# --- norms ----------------------------------------------------------------------------------------


def make_norm(config: ModelConfig, context: ModelContext) -> RMSNorm | LayerNorm:
    """The norm over the hidden size that a family has."""
    kind, sizes = config.plan.norm, (config.hidden_size, config.rms_norm_eps)
    if kind.endswith("layer"):
        layer_norm = CenteredLayerNorm if kind == "centered layer" else LayerNorm
        return layer_norm(*sizes, bias=config.plan.norm_bias, context=context)
    norm = CenteredNorm if kind == "centered" else RMSNorm
    return norm(*sizes, context=context, dtype=norm_dtype(kind, context.dtype))


def norm_dtype(kind: NormKind, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm's weight: float32 or wider where the norm is rounded behind it."""
    return dtype if kind == "rms" else torch.promote_types(dtype, torch.float32)


class CenteredNorm(RMSNorm):
    """RMSNorm whose stored weight is how far the factor is from 1.

    Why added in the dtype that it is kept in: 1 + weight has more digits than 16 bits hold.
    """

    def store(self, stored: torch.Tensor) -> None:
        self.weight.copy_(stored.to(self.weight.dtype) + 1)


class LayerNorm(Layer):
    """(x - mean(x)) / std(x) * weight, plus a bias where the checkpoint has one; in plain torch."""

    def __init__(self, size: int, eps: float, *, bias: bool, context: ModelContext) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        dtype = norm_dtype("layer", context.dtype)
        self.weight = context.parameter(size, dtype=dtype)
        self.bias = context.parameter(size, dtype=dtype) if bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm.forward`."""
        total = x if residual is None else x + residual
        wide = total.to(self.weight.dtype)
        normed = F.layer_norm(wide, (self.size,), self.weight, self.bias, self.eps)
        return normed.to(x.dtype), total

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return whole_slots(path, weight=self.weight, bias=self.bias)


class CenteredLayerNorm(LayerNorm):
    """LayerNorm whose stored weight is how far the factor is from 1."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        name, slots = f"{path}.weight", super().weight_slots(path)
        return slots | {name: replace(slots[name], store=self.store)}

    def store(self, stored: torch.Tensor) -> None:
        self.weight.copy_(stored.to(self.weight.dtype) + 1)


class OtherHeadNorm(HeadNorm):
    """The norm of each head, of the family's kind, with a head's dimensions in the order that
    `head_order` says."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        dtype = norm_dtype(config.plan.norm, context.dtype)
        super().__init__(spec, config.rms_norm_eps, context=context, dtype=dtype)
        self.kind, self.order = config.plan.norm, head_order(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H + K, D] -> the same, each head normed, where no backend does it."""
        wide = x.to(self.weight.dtype)
        normed = F.rms_norm(wide, self.weight.shape[1:], None, self.weights.eps)
        return (normed * self.weight).to(x.dtype)

    def store(self, rows: torch.Tensor, stored: torch.Tensor) -> None:
        factors = stored.to(rows.dtype) + 1 if self.kind == "centered" else stored
        rows.copy_(ordered(factors, self.order))


class WidthNorm(OtherHeadNorm):
    """RMSNorm over all query heads together, and over all key heads: `q_norm` and `k_norm` beside
    this module in the checkpoint, [H * D] and [K * D] of all ranks.

    Attributes:
        weights: what backends norm with; None: heads are split over ranks, and `forward` norms
            them.

    Source: OLMo 2 (arXiv 2501.00656), section 3.3.
    """

    weights: HeadNormWeights | None

    def __init__(self, spec: AttentionSpec, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(spec, config, context)
        self.ranks, self.all_reduce = context.shard.world_size, context.all_reduce
        self.eps, self.counts = config.rms_norm_eps, (spec.num_heads, spec.num_kv_heads)
        self.weights = None
        if self.ranks == 1:
            self.weights = HeadNormWeights(weight=self.weight, eps=self.eps, together=self.counts)
        heads = config.num_attention_heads, config.num_key_value_heads
        self.whole = [(count * config.head_dim, context.shard.of_heads(count)) for count in heads]

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """[T, H + 2 K, D] -> the same, value heads as they were; for heads split over ranks."""
        q, k, v = heads.split((*self.counts, self.counts[1]), dim=1)
        weights = self.weight.split(self.counts)
        return torch.cat((self._normed(q, weights[0]), self._normed(k, weights[1]), v), dim=1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = self.all_reduce(wide.square().sum((1, 2), keepdim=True))
        # Why it holds for heads that several ranks share: they count as often in both.
        size = weight.numel() * self.ranks
        normed = (wide * torch.rsqrt(total / size + self.eps)).to(weight.dtype)
        return (normed * weight).to(x.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return {
            name: replace(slot, shape=(size,), part=(shard.slice(size, name),))
            for (name, slot), (size, shard) in zip(
                super().weight_slots(path).items(), self.whole, strict=True
            )
        }

    def store(self, rows: torch.Tensor, stored: torch.Tensor) -> None:
        rows.copy_(ordered(stored.view(rows.shape).T, self.order).T)
