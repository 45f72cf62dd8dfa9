"""Norm and rotation of query and key heads, in plain torch: what backends fuse with their store.

Rounding follows the checkpoints' own code. If a norm's weight has the model's dtype, the norm is
rounded to that dtype before it is multiplied by the weight; if the weight is wider, after.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX; the norm of
heads is that of Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of one step's positions, each [T, 1, D / 2], the halves of one tensor [T, 1, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormWeights:
    """RMSNorm of each query and key head: weight [H + K, D] of the model's dtype or wider."""

    weight: torch.Tensor
    eps: float


def rotate(x: torch.Tensor, rotation: Rotation, norm: HeadNormWeights | None) -> torch.Tensor:
    """Norms the heads of x [T, H + K, D] and turns their pairs (x[i], x[i + D / 2]); a new
    tensor."""
    if norm is not None:
        weight = norm.weight
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, norm.eps)
        x = (normed * weight).to(x.dtype)
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
