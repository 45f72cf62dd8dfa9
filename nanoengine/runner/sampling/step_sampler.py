"""StepSampler: samples steps in which a row needs more than the most likely token.

    update   every row's parameters, once one row is not plain
    run      drafts, edited logits, draws, log-probabilities   Sampler, PromptScorer, Pooler
    take     accepted drafts; passes the tokens to processors and rows

Made by the ModelRunner at the first row that is not plain. Steps of plain rows skip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.input_batch import InputBatch, Ints
from nanoengine.runner.sampling.greedy import is_plain, pack_found
from nanoengine.runner.sampling.logits_processors import LogitsProcessor, ProcessorStates
from nanoengine.runner.sampling.logprobs import PromptScorer, to_records
from nanoengine.runner.sampling.sampler import FetchedTokens, SampledTokens, Sampler
from nanoengine.runner.step import LaunchedStep

if TYPE_CHECKING:
    from nanoengine.runner.pooling import Pooler


class StepSampler:
    """Samples steps, and keeps the sampling state of every row.

    Args:
        rows, model: the runner's.
        processors: logits processors, run after those for SamplingParams.
        all_rows: plain rows are sampled here too, because all logits are processed.

    Attributes:
        latest: the previous step, whose tokens processors must know.
        pooler: for rows whose hidden states are pooled; None before the first such row.
    """

    def __init__(
        self,
        rows: InputBatch,
        model: CausalLM,
        processors: Sequence[LogitsProcessor],
        *,
        all_rows: bool,
    ) -> None:
        config, num_rows = model.config, len(rows.seq_ids)
        self.rows, self.model, self.all_rows = rows, model, all_rows
        self.sampler = Sampler(config.vocab_size, num_rows, config.eos_token_ids, processors)
        self.scorer = PromptScorer(rows, model.logits)
        self._is_sampled_here = np.full(num_rows, all_rows)
        self.latest: LaunchedStep | None = None
        self.pooler: Pooler | None = None

    def update(self, plan: StepPlan) -> None:
        """Applies the plan's row changes."""
        for row in plan.released:
            self.sampler.release(row)
            self.scorer.release(row)
            if self.pooler is not None:
                self.pooler.release(row)
        for new in plan.admitted:
            self._is_sampled_here[new.row] = self.all_rows or not is_plain(new)
            if new.params.pooling:
                if self.pooler is None:
                    from nanoengine.runner.pooling import Pooler

                    self.pooler = Pooler()
                self.pooler.admit(new)
                continue
            self.sampler.admit(new)
            self.scorer.admit(new)
        for fork in plan.forks:
            self._is_sampled_here[fork.row] = self._is_sampled_here[fork.parent_row]
            self.sampler.fork(fork)
        for row, position, _ in plan.chosen_tokens:
            self.sampler.rewrite(row, self.rows.token_ids[row, : position + 1])

    def scored(self, plan: StepPlan) -> tuple[Ints, Ints] | None:
        """Positions, other than the sampling ones, whose hidden states are needed, in the form of
        `InputBatch.make_batch`."""
        scored = self.scorer.scored(plan)
        return scored if self.pooler is None else self.pooler.join(plan, scored)

    def samples(self, plan: StepPlan) -> bool:
        """Whether a row of this step is not plain."""
        return bool(plan.draft_token_ids) or bool(self._is_sampled_here[plan.rows].any())

    def run(
        self, step: LaunchedStep, hidden: torch.Tensor, scored: tuple[Ints, Ints] | None
    ) -> list[torch.Tensor]:
        """Samples from a step's hidden states; returns the tensors for the host.

        Args:
            hidden: states of the lines, then of the scored positions, [.., hidden_size].
            scored: the result of the method `scored`.
        """
        sampling, scoring = hidden.tensor_split([len(step.lines.entries)])
        sampled, logits = None, None
        if len(sampling):
            sampled = self._most_likely(step, sampling)
            logits = None if sampled else self.model.logits(sampling)  # [L, V]
        step.marks.append(step.now())
        tensors: list[torch.Tensor] = []
        if logits is not None:
            sampled = self.sample(step, logits)
        if sampled is not None:
            # Why not with drafts: the host finds the number of accepted drafts, in `take`.
            if not step.plan.draft_token_ids:
                self.rows.keep(step.lines, sampled.token_ids)
            tensors += self.await_tokens(step, sampled)
        if scored is not None:
            step.pending = step.pending or PendingOutputs()
            if self.pooler is not None:
                scoring, ended = self.pooler.take(step.plan, scored[1], scoring)
                step.pending.pooled_entries = {i: found.shape for i, found in ended.items()}
                tensors += [torch.cat([one.flatten() for one in ended.values()])] if ended else []
            step.pending.scored_entries, scores = self.scorer.score(step.plan, scored, scoring)
            tensors += scores
        step.marks.append(step.now())
        return tensors

    def _most_likely(self, step: LaunchedStep, hidden: torch.Tensor) -> SampledTokens | None:
        """The tokens of all lines, if all are greedy and the model finds them without all
        logits."""
        rows, errors = step.lines.rows, dict[int, str]()
        if not self.sampler.only_masked(rows):
            return None

        def masks() -> np.ndarray:
            self._learn_tokens()
            found, failed = self.sampler.masks(rows, step.plan.draft_token_ids)
            errors.update(failed)
            return found

        is_masked = self.sampler.has_processors[rows].any()
        found = self.model.most_likely(hidden, masks if is_masked else None)
        return None if found is None else SampledTokens(packed=pack_found(*found), errors=errors)

    def sample(self, step: LaunchedStep, logits: torch.Tensor) -> SampledTokens:
        """Samples one token per line."""
        rows, positions = step.lines.rows, step.lines.positions
        if self.sampler.has_processors[rows].any():
            self._learn_tokens()
        return self.sampler.sample(logits, rows, positions, step.plan.draft_token_ids)

    def _learn_tokens(self) -> None:
        """Waits for the tokens of the previous step, which processors must know.

        Why not before the forward: the device runs the forward during the wait.
        """
        if self.latest is not None:
            self.latest.result()

    def await_tokens(self, step: LaunchedStep, sampled: SampledTokens) -> list[torch.Tensor]:
        """Records what to do with the tokens when they arrive; returns the tensors for the host."""
        step.pending = PendingOutputs(
            sampled=sampled, processor_states=self.sampler.states_of(step.plan.rows)
        )
        return sampled.tensors


