"""Norm and rotation of query and key heads, in plain torch: what backends fuse with their store.

Rounding follows the checkpoints' own code. If a norm's weight has the model's dtype, the norm is
rounded to that dtype before it is multiplied by the weight; if the weight is wider, after.

Source: Su et al., RoFormer (arXiv 2104.09864), in the half-split form of GPT-NeoX; the norm of
heads is that of Qwen3 (arXiv 2505.09388), that of all together of OLMo 2 (arXiv 2501.00656).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of one step's positions, each [T, 1, D / 2], the halves of one tensor [T, 1, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNormWeights:
    """RMSNorm of query and key heads: weight [H + K, D] of the model's dtype or wider.

    Attributes:
        together: None: each head is normed by itself; (H, K): all query heads as one row, and all
            key heads as another.
    """

    weight: torch.Tensor
    eps: float
    together: tuple[int, int] | None = None


def normed_heads(x: torch.Tensor, norm: HeadNormWeights) -> torch.Tensor:
    """The norm of the heads of x [T, H + K, D]."""
    wide = x.to(norm.weight.dtype)
    if norm.together is None:
        normed = F.rms_norm(wide, (x.shape[-1],), None, norm.eps)
    else:
        rows = [part.flatten(1) for part in wide.split(norm.together, dim=1)]
        normed = torch.cat([F.rms_norm(row, row.shape[1:], None, norm.eps) for row in rows], dim=1)
    return (normed.view(x.shape) * norm.weight).to(x.dtype)


def rotate(x: torch.Tensor, rotation: Rotation, norm: HeadNormWeights | None) -> torch.Tensor:
    """Norms the heads of x [T, H + K, D] and turns their pairs (x[i], x[i + D / 2]); a new
    tensor."""
    if norm is not None:
        x = normed_heads(x, norm)
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out
