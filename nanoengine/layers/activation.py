"""The gates of gated MLPs, by the name that a config gives them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 I], gate first: [..., I].

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), SwiGLU.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of [..., 2 I], gate first, in the tanh approximation: [..., I].

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), GEGLU.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATES = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
"""`hidden_act` -> the gate."""
