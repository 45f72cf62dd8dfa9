"""Log-probabilities under the raw logits: of sampled tokens, and of prompt tokens.

    positions of a prompt       0    1    2    3   (hidden states of a step, [T, hidden_size])
    the tokens they predict     t1   t2   t3   t4  t1 to t3 are scored, t4 is sampled

`token_logprobs` runs on the device; `to_records` makes plain records on the host. The Sampler calls
them for sampled tokens, the `PromptScorer` for prompt tokens.

Legend: L lines of logits, V vocabulary, N top log-probabilities, E entries of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, StepPlan, TokenLogprob
from nanoengine.runner.input_batch import InputBatch, Ints
from nanoengine.runner.sampling.draw import line_chunks, top_candidates, upcast
from nanoengine.runner.transfers import ship

LOGITS_CHUNK = 256
"""Maximum number of prompt positions whose logits exist at a time: 256 x 152k float32 are 0.16
GB."""


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Log-probabilities of given tokens and of the most likely ones under raw logits.

    Natural logarithms, of a softmax in float32 (float64 for float64 logits). A rank is 1 + the
    number of tokens with a strictly greater log-probability, so equals share it; among equals the
    lower id comes first.

    Args:
        logits: [L, V].
        token_ids: [L] int64.
        num_top: N; at most V are returned.

    Returns:
        [L, 1 + N, 3] float64: (token id, log-probability, rank) of the given token, then of the top
        N. One tensor, so that there is one copy to the host; see `to_records`.
    """
    num_top = min(num_top, logits.shape[-1])
    out = logits.new_empty((len(logits), 1 + num_top, 3), dtype=torch.float64)
    for lines in line_chunks(logits):
        logprobs = upcast(logits[lines]).log_softmax(-1)
        ids = token_ids[lines, None]
        values = logprobs.gather(-1, ids)
        ranks = 1 + (logprobs > values).sum(-1, keepdim=True)
        if num_top:
            top_values, top_ids = top_candidates(logprobs, num_top)
            # Why: in descending order, the index of the first equal value is the number of greater
            # ones.
            top_ranks = 1 + torch.searchsorted(-top_values, -top_values)
            values = torch.cat((values, top_values), -1)
            ids, ranks = torch.cat((ids, top_ids), -1), torch.cat((ranks, top_ranks), -1)
        out[lines] = torch.stack((ids.double(), values.double(), ranks.double()), -1)
    return out


def to_records(line: Sequence[Sequence[float]]) -> list[TokenLogprob]:
    """One line of `token_logprobs`, as a list: the given token first, then the top ones."""
    return [TokenLogprob(int(i), value, int(rank)) for i, value, rank in line]


class PromptScorer:
    """Log-probabilities of prompt tokens, for rows with `prompt_logprobs`.

    Args:
        input_batch: the runner's, with the prompts' tokens.
        logits: hidden states -> logits [L, V].
    """

    def __init__(self, input_batch: InputBatch, logits: Callable[..., torch.Tensor]) -> None:
        self._input_batch, self._logits = input_batch, logits
        # row -> number of top tokens, first scored position, number of prompt tokens
        self._requests: dict[int, tuple[int, int, int]] = {}

    def admit(self, sequence: AdmittedSequence) -> None:
        """Adds a row, if its sequence has `prompt_logprobs`."""
        params = sequence.params
        if params.prompt_logprobs is not None:
            first, num_prompt = params.first_scored_position, sequence.num_prompt_tokens
            self._requests[sequence.row] = params.prompt_logprobs, first, num_prompt

    def release(self, row: int) -> None:
        """Removes a row."""
        self._requests.pop(row, None)

    def scored(self, plan: StepPlan) -> tuple[Ints, Ints] | None:
        """The positions of each entry that are followed by a prompt token to score, in the form of
        `InputBatch.make_batch`.

        Returns:
            Two arrays [E]: the number of positions before the first scored one, and the number of
            scored ones. None if no position is scored.
        """
        if not self._requests:
            return None
        skipped, counts = np.zeros((2, len(plan.rows)), np.int64)
        for entry, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
            _, first, num_prompt = self._requests.get(row, (0, 0, 0))
            end = min(start + plan.num_scheduled_tokens[entry], num_prompt - 1)
            skipped[entry] = max(first - start, 0)
            counts[entry] = max(end - max(start, first), 0)
        return (skipped, counts) if counts.any() else None

    def score(
        self, plan: StepPlan, scored: tuple[Ints, Ints], hidden: torch.Tensor
    ) -> tuple[list[int], list[torch.Tensor]]:
        """Scores the prompt tokens that follow the `scored` positions of each entry.

        Args:
            hidden: states of those positions, entry by entry, [sum of their counts, hidden_size].

        Returns:
            The entry of each tensor, and the tensors from `token_logprobs`, one or more per entry.
        """
        entries: list[int] = []
        tensors: list[torch.Tensor] = []
        skipped, counts = scored
        for entry in np.flatnonzero(counts).tolist():
            row, count = plan.rows[entry], int(counts[entry])
            start = plan.starts[entry] + int(skipped[entry])
            num_top, _, _ = self._requests[row]
            following = self._input_batch.token_ids[row, start + 1 : start + count + 1]
            for low in range(0, count, LOGITS_CHUNK):
                targets = following[low : low + LOGITS_CHUNK].astype(np.int64)
                logits = self._logits(hidden[low : low + len(targets)])
                tensors.append(token_logprobs(logits, ship(logits.device, targets)[0], num_top))
                entries.append(entry)
            hidden = hidden[count:]
        return entries, tensors
