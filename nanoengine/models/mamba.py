"""Mamba-2 as the mixer of a decoder layer.

    MambaMixer   x ─ in_proj ─┬─ x, b, c ─ convolution ─ silu ─ Mamba's rule ─┬─ norm ─ out_proj
                              ├─ dt ─────────────────────────┘                │
                              └─ gate z ─ silu ───────────────────────────────*

`generic.py` uses it for configs that have such layers.

Legend: T tokens, L rows of logits, G groups, H heads, E / V size of a state's rows / of a head.
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
from nanoengine.models.linear_attention import Decay, GatheredLinear, MatrixStateLayer, pick_rows


class MambaMixer(MatrixStateLayer):
    """A Mamba-2 layer; its groups are split over ranks."""

    name, names = "mamba", ("mamba_n_groups", "mamba_n_heads")
    rule, values_first = mamba2, True

    def __init__(self, path: str, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(path, config, context)
        plan, groups = self.plan, self.plan.num_key_heads * context.shard.world_size
        own = self.sizes[0]
        sizes = own, *self.sizes, self.each
        rows = pick_rows(sizes, groups, context.shard, merged=False)
        self.in_proj = GatheredLinear(
            f"{path}.in_proj", config.hidden_size, {"in_proj": rows}, bias=plan.bias,
            context=context,
        )  # fmt: skip
        self.factors: torch.Tensor | None = None
        if config.plan.falcon_h1 is not None:
            counts = torch.tensor(sizes) * plan.num_key_heads
            each = torch.tensor(config.plan.falcon_h1.ssm_multipliers, dtype=torch.float64)
            self.factors = each.repeat_interleave(counts).to(context.device, context.dtype)
        self.heads = MambaHeads(groups * self.each, plan.time_step_limits, context)
        self.norm = None
        if plan.norm is not None:
            self.norm = GroupNorm(groups, own, config.rms_norm_eps, context)
        self.gates_of, self.gated_of = self.heads.forward, self.gated

    def forward(
        self, x: torch.Tensor, rotation: Rotation, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """All tokens advance their states; only the outputs in `rows` are returned."""
        projected = self.in_proj(x)
        if self.factors is not None:
            projected = projected * self.factors
        return self.out_proj(self.mixer_fn(projected, batch, rows))

    def mix(self, projected: torch.Tensor, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        """Computes everything between the projections: [T, H * V + channels + H] -> [L, H * V]."""
        sizes = self.inner, self.plan.channels, self.plan.num_value_heads
        z, xbc, dt = projected.split(sizes, dim=1)
        out = self.through(batch, xbc, *self.gates_of(dt))
        return self.gated_of(select_rows(out, rows).flatten(1), select_rows(z, rows))

    def gated(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Applies the gate and the norm to the heads' outputs: [L, H * V] twice -> the same."""
        gate = F.silu(z.to(out.dtype))
        if self.norm is None:
            out = out * gate
        elif self.plan.norm == "after_gate":
            out = self.norm(out * gate)
        else:
            out = self.norm(out) * gate
        return out.to(z.dtype)

    def inputs(self, mixed: torch.Tensor, *numbers: torch.Tensor) -> MambaInputs:
        plan = self.plan
        keys = plan.num_key_heads * plan.key_dim
        x, b, c = F.silu(mixed.to(self.states.dtype)).split((self.inner, keys, keys), dim=1)
        shape = (len(mixed), plan.num_key_heads, plan.key_dim)
        x, past = x.view(len(mixed), -1, plan.value_dim), self.heads.d.expand(len(mixed), -1)
        return MambaInputs(x, b.view(shape), c.view(shape), *numbers, past)


class MambaHeads(Decay):
    """The learned parameters per head of a Mamba layer: decay (a_log), bias of dt, and the skip
    connection around the state (d).

    Args:
        num_heads: on all ranks.
        limits: the range to which dt is clamped.
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


class GroupNorm(Layer):
    """RMSNorm per group within a row; a rank has whole groups: [L, G * size] -> the same."""

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
