"""Pooler: makes vectors from a step's hidden states, for the rows that ask for one.

    hidden [.., hidden_size] of a step's pooled positions
      last, cls   of one position                          copied
      mean        sum of the chunk, added to the row's     divided at the end of the prompt
      all         of all positions, appended to the row's  copied

Made by `StepSampler` at the first pooled row. A prompt that is preempted starts again with a new
row and a new sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.core.plan import AdmittedSequence, StepPlan, StepResult
from nanoengine.runner.input_batch import Ints
from nanoengine.settings.pooling import States

NOT_FINITE = "the hidden states hold NaN or infinity, so the prompt has no vector"


@dataclass(slots=True)
class _Row:
    """A row's prompt and the result of its computed part: one or more vectors [hidden_size]."""

    pooling: States
    num_tokens: int
    found: torch.Tensor | None = None

    def positions(self, start: int, count: int) -> tuple[int, int]:
        """For `count` tokens from `start` on: how many positions are skipped, and how many are
        pooled."""
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
        """The result in float32: [hidden_size], or [num_tokens, hidden_size] for "all"."""
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
        """Adds the positions that pooled rows need to the positions of `PromptScorer.scored`."""
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
        """Pools the hidden states of a step's scored positions that belong to pooled rows.

        Args:
            counts: [E], number of scored positions per entry; set to 0 for pooled rows.

        Returns:
            The remaining hidden states, and by entry the vectors of prompts that end in this step.
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


def add_to_result(
    shapes: Mapping[int, torch.Size], numbers: torch.Tensor, result: StepResult
) -> None:
    """Puts vectors into a step's result.

    Args:
        shapes: shape of the vector of each entry.
        numbers: elements of all vectors, concatenated, on the host.
    """
    parts = numbers.split([shape.numel() for shape in shapes.values()])
    for (entry, shape), vector in zip(shapes.items(), parts, strict=True):
        result.pooled[entry] = vector.view(shape).numpy()
        if not vector.isfinite().all():
            result.errors[entry] = NOT_FINITE
