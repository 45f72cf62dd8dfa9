"""Layouts that differ from Llama's: which dimensions RoPE rotates, and how a checkpoint stores
matrices.

    positions       partial RoPE, or no RoPE
    linear layers   several matrices in one tensor, heads in another order

Pairs without RoPE have the angle 0. For interleaved or partial RoPE, the loader reorders the
dimensions of queries and keys as backends expect them (`head_order`). Attention scores don't
change, because queries and keys are reordered alike.

Called by `models/generic.py`, `models/mla.py` and `models/linear_attention.py`.

Legend: T tokens, H / K query / KV heads of this rank, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.rope import RopeConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.layers.layer import ModelContext
from nanoengine.layers.linear import MergedLinear, QKVLinear
from nanoengine.layers.rotary import RotaryEmbedding, cos_and_sin

# --- positions ------------------------------------------------------------------------------------


class PartialRotary(RotaryEmbedding):
    """RoPE on the first `plan.rotary_dim` dimensions of a head, all if None; for MLA the table has
    only these."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        plan, size = config.plan, config.plan.rotary_dim or config.head_dim
        cos, sin = cos_and_sin(rope, size, num_positions)
        padding = (0, 0 if plan.mla else (config.head_dim - size) // 2)
        return F.pad(cos, padding, value=1.0), F.pad(sin, padding)


class NoRotary(RotaryEmbedding):
    """No RoPE: all angles are 0."""

    def make_table(self, rope: RopeConfig, config: ModelConfig, num_positions: int) -> Rotation:
        return torch.ones(1, config.head_dim // 2), torch.zeros(1, config.head_dim // 2)

    def forward(self, positions: torch.Tensor) -> Rotation:
        return super().forward(torch.zeros_like(positions))


def head_order(config: ModelConfig) -> torch.Tensor | None:
    """Returns, for each dimension of a head here, its index in the checkpoint's head, [D] int64, so
    that RoPE rotates the pairs i and i + D / 2; None: the checkpoint has this order."""
    head_dim, plan = config.head_dim, config.plan
    size = plan.rotary_dim or head_dim
    if size == head_dim and not plan.rope_interleaved:
        return None
    rotated = torch.arange(size)
    pairs = rotated.view(-1, 2).T if plan.rope_interleaved else rotated.view(2, -1)
    rest = torch.arange(size, head_dim).view(2, -1)
    return torch.cat((pairs, rest), dim=1).flatten()


# --- linear layers --------------------------------------------------------------------------------


class FusedTensorLinear(MergedLinear):
    """Matrices that the checkpoint stores as one tensor, under this layer's name."""

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        first, found = 0, []
        for name, size in self.parts.items():
            part = self.shards[name].slice(size, name)
            rows = torch.arange(first + part.start, first + part.stop)
            found.append(ordered(rows, self.orders.get(name)))
            first += size
        matrix = MatrixPart((first, self.in_features), order=torch.cat(found))
        return self.slots_of(path, matrix)


def replicated_linear(
    path: str, inputs: int, outputs: int, context: ModelContext, *, bias: bool = False
) -> MergedLinear:
    """Makes a linear layer that is replicated on all ranks."""
    name = path.rpartition(".")[2]
    shards = {name: context.shard.for_kv_heads(1)}
    return MergedLinear(path, inputs, {name: outputs}, bias=bias, context=context, shards=shards)


class ReorderedQKV(QKVLinear):
    """The query, key and value projections, with outputs in the order that attention expects.

    Dimensions of query and key heads are ordered by `head_order`. Output gates precede the queries,
    wherever the checkpoint stores them: [..., G + (H + 2 K) * D], where G is H * D, or H if there
    is one gate per head.
    """

    def __init__(self, name: str, config: ModelConfig, context: ModelContext) -> None:
        where = config.plan.output_gate
        gates = 1 if where == "per_head" else config.head_dim if where else 0
        super().__init__(name, config, context, gates)
        self.head_dim, order = config.head_dim, head_order(config)
        if where == "per_head":
            size = config.num_attention_heads * gates
            self.parts = {"gate_proj": size, **self.parts, "q_proj": self.parts["q_proj"] - size}
            self.shards = {"gate_proj": context.shard, **self.shards}
        for part in ("q_proj", "k_proj"):
            rows = torch.arange(self.shards[part].split(self.parts[part], part))
            heads, gated = rows.view(-1, config.head_dim), where == part
            queries = heads[::2] if gated else heads
            queries = queries if order is None else queries[:, order]
            if gated or order is not None:
                each = (heads[1::2], queries) if gated else (queries,)
                self.orders[part] = torch.cat(each).flatten()


class FusedTensorQKV(ReorderedQKV, FusedTensorLinear):
    """A `ReorderedQKV` that the checkpoint stores as one tensor."""
