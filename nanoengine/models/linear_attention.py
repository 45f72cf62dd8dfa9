"""Recurrent layers: they keep a state of fixed size per sequence instead of keys and values.

    GatedDeltaNet   x ─ in_proj ─┬─ q, k, v ─ convolution ─ delta rule ─ norm ─┐
                                 └─ gate z ───────────────────────── silu ─── * ─ out_proj
    ShortConv       x ─ in_proj ─ before * value ─ convolution ─ * behind ─ out_proj

`batch.state_waves` says which states a step reads and writes.

Legend: T tokens, L rows of logits, H / G value / key heads, E / V size of a key / value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch, ScanStep
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import LinearAttentionConfig
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, full_slots
from nanoengine.errors import ConfigError
from nanoengine.layers import delta_rule
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.collectives import Shard
from nanoengine.layers.delta_rule import DeltaInputs
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.layouts import FusedTensorLinear
from nanoengine.layers.linear import MergedLinear, RowParallelLinear
from nanoengine.models.decoder import select_rows


class RecurrentLayer(Layer):
    """The base class: the interface between the runner and all recurrent layers.

    Attributes:
        name: of the module in a checkpoint's layer.
        plan: the plan of this rank's part of the layer.
        graph_safe: a decode decides nothing on the host, and writes nothing to slot 0.
        decode_fn, prefill_fn: advance the sequences of a wave that have one token, or
            more; `steps` and `scans` of the class, or kernels that replace them.
    """

    name, graph_safe = "", False
    plan: LinearAttentionConfig
    decode_fn: Callable[..., torch.Tensor]
    prefill_fn: Callable[..., None]

    def bind(self, states: torch.Tensor) -> None:
        """Gives the layer its slice of all states, [number of states,
        `LinearAttentionConfig.size`]."""
        raise NotImplementedError

    def over_waves(
        self, batch: Batch, given: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> torch.Tensor:
        """Fills `out` [T, ...] in the order in which the step's sequences depend on each other.

        Args:
            given: the per-token arguments of both functions, [T, ...] each.
        """
        for wave in batch.state_waves:
            slots = wave.reads, wave.writes
            if len(wave.reads) == len(out):
                return self.decode_fn(*given, *slots)
            if len(wave.reads):
                out[wave.tokens] = self.decode_fn(*(x[wave.tokens] for x in given), *slots)
            if wave.spans:
                self.prefill_fn(*given, wave, out)
        return out


class MatrixStateLayer(RecurrentLayer):
    """The base of layers that keep a matrix per head, updated by a rule, and the convolution's last
    inputs.

    Attributes:
        names: the config's keys for the numbers of key heads and of value heads.
        values_first: values precede keys in the convolution's input.
        rule: the module with the rule's `step` and `scan`.
        each: value heads per key head.
        sizes: sizes of the parts of the convolution's input, per key head.
        inner: elements of all value heads of this rank.
        mixer_fn: computes everything between the projections.
    """

    names: tuple[str, str]
    values_first: bool
    rule: ModuleType
    mix: Callable[..., torch.Tensor]

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        whole, shard = config.states, context.shard
        assert whole is not None
        key_heads, heads = whole.num_key_heads, whole.num_value_heads
        plan = self.plan = replace(
            whole,
            num_key_heads=shard.split(key_heads, self.names[0]),
            num_value_heads=shard.split(heads, self.names[1]),
            channels=shard.split(whole.channels),
        )
        self.each, self.inner = heads // key_heads, plan.num_value_heads * plan.value_dim
        sizes = self.each * plan.value_dim, plan.key_dim, plan.key_dim
        self.sizes = sizes if self.values_first else sizes[::-1]
        channels = pick_rows(self.sizes, key_heads, shard, merged=False)
        self.conv1d = CausalConv(
            plan.kernel, plan.channels, bias=plan.conv_bias, picked=channels, context=context
        )
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj",
            heads * plan.value_dim,
            config.hidden_size,
            bias=plan.output_bias,
            context=context,
        )
        self.states = self.rows = torch.empty(0)
        self.decode_fn, self.prefill_fn = self.steps, self.scans
        self.mixer_fn = self.mix

    def bind(self, states: torch.Tensor) -> None:
        plan, self.rows = self.plan, states
        size = plan.size - (plan.kernel - 1) * plan.channels
        matrices, inputs = states.split((size, plan.size - size), dim=1)
        self.states = matrices.unflatten(1, (plan.num_value_heads, plan.key_dim, plan.value_dim))
        self.conv1d.bind(inputs)

    def through(self, batch: Batch, mixed: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        """Applies convolution and rule: the convolution's input [T, channels] and the rule's inputs
        per head [T, H] -> the heads' outputs [T, H, V]."""
        shape = len(mixed), self.plan.num_value_heads, self.plan.value_dim
        out = mixed.new_empty(shape, dtype=self.states.dtype)
        return self.over_waves(batch, (mixed, *numbers), out)

    def inputs(self, mixed: torch.Tensor, *numbers: torch.Tensor) -> Any:
        """Makes the rule's inputs from the convolution's output."""
        raise NotImplementedError

    def steps(
        self, mixed: torch.Tensor, first: torch.Tensor, second: torch.Tensor, reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Advances several sequences by one token each -> [T, H, V].

        Args:
            mixed: the convolution's input, [T, channels].
            first, second: the rule's inputs per head, [T, H].
            reads, writes: [T], the state before each token, and the state to write.
        """
        mixed = self.conv1d.step(mixed, reads, writes)
        return self.rule.step(self.inputs(mixed, first, second), self.states, reads, writes)

    def scans(
        self, mixed: torch.Tensor, first: torch.Tensor, second: torch.Tensor, wave: ScanStep,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Advances each of a wave's sequences by several tokens, in order, into `out` [T, H, V];
        the arguments are as for `steps`, for all tokens of the step."""
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            convolved = self.conv1d.scan(mixed[tokens], span)
            inputs = self.inputs(convolved, first[tokens], second[tokens])
            state, done = self.states[span.read], 0
            for count, block in span.writes:
                part = inputs.part(slice(done, count))
                found, state = self.rule.scan(part, state, span.position + done)
                self.states[block].copy_(state)
                out[span.start + done : span.start + count] = found
                done = count


class GatedDeltaNet(MatrixStateLayer):
    """Linear attention by the gated delta rule. Source: Qwen3-Next; arXiv 2412.06464."""

    name, names = "linear_attn", ("linear_num_key_heads", "linear_num_value_heads")
    rule, values_first = delta_rule, False

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, config, context)
        plan, shard, self.eps = self.plan, context.shard, config.rms_norm_eps
        sizes, z, one = self.sizes, self.sizes[-1:], (self.each,)
        if plan.fused_qkvz:
            tensors = {"in_proj_qkvz": (*sizes, *z)}, {"in_proj_ba": one * 2}
        else:
            tensors = {"in_proj_qkv": sizes, "in_proj_z": z}, {"in_proj_b": one, "in_proj_a": one}
        key_heads = plan.num_key_heads * shard.world_size
        rows_of = partial(pick_rows, num_heads=key_heads, shard=shard, merged=plan.fused_qkvz)
        self.in_proj_qkvz, self.in_proj_ba = (
            GatheredLinear(
                f"{path}.{name}",
                config.hidden_size,
                {tensor: rows_of(each) for tensor, each in found.items()},
                context=context,
            )
            for name, found in zip(("in_proj_qkvz", "in_proj_ba"), tensors, strict=True)
        )
        self.decay = Decay(key_heads * self.each, context)
        self.norm = GateNorm(plan.value_dim, context)
        # Why after the norm: the columns of quantized blocks can't be reordered.
        order = torch.arange(plan.num_value_heads).view(-1, self.each).T.flatten()
        self.out_order = order if plan.tiled and self.each > 1 else None
        if self.out_order is not None and shard.world_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={shard.world_size} does not divide this checkpoint, whose"
                f" {path}.out_proj has its inputs in another order than its heads: use 1"
            )
        self.gates_of, self.norm_of = self.gates, self.norm.forward

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All tokens advance their states; only the outputs in `rows` are returned."""
        qkvz, ba = self.in_proj_qkvz(x), self.in_proj_ba(x)
        return self.out_proj(self.mixer_fn(qkvz, ba, batch, rows))

    def mix(
        self, qkvz: torch.Tensor, ba: torch.Tensor, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes everything between the projections: [T, channels + H * V], [T, 2 H] -> [L, H *
        V]."""
        qkv, z = qkvz.split((self.plan.channels, self.inner), dim=1)
        beta, decay = self.gates_of(ba)
        out = select_rows(self.through(batch, qkv, decay, beta), rows)
        normed = self.norm_of(out, select_rows(z, rows).view(out.shape), self.eps)
        return (normed if self.out_order is None else normed[:, self.out_order]).flatten(1)

    def gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each head's write strength (beta) and decay per token: [T, 2 H] -> [T, H] each; see
        `DeltaInputs`."""
        beta, a = ba.to(self.states.dtype).chunk(2, dim=1)
        return beta.sigmoid(), self.decay(a)

    def inputs(self, mixed: torch.Tensor, *numbers: torch.Tensor) -> DeltaInputs:
        """Normalizes queries and keys to length 1 and repeats them for each value head of a key
        head."""
        plan, keys = self.plan, self.plan.num_key_heads * self.plan.key_dim
        mixed = F.silu(mixed.to(self.states.dtype))
        q, k, v = mixed.split((keys, keys, plan.channels - 2 * keys), dim=1)
        q, k = (x.view(len(x), plan.num_key_heads, plan.key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(self.each, dim=1) for x in (q * plan.key_dim**-0.5, k))
        v = v.view(len(v), plan.num_value_heads, plan.value_dim)
        return DeltaInputs(q, k, v, *numbers)


class ShortConv(RecurrentLayer):
    """A convolution between two gates. Source: LFM2 (arXiv 2511.23404)."""

    name = "conv"

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden, shard = config.states, config.hidden_size, context.shard
        assert plan is not None
        self.plan = replace(plan, channels=shard.split(hidden))
        self.in_proj = FusedTensorLinear(
            f"{path}.in_proj",
            hidden,
            {"before": hidden, "behind": hidden, "value": hidden},
            bias=plan.bias,
            context=context,
        )
        own = torch.arange(hidden)[shard.slice(hidden, "hidden_size")]
        self.conv = CausalConv(
            plan.kernel, len(own), bias=plan.bias, picked=(hidden, own), context=context
        )
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj", hidden, hidden, bias=plan.bias, context=context
        )
        self.rows = torch.empty(0)
        self.decode_fn, self.prefill_fn = self.conv.step, self.scans

    def bind(self, states: torch.Tensor) -> None:
        self.rows = states
        self.conv.bind(states)

    def scans(self, x: torch.Tensor, wave: ScanStep, out: torch.Tensor) -> None:
        """As `MatrixStateLayer.scans`; x and `out` are [T, C]."""
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            out[tokens] = self.conv.scan(x[tokens], span)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All tokens advance their states; only the outputs in `rows` are returned."""
        before, behind, value = self.in_proj(x).chunk(3, dim=1)
        gated = before * value
        out = self.over_waves(batch, (gated,), torch.empty_like(gated))
        return self.out_proj(select_rows(behind, rows) * select_rows(out, rows))


