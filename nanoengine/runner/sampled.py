"""SampledTokens: what the Sampler makes of a step's logits, on the device and as plain numbers.

Steps of plain rows have none of it: see greedy.py. Legend: L lines of logits, N top ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nanoengine.core.plan import TokenLogprob
from nanoengine.runner.greedy import NO_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedTokens:
    """What a step sampled, as plain numbers. Indices count the lines of logits.

    Attributes:
        token_ids: one a line; 0 in lines named in `errors`.
        logprobs: index -> the sampled token first, then the top ones (which may name it again).
        errors: index -> why this line has no valid token.
    """

    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprob]]
    errors: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What a step sampled, still on the device.

    Attributes:
        packed: [2, L] int64, of each line its token, 0 where there is no valid one; and whether
            there is.
        logprob_lines: the lines that asked for log-probabilities, and how many top ones each.
        logprobs: [len(logprob_lines), 1 + N, 3], as `token_logprobs` returns them; None if no line
            asked.
        errors: of some invalid lines, what a processor has raised.
    """

    packed: torch.Tensor
    logprob_lines: list[tuple[int, int]] = field(default_factory=list)
    logprobs: torch.Tensor | None = None
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def token_ids(self) -> torch.Tensor:
        """[L] int64; 0 where there is no valid token."""
        return self.packed[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the host wants to see: `packed`, then log-probabilities if any."""
        return [self.packed] if self.logprobs is None else [self.packed, self.logprobs]

    def fetch(self, tensors: Sequence[torch.Tensor] | None = None) -> FetchedTokens:
        """Plain numbers, from `tensors` once they have come to the host; None: waits for them."""
        tensors = self.tensors if tensors is None else tensors
        token_ids, valid = tensors[0].tolist()
        logprobs = {}
        if self.logprobs is not None:
            entries = tensors[1].tolist()
            for (line, num_top), found in zip(self.logprob_lines, entries, strict=True):
                logprobs[line] = to_records(found[: 1 + num_top])
        errors = {
            line: self.errors.get(line, NO_TOKEN) for line, holds in enumerate(valid) if not holds
        }
        return FetchedTokens(token_ids=token_ids, logprobs=logprobs, errors=errors)


def to_records(line: Sequence[Sequence[float]]) -> list[TokenLogprob]:
    """One line of `token_logprobs`, as a list: the given token first, then the top ones."""
    return [TokenLogprob(int(i), value, int(rank)) for i, value, rank in line]
