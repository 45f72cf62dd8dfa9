"""Mamba-2 on the CPU: what stands between two projections as a compiled call, and whole layers. Put
in place by `CPUKernels.fuse`; the readable form is `MambaMixer.mix`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.attention.batch import Batch
from nanoengine.kernels.cpu_mamba import BEFORE, BEHIND, PLAIN, mamba_layers, mamba_rule
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.cpu_states import StateParts, spans_of
from nanoengine.layers.linear import Linear

NORMS = {None: PLAIN, "behind": BEHIND, "before": BEFORE}
"""`StatePlan.norm` -> what kernels call it."""


class CPUMamba:
    """`MambaMixer.mix` of one layer as one compiled call, in float32.

    Attributes:
        operands: what `mamba_rule` calls weights, shape, kind and numbers.
    """

    def __init__(self, layer: Any) -> None:
        plan, conv, heads, norm = layer.plan, layer.conv1d, layer.heads, layer.norm
        self._views, self._layer = NumpyViews(), layer
        nothing = torch.empty(0)
        weights = (
            conv.weight, nothing if conv.bias is None else conv.bias, heads.a_log, heads.dt_bias,
            heads.d, nothing if norm is None else norm.weight,
        )  # fmt: skip
        eps = 0.0 if norm is None else norm.eps
        each = plan.num_value_heads // plan.num_key_heads
        self.operands = (
            tuple(weight.detach().numpy() for weight in weights),
            (plan.num_key_heads, each, plan.key_dim, plan.value_dim),
            NORMS[plan.norm],
            tuple(np.float32(number) for number in (eps, *plan.step_limits)),
        )

    def __call__(
        self, projected: torch.Tensor, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        out, states = np.empty((len(projected), self._layer.inner), np.float32), self._layer.rows
        spans = spans_of(batch.state_waves)
        mamba_rule(
            projected.numpy(), spans, self._views(states), *self.operands, out, num_workers()
        )
        found = torch.from_numpy(out)
        return found if rows is None else found.index_select(0, rows)


class MambaParts(StateParts):
    """What a decoder layer with a `MambaMixer` is made of."""

    kernel = staticmethod(mamba_layers)

    def of_mixer(self, layer: Any) -> list[Linear]:
        return [layer.mixer.in_proj, layer.mixer.out_proj]

    def of_rule(self, projections: list[Any]) -> tuple[Any, ...]:
        return *projections, *CPUMamba(self.mixer).operands
