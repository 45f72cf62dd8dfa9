"""Samples tokens without asking the host: what a GPU runs, inside a CUDA graph or outside.

    kind        for batches in which                      how
    GREEDY      all lines take the most likely token      argmax
    DRAWN       no line filters                           draw from all tokens
    FILTERED    some line filters                         sort, then draw from what the filters keep

The host knows the kind from the sampling parameters. All else has fixed shapes and no branch on a
value, so nothing waits, and a captured graph fits every batch of its kind. The tokens are those
that the CPU samples with `sampling_ops.py`, where it may look at values and take shortcuts.

On CUDA one kernel does all kinds (`triton_sampling.py`). This file is its readable form, and serves
float64. An exponential may differ between the two in its last bit, and now and then that changes a
token: by estimate once in millions of draws where few tokens are likely, once in ten thousand where
all are. On one device a seed's tokens are always the same.

Called by the sampler and by the decode step. Legend: L lines of logits, V vocabulary.
"""

from __future__ import annotations

import enum

import torch

from nanoengine.runner.sampling_ops import (
    CHUNK,
    DrawParams,
    argmax,
    draw,
    draw_all_sorted,
    pad_to_blocks,
    widen,
)


class SamplingKind(enum.Enum):
    """How the lines of a batch are sampled; see the module."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    FILTERED = "filtered"


def sample_on_device(
    logits: torch.Tensor, params: DrawParams, kind: SamplingKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token a line: ids [L] int64, and whether the line has a valid one, [L] bool.

    Args:
        logits: [L, V], any float dtype.
        params: temperature 0 for greedy lines, top_k V where it is off.
    """
    if has_kernel(logits.device, logits.dtype):
        from nanoengine.runner.triton_sampling import sample_lines

        draws, filters = kind is not SamplingKind.GREEDY, kind is SamplingKind.FILTERED
        return sample_lines(logits, params.packed, draws, filters)
    size = max(1, CHUNK // (4 if kind is SamplingKind.FILTERED else 1) // logits.shape[-1])
    chunks = [
        _sample_chunk(logits[start : start + size], params[start : start + size], kind)
        for start in range(0, len(logits), size)
    ]
    ids, largest = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    valid = largest.isfinite()
    return torch.where(valid, ids, 0), valid


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton kernel samples these lines."""
    return device.type == "cuda" and dtype != torch.float64


def _sample_chunk(
    logits: torch.Tensor, params: DrawParams, kind: SamplingKind
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, best = argmax(logits)
    if kind is SamplingKind.GREEDY:
        return ids, best
    wide = pad_to_blocks(widen(logits))
    largest = best[:, None].to(wide.dtype)
    # Greedy lines divide by a temperature of 0, so what they draw is thrown away below.
    drawn = draw(wide, largest, params)
    if kind is SamplingKind.FILTERED:
        filters = (params.column("top_k") < logits.shape[-1]) | (params.column("top_p") < 1)
        filters = filters | (params.column("min_p") > 0)
        drawn = torch.where(filters[:, 0], draw_all_sorted(wide, largest, params), drawn)
    return torch.where(params.column("temperature")[:, 0] == 0, ids, drawn), best
