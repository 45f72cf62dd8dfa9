"""CPUMambaSteps: single tokens of a MambaMixer in one compiled call. Put in place by
`CPUKernels.fuse`; the readable form is `MambaMixer.steps`."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.checkpoint.plan import StatePlan
from nanoengine.kernels.cpu_mamba import mamba_step
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers, start_workers
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.mamba2 import MambaTokens


class CPUMambaSteps:
    """The steps of one layer.

    Args:
        plan: of this rank's part of the layer.
        d: of each head, [H].
    """

    def __init__(self, plan: StatePlan, conv: CausalConv, d: torch.Tensor) -> None:
        start_workers()
        self._views, self._d, self._weight = NumpyViews(), d, conv.weight
        self._bias = conv.weight.new_empty(0) if conv.bias is None else conv.bias
        heads = plan.num_value_heads // plan.num_key_heads
        self._shape = (plan.num_key_heads, heads, plan.key_dim, plan.value_dim)

    def __call__(self, tokens: MambaTokens) -> torch.Tensor:
        """See `MambaMixer.steps`."""
        xbc, dt, decay, states, reads, writes = tokens
        rows, views = xbc.contiguous().numpy(), self._views
        groups, heads, _, values = self._shape
        out = np.empty((len(rows), groups * heads, values), rows.dtype)
        mamba_step(
            rows, dt.contiguous().numpy(), decay.contiguous().numpy(), views(self._d),
            views(self._weight), views(self._bias), views(states), reads.numpy(), writes.numpy(),
            np.empty_like(rows), out, self._shape, num_workers(),
        )  # fmt: skip
        return torch.from_numpy(out)
