"""Layers that keep a state of fixed size a sequence where SelfAttention keeps keys and values.

    GatedDeltaNet   x ─ in_proj ─┬─ q, k, v ─ convolution ─ delta rule ─ norm ─┐
                                 └─ gate z ───────────────────────── silu ─── * ─ out_proj
    ShortConv       x ─ in_proj ─ before * value ─ convolution ─ * behind ─ out_proj

Which states a step reads and writes stands in `batch.state_waves`.

Legend: T tokens, L rows of logits, H / G value / key heads, E / V size of a key / value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch, StateWave
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import StatePlan
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, whole_slots
from nanoengine.errors import ConfigError
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.collectives import Shard
from nanoengine.layers.delta_rule import DeltaInputs, DeltaSpans, DeltaTokens, scan, step
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import MergedLinear, RowParallelLinear
from nanoengine.layers.variants import OneTensor
from nanoengine.models.decoder import taken


class StateLayer(Layer):
    """The base: what the runner asks of any of them.

    Attributes:
        name: of the module in a checkpoint's layer.
        plan: of this rank's part of the layer.
        graph_safe: a decode decides nothing on the host, and writes nothing to slot 0.
    """

    name, graph_safe = "", False
    plan: StatePlan

    def bind(self, states: torch.Tensor) -> None:
        """Gives the layer its slice of all states, [number of states, `StatePlan.size`]."""
        raise NotImplementedError

    def over_waves(
        self,
        batch: Batch,
        out: torch.Tensor,
        one_each: Callable[[torch.Tensor | slice, StateWave], torch.Tensor],
        several_each: Callable[[StateWave, torch.Tensor], None],
    ) -> torch.Tensor:
        """Fills `out` [T, ...] in the order in which the step's sequences depend on each other.

        Args:
            one_each: the tokens of sequences with one, as indices, and their wave -> [D, ...].
            several_each: fills the rows of a wave's spans.
        """
        for wave in batch.state_waves:
            if len(wave.reads) == len(out):
                return one_each(slice(None), wave)
            if len(wave.reads):
                out[wave.tokens] = one_each(wave.tokens, wave)
            if wave.spans:
                several_each(wave, out)
        return out


class GatedDeltaNet(StateLayer):
    """Linear attention by the gated delta rule. Source: Qwen3-Next; arXiv 2412.06464."""

    name = "linear_attn"

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        whole, hidden, shard = config.states, config.hidden_size, context.shard
        assert whole is not None
        plan = replace(
            whole,
            num_key_heads=shard.split(whole.num_key_heads, "linear_num_key_heads"),
            num_value_heads=shard.split(whole.num_value_heads, "linear_num_value_heads"),
            channels=shard.split(whole.channels),
        )
        self.plan, self.eps = plan, config.rms_norm_eps
        heads = whole.num_value_heads // whole.num_key_heads
        sizes = plan.key_dim, plan.key_dim, heads * plan.value_dim
        z, one = sizes[-1:], (heads,)
        if whole.merged:
            tensors = {"in_proj_qkvz": (*sizes, *z)}, {"in_proj_ba": (heads, heads)}
        else:
            tensors = {"in_proj_qkv": sizes, "in_proj_z": z}, {"in_proj_b": one, "in_proj_a": one}
        rows_of = partial(pick_rows, num_heads=whole.num_key_heads, shard=shard)
        self.in_proj_qkvz, self.in_proj_ba = (
            PickedLinear(
                f"{path}.{name}",
                hidden,
                {tensor: rows_of(each, merged=whole.merged) for tensor, each in found.items()},
                context=context,
            )
            for name, found in zip(("in_proj_qkvz", "in_proj_ba"), tensors, strict=True)
        )
        channels = rows_of(sizes, merged=False)
        self.conv1d = CausalConv(
            plan.kernel, plan.channels, bias=False, picked=channels, context=context
        )
        self.decay = Decay(whole.num_value_heads, context)
        self.norm = GateNorm(plan.value_dim, context)
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj", whole.num_value_heads * plan.value_dim, hidden, context=context
        )
        # Why after the norm: columns of quantized blocks can't be put in another order.
        order = torch.arange(plan.num_value_heads).view(-1, heads).T.flatten()
        self.out_order = order if whole.tiled and heads > 1 else None
        if self.out_order is not None and shard.world_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={shard.world_size} does not divide this checkpoint, whose"
                f" {path}.out_proj has its inputs in another order than its heads: use 1"
            )
        self.states = self.rows = torch.empty(0)
        self.one_token_each, self.several_tokens_each = self.steps, self.scans
        self.gates_of, self.norm_of, self.mix_of = self.gates, self.norm.forward, self.mix

    def bind(self, states: torch.Tensor) -> None:
        plan, self.rows = self.plan, states
        size = plan.size - (plan.kernel - 1) * plan.channels
        matrices, inputs = states.split((size, plan.size - size), dim=1)
        shape = (plan.num_value_heads, plan.key_dim, plan.value_dim)
        self.states = matrices.unflatten(1, shape)
        self.conv1d.bind(inputs)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All rows advance their states; those that `rows` names come out."""
        qkvz, ba = self.in_proj_qkvz(x), self.in_proj_ba(x)
        return self.out_proj(self.mix_of(qkvz, ba, batch, rows))

    def mix(
        self, qkvz: torch.Tensor, ba: torch.Tensor, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """What stands between the projections: [T, channels + H * V], [T, 2 H] -> [L, H * V]."""
        plan = self.plan
        qkv, z = qkvz.split((plan.channels, qkvz.shape[1] - plan.channels), dim=1)
        beta, decay = self.gates_of(ba)

        def one_each(tokens: torch.Tensor | slice, wave: StateWave) -> torch.Tensor:
            inputs = qkv[tokens], decay[tokens], beta[tokens]
            return self.one_token_each(DeltaTokens(*inputs, self.rows, wave.reads, wave.writes))

        def several_each(wave: StateWave, out: torch.Tensor) -> None:
            self.several_tokens_each(DeltaSpans(qkv, decay, beta, self.rows, wave), out)

        shape = (len(qkv), plan.num_value_heads, plan.value_dim)
        empty = qkv.new_empty(shape, dtype=self.states.dtype)
        out = self.over_waves(batch, empty, one_each, several_each)
        gate = taken(z, rows).view(-1, plan.num_value_heads, plan.value_dim)
        normed = self.norm_of(taken(out, rows), gate, self.eps)
        return (normed if self.out_order is None else normed[:, self.out_order]).flatten(1)

    def gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much each head learns at a token, and how much it forgets: [T, 2 H] -> [T, H] each,
        as `DeltaInputs` has them."""
        beta, a = ba.to(self.states.dtype).chunk(2, dim=1)
        return beta.sigmoid(), self.decay(a)

    def steps(self, tokens: DeltaTokens) -> torch.Tensor:
        """One token of each of several sequences -> [T, H, V]."""
        qkv, decay, beta, _, reads, writes = tokens
        mixed = self.conv1d.step(qkv, reads, writes)
        return step(self._heads(mixed, decay, beta), self.states, reads, writes)

    def scans(self, spans: DeltaSpans, out: torch.Tensor) -> None:
        """Several tokens of each of a wave's sequences, one after the other, into `out` [T, H,
        V]."""
        qkv, decay, beta, _, wave = spans
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            mixed = self.conv1d.scan(qkv[tokens], span)
            inputs = self._heads(mixed, decay[tokens], beta[tokens])
            state, done, found = self.states[span.read], 0, []
            for count, block in span.writes:
                part = inputs.part(slice(done, count))
                rows, state = scan(part, state, span.position + done)
                self.states[block].copy_(state)
                found.append(rows)
                done = count
            out[tokens] = torch.cat(found)

    def _heads(self, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> DeltaInputs:
        """Queries and keys of length 1, each for all value heads that its head serves."""
        plan, keys = self.plan, self.plan.num_key_heads * self.plan.key_dim
        mixed = F.silu(mixed.to(self.states.dtype))
        q, k, v = mixed.split((keys, keys, plan.channels - 2 * keys), dim=1)
        q, k = (x.view(len(x), plan.num_key_heads, plan.key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (
            x.repeat_interleave(plan.num_value_heads // plan.num_key_heads, dim=1)
            for x in (q * plan.key_dim**-0.5, k)
        )
        v = v.view(len(v), plan.num_value_heads, plan.value_dim)
        return DeltaInputs(q, k, v, decay, beta)


class ShortConv(StateLayer):
    """A convolution between two gates. Source: LFM2 (arXiv 2511.23404)."""

    name = "conv"

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden, shard = config.states, config.hidden_size, context.shard
        assert plan is not None
        self.plan = replace(plan, channels=shard.split(hidden))
        self.in_proj = OneTensor(
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
        self.one_token_each, self.several_tokens_each = self.conv.step, self.scans

    def bind(self, states: torch.Tensor) -> None:
        self.rows = states
        self.conv.bind(states)

    def scans(self, x: torch.Tensor, wave: StateWave, out: torch.Tensor) -> None:
        """As `GatedDeltaNet.scans`; x and `out` are [T, C]."""
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            out[tokens] = self.conv.scan(x[tokens], span)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All rows advance their states; those that `rows` names come out."""
        before, behind, value = self.in_proj(x).chunk(3, dim=1)
        gated = before * value
        out = self.over_waves(
            batch,
            torch.empty_like(gated),
            lambda tokens, wave: self.one_token_each(gated[tokens], wave.reads, wave.writes),
            lambda wave, out: self.several_tokens_each(gated, wave, out),
        )
        return self.out_proj(taken(behind, rows) * taken(out, rows))


