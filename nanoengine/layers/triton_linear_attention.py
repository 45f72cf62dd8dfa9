"""Linear attention in Triton: one launch replaces a dozen small operations per token.

`TritonKernels.fuse` installs these after a model is loaded. The reference implementations are
`GatedDeltaNet.gates`, `MatrixStateLayer.decode` and `prefill`, `GatedRMSNorm`, `CausalConv.step`
and `scan`. This file chooses grids and widths; the arithmetic is in
`kernels/triton_linear_attention.py`.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import torch

from nanoengine.attention.batch import ScanStep
from nanoengine.kernels import triton_linear_attention as kernels
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.delta_rule import CHUNK

CONV_WIDTH = 512
"""Channels of one token per program of the convolution: 4 per thread, 16 bytes of a float32
state."""
TILE_WIDTH = 32
"""Channels of one piece per program of the convolution: 16 elements per thread."""
STEP_WIDTH = 32
"""Columns of a state per program of a decode, with all rows of the state: 16 KiB for 128 rows."""
SCAN_WIDTH, SCAN_KEYS = 32, 16
"""Columns of a state that a program carries through all pieces, and keys in registers at a time.
Twice as many would need all 255 registers of a thread."""


def width_of(size: int, max_width: int) -> int:
    """Elements per program out of `size`; `tl.dot` needs at least 16."""
    return min(max_width, max(16, next_power_of_2(size)))


def delta_gates(
    a_log: torch.Tensor, dt_bias: torch.Tensor, ba: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `GatedDeltaNet.gates`."""
    count, heads = len(ba), len(a_log)
    assert ba.stride(1) == 1, "rows must be contiguous"
    beta = torch.empty((count, heads), dtype=a_log.dtype, device=ba.device)
    decay = torch.empty_like(beta)
    launch(
        kernels.gates_kernel, (count,),
        Constants(ROW=ba.stride(0), HEADS=heads, WIDTH=next_power_of_2(heads), num_warps=1),
        beta, decay, ba, a_log, dt_bias,
    )  # fmt: skip
    return beta, decay


def gated_rms_norm(
    weight: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `GatedRMSNorm`."""
    count, heads, size = x.shape
    assert x.is_contiguous() and gate.stride()[1:] == (size, 1), "rows must be contiguous"
    out = torch.empty(x.shape, dtype=gate.dtype, device=gate.device)
    launch(
        kernels.gate_norm_kernel, (count, heads),
        Constants(
            GATE_ROW=gate.stride(0), HEADS=heads, SIZE=size, WIDTH=next_power_of_2(size),
            EPS=eps, num_warps=1
        ),
        out, x, gate, weight,
    )  # fmt: skip
    return out


class TritonConv:
    """A causal convolution over single tokens, and over the sequences of a wave."""

    def __init__(self, conv: CausalConv) -> None:
        self.conv = conv

    def step(self, x: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor) -> torch.Tensor:
        """See `CausalConv.step`."""
        assert reads.stride() == writes.stride() == (1,), "slots must be contiguous"
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width = width_of(x.shape[1], CONV_WIDTH)
        launch(
            kernels.conv_step_kernel, (len(x), cdiv(x.shape[1], width)),
            Constants(**self._sizes(x), WIDTH=width, num_warps=4),
            out, x, *self._weights(), reads, writes,
        )  # fmt: skip
        return out

    def scan(self, x: torch.Tensor, wave: ScanStep, out: torch.Tensor) -> None:
        """Computes all of a wave's spans in one launch; see `CausalConv.scan`."""
        pieces, firsts = wave.pieces
        channels, sizes = x.shape[1], self._sizes(x)
        width = width_of(channels, TILE_WIDTH)
        launch(
            kernels.conv_scan_kernel, (len(pieces), cdiv(channels, width)),
            Constants(**sizes, P=CHUNK, WIDTH=width, num_warps=4),
            out, x, *self._weights(), pieces,
        )  # fmt: skip
        width = width_of(channels, CONV_WIDTH)
        launch(
            kernels.conv_keep_kernel, (len(firsts) - 1, cdiv(channels, width)),
            Constants(**sizes, WIDTH=width, num_warps=4),
            x, self.conv.states, pieces, firsts,
        )  # fmt: skip

    def _weights(self) -> tuple[torch.Tensor, ...]:
        conv = self.conv
        return conv.states, conv.weight, conv.weight if conv.bias is None else conv.bias

    def _sizes(self, x: torch.Tensor) -> dict[str, int]:
        (taps, channels), states = self.conv.shape, self.conv.states
        assert x.stride(1) == 1 and states.stride()[1:] == (channels, 1), "rows must be contiguous"
        return {
            "X_ROW": x.stride(0), "STATE_ROW": states.stride(0), "CHANNELS": channels,
            "TAPS": taps, "BIAS": self.conv.bias is not None,
        }  # fmt: skip


class TritonDelta:
    """The delta rule of one layer, a `GatedDeltaNet`."""

    def __init__(self, layer: Any) -> None:
        self.plan, self.layer, self.conv = layer.plan, layer, TritonConv(layer.conv1d)

    def step(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, reads: torch.Tensor,
        writes: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """See `MatrixStateLayer.decode`."""
        states = self.layer.flat_states
        plan, mixed = self.plan, self.conv.step(qkv, reads, writes)
        shape = (len(qkv), plan.num_value_heads, plan.value_dim)
        out = torch.empty(shape, dtype=states.dtype, device=states.device)
        width = min(STEP_WIDTH, next_power_of_2(plan.value_dim))
        launch(
            kernels.delta_step_kernel, (*shape[:2], cdiv(plan.value_dim, width)),
            Constants(
                STATE_ROW=states.stride(0), KEY_HEADS=plan.num_key_heads,
                VALUE_HEADS=plan.num_value_heads, KEY=plan.key_dim, VALUE=plan.value_dim,
                KEYS=next_power_of_2(plan.key_dim), WIDTH=width, num_warps=4
            ),
            out, mixed, decay, beta, states, reads, writes,
        )  # fmt: skip
        return out

    def scan(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, wave: ScanStep,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """See `MatrixStateLayer.prefill`."""
        plan, states = self.plan, self.layer.flat_states
        mixed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        self.conv.scan(qkv, wave, mixed)
        pieces, firsts = wave.pieces
        heads, key, value = plan.num_value_heads, plan.key_dim, plan.value_dim

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=states.dtype, device=states.device)

        read, recalls, write, values, attended = (
            empty(len(qkv), heads, size) for size in (key, key, key, value, CHUNK)
        )
        parts = read, recalls, write, values, attended, empty(len(pieces), heads)
        launch(
            kernels.delta_chunks_kernel, (len(pieces), heads),
            Constants(
                KEY_HEADS=plan.num_key_heads, VALUE_HEADS=heads, KEY=key, VALUE=value, P=CHUNK,
                K=SCAN_KEYS, num_warps=4, num_stages=1
            ),
            *parts, mixed, decay, beta, pieces,
        )  # fmt: skip
        width = width_of(value, SCAN_WIDTH)
        launch(
            kernels.delta_scan_kernel, (len(firsts) - 1, heads, cdiv(value, width)),
            Constants(
                STATE_ROW=states.stride(0), HEADS=heads, KEY=key, VALUE=value, P=CHUNK,
                K=SCAN_KEYS, WIDTH=width, num_warps=4, num_stages=1
            ),
            out, states, *parts, pieces, firsts,
        )  # fmt: skip
