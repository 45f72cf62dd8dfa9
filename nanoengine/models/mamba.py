"""Mamba-2 in a decoder layer.

    MambaMixer   x ─ in_proj ─┬─ x, b, c ─ convolution ─ silu ─ Mamba's rule ─┬─ norm ─ out_proj
                              ├─ dt ─────────────────────────┘                │
                              └─ gate z ─ silu ───────────────────────────────*

Taken by `variants.py` for configs that have such layers.

Legend: T tokens, L rows of logits, G groups, H heads, E / V size of a state's rows / of a head.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch, StateWave
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.plan import ANY_STEP
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.linear import RowParallelLinear
from nanoengine.layers.mamba2 import MambaInputs, MambaSpans, MambaTokens, scan, step
from nanoengine.models.decoder import taken
from nanoengine.models.states import Decay, PickedLinear, StateLayer, pick_rows


class MambaMixer(StateLayer):
    """A Mamba-2 layer; ranks part its groups."""

    name = "mamba"

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        whole, hidden, shard = config.states, config.hidden_size, context.shard
        assert whole is not None
        groups, heads = whole.num_key_heads, whole.num_value_heads // whole.num_key_heads
        plan = self.plan = replace(
            whole,
            num_key_heads=shard.split(groups, "mamba_n_groups"),
            num_value_heads=shard.split(whole.num_value_heads, "mamba_n_heads"),
            channels=shard.split(whole.channels),
        )
        self.inner = plan.num_value_heads * plan.value_dim
        mixed = heads * plan.value_dim, plan.key_dim, plan.key_dim
        rows = pick_rows((mixed[0], *mixed, heads), groups, shard, merged=False)
        self.in_proj = PickedLinear(
            f"{path}.in_proj", hidden, {"in_proj": rows}, bias=plan.bias, context=context
        )
        self.factors: torch.Tensor | None = None
        if config.plan.factors is not None:
            own = mixed[0] * plan.num_key_heads, plan.key_dim * plan.num_key_heads
            counts = torch.tensor([own[0], own[0], own[1], own[1], plan.num_value_heads])
            each = torch.tensor(config.plan.factors.projected, dtype=torch.float64)
            self.factors = each.repeat_interleave(counts).to(context.device, context.dtype)
        channels = pick_rows(mixed, groups, shard, merged=False)
        self.conv1d = CausalConv(
            plan.kernel, plan.channels, bias=plan.conv_bias, picked=channels, context=context
        )
        self.heads = MambaHeads(whole.num_value_heads, plan.step_limits, context)
        self.norm = None
        if plan.norm is not None:
            self.norm = GroupNorm(groups, mixed[0], config.rms_norm_eps, context)
        self.out_proj = RowParallelLinear(
            f"{path}.out_proj",
            whole.num_value_heads * plan.value_dim,
            hidden,
            bias=plan.output_bias,
            context=context,
        )
        self.states = self.rows = torch.empty(0)
        self.one_token_each, self.several_tokens_each = self.steps, self.scans
        self.gates_of, self.gated_of, self.mix_of = self.heads.forward, self.gated, self.mix

    def bind(self, states: torch.Tensor) -> None:
        plan, self.rows = self.plan, states
        size = plan.size - (plan.kernel - 1) * plan.channels
        matrices, inputs = states.split((size, plan.size - size), dim=1)
        self.states = matrices.unflatten(1, (plan.num_value_heads, plan.key_dim, plan.value_dim))
        self.conv1d.bind(inputs)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All rows advance their states; those that `rows` names come out."""
        projected = self.in_proj(x)
        if self.factors is not None:
            projected = projected * self.factors
        return self.out_proj(self.mix_of(projected, batch, rows))

    def mix(self, projected: torch.Tensor, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        """What stands between the projections: [T, H * V + channels + H] -> [L, H * V]."""
        plan = self.plan
        z, xbc, dt = projected.split((self.inner, plan.channels, plan.num_value_heads), dim=1)
        dt, decay = self.gates_of(dt)

        def one_each(tokens: torch.Tensor | slice, wave: StateWave) -> torch.Tensor:
            inputs = xbc[tokens], dt[tokens], decay[tokens]
            return self.one_token_each(MambaTokens(*inputs, self.rows, wave.reads, wave.writes))

        def several_each(wave: StateWave, out: torch.Tensor) -> None:
            self.several_tokens_each(MambaSpans(xbc, dt, decay, self.rows, wave), out)

        shape = (len(z), plan.num_value_heads, plan.value_dim)
        empty = z.new_empty(shape, dtype=self.states.dtype)
        out = taken(self.over_waves(batch, empty, one_each, several_each), rows).flatten(1)
        return self.gated_of(out, taken(z, rows))

    def gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """What heads have read, weighed by the gate and normed: [L, H * V] twice -> the same."""
        gate = F.silu(z.to(out.dtype))
        if self.norm is None:
            out = out * gate
        elif self.plan.norm == "behind":
            out = self.norm(out * gate)
        else:
            out = self.norm(out) * gate
        return out.to(z.dtype)

    def steps(self, tokens: MambaTokens) -> torch.Tensor:
        """One token of each of several sequences -> [T, H, V]."""
        xbc, dt, decay, _, reads, writes = tokens
        mixed = self.conv1d.step(xbc, reads, writes)
        return step(self._inputs(mixed, dt, decay), self.heads.d, self.states, reads, writes)

    def scans(self, spans: MambaSpans, out: torch.Tensor) -> None:
        """Several tokens of each of a wave's sequences, one after the other, into `out` [T, H,
        V]."""
        xbc, dt, decay, _, wave = spans
        for span in wave.spans:
            tokens = slice(span.start, span.end)
            mixed = self.conv1d.scan(xbc[tokens], span)
            inputs = self._inputs(mixed, dt[tokens], decay[tokens])
            state, done = self.states[span.read], 0
            for count, block in span.writes:
                part = inputs.part(slice(done, count))
                found, state = scan(part, self.heads.d, state, span.position + done)
                self.states[block].copy_(state)
                out[span.start + done : span.start + count] = found
                done = count

    def _inputs(self, mixed: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor) -> MambaInputs:
        plan = self.plan
        keys = plan.num_key_heads * plan.key_dim
        x, b, c = F.silu(mixed.to(self.states.dtype)).split((self.inner, keys, keys), dim=1)
        shape = (len(mixed), plan.num_key_heads, plan.key_dim)
        return MambaInputs(
            x.view(len(mixed), plan.num_value_heads, plan.value_dim),
            b.view(shape), c.view(shape), dt, decay,
        )  # fmt: skip


class MambaHeads(Decay):
    """What a Mamba layer learns of each head: how fast it forgets (a_log), a bias of dt, and the
    way past the state (d).

    Args:
        num_heads: of all ranks.
        limits: between which dt stays.
    """

    def __init__(self, num_heads: int, limits: tuple[float, float], context: ModelContext) -> None:
        super().__init__(num_heads, context, "mamba_n_heads")
        self.d = context.parameter(*self.a_log.shape, dtype=self.a_log.dtype)
        self.limits = None if limits == ANY_STEP else limits

    def forward(self, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dt as projected -> dt and decay, [T, H] each."""
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        if self.limits is not None:
            dt = dt.clamp(*self.limits)
        return dt, -self.a_log.exp() * dt

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return self.head_slots(path, A_log=self.a_log, dt_bias=self.dt_bias, D=self.d)


class GroupNorm(Layer):
    """RMSNorm of each group's part of a row; a rank has whole groups: [L, G * size] -> the same."""

    def __init__(self, groups: int, size: int, eps: float, context: ModelContext) -> None:
        super().__init__()
        self.part = context.shard.slice(groups * size, "mamba_n_groups")
        self.whole, self.size, self.eps = groups * size, size, eps
        self.weight = context.parameter(self.part.stop - self.part.start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.unflatten(1, (-1, self.size)), (self.size,), None, self.eps)
        return normed.flatten(1) * self.weight

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        store = self.weight.copy_
        return {f"{path}.weight": WeightSlot(shape=(self.whole,), part=(self.part,), store=store)}
