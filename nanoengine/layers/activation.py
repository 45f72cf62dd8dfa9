"""The gate of a gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I], gate first: [..., I].

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), SwiGLU.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
