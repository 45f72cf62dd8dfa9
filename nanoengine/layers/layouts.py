"""Layouts that differ from Llama's: which dimensions RoPE rotates, and how a checkpoint stores
matrices.

    positions       RoPE of a part of a head, or of none; learned vectors
    linear layers   several matrices in one tensor, heads in another order, [inputs, outputs]

Pairs without RoPE have the angle 0. Where RoPE rotates neighbours, or a part of a head, the loader
puts the dimensions of queries and keys in the order that backends rotate (`head_order`). Scores
don't change, because queries and keys are reordered alike.

Called by `models/generic.py`, `models/latent.py` and `models/states.py`.

Legend: T tokens, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import LayerPlan
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered, whole_slots
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear
from nanoengine.layers.rotary import RotaryEmbedding, cos_and_sin

# --- positions ------------------------------------------------------------------------------------


class PartialRotary(RotaryEmbedding):
    """RoPE of the first `plan.rotary_dim` dimensions of a head; of latents these come alone."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        size, plan = config.plan.rotary_dim, config.plan
        assert size is not None
        cos, sin = cos_and_sin(rope, size, num_positions)
        still = (0, 0 if plan.latent else (config.head_dim - size) // 2)
        return F.pad(cos, still, value=1.0), F.pad(sin, still)


class NoRotary(RotaryEmbedding):
    """No RoPE, whatever the position."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        return torch.ones(1, config.head_dim // 2), torch.zeros(1, config.head_dim // 2)

    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(torch.zeros_like(positions))


class LearnedPositions(Layer):
    """The learned vectors of positions [T], [T, hidden_size]."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self.before = config.plan.learned_positions or 0
        rows = config.max_position_embeddings + self.before
        self.weight = context.parameter(rows, config.hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.before, self.weight)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return whole_slots(path, weight=self.weight)


def head_order(config: ModelConfig) -> torch.Tensor | None:
    """Which dimension of a checkpoint's head each of ours is, [D] int64, so that those turned
    together are i and i + D / 2; None: they are so already."""
    head_dim, plan = config.head_dim, config.plan
    size = plan.rotary_dim or head_dim
    if size == head_dim and not plan.rope_interleaved and not plan.rope_reversed:
        return None
    turned = torch.arange(size)
    pairs = turned.view(-1, 2).T if plan.rope_interleaved else turned.view(2, -1)
    pairs = pairs.flip(0) if plan.rope_reversed else pairs
    still = torch.arange(size, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


# --- linear layers --------------------------------------------------------------------------------


class OneTensorLinear(MergedLinear):
    """Matrices that the checkpoint holds as one tensor, of this layer's own name."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.orders.get(name)))
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


class ReorderedQKV(QKVLinear):
    """The query, key and value projections, with rows in the order that the layer reads them.

    Dimensions of query and key heads are ordered as `head_order` says. Gates come first here,
    before the queries, wherever the checkpoint holds them: [..., G + (H + 2 K) * D], G being
    H * D, or H where a head has one.
    """

    def __init__(self, name: str, config: ModelConfig, context: ModelContext) -> None:
        where = config.plan.output_gate
        gates = 1 if where == "per_head" else config.head_dim if where else 0
        super().__init__(name, config, context, gates)
        self.head_dim, order = config.head_dim, head_order(config)
        if where in ("gate_proj", "per_head"):
            size = config.num_attention_heads * gates
            self.parts = {"gate_proj": size, **self.parts, "q_proj": self.parts["q_proj"] - size}
            self.shards = {"gate_proj": context.shard, **self.shards}
        for part in ("q_proj", "k_proj"):
            rows = torch.arange(self.shards[part].split(self.parts[part], part))
            heads, gated = rows.view(-1, config.head_dim), where == part
            found = heads[::2] if gated else heads
            found = found if order is None else found[:, order]
            if gated or order is not None:
                each = (heads[1::2], found) if gated else (found,)
                self.orders[part] = torch.cat(each).flatten()


class OneTensorQKV(ReorderedQKV, OneTensorLinear):
    """Both at once."""


class HeadByHeadQKV(OneTensorQKV):
    """Of each KV head its queries, its key and its value, then those of the next."""

    def stored_rows(self, rows: torch.Tensor) -> torch.Tensor:
        kv_heads = self.parts["k_proj"] // self.head_dim
        stored = torch.arange(sum(self.parts.values())).view(kv_heads, -1, self.head_dim)
        parts = stored[:, :-2], stored[:, -2], stored[:, -1]
        return torch.cat([part.flatten() for part in parts])[rows]


QKV_LAYOUTS: dict[bool | str, type[ReorderedQKV]] = {
    False: ReorderedQKV,
    "parts": OneTensorQKV,
    "heads": HeadByHeadQKV,
}
"""`LayerPlan.fused_qkv` -> the layer."""


def as_stored(slots: Mapping[str, WeightSlot], plan: LayerPlan) -> dict[str, WeightSlot]:
    """The slots of a model whose norms have no weight, which are 1 then, or whose checkpoint has
    the matrices of layers as [inputs, outputs]."""
    found = dict(slots)
    for name, slot in slots.items():
        if plan.norm.startswith("bare") and name.endswith("norm.weight"):
            found[name] = replace(slot, absent=partial(slot.store, torch.ones(slot.shape)))
        elif plan.transposed_matrices and ".layers." in name and len(slot.shape) == 2:
            part = (*slot.part, slice(None), slice(None))[1::-1]
            store = slot.store
            found[name] = replace(
                slot, shape=slot.shape[::-1], part=part, store=lambda m, store=store: store(m.T)
            )
    return found
