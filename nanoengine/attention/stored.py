"""Caches of bytes: how many numbers of them a row takes, how it becomes bytes and comes back.

A row is the key or the value of one KV head of one token. Called by `naive.py`, and by whoever
counts a cache's bytes.

    fp8     one scale a layer, not in the cache            `fp8.py`
    int8    a scale beside each row, in its last 4 bytes   `int8.py`
"""

from __future__ import annotations

import torch

BYTES = (torch.float8_e4m3fn, torch.int8)
SCALE_BYTES = 4
"""Of a float32 beside a row of int8."""


def stored_dim(head_dim: int, kv_dtype: torch.dtype) -> int:
    """Numbers of a cache of this dtype for a row of `head_dim`."""
    return head_dim + SCALE_BYTES if kv_dtype == torch.int8 else head_dim


def to_bytes(x: torch.Tensor, kv_dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Rows [..., D] as [..., `stored_dim`] of one of BYTES; `scale` is the layer's."""
    if kv_dtype == torch.int8:
        from nanoengine.attention.int8 import to_int8

        return to_int8(x)
    from nanoengine.attention.fp8 import to_fp8

    return to_fp8(x, scale)


def from_bytes(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The rows that `to_bytes` stored, in a wider dtype."""
    if stored.dtype == torch.int8:
        from nanoengine.attention.int8 import from_int8

        return from_int8(stored, dtype)
    from nanoengine.attention.fp8 import from_fp8

    return from_fp8(stored, scale, dtype)
