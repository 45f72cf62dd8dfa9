"""Recurrent layers: linear attention and short convolutions, which keep a state of fixed size per
sequence instead of keys and values.

    GatedDeltaNet   x ─ in_proj ─┬─ q, k, v ─ convolution ─ delta rule ─ norm ─┐
                                 └─ gate z ───────────────────────── silu ─── * ─ out_proj
    ShortConv       x ─ in_proj ─ input_gate * value ─ convolution ─ * output_gate ─ out_proj

`batch.state_waves` has a step's sequences, with the slots of the states that they read and write.
No sequence of a wave reads a state that another one of the same wave writes.

Legend: T tokens, L tokens with logits, H / G value / key heads, E / V size of a key / value.
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
    """The base class: the runner's interface to all recurrent layers.

    Attributes:
        name: the module's name in a checkpoint's layer.
        plan: the sizes of this rank's part of the layer.
        bind: binds the layer to its states, [slots, `LinearAttentionConfig.size`].
        graph_safe: a decode makes no decision on the host, and leaves slot 0 zero (see `KVCache`).
        decode_fn, prefill_fn: advance the sequences of a wave that have one token, and those that
            have several: the methods `decode` and `prefill`, or kernels that replace them.
    """

    name, graph_safe = "", False
    plan: LinearAttentionConfig
    bind: Callable[[torch.Tensor], None]
    decode_fn: Callable[..., torch.Tensor]
    prefill_fn: Callable[..., None]

    def run_waves(
        self, batch: Batch, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> torch.Tensor:
        """Runs the step's waves one after the other, and returns all tokens' outputs.

        Args:
            inputs: the per-token arguments of `decode_fn` and `prefill_fn`, [T, ...] each.
            out: where the outputs are written, [T, ...].
        """
        for wave in batch.state_waves:
            slots = wave.reads, wave.writes
            if len(wave.reads) == len(out):
                return self.decode_fn(*inputs, *slots)
            if len(wave.reads):
                out[wave.tokens] = self.decode_fn(*(x[wave.tokens] for x in inputs), *slots)
            if wave.spans:
                self.prefill_fn(*inputs, wave, out)
        return out


class MatrixStateLayer(RecurrentLayer):
    """The base of layers whose state has a matrix per head, which a rule updates, and the last
    inputs of a convolution.

    Attributes:
        head_count_keys: the config's keys for the numbers of key heads and of value heads.
        values_first: the convolution's input has values before keys.
        rule: the module with the rule's `step` and `scan`.
        heads_per_key: value heads per key head.
        sizes: elements per key head of each part of the convolution's input.
        inner_size: elements of all value heads of this rank.
        mixer_fn: computes everything between the projections: `mix`, or a kernel.
        rule_inputs: makes the rule's inputs from the convolution's output and the gates.
        flat_states: the states as they are bound, [slots, `plan.size`].
        states: the matrices in them, [slots, H, E, V].
    """

    head_count_keys: tuple[str, str]
    values_first: bool
    rule: ModuleType
    mix: Callable[..., torch.Tensor]
    rule_inputs: Callable[..., Any]

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        all_ranks, shard = config.states, context.shard
        assert all_ranks is not None
        key_heads, heads = all_ranks.num_key_heads, all_ranks.num_value_heads
        plan = self.plan = replace(
            all_ranks,
            num_key_heads=shard.split(key_heads, self.head_count_keys[0]),
            num_value_heads=shard.split(heads, self.head_count_keys[1]),
            channels=shard.split(all_ranks.channels),
        )
        self.heads_per_key = heads // key_heads
        self.inner_size = plan.num_value_heads * plan.value_dim
        sizes = self.heads_per_key * plan.value_dim, plan.key_dim, plan.key_dim
        self.sizes = sizes if self.values_first else sizes[::-1]
        channels = rank_rows(self.sizes, key_heads, shard, merged=False)
        self.conv1d = CausalConv(
            plan.kernel, plan.channels, bias=plan.conv_bias, rank_channels=channels, context=context
        )
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj",
            heads * plan.value_dim,
            config.hidden_size,
            bias=plan.output_bias,
            context=context,
        )
        self.states = self.flat_states = torch.empty(0)
        self.decode_fn, self.prefill_fn = self.decode, self.prefill
        self.mixer_fn = self.mix

    def bind(self, states: torch.Tensor) -> None:
        plan, self.flat_states = self.plan, states
        size = plan.size - (plan.kernel - 1) * plan.channels
        matrices, inputs = states.split((size, plan.size - size), dim=1)
        self.states = matrices.unflatten(1, (plan.num_value_heads, plan.key_dim, plan.value_dim))
        self.conv1d.bind(inputs)

    def conv_and_rule(self, batch: Batch, x: torch.Tensor, *gates: torch.Tensor) -> torch.Tensor:
        """Applies convolution and rule.

        Args:
            x: the convolution's input, [T, channels].
            gates: the rule's inputs per head, [T, H] each.

        Returns:
            The heads' outputs, [T, H, V].
        """
        shape = len(x), self.plan.num_value_heads, self.plan.value_dim
        return self.run_waves(batch, (x, *gates), x.new_empty(shape, dtype=self.states.dtype))

    def decode(
        self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Advances several sequences by one token each -> [T, H, V].

        Args:
            x: the convolution's input, [T, channels].
            first, second: the rule's inputs per head, [T, H] each: decay and beta, or dt and decay.
            reads, writes: [T], the slots of each token's old and new state.
        """
        convolved = self.conv1d.step(x, reads, writes)
        inputs = self.rule_inputs(convolved, first, second)
        return self.rule.step(inputs, self.states, reads, writes)

    def prefill(
        self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, wave: ScanStep,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Advances each sequence of `wave.spans` by its tokens, and writes their outputs to `out`
        [T, H, V]. x, first and second are as for `decode`, for all tokens of the step."""
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            convolved = self.conv1d.scan(x[tokens], span)
            inputs = self.rule_inputs(convolved, first[tokens], second[tokens])
            state, done = self.states[span.read], 0
            for count, slot in span.writes:
                part = inputs.part(slice(done, count))
                outputs, state = self.rule.scan(part, state, span.position + done)
                self.states[slot].copy_(state)
                out[span.start + done : span.start + count] = outputs
                done = count


class GatedDeltaNet(MatrixStateLayer):
    """Linear attention with the gated delta rule. Source: Qwen3-Next; arXiv 2412.06464."""

    name, head_count_keys = "linear_attn", ("linear_num_key_heads", "linear_num_value_heads")
    rule, values_first = delta_rule, False

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, config, context)
        plan, shard, self.eps = self.plan, context.shard, config.rms_norm_eps
        sizes, z, gate = self.sizes, self.sizes[-1:], (self.heads_per_key,)
        if plan.fused_qkvz:
            tensors = {"in_proj_qkvz": (*sizes, *z)}, {"in_proj_ba": gate * 2}
        else:
            tensors = {"in_proj_qkv": sizes, "in_proj_z": z}, {"in_proj_b": gate, "in_proj_a": gate}
        key_heads = plan.num_key_heads * shard.world_size
        rows_of = partial(rank_rows, num_heads=key_heads, shard=shard, merged=plan.fused_qkvz)
        self.in_proj_qkvz, self.in_proj_ba = (
            GatheredLinear(
                f"{path}.{name}",
                config.hidden_size,
                {tensor: rows_of(sizes) for tensor, sizes in sources.items()},
                context=context,
            )
            for name, sources in zip(("in_proj_qkvz", "in_proj_ba"), tensors, strict=True)
        )
        self.decay = Decay(key_heads * self.heads_per_key, context)
        self.norm = GatedRMSNorm(plan.value_dim, context)
        # Why not reorder out_proj's columns: in quantized blocks they can't be reordered.
        order = torch.arange(plan.num_value_heads).view(-1, self.heads_per_key).T.flatten()
        self.out_order = order if plan.tiled and self.heads_per_key > 1 else None
        if self.out_order is not None and shard.world_size > 1:
            raise ConfigError(
                f"tensor_parallel_size={shard.world_size} is not supported for this checkpoint,"
                f" because it stores the inputs of {path}.out_proj in another order: set it to 1"
            )
        self.gates_fn, self.norm_fn = self.gates, self.norm.forward

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Advances the states by all tokens; returns the outputs of `rows` only."""
        qkvz, ba = self.in_proj_qkvz(x), self.in_proj_ba(x)
        return self.out_proj(self.mixer_fn(qkvz, ba, batch, rows))

    def mix(
        self, qkvz: torch.Tensor, ba: torch.Tensor, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Computes everything between the projections.

        [T, channels + H * V] and [T, 2 H] -> [L, H * V].
        """
        qkv, z = qkvz.split((self.plan.channels, self.inner_size), dim=1)
        beta, decay = self.gates_fn(ba)
        out = select_rows(self.conv_and_rule(batch, qkv, decay, beta), rows)
        normed = self.norm_fn(out, select_rows(z, rows).view(out.shape), self.eps)
        return (normed if self.out_order is None else normed[:, self.out_order]).flatten(1)

    def gates(self, ba: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each head's beta and decay per token: [T, 2 H] -> [T, H] each; see `DeltaInputs`."""
        beta, a = ba.to(self.states.dtype).chunk(2, dim=1)
        return beta.sigmoid(), self.decay(a)

    def rule_inputs(self, convolved: torch.Tensor, *gates: torch.Tensor) -> DeltaInputs:
        """L2-normalizes queries and keys, and repeats them for all value heads of a key head."""
        plan, keys = self.plan, self.plan.num_key_heads * self.plan.key_dim
        qkv = F.silu(convolved.to(self.states.dtype))
        q, k, v = qkv.split((keys, keys, plan.channels - 2 * keys), dim=1)
        q, k = (x.view(len(x), plan.num_key_heads, plan.key_dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(self.heads_per_key, dim=1) for x in (q * plan.key_dim**-0.5, k))
        v = v.view(len(v), plan.num_value_heads, plan.value_dim)
        return DeltaInputs(q, k, v, *gates)


class ShortConv(RecurrentLayer):
    """A causal convolution between two gates. Source: LFM2 (arXiv 2511.23404)."""

    name = "conv"

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        plan, hidden, shard = config.states, config.hidden_size, context.shard
        assert plan is not None
        self.plan = replace(plan, channels=shard.split(hidden))
        self.in_proj = FusedTensorLinear(
            f"{path}.in_proj",
            hidden,
            {"input_gate": hidden, "output_gate": hidden, "value": hidden},
            bias=plan.bias,
            context=context,
        )
        own = torch.arange(hidden)[shard.slice(hidden, "hidden_size")]
        self.conv = CausalConv(
            plan.kernel, len(own), bias=plan.bias, rank_channels=(hidden, own), context=context
        )
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj", hidden, hidden, bias=plan.bias, context=context
        )
        self.flat_states = torch.empty(0)
        self.decode_fn, self.prefill_fn = self.conv.step, self.prefill

    def bind(self, states: torch.Tensor) -> None:
        self.flat_states = states
        self.conv.bind(states)

    def prefill(self, x: torch.Tensor, wave: ScanStep, out: torch.Tensor) -> None:
        """As `MatrixStateLayer.prefill`; x and `out` are [T, C]."""
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            out[tokens] = self.conv.scan(x[tokens], span)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Advances the states by all tokens; returns the outputs of `rows` only."""
        input_gate, output_gate, value = self.in_proj(x).chunk(3, dim=1)
        gated = input_gate * value
        out = self.run_waves(batch, (gated,), torch.empty_like(gated))
        return self.out_proj(select_rows(output_gate, rows) * select_rows(out, rows))


RECURRENT_LAYERS = {"delta": GatedDeltaNet, "conv": ShortConv}
"""`LinearAttentionConfig.kind` -> the class."""


class GatheredLinear(MergedLinear):
    """A MergedLinear whose rows are gathered from tensors of the checkpoint.

    Args:
        sources: tensor name, next to this layer in the checkpoint -> its number of rows, and the
            indices of this rank's rows, in order.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        sources: Mapping[str, tuple[int, torch.Tensor]],
        *,
        bias: bool = False,
        context: ModelContext,
    ) -> None:
        num_rows = {part: len(rows) for part, (_, rows) in sources.items()}
        whole = dict.fromkeys(sources, Shard())
        super().__init__(name, in_features, num_rows, bias=bias, context=context, shards=whole)
        self.sources = sources

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        parent, slots, first = path.rpartition(".")[0], {}, 0
        for name, (size, rows) in self.sources.items():
            matrix = MatrixPart((size, self.in_features), (), first, rows)
            slots |= self.slots_of(f"{parent}.{name}", matrix)
            first += len(rows)
        return slots


def rank_rows(
    sizes: tuple[int, ...], num_heads: int, shard: Shard, *, merged: bool
) -> tuple[int, torch.Tensor]:
    """Returns the number of rows of a tensor that concatenates several outputs, and the indices of
    the rows of this rank's key heads.

    Args:
        sizes: rows of each output per key head.
        merged: the tensor is ordered by key head, then output; otherwise by output, then key head.
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
    """Each head's decay per token: a [T, H] -> logarithms of decays [T, H], at most 0.

    `num_heads` counts the heads of all ranks; `name` is its key in the config.
    """

    def __init__(self, num_heads: int, context: ModelContext, name: str = "heads") -> None:
        super().__init__()
        wide = torch.promote_types(context.dtype, torch.float32)
        self.num_heads, self.part = num_heads, context.shard.slice(num_heads, name)
        num_local = self.part.stop - self.part.start
        self.a_log = context.parameter(num_local, dtype=wide)
        self.dt_bias = context.parameter(num_local, dtype=wide)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return -self.a_log.exp() * F.softplus(a + self.dt_bias)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return self.head_slots(path, A_log=self.a_log, dt_bias=self.dt_bias)

    def head_slots(self, path: str, **tensors: torch.Tensor) -> dict[str, WeightSlot]:
        """The slots of tensors with one element per head, split over ranks. In the checkpoint they
        are next to the module `path`."""
        parent, shape, part = path.rpartition(".")[0], (self.num_heads,), (self.part,)
        return {
            f"{parent}.{name}": WeightSlot(shape=shape, part=part, store=tensor.copy_)
            for name, tensor in tensors.items()
        }


class GatedRMSNorm(Layer):
    """RMSNorm per head times the silu of the gate: x and gate [L, H, V] -> [L, H, V]."""

    def __init__(self, size: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = context.parameter(size)

    def forward(self, x: torch.Tensor, gate: torch.Tensor, eps: float) -> torch.Tensor:
        normed = F.rms_norm(x, x.shape[-1:], None, eps).to(gate.dtype) * self.weight
        return (normed.to(x.dtype) * F.silu(gate.to(x.dtype))).to(gate.dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return full_slots(path, weight=self.weight)
