"""Caches of bytes in plain torch, for `naive.py`: how a row becomes bytes and comes back.

A row is the key or the value of one KV head of one token.

    fp8     one scale a layer, not in the cache            `fp8.py`
    int8    a scale beside each row, in its last 4 bytes   `int8.py`
"""

from __future__ import annotations

import torch

BYTES = (torch.float8_e4m3fn, torch.int8)


def to_bytes(x: torch.Tensor, kv_dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Rows [..., D] as one of BYTES, of int8 [..., D + 4]; `scale` is the layer's."""
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
