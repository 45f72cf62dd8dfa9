"""Samples tokens on a GPU with one kernel. `draw.sample_on_device` calls it; `draw.py` is the
reference implementation in plain torch.

This file chooses tile sizes and warps; the arithmetic is in `kernels/triton_sampling.py`. A token
depends only on its own line, seed and position, not on the batch or on graph replay. It equals the
token of the reference implementation, unless the last bit of an exponential decides.

It has been run in Triton's interpreter and compiled ahead of time; it has not run on a GPU yet.
"""

from __future__ import annotations

import torch

from nanoengine.kernels import triton_sampling as kernels
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2

BLOCK = 4096
"""Logits of a line per tile: 16 for each of 256 threads, two 16-byte loads for 16-bit logits. If
lines filter, 8 for each of 512 threads, which keeps registers at 128."""

NUM_CANDIDATES, CAPACITY = 64, 128
"""Number of most likely tokens that a filtered line gathers, and the capacity including ties. 64
covers the usual top_k, and usually the tokens that top_p keeps."""

ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Number of low bits that are zero in every value of the dtype, as float32."""


def sample_lines(
    logits: torch.Tensor, params: torch.Tensor, draws: bool, filters: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per line: ids [L] int64, and whether each is valid, [L] bool.

    Args:
        logits: [L, V] of a dtype in ZERO_BITS.
        params: [5, L] float64, the rows of `DrawParams`.
        draws: some lines may draw.
        filters: some lines may filter.
    """
    num_lines, size = logits.shape
    assert logits.stride(1) == params.stride(1) == 1, "lines must be contiguous"
    ids = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    valid = torch.empty(num_lines, dtype=torch.bool, device=logits.device)
    shape = (num_lines if filters else 0, 2, CAPACITY)
    candidates = torch.empty(shape, dtype=torch.int32, device=logits.device)
    of_lines = kernels.SamplingConstants(
        line=logits.stride(0), size=size, block=BLOCK,
        tiles=next_power_of_2(cdiv(size, BLOCK)), stages=4,
        shift=ZERO_BITS[logits.dtype], top_n=NUM_CANDIDATES, capacity=CAPACITY,
    )  # fmt: skip
    launch(
        kernels.sample_kernel, (num_lines,),
        Constants(S=of_lines, DRAW=draws, FILTER=filters, num_warps=16 if filters else 8),
        ids, valid.view(torch.int8), candidates, logits, params, params.stride(0),
    )  # fmt: skip
    return ids, valid
