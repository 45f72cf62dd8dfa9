"""SampledTokens: what a step has sampled, on the device and then as plain numbers.

Most rows ask for the most likely token of the model's own logits: `most_likely_tokens`.
Special: special_rows.py (draws, edited logits, log-probabilities).

Legend: L lines of logits, N top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, TokenLogprob
from nanoengine.models.decoder import CausalLM
from nanoengine.settings.params import GREEDY_BELOW

MAX_VOCAB_SIZE = 2**19
"""So many tokens of weight `sampling_ops.SCALE` add up to 2**53, up to which float64 is exact."""
NO_TOKEN = "no token can be sampled: the logits hold NaN or +inf, or nothing but -inf"


def is_plain(sequence: AdmittedSequence) -> bool:
    """Whether each token is the most likely one, nothing edits logits and none are reported."""
    params = sequence.params
    return params.temperature < GREEDY_BELOW and not (
        sequence.bad_word_ids
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.min_tokens
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
        or params.logits_processors
        or params.extra_args
    )


def most_likely_tokens(model: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row of hidden states [L, hidden_size], as
    `SampledTokens.packed`."""
    found = model.most_likely(hidden)
    if found is not None:
        return pack_found(*found)
    largest, token_ids = model.logits(hidden).max(-1)  # the lowest of equal ids
    valid = largest.isfinite()
    return torch.stack((token_ids * valid, valid.long()))


def pack_found(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Greedy tokens, as kernels of the CPU find them: the tokens [L] with the largest logits, and
    these logits [L]. Where one is NaN, there is no token.

    Why numpy: within a step a call of torch takes 10 us, for however few numbers.
    """
    packed = np.empty((2, len(token_ids)), np.int64)
    packed[1] = valid = np.isfinite(logits.numpy())
    packed[0] = token_ids.numpy() * valid
    return torch.from_numpy(packed)


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


def pack_tokens(token_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`SampledTokens.packed` of ids [L] int64 and validity [L] bool, in memory of its own."""
    return torch.stack((token_ids, valid.long()))


def to_records(line: Sequence[Sequence[float]]) -> list[TokenLogprob]:
    """One line of `token_logprobs`, as a list: the given token first, then the top ones."""
    return [TokenLogprob(int(i), value, int(rank)) for i, value, rank in line]


def check_vocabulary(vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Raises ValueError for a vocabulary that can't be sampled from, or EOS ids outside of it."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be in [1, {MAX_VOCAB_SIZE}], got {vocab_size}")
    if bad := [i for i in eos_token_ids if not 0 <= i < vocab_size]:
        raise ValueError(f"EOS ids must be in [0, {vocab_size}), got {bad}")
