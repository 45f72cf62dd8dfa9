"""CPUDeltaSteps: single tokens of a GatedDeltaNet in one compiled call. Put in place by
`CPUKernels.fuse`; the readable form is `GatedDeltaNet.steps`."""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.checkpoint.plan import StatePlan
from nanoengine.kernels.cpu_delta import delta_step
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers, start_workers
from nanoengine.layers.delta_rule import DeltaTokens


class CPUDeltaSteps:
    """The steps of one layer.

    Args:
        plan: of this rank's part of the layer.
        weight: of the convolution, [W, C].
    """

    def __init__(self, plan: StatePlan, weight: torch.Tensor) -> None:
        start_workers()
        self._views, self._weight = NumpyViews(), weight
        heads = plan.num_value_heads // plan.num_key_heads
        self._shape = (plan.num_key_heads, heads, plan.key_dim, plan.value_dim)

    def __call__(self, tokens: DeltaTokens) -> torch.Tensor:
        """See `GatedDeltaNet.steps`."""
        qkv, decay, beta, states, reads, writes = tokens
        rows = qkv.contiguous().numpy()
        key_heads, heads, _, values = self._shape
        out = np.empty((len(rows), key_heads * heads, values), rows.dtype)
        delta_step(
            rows, decay.contiguous().numpy(), beta.contiguous().numpy(), self._views(self._weight),
            self._views(states), reads.numpy(), writes.numpy(), out, self._shape, num_workers(),
        )  # fmt: skip
        return torch.from_numpy(out)
