"""TritonOps: the norms and gates of a decoder layer as one kernel each. Made by `make_ops`.

Plain torch reads and writes a row once for each operation, and launches a kernel for it; one kernel
for all of them saves that memory traffic. This file chooses grids, widths and warps; the arithmetic
is in `kernels/triton_layers.py`.

The kernels have run in Triton's interpreter and been compiled ahead of time for sm_80, sm_89 and
sm_90. They have not run on a GPU yet.
"""

from __future__ import annotations

import torch

from nanoengine.errors import ConfigError, MissingDependencyError
from nanoengine.layers.ops import GATES

try:
    import triton
except ImportError as error:
    raise MissingDependencyError(
        "fused layers on a GPU need the package triton, which CUDA builds of torch bring along:"
        " install such a build, or `pip install triton`"
    ) from error

from nanoengine.kernels import triton_layers as kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the kernels compute; float64 takes plain torch."""

GATE_WIDTH = 1024
"""Elements that one program gates: 8 a thread, 16 bytes of a 16-bit dtype."""


def norm_warps(size: int) -> int:
    """Warps that share a row of `size` elements.

    Why 256 elements a warp: 8 a thread are one load of 16 bytes. More than 16 warps would wait for
    each other longer than they read.
    """
    return min(max(triton.next_power_of_2(size) // 256, 1), 16)


class TritonOps:
    """LayerOps in Triton: a row is read once and written once.

    Results differ from `TorchOps` by the order of a row's sum and by the exponential's last bit.

    Raises:
        ConfigError: a dtype that the kernels don't compute.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ConfigError(
                f"fused layers compute float16, bfloat16 and float32, got {dtype}: use TorchOps"
            )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._norm(x, residual, weight, eps), residual

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """The norm of x, or of x + residual, which then takes residual's place."""
        num_tokens, size = x.shape
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
        added = x if residual is None else residual
        assert x.stride(1) == added.stride(1) == 1, "rows must be contiguous"
        kernels.rms_norm_kernel[(num_tokens,)](
            out, x, added, weight,
            X_ROW=x.stride(0), RESIDUAL_ROW=added.stride(0), SIZE=size,
            WIDTH=triton.next_power_of_2(size), EPS=eps, ADD=residual is not None,
            num_warps=norm_warps(size),
        )  # fmt: skip
        return out

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        assert activation in GATES, activation
        assert gate_up.stride(1) == 1, "rows must be contiguous"
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        width = min(GATE_WIDTH, triton.next_power_of_2(size))
        kernels.gate_kernel[(num_tokens, triton.cdiv(size, width))](
            out, gate_up,
            ROW=gate_up.stride(0), SIZE=size, WIDTH=width, ACTIVATION=activation, num_warps=4,
        )  # fmt: skip
        return out
