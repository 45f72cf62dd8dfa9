"""TritonMamba: the rule, the gates and the norm of a MambaMixer, in Triton.

`TritonKernels.fuse` installs it after a model is loaded. Each method names its reference
implementation. This file chooses grids and widths; the arithmetic is in `kernels/triton_mamba.py`.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.attention.batch import ScanStep
from nanoengine.kernels import triton_mamba as kernels
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2
from nanoengine.layers.delta_rule import CHUNK
from nanoengine.layers.triton_linear_attention import TritonConv, width_of

STEP_WIDTH = 32
"""Columns of a state per program of a decode, with all rows of the state: 16 KiB for 128 rows."""
SCAN_WIDTH, SCAN_KEYS = 32, 16
"""Columns of a state that a program carries through all pieces, and rows of the state in registers
at a time. float32 products need three times the registers, so float32 has half the columns."""


class TritonMamba:
    """Everything between the projections of one layer, a `MambaMixer`."""

    def __init__(self, layer: Any) -> None:
        self.plan, self.layer, self.conv = layer.plan, layer, TritonConv(layer.conv1d)
        self.heads, self.norm = layer.heads, layer.norm

    def gates(self, dt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `MambaHeads.forward`."""
        count, heads = dt.shape
        assert dt.stride(1) == 1, "rows must be contiguous"
        min_dt, max_dt = self.plan.time_step_limits
        out, decay = (
            torch.empty(dt.shape, dtype=self.heads.d.dtype, device=dt.device) for _ in range(2)
        )
        launch(
            kernels.mamba_gates_kernel, (count,),
            Constants(
                RAW_ROW=dt.stride(0), HEADS=heads, WIDTH=next_power_of_2(heads), DT_MIN=min_dt,
                DT_MAX=max_dt, num_warps=1
            ),
            out, decay, dt, self.heads.a_log, self.heads.dt_bias,
        )  # fmt: skip
        return out, decay

    def step(
        self, xbc: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `MatrixStateLayer.decode`."""
        mixed, states = self.conv.step(xbc, reads, writes), self.layer.flat_states
        sizes, value = self._sizes(states), self.plan.value_dim
        out = torch.empty((*dt.shape, value), dtype=states.dtype, device=states.device)
        width = width_of(value, STEP_WIDTH)
        launch(
            kernels.mamba_step_kernel, (*dt.shape, cdiv(value, width)),
            Constants(**sizes, KEYS=next_power_of_2(self.plan.key_dim), WIDTH=width, num_warps=4),
            out, mixed, dt, decay, self.heads.d, states, reads, writes,
        )  # fmt: skip
        return out

    def scan(
        self, xbc: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, wave: ScanStep,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """See `MatrixStateLayer.prefill`; all spans are computed in one launch."""
        mixed, states = xbc.new_empty(xbc.shape), self.layer.flat_states
        self.conv.scan(xbc, wave, mixed)
        pieces, firsts = wave.pieces
        exact = xbc.dtype == torch.float32
        width = width_of(self.plan.value_dim, SCAN_WIDTH // 2 if exact else SCAN_WIDTH)
        grid = len(firsts) - 1, dt.shape[1], cdiv(self.plan.value_dim, width)
        launch(
            kernels.mamba_scan_kernel, grid,
            Constants(
                **self._sizes(states), P=CHUNK, K=SCAN_KEYS, WIDTH=width, num_warps=4, num_stages=1,
                PRECISION="tf32x3" if exact else "tf32",
            ),
            out, states, mixed, dt, decay, self.heads.d, pieces, firsts,
        )  # fmt: skip

    def gate_and_norm(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See `MambaMixer.gate_and_norm`."""
        groups, weight, eps = self.plan.num_key_heads, x, 0.0
        if self.norm is not None:
            weight, eps = self.norm.weight, self.norm.eps
        size = x.shape[1] // groups
        width = next_power_of_2(size)
        assert x.is_contiguous() and z.stride(1) == 1, "rows must be contiguous"
        out = torch.empty(x.shape, dtype=z.dtype, device=z.device)
        launch(
            kernels.mamba_norm_kernel, (len(x), groups),
            Constants(
                GATE_ROW=z.stride(0), GROUPS=groups, SIZE=size, WIDTH=width, EPS=eps,
                NORM=self.plan.norm or "", num_warps=min(8, max(1, width // 256)),
            ),
            out, x, z, weight,
        )  # fmt: skip
        return out

    def _sizes(self, states: torch.Tensor) -> dict[str, int]:
        plan = self.plan
        return {
            "STATE_ROW": states.stride(0), "GROUPS": plan.num_key_heads,
            "HEADS": plan.num_value_heads, "KEY": plan.key_dim, "VALUE": plan.value_dim,
        }  # fmt: skip
