"""Mamba-2 on the CPU: everything between the two projections as one compiled call.

`CPUKernels.fuse` installs it; the reference implementation is `MambaMixer.mix`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.kernels.cpu_mamba import AFTER_GATE, BEFORE_GATE, NO_NORM, Mamba, mamba_rule
from nanoengine.layers.cpu_linear_attention import CPURule

NORMS = {None: NO_NORM, "after_gate": AFTER_GATE, "before_gate": BEFORE_GATE}
"""`LinearAttentionConfig.norm` -> its constant in the kernels."""


class CPUMamba(CPURule):
    """The compiled form of `MambaMixer.mix`."""

    rule, mixer = staticmethod(mamba_rule), Mamba

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        plan, conv, heads, norm = layer.plan, layer.conv1d, layer.heads, layer.norm
        empty = torch.empty(0)
        weights = (
            conv.weight, empty if conv.bias is None else conv.bias, heads.a_log, heads.dt_bias,
            heads.d, empty if norm is None else norm.weight,
        )  # fmt: skip
        each = plan.num_value_heads // plan.num_key_heads
        min_dt, max_dt = plan.time_step_limits
        self.operands = (
            tuple(weight.detach().numpy() for weight in weights),
            (plan.num_key_heads, each, plan.key_dim, plan.value_dim),
            NORMS[plan.norm],
            np.float32(0 if norm is None else norm.eps),
            (np.float32(min_dt), np.float32(max_dt)),
        )
