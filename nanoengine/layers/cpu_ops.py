"""CPUOps: norms and gates on the CPU in one pass each, over kernels compiled by numba.

Chosen by `make_ops` for float32 and float64 on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.kernels import cpu_layers as kernels
from nanoengine.kernels.threads import num_workers
from nanoengine.kernels.views import Views


class CPUOps:
    """Fused kernels with the arithmetic of `TorchOps`; `add_rms_norm` works in place."""

    def __init__(self) -> None:
        self._views = Views()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = x.contiguous().numpy()
        kernels.rms_norm(
            source, self._views(weight), source.dtype.type(eps), out.numpy(), num_workers()
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values: np.ndarray = x.numpy()
        kernels.add_rms_norm(
            values, residual.numpy(), self._views(weight), values.dtype.type(eps), num_workers()
        )
        return x, residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        rows, both = gate_up.shape
        out = torch.empty(rows, both // 2, dtype=gate_up.dtype)
        kernels.gate(gate_up.numpy(), activation == "gelu_pytorch_tanh", out.numpy(), num_workers())
        return out