@dataclass(slots=True, kw_only=True)
class PendingOutputs:
    """Outputs that are added to a step's result when the device has finished.

    Attributes:
        sampled: the sampled tokens; None if no row samples.
        edits: processor states that must accept the tokens, by entry of the plan.
        pooled_entries: entries of the plan with the shapes of their vectors, whose elements come in
            one tensor, if there are any.
        scored_entries: for each tensor of prompt scores, the entry of the plan that it belongs to.
    """

    sampled: SampledTokens | None = None
    processor_states: dict[int, ProcessorStates] = field(default_factory=dict)
    pooled_entries: dict[int, torch.Size] = field(default_factory=dict)
    scored_entries: list[int] = field(default_factory=list)

    def take(self, step: LaunchedStep, tensors: list[torch.Tensor], result: StepResult) -> None:
        """Fills the result. The tensors are those in `sampled`, then one with all vectors if there
        are any, then the prompt scores."""
        if self.pooled_entries:
            from nanoengine.runner.pooling import add_to_result

            add_to_result(self.pooled_entries, tensors[-1 - len(self.scored_entries)], result)
        scores = tensors[len(tensors) - len(self.scored_entries) :]
        for entry, tensor in zip(self.scored_entries, scores, strict=True):
            found = result.prompt_logprobs.setdefault(entry, [])
            found += [to_records(line) for line in tensor.tolist()]
        if self.sampled is not None:
            self._tell_tokens(step, self.sampled.fetch(tensors), result)

    def _tell_tokens(self, step: LaunchedStep, fetched: FetchedTokens, result: StepResult) -> None:
        """Sorts tokens by sequence, keeps accepted ones, and passes them to rows and processors."""
        plan, lines = step.plan, step.lines
        step.rows.write(lines, np.array(fetched.token_ids))
        over: set[int] = set()  # entries that go no further in this step
        for line, entry in enumerate(lines.entries.tolist()):
            tokens = result.token_ids[entry]
            drafts = plan.draft_token_ids.get(plan.rows[entry], ())
            # Why errors: the next step repeats this line, after known tokens only.
            if tokens and (tokens[-1] != drafts[len(tokens) - 1] or line in fetched.errors):
                over.add(entry)  # the draft before this line was wrong
            if entry in over:
                continue
            tokens.append(fetched.token_ids[line])
            if line in fetched.errors:
                result.errors[entry] = fetched.errors[line]
            if line in fetched.logprobs:
                result.logprobs.setdefault(entry, []).append(fetched.logprobs[line])
        for entry, processor_states in self.processor_states.items():
            processor_states.accept(result.token_ids[entry])
