"""8-bit KV caches in plain torch: quantization and dequantization of a row.

A row is the key or the value of one KV head of one token. `naive.py` calls this for an 8-bit cache;
the kernels for a CPU (`kernels/int8_cache.py`) and a GPU (`triton_store.py`) do the same.

**fp8** is e4m3: 4 bits of exponent, 3 of mantissa, no infinity. A layer's keys share one scale, its
values another: the checkpoint's, else 1. An element is stored as element / scale, rounded to
nearest and clamped to the format's range. Rounding changes an element by at most 1/16 of it, or by
2**-10 scales if that is more. So rounded values change an output by at most 1/16 of the greatest
value, and rounded keys change a score by at most 1/16 of the sum of its products' magnitudes.

**int8**: a row is multiplied by a Hadamard matrix, and its elements are stored as element * 127 /
the row's largest, rounded half to even, followed by a float32 scale. A second multiplication by the
matrix restores the row. The bytes of a row depend only on this row, and a block with its scales is
contiguous. Rounding changes an element of the product by at most 1/254 of the row's largest.
A row with infinity or NaN gets an infinite or NaN scale, so a broken model is still noticed.

Why a Hadamard matrix: keys of trained models have a few channels that are many times larger than
the others, which would then get few of the 255 levels. The product spreads each channel over all.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), with static scales
as in vLLM's checkpoints; KVQuant (Hooper et al., arXiv 2401.18079), for values with one scale per
token; QuaRot (Ashkboos et al., arXiv 2404.00456), for the Hadamard matrix.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite fp8 value. NaN stays NaN, so a broken model is still noticed."""

SCALE_BYTES = 4
MIN_ROW_MAX = 2.0**-100
"""An int8 row without larger elements is stored as zeros, because 1 / scale must be finite."""


def to_bytes(x: torch.Tensor, kv_dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Quantizes rows [..., D] to fp8 with the layer's scale, or to int8 [..., D + SCALE_BYTES]."""
    return to_fp8(x, scale) if kv_dtype == FP8 else to_int8(x)


def from_bytes(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the rows that `to_bytes` stored, to a wider dtype."""
    return from_fp8(stored, scale, dtype) if stored.dtype == FP8 else from_int8(stored, dtype)


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in fp8, clamped to +-LARGEST."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # Why a multiplication: it rounds alike in plain torch and on every GPU, unlike a division.
    return (x.to(wide) * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def from_fp8(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes what `to_fp8` stored, to a wider dtype."""
    return stored.to(dtype) * scale


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiplies rows [..., D] by a Hadamard matrix, in blocks of the largest power of two that
    divides D. Applied twice it gives the row times that power.

    >>> hadamard(torch.tensor([1.0, 2.0]))
    tensor([ 3., -1.])
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        even, odd = blocks.unflatten(-1, (-1, 2)).unbind(-1)
        blocks = torch.cat((even + odd, even - odd), dim=-1)
    return blocks.flatten(-2)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rows [..., D] as int8 [..., D + SCALE_BYTES]: elements, then the bytes of the scale."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Why divided here and not when read: the kernels then need no further factor.
    rows = hadamard(wide / (x.shape[-1] & -x.shape[-1])).float()
    largest = rows.abs().amax(-1, keepdim=True)
    scale = largest / 127
    # Why a multiplication: the kernels multiply by the inverse, and both must round alike.
    inverse = torch.where(largest > MIN_ROW_MAX, 1 / scale, 0)
    codes = (rows * inverse).nan_to_num().round().to(torch.int8)
    return torch.cat((codes, scale.view(torch.int8)), dim=-1)


def from_int8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the rows that `to_int8` stored, to a wider dtype."""
    codes, scale = stored.split((stored.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    # Why clone: a view of one row is contiguous, and may be unaligned.
    scale = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    return hadamard(codes.to(dtype) * scale)
