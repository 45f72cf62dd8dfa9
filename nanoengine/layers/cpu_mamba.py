"""Mamba-2 on the CPU: everything between the two projections as one compiled call.

`CPUKernels.fuse` installs it; the readable form is `MambaMixer.mix`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.kernels.cpu_mamba import BEFORE, BEHIND, PLAIN, Mamba, mamba_rule
from nanoengine.layers.cpu_linear_attention import CPURule

NORMS = {None: PLAIN, "after_gate": BEHIND, "before_gate": BEFORE}
"""`LinearAttentionConfig.norm` -> its constant in the kernels."""


class CPUMamba(CPURule):
    """The compiled form of `MambaMixer.mix`."""

    rule, mixer = staticmethod(mamba_rule), Mamba

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        plan, conv, heads, norm = layer.plan, layer.conv1d, layer.heads, layer.norm
        nothing = torch.empty(0)
        weights = (
            conv.weight, nothing if conv.bias is None else conv.bias, heads.a_log, heads.dt_bias,
            heads.d, nothing if norm is None else norm.weight,
        )  # fmt: skip
        each = plan.num_value_heads // plan.num_key_heads
        least, most = plan.time_step_limits
        self.operands = (
            tuple(weight.detach().numpy() for weight in weights),
            (plan.num_key_heads, each, plan.key_dim, plan.value_dim),
            NORMS[plan.norm],
            np.float32(0 if norm is None else norm.eps),
            (np.float32(least), np.float32(most)),
        )
