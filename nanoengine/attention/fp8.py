"""The fp8 KV cache in plain torch: how a number becomes a byte and comes back.

The format is e4m3: 4 bits of exponent, 3 of mantissa, no infinity. A layer's keys share one scale,
its values another. A number is stored as number / scale, rounded to nearest; what is larger than
the format's largest number is stored as that. The scale comes from the checkpoint if it has one,
else it is 1.

Rounding changes a number by at most 1/16 of it, or by 2**-10 scales where that is more. So rounded
values change an output by at most 1/16 of the greatest value, and rounded keys change a score by at
most 1/16 of the sum of its products' sizes.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433); static scales as in
vLLM's checkpoints.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of the format. NaN stays NaN, so a broken model is still noticed."""


def to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in fp8, held at +-LARGEST."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # Why a factor and not a division: it rounds alike in plain torch and on every GPU.
    return (x.to(wide) * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FP8)


def from_fp8(stored: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `to_fp8` stored, in a wider dtype."""
    return stored.to(dtype) * scale
