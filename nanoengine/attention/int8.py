"""The int8 KV cache in plain torch: how a row becomes bytes and comes back.

A row is the key or the value of one KV head of one token. Its numbers are stored as
number * 127 / the row's largest, rounded half to even, with a float32 scale beside them. So a row
depends on nothing but itself, and a block of rows and scales is one piece of bytes.

Rounding changes a number by at most 1/254 of its row's largest. A row with infinity or NaN gets
such a scale, so a broken model is still noticed.

Called by `stored.py`; `kernels/int8_cache.py` has the same for the CPU's kernels.

Source: KVQuant (Hooper et al., arXiv 2401.18079), for values with a scale a token.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
LEAST = 2.0**-100
"""A row whose numbers are all at most as large is kept as zeros: 1 / scale must be finite."""


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as int8 [..., D + SCALE_BYTES]: numbers, then the bytes of the scale."""
    rows = x.float()
    largest = rows.abs().amax(-1, keepdim=True)
    scale = largest / 127
    # Why a factor and not a division: the kernels multiply, and both must round alike.
    inverse = torch.where(largest > LEAST, 1 / scale, 0)
    codes = (rows * inverse).nan_to_num().round().to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), dim=-1)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows that `to_int8` stored, in a wider dtype."""
    codes, scale = stored.split((stored.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return codes.to(dtype) * scale.contiguous().view(torch.float32)
