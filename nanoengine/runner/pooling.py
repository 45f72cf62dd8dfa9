"""Pooler: computes embeddings from a step's hidden states, for rows with pooling.

    hidden [.., hidden_size] of a step's pooled positions
      last, cls   one position
      mean        sums of chunks, divided by the length at the end of the prompt
      all         all positions, chunk after chunk

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

NOT_FINITE = "the hidden states contain NaN or infinity, so the prompt has no vector"


@dataclass(slots=True)
class _PooledRow:
    """A row's prompt, and the result so far: None, or one or more vectors [hidden_size]."""

    pooling: States
    num_tokens: int
    value: torch.Tensor | None = None

    def positions(self, start: int, count: int) -> tuple[int, int]:
        """For `count` tokens from `start` on: how many positions are skipped, and how many are
        pooled."""
        if self.pooling == "last":
            return count - 1, int(start + count == self.num_tokens)
        return 0, int(start == 0) if self.pooling == "cls" else count

    def add(self, hidden: torch.Tensor) -> None:
        """Adds the hidden states of a step's positions."""
        if self.pooling == "mean":
            chunk = hidden.sum(0, dtype=torch.float64)
            self.value = chunk if self.value is None else self.value + chunk
        elif self.pooling == "all":
            self.value = hidden.clone() if self.value is None else torch.cat((self.value, hidden))
        elif len(hidden):
            self.value = hidden[0].clone()

    def vector(self) -> torch.Tensor:
        """The result in float32: [hidden_size], or [num_tokens, hidden_size] for "all"."""
        return (self.value / (self.num_tokens if self.pooling == "mean" else 1)).float()


class Pooler:
    """The pooled rows of a runner."""

    def __init__(self) -> None:
        self._rows: dict[int, _PooledRow] = {}

    def admit(self, sequence: AdmittedSequence) -> None:
        """Adds a row."""
        self._rows[sequence.row] = _PooledRow(sequence.params.pooling, sequence.num_prompt_tokens)

    def release(self, row: int) -> None:
        """Removes a row."""
        self._rows.pop(row, None)

    def merge(self, plan: StepPlan, scored: tuple[Ints, Ints] | None) -> tuple[Ints, Ints] | None:
        """Merges the positions that pooled rows need into the result of `PromptScorer.scored`."""
        if self._rows.keys().isdisjoint(plan.rows):
            return scored
        skipped, counts = np.zeros((2, len(plan.rows)), np.int64) if scored is None else scored
        for entry, row in enumerate(plan.rows):
            if row in self._rows:
                start, count = plan.starts[entry], plan.num_scheduled_tokens[entry]
                skipped[entry], counts[entry] = self._rows[row].positions(start, count)
        return skipped, counts

    def pool(
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
                pooled.add(parts[entry])
                parts[entry], counts[entry] = parts[entry][:0], 0
                if plan.starts[entry] + plan.num_scheduled_tokens[entry] == pooled.num_tokens:
                    ended[entry] = pooled.vector()
        return torch.cat(parts), ended


def add_to_result(
    shapes: Mapping[int, torch.Size], elements: torch.Tensor, result: StepResult
) -> None:
    """Adds vectors to a step's result.

    Args:
        shapes: shape of the vector of each entry.
        elements: of all vectors, concatenated, on the host.
    """
    parts = elements.split([shape.numel() for shape in shapes.values()])
    for (entry, shape), vector in zip(shapes.items(), parts, strict=True):
        result.pooled[entry] = vector.view(shape).numpy()
        if not vector.isfinite().all():
            result.errors[entry] = NOT_FINITE