STATE_LAYERS = {"delta": GatedDeltaNet, "conv": ShortConv}
"""`LinearAttentionConfig.kind` -> the layer."""


class GatheredLinear(MergedLinear):
    """A MergedLinear of rows that are selected from the checkpoint's tensors.

    Args:
        picks: tensor name (next to this layer) -> its number of rows, and the rows that this rank
            takes, in order.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        picks: Mapping[str, tuple[int, torch.Tensor]],
        *,
        bias: bool = False,
        context: ModelContext,
    ) -> None:
        taken_rows = {part: len(rows) for part, (_, rows) in picks.items()}
        whole = dict.fromkeys(picks, Shard())
        super().__init__(name, in_features, taken_rows, bias=bias, context=context, shards=whole)
        self.picks = picks

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        beside, slots, first = path.rpartition(".")[0], {}, 0
        for name, (size, picked) in self.picks.items():
            matrix = MatrixPart((size, self.in_features), (), first, picked)
            slots |= self.slots_of(f"{beside}.{name}", matrix)
            first += len(picked)
        return slots


def pick_rows(
    sizes: tuple[int, ...], num_heads: int, shard: Shard, *, merged: bool
) -> tuple[int, torch.Tensor]:
    """Counts the rows of a tensor with several outputs and selects the rows of one rank's key
    heads.

    Args:
        sizes: rows per key head of each output.
        merged: the rows of one key head are adjacent; else the rows of one output are.
    """
    heads, num_rows = shard.slice(num_heads, "linear_num_key_heads"), num_heads * sum(sizes)
    rows = torch.arange(num_rows)
    if merged:
        parts = rows.view(num_heads, -1).split(sizes, dim=1)
    else:
        outputs = rows.split([num_heads * size for size in sizes])
        parts = tuple(output.view(num_heads, -1) for output in outputs)
    return num_rows, torch.cat([part[heads].flatten() for part in parts])


class Decay(Layer):
    """Each head's decay per token: a [T, H] -> logarithms [T, H], at most 0.

    `num_heads` counts all ranks' heads; `name` is the config's key for it.
    """

    def __init__(self, num_heads: int, context: ModelContext, name: str = "heads") -> None:
        super().__init__()
        wide = torch.promote_types(context.dtype, torch.float32)
        self.num_heads, self.part = num_heads, context.shard.slice(num_heads, name)
        own = self.part.stop - self.part.start
        self.a_log = context.parameter(own, dtype=wide)
        self.dt_bias = context.parameter(own, dtype=wide)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return -self.a_log.exp() * F.softplus(a + self.dt_bias)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return self.head_slots(path, A_log=self.a_log, dt_bias=self.dt_bias)

    def head_slots(self, path: str, **tensors: torch.Tensor) -> dict[str, WeightSlot]:
        """The slots of tensors with one element per head, next to the module `path`; each rank
        holds its part."""
        beside, shape, part = path.rpartition(".")[0], (self.num_heads,), (self.part,)
        return {
            f"{beside}.{name}": WeightSlot(shape=shape, part=part, store=tensor.copy_)
            for name, tensor in tensors.items()
        }


class GateNorm(Layer):
    """RMSNorm of each head, multiplied by the silu of its gate: [L, H, V] twice -> [L, H, V]."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = context.parameter(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], None, eps).to(gate.dtype) * self.weight
        return (normed.to(x.dtype) * F.silu(gate.to(x.dtype))).to(gate.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return full_slots(path, weight=self.weight)
