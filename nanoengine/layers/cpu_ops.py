"""CPUOps: norms and gates on the CPU in one pass each, over kernels compiled by numba.

Chosen by `make_ops` for float32 and float64 on a CPU. `TorchOps` is the plain form;
`tests/kernels/test_cpu_kernels.py` compares the two.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.kernels import cpu_layers as kernels
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers, share_threads_with_torch


class CPUOps:
    """Fused kernels with the arithmetic of `TorchOps`; `add_rms_norm` works in place."""

    def __init__(self) -> None:
        share_threads_with_torch()
        self._views = NumpyViews()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        source, factors = x.contiguous().numpy(), self._views(weight)
        out = np.empty(source.shape, source.dtype)
        kernels.rms_norm(source, factors, source.dtype.type(eps), out, num_workers())
        return torch.from_numpy(out)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, factors = x.numpy(), self._views(weight)
        kernels.add_rms_norm(
            values, residual.numpy(), factors, values.dtype.type(eps), num_workers()
        )
        return x, residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        source = gate_up.numpy()
        rows, both = source.shape
        out = np.empty((rows, both // 2), source.dtype)
        kernels.gate(source, kernels.GATES[activation], out, num_workers())
        return torch.from_numpy(out)
