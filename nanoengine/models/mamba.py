"""Mamba-2 as the mixer of a decoder layer.

    MambaMixer   x ─ in_proj ─┬─ x, b, c ─ convolution ─ silu ─ Mamba's rule ─┬─ norm ─ out_proj
                              ├─ dt ─────────────────────────┘                │
                              └─ gate z ─ silu ───────────────────────────────*

`generic.py` uses it for configs that have such layers.

Legend: T tokens, L tokens with logits, G groups, H heads, V size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nanoengine.attention.base import Rotation
from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.layer_config import NO_STEP_LIMITS
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers import mamba2
from nanoengine.layers.layer import Layer, ModelContext
from nanoengine.layers.mamba2 import MambaInputs
from nanoengine.models.decoder import select_rows
from nanoengine.models.linear_attention import Decay, GatheredLinear, MatrixStateLayer, rank_rows


class MambaMixer(MatrixStateLayer):
    """A Mamba-2 layer; its groups are split over ranks."""

    name, head_count_keys = "mamba", ("mamba_n_groups", "mamba_n_heads")
    rule, values_first = mamba2, True

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, config, context)
        plan, groups = self.plan, self.plan.num_key_heads * context.shard.world_size
        group_size = self.sizes[0]
        sizes = group_size, *self.sizes, self.heads_per_key
        rows = rank_rows(sizes, groups, context.shard, merged=False)
        self.in_proj = GatheredLinear(
            f"{path}.in_proj", config.hidden_size, {"in_proj": rows}, bias=plan.bias,
            context=context,
        )  # fmt: skip
        self.multipliers: torch.Tensor | None = None
        if config.plan.falcon_h1 is not None:
            counts = torch.tensor(sizes) * plan.num_key_heads
            factors = torch.tensor(config.plan.falcon_h1.ssm_multipliers, dtype=torch.float64)
            self.multipliers = factors.repeat_interleave(counts).to(context.device, context.dtype)
        self.heads = MambaHeads(groups * self.heads_per_key, plan.time_step_limits, context)
        self.norm = None
        if plan.norm is not None:
            self.norm = GroupedRMSNorm(groups, group_size, config.rms_norm_eps, context)
        self.gates_fn, self.gated_norm_fn = self.heads.forward, self.gate_and_norm

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Advances the states by all tokens; returns the outputs of `rows` only."""
        projected = self.in_proj(x)
        if self.multipliers is not None:
            projected = projected * self.multipliers
        return self.out_proj(self.mixer_fn(projected, batch, rows))

    def mix(self, projected: torch.Tensor, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        """Computes everything between the projections: [T, H * V + channels + H] -> [L, H * V]."""
        sizes = self.inner_size, self.plan.channels, self.plan.num_value_heads
        z, xbc, dt = projected.split(sizes, dim=1)
        out = self.conv_and_rule(batch, xbc, *self.gates_fn(dt))
        return self.gated_norm_fn(select_rows(out, rows).flatten(1), select_rows(z, rows))

    def gate_and_norm(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Applies the gate z and the norm to the heads' outputs: both [L, H * V] -> [L, H * V]."""
        gate = F.silu(z.to(out.dtype))
        if self.norm is None:
            out = out * gate
        elif self.plan.norm == "after_gate":
            out = self.norm(out * gate)
        else:
            out = self.norm(out) * gate
        return out.to(z.dtype)

    def rule_inputs(self, convolved: torch.Tensor, *gates: torch.Tensor) -> MambaInputs:
        plan = self.plan
        keys = plan.num_key_heads * plan.key_dim
        xbc, count = F.silu(convolved.to(self.states.dtype)), len(convolved)
        x, b, c = xbc.split((self.inner_size, keys, keys), dim=1)
        shape = (count, plan.num_key_heads, plan.key_dim)
        x, skip = x.view(count, -1, plan.value_dim), self.heads.d.expand(count, -1)
        return MambaInputs(x, b.view(shape), c.view(shape), *gates, skip)


class MambaHeads(Decay):
    """The learned parameters per head of a Mamba layer: decay (a_log), bias of dt, and the weight
    of the skip connection (d).

    Args:
        num_heads: heads of all ranks.
        limits: the range to which dt is clamped (`time_step_limit` of configs).
    """

    def __init__(self, num_heads: int, limits: tuple[float, float], context: ModelContext) -> None:
        super().__init__(num_heads, context, "mamba_n_heads")
        self.d = context.parameter(*self.a_log.shape, dtype=self.a_log.dtype)
        self.limits = None if limits == NO_STEP_LIMITS else limits

    def forward(self, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The projected dt -> dt and decay, [T, H] each."""
        dt = F.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        if self.limits is not None:
            dt = dt.clamp(*self.limits)
        return dt, -self.a_log.exp() * dt

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        return self.head_slots(path, A_log=self.a_log, dt_bias=self.dt_bias, D=self.d)


class GroupedRMSNorm(Layer):
    """RMSNorm per group of a token's elements; a rank has whole groups: [L, G * size] -> the
    same."""

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
