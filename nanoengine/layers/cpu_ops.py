"""CPUOps: norms and gates on the CPU in one pass each, over kernels compiled by numba.

Chosen by `make_ops` for float32 and float64 on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.kernels import cpu_layers as kernels
from nanoengine.kernels.threads import num_workers


class CPUOps:
    """Fused kernels with the arithmetic of `TorchOps`; `add_rms_norm` works in place."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source = x.contiguous().numpy()
        kernels.rms_norm(source, weight.numpy(), source.dtype.type(eps), out.numpy(), num_workers())
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values: np.ndarray = x.numpy()
        kernels.add_rms_norm(
            values, residual.numpy(), weight.numpy(), values.dtype.type(eps), num_workers()
        )
        return x, residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        kernels.gate(gate_up.numpy(), activation == "gelu_pytorch_tanh", out.numpy(), num_workers())
        return out
