"""Layers that keep states, by Triton: what a GPU runs in place of a dozen small operations a token.

Put in place by `TritonKernels.fuse` once a model is loaded. The readable forms are
`GatedDeltaNet.steps`, `CausalConv.step` and `scan`. This file chooses grids and widths; the
arithmetic is in `kernels/triton_states.py`.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton

from nanoengine.checkpoint.plan import StatePlan
from nanoengine.kernels import triton_states as kernels
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.delta_rule import CHUNK, Chunks, DeltaTokens

CONV_WIDTH = 512
"""Channels of a token that one program takes: 4 a thread, 16 bytes of a float32 state."""
STEP_WIDTH = 32
"""Columns of a matrix that one program of a step holds, with all of its rows: 16 KiB of 128."""
SCAN_WIDTH, SCAN_KEYS = 32, 16
"""Columns that a program takes through all chunks, and rows of them in registers at once: with
twice as many it takes all 255 registers of a thread."""


def conv_step(
    conv: CausalConv, x: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor
) -> torch.Tensor:
    """See `CausalConv.step`."""
    (taps, channels), states = conv.shape, conv.states
    assert x.stride(1) == 1 and states.stride()[1:] == (channels, 1), "rows must be contiguous"
    out = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    width = min(CONV_WIDTH, triton.next_power_of_2(channels))
    kernels.conv_step_kernel[(len(x), triton.cdiv(channels, width))](
        out, x, states, conv.weight, conv.weight if conv.bias is None else conv.bias,
        reads, writes,
        X_ROW=x.stride(0), STATE_ROW=states.stride(0), CHANNELS=channels, TAPS=taps,
        BIAS=conv.bias is not None, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


class TritonDeltaSteps:
    """The steps of one GatedDeltaNet.

    Args:
        plan: of this rank's part of the layer.
        conv: its convolution.
    """

    def __init__(self, plan: StatePlan, conv: CausalConv) -> None:
        self.plan, self.conv = plan, conv

    def __call__(self, tokens: DeltaTokens) -> torch.Tensor:
        """See `GatedDeltaNet.steps`."""
        qkv, decay, beta, states, reads, writes = tokens
        plan, mixed = self.plan, conv_step(self.conv, qkv, reads, writes)
        shape = (len(qkv), plan.num_value_heads, plan.value_dim)
        out = torch.empty(shape, dtype=states.dtype, device=states.device)
        width = min(STEP_WIDTH, triton.next_power_of_2(plan.value_dim))
        grid = (*shape[:2], triton.cdiv(plan.value_dim, width))
        kernels.delta_step_kernel[grid](
            out, mixed, decay.contiguous(), beta.contiguous(), states, reads, writes,
            STATE_ROW=states.stride(0), KEY_HEADS=plan.num_key_heads,
            VALUE_HEADS=plan.num_value_heads, KEY=plan.key_dim, VALUE=plan.value_dim,
            KEYS=triton.next_power_of_2(plan.key_dim), WIDTH=width, num_warps=4,
        )  # fmt: skip
        return out


def through_chunks(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `delta_rule.through_chunks`."""
    count, heads, _, key = chunks.read.shape
    value = chunks.values.shape[-1]
    out = torch.empty(chunks.values.shape, dtype=state.dtype, device=state.device)
    last = state.clone(memory_format=torch.contiguous_format)
    width = min(SCAN_WIDTH, max(16, triton.next_power_of_2(value)))
    kernels.delta_scan_kernel[(heads, triton.cdiv(value, width))](
        out, last, *(part.contiguous() for part in chunks), count,
        HEADS=heads, KEY=key, VALUE=value, P=CHUNK, K=SCAN_KEYS, WIDTH=width,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    return out, last
