"""Pooler: hidden states of a step to vectors, for the rows that ask for one.

    hidden [.., hidden_size] of a step's pooled positions
      last, cls   one position's                          goes on as it is
      mean        the sum of a chunk, added to the row's  is divided at the end of the prompt
      all         those of a chunk, behind the row's      go on as they are

Made by `StepSampler` at the first pooled row. A prompt that is preempted begins anew with its row,
and so does its sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, StepPlan, StepResult
from nanoengine.runner.row_buffers import Ints
from nanoengine.settings.pooling import States

NOT_FINITE = "the hidden states hold NaN or infinity, so the prompt has no vector"


@dataclass(slots=True)
class _Row:
    """A row's prompt, and what its computed part has come to, [hidden_size] or more of them."""

    pooling: States
    num_tokens: int
    found: torch.Tensor | None = None

    def positions(self, start: int, count: int) -> tuple[int, int]:
        """Of so many tokens from `start` on: how many are passed over, and how many count then."""
        if self.pooling == "last":
            return count - 1, int(start + count == self.num_tokens)
        return 0, int(start == 0) if self.pooling == "cls" else count

    def take(self, hidden: torch.Tensor) -> None:
        """Adds the hidden states of a step's positions."""
        if self.pooling == "mean":
            chunk = hidden.sum(0, dtype=torch.float64)
            self.found = chunk if self.found is None else self.found + chunk
        elif self.pooling == "all":
            self.found = hidden.clone() if self.found is None else torch.cat((self.found, hidden))
        elif len(hidden):
            self.found = hidden[0].clone()

    def vector(self) -> torch.Tensor:
        """[hidden_size], or of all tokens [num_tokens, hidden_size], float32."""
        return (self.found / (self.num_tokens if self.pooling == "mean" else 1)).float()


class Pooler:
    """The pooled rows of a runner."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def admit(self, sequence: AdmittedSequence) -> None:
        """Notes a row that is pooled."""
        self._rows[sequence.row] = _Row(sequence.params.pooling, sequence.num_prompt_tokens)

    def release(self, row: int) -> None:
        """Forgets a row."""
        self._rows.pop(row, None)

    def join(self, plan: StepPlan, scored: tuple[Ints, Ints] | None) -> tuple[Ints, Ints] | None:
        """The positions of `PromptScorer.scored`, and those that pooled rows need beside them."""
        if self._rows.keys().isdisjoint(plan.rows):
            return scored
        skipped, counts = np.zeros((2, len(plan.rows)), np.int64) if scored is None else scored
        for entry, row in enumerate(plan.rows):
            if row in self._rows:
                start, count = plan.starts[entry], plan.num_scheduled_tokens[entry]
                skipped[entry], counts[entry] = self._rows[row].positions(start, count)
        return skipped, counts

    def take(
        self, plan: StepPlan, counts: Ints, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Takes pooled rows' part of the hidden states of a step's scored positions.

        Args:
            counts: [E], how many of them each entry has; 0 afterwards where they were taken.

        Returns:
            The hidden states that are left, and by entry the vectors of the prompts that end.
        """
        parts, ended = list(hidden.split(counts.tolist())), dict[int, torch.Tensor]()
        for entry, row in enumerate(plan.rows):
            pooled = self._rows.get(row)
            if pooled is not None:
                pooled.take(parts[entry])
                parts[entry], counts[entry] = parts[entry][:0], 0
                if plan.starts[entry] + plan.num_scheduled_tokens[entry] == pooled.num_tokens:
                    ended[entry] = pooled.vector()
        return torch.cat(parts), ended


def tell(shapes: Mapping[int, torch.Size], numbers: torch.Tensor, result: StepResult) -> None:
    """Puts vectors into a step's result.

    Args:
        shapes: of the vector of each entry.
        numbers: of all of them, one behind the other, on the host now.
    """
    parts = numbers.split([shape.numel() for shape in shapes.values()])
    for (entry, shape), vector in zip(shapes.items(), parts, strict=True):
        result.pooled[entry] = vector.view(shape).numpy()
        if not vector.isfinite().all():
            result.errors[entry] = NOT_FINITE
