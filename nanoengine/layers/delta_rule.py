"""The gated delta rule: a matrix per head that decays, and associates keys with values.

    S = exp(decay) S                      forget
    S = S + k (beta (v - k S))            move the value recalled by k towards v, by beta
    out = q S

`step` computes one token of each of many sequences. `scan` computes many tokens of one sequence, by
matrix products over chunks of 64: within a chunk, the corrections beta (v - k S) are the solution
of a triangular system (the WY form). Chunks begin at positions that are multiples of 64, so results
hardly depend on how a prompt is split into steps. Both compute in the dtype of the states.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464); the chunked form is from
"Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484).

Legend: T tokens, N tokens of one sequence, H value heads, E / V size of a key / value, S states, C
chunks, P tokens per chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64


class DeltaInputs(NamedTuple):
    """The rule's inputs per token; queries are scaled, decays are logarithms, at most 0."""

    q: torch.Tensor  # [T, H, E]
    k: torch.Tensor  # [T, H, E]
    v: torch.Tensor  # [T, H, V]
    decay: torch.Tensor  # [T, H]
    beta: torch.Tensor  # [T, H]

    def part(self, tokens: slice) -> DeltaInputs:
        """Selects some of the tokens."""
        return DeltaInputs(*(tensor[tokens] for tensor in self))


def step(
    inputs: DeltaInputs, states: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor
) -> torch.Tensor:
    """Computes one token of each of several sequences -> [T, H, V].

    Args:
        states: [S, H, E, V].
        reads, writes: [T], the state before each token, and the state to write.
    """
    q, k, v, decay, beta = inputs
    state = states.index_select(0, reads) * decay.exp()[..., None, None]  # [T, H, E, V]
    recalled = (state * k.unsqueeze(-1)).sum(-2)
    change = (v - recalled) * beta.unsqueeze(-1)
    state.addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
    states.index_copy_(0, writes, state)
    return (state * q.unsqueeze(-1)).sum(-2)


class Chunks(NamedTuple):
    """The effect of each chunk on a state S. With `new` = values - recalls S, the output is read S
    + attended new, and the next state is forget S + write^T new."""

    read: torch.Tensor  # [C, H, P, E]
    recalls: torch.Tensor  # [C, H, P, E]
    write: torch.Tensor  # [C, H, P, E]
    values: torch.Tensor  # [C, H, P, V]
    attended: torch.Tensor  # [C, H, P, P]
    forget: torch.Tensor  # [C, H, 1, 1]


def scan_chunks(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Advances a state [H, E, V] over all chunks in order.

    Returns:
        [C, H, P, V], and the state after the last chunk.
    """
    out = torch.empty_like(chunks.values)
    for chunk, found in enumerate(out):
        read, recalls, write, values, attended, forget = (part[chunk] for part in chunks)
        new = values - recalls @ state
        found.copy_(read @ state + attended @ new)
        state = state * forget + write.mT @ new
    return out, state


def scan(
    inputs: DeltaInputs, state: torch.Tensor, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes tokens of one sequence, the first at `position`, starting from `state` [H, E, V].

    Returns:
        [N, H, V], and the state after the last token.
    """
    front = position % CHUNK
    count = len(inputs.q)
    back = -(front + count) % CHUNK
    # Why zeros are harmless: a token whose key, decay and beta are 0 does not change the state.
    q, k, v = (_chunked(F.pad(x, (0, 0, 0, 0, front, back))) for x in inputs[:3])  # [C, H, P, E]
    decay, beta = (_chunked(F.pad(x, (0, 0, front, back))) for x in inputs[3:])  # [C, H, P]
    decays = decay.cumsum(-1)  # from the chunk's beginning
    pairwise = decays.unsqueeze(-1) - decays.unsqueeze(-2)  # [C, H, P, P], from column to row
    future = torch.ones_like(pairwise[0, 0], dtype=torch.bool).triu(1)
    pairwise = pairwise.masked_fill(future, -torch.inf).exp()
    k_beta = beta.unsqueeze(-1) * k
    system = k_beta @ k.mT * pairwise  # `unitriangular` replaces its diagonal by ones
    right = torch.cat((beta.unsqueeze(-1) * v, k_beta * decays.exp().unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, recalls = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    attended = q @ k.mT * pairwise
    read = q * decays.exp().unsqueeze(-1)
    last = decays[..., -1:]
    write = k * (last - decays).exp().unsqueeze(-1)
    forget = last.exp().unsqueeze(-1)
    out, state = scan_chunks(Chunks(read, recalls, write, values, attended, forget), state)
    return out.transpose(1, 2).flatten(0, 1)[front : front + count], state


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[C * P, H, ...] -> [C, H, P, ...]."""
    return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)
