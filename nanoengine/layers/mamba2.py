"""Mamba-2's rule: a matrix per head that decays, and to which each token adds a product.

    S = exp(decay) S + b (dt x)       b: which rows of S to write; dt: step size; decay: a dt, a < 0
    y = c S + d x                     c: which rows of S to read; d: a learned skip connection

Heads of a group share b and c. `step` computes one token of each of many sequences, `scan` many
tokens of one sequence, by matrix products over chunks of 64 (the dual form, "SSD"). Chunks begin at
positions that are multiples of 64, so results hardly depend on how a prompt is split into steps.
Both compute in the dtype of the states. Called by `models/mamba.py`.

Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060).

Legend: T tokens, N tokens of one sequence, G groups, R heads per group, H = G * R, E size of b and
c, V size of a head, P tokens per chunk, S states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanoengine.layers.delta_rule import CHUNK


class MambaInputs(NamedTuple):
    """The rule's inputs per token."""

    x: torch.Tensor  # [T, H, V]
    b: torch.Tensor  # [T, G, E]
    c: torch.Tensor  # [T, G, E]
    dt: torch.Tensor  # [T, H]
    decay: torch.Tensor  # [T, H], logarithms, at most 0
    d: torch.Tensor  # [T, H], for all tokens the same

    def part(self, tokens: slice) -> MambaInputs:
        """Selects some of the tokens."""
        return MambaInputs(*(tensor[tokens] for tensor in self))


def step(
    inputs: MambaInputs, states: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor
) -> torch.Tensor:
    """Computes one token of each of several sequences -> [T, H, V].

    Args:
        states: [S, H, E, V].
        reads, writes: [T], the state before each token, and the state to write.
    """
    x, b, c, dt, decay, d = inputs
    heads = x.shape[1] // b.shape[1]
    b, c = (each.repeat_interleave(heads, dim=1).unsqueeze(-1) for each in (b, c))  # [T, H, E, 1]
    state = states.index_select(0, reads) * decay.exp()[..., None, None]
    state.addcmul_(b, (x * dt.unsqueeze(-1)).unsqueeze(-2))
    states.index_copy_(0, writes, state)
    return (state * c).sum(-2) + x * d.unsqueeze(-1)


def scan(
    inputs: MambaInputs, state: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes tokens of one sequence, the first at `position`, starting from `state` [H, E, V].

    Returns:
        [N, H, V], and the state after the last token.
    """
    x, *_, d = inputs
    count, size, groups = len(x), x.shape[-1], inputs.b.shape[1]
    out = torch.empty_like(x)
    # Why concatenated: one product then reads, or writes, the states of all heads of a group.
    state = state.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)  # [G, E, R * V]
    start, end = 0, min(count, CHUNK - position % CHUNK)
    while start < count:
        found, state = _chunk(inputs.part(slice(start, end)), state)
        out[start:end] = found
        start, end = end, min(count, end + CHUNK)
    out += x * d.unsqueeze(-1)
    return out, state.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


def _chunk(inputs: MambaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the tokens of one chunk from `state` [G, E, R * V] -> [P, H, V], and the next
    state."""
    x, b, c, dt, decay, _ = inputs
    groups, count, size = b.shape[1], len(x), x.shape[-1]
    b, c = b.transpose(0, 1), c.transpose(0, 1)  # [G, P, E]
    written = x * dt.unsqueeze(-1)  # [P, H, V]
    decays = decay.cumsum(0)  # [P, H], from the chunk's beginning
    pairwise = decays.T.unsqueeze(-1) - decays.T.unsqueeze(-2)  # [H, P, P], from column to row
    future = torch.ones_like(pairwise[0], dtype=torch.bool).triu_(1)
    pairwise = pairwise.masked_fill_(future, -torch.inf).exp_().unflatten(0, (groups, -1))
    attended = ((c @ b.mT).unsqueeze(1) * pairwise).flatten(0, 1)  # [H, P, P]
    inside = (attended @ written.transpose(0, 1)).transpose(0, 1)  # [P, H, V]
    read = (c @ state).view(groups, count, -1, size).transpose(0, 1).reshape(x.shape)
    out = torch.addcmul(inside, read, decays.exp().unsqueeze(-1))
    last = decays[-1]
    decayed = written * (last - decays).exp().unsqueeze(-1)
    decayed = decayed.unflatten(1, (groups, -1)).flatten(2).transpose(0, 1)  # [G, P, R * V]
    forget = last.exp().view(groups, -1, 1).expand(-1, -1, size).reshape(groups, 1, -1)
    return out, torch.baddbmm(state * forget, b.mT, decayed)