STATE_LAYERS = {"delta": GatedDeltaNet, "conv": ShortConv}
"""`StatePlan.kind` -> the layer."""


class PickedLinear(MergedLinear):
    """A MergedLinear of rows that are picked from the checkpoint's tensors.

    Args:
        picks: for each tensor, by its name beside this layer's, how many rows it has, and which of
            them this rank takes, in what order.
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
    """How many rows a tensor of several outputs has, and which belong to one rank's key heads.

    Args:
        sizes: rows a key head of each output.
        merged: the rows of a key head lie together; else those of an output.
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
    """How much each head forgets at a token: a [T, H] -> logarithms [T, H], at most 0.

    `num_heads` are those of all ranks, `name` what the config calls them.
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
        """Slots of a number a head, of which this rank holds its part, beside the module `path`."""
        beside, shape, part = path.rpartition(".")[0], (self.num_heads,), (self.part,)
        return {
            f"{beside}.{name}": WeightSlot(shape=shape, part=part, store=tensor.copy_)
            for name, tensor in tensors.items()
        }


class GateNorm(Layer):
    """RMSNorm of each head, weighed by the silu of its gate: [L, H, V] twice -> [L, H, V]."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = context.parameter(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], None, eps).to(gate.dtype) * self.weight
        return (normed.to(x.dtype) * F.silu(gate.to(x.dtype))).to(gate.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return whole_slots(path, weight=self.weight)
