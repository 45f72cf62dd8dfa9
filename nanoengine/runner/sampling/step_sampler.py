"""StepSampler: samples steps in which a row needs more than the most likely token.

    update    keeps the parameters of all rows
    run       samples and scores on the device        Sampler, PromptScorer, Pooler
    fill      accepts drafts; passes the tokens to logits processors and the InputBatch

Made by the ModelRunner at the first row that is not plain. Steps of only plain rows skip `run`.
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
from nanoengine.runner.sampling.greedy import is_plain, pack_greedy
from nanoengine.runner.sampling.logits_processors import LogitsProcessor, ProcessorStates
from nanoengine.runner.sampling.logprobs import PromptScorer, to_records
from nanoengine.runner.sampling.sampler import FetchedTokens, SampledTokens, Sampler
from nanoengine.runner.step import LaunchedStep

if TYPE_CHECKING:
    from nanoengine.runner.pooling import Pooler


class StepSampler:
    """Samples steps, and keeps the sampling state of every row.

    Args:
        input_batch, model: the runner's.
        processors: logits processors, run after those for SamplingParams.
        all_rows: samples plain rows too, because `processors` change all logits.

    Attributes:
        previous_step: the previous step, whose tokens logits processors must know.
        pooler: for rows whose hidden states are pooled; None before the first such row.
    """

    def __init__(
        self,
        input_batch: InputBatch,
        model: CausalLM,
        processors: Sequence[LogitsProcessor],
        *,
        all_rows: bool,
    ) -> None:
        config, num_rows = model.config, len(input_batch.seq_ids)
        self.input_batch, self.model, self.all_rows = input_batch, model, all_rows
        self.sampler = Sampler(config.vocab_size, num_rows, config.eos_token_ids, processors)
        self.scorer = PromptScorer(input_batch, model.logits)
        self._needs_sampler = np.full(num_rows, all_rows)
        self.previous_step: LaunchedStep | None = None
        self.pooler: Pooler | None = None

    def update(self, plan: StepPlan) -> None:
        """Applies the plan's row changes."""
        for row in plan.released:
            self.sampler.release(row)
            self.scorer.release(row)
            if self.pooler is not None:
                self.pooler.release(row)
        for new in plan.admitted:
            self._needs_sampler[new.row] = self.all_rows or not is_plain(new)
            if new.params.pooling:
                if self.pooler is None:
                    from nanoengine.runner.pooling import Pooler

                    self.pooler = Pooler()
                self.pooler.admit(new)
                continue
            self.sampler.admit(new)
            self.scorer.admit(new)
        for fork in plan.forks:
            self._needs_sampler[fork.row] = self._needs_sampler[fork.parent_row]
            self.sampler.fork(fork)
        for row, position, _ in plan.chosen_tokens:
            self.sampler.rewrite(row, self.input_batch.token_ids[row, : position + 1])

    def scored(self, plan: StepPlan) -> tuple[Ints, Ints] | None:
        """Further positions whose hidden states are needed, as `InputBatch.make_batch` takes
        them."""
        scored = self.scorer.scored(plan)
        return scored if self.pooler is None else self.pooler.merge(plan, scored)

    def handles(self, plan: StepPlan) -> bool:
        """Whether a row of this step is not plain."""
        return bool(plan.draft_token_ids) or bool(self._needs_sampler[plan.rows].any())

    def run(
        self, step: LaunchedStep, hidden: torch.Tensor, scored: tuple[Ints, Ints] | None
    ) -> list[torch.Tensor]:
        """Samples from a step's hidden states; returns the tensors for the host.

        Args:
            hidden: hidden states of the sampled positions, then of the scored ones, [..,
                hidden_size].
            scored: from the method `scored`.
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
            # Why not with drafts: `fill` finds the number of accepted ones, on the host.
            if not step.plan.draft_token_ids:
                self.input_batch.store_sampled(step.lines, sampled.token_ids)
            tensors += self.expect_tokens(step, sampled)
        if scored is not None:
            step.pending = step.pending or PendingOutputs()
            if self.pooler is not None:
                scoring, pooled = self.pooler.pool(step.plan, scored[1], scoring)
                step.pending.pooled_entries = {i: vector.shape for i, vector in pooled.items()}
                tensors += [torch.cat([x.flatten() for x in pooled.values()])] if pooled else []
            step.pending.scored_entries, scores = self.scorer.score(step.plan, scored, scoring)
            tensors += scores
        step.marks.append(step.now())
        return tensors

    def _most_likely(self, step: LaunchedStep, hidden: torch.Tensor) -> SampledTokens | None:
        """The tokens of all lines if all are greedy, and the model can find them without computing
        all logits; else None."""
        rows, errors = step.lines.rows, dict[int, str]()
        if not self.sampler.needs_only_argmax(rows):
            return None

        def masks() -> np.ndarray:
            self._wait_for_previous_step()
            bits, failed = self.sampler.masks(rows, step.plan.draft_token_ids)
            errors.update(failed)
            return bits

        is_masked = self.sampler.has_processors[rows].any()
        found = self.model.most_likely(hidden, masks if is_masked else None)
        return None if found is None else SampledTokens(packed=pack_greedy(*found), errors=errors)

    def sample(self, step: LaunchedStep, logits: torch.Tensor) -> SampledTokens:
        """Samples one token per line."""
        rows, positions = step.lines.rows, step.lines.positions
        if self.sampler.has_processors[rows].any():
            self._wait_for_previous_step()
        return self.sampler.sample(logits, rows, positions, step.plan.draft_token_ids)

    def _wait_for_previous_step(self) -> None:
        """Waits for the tokens of the previous step, which logits processors must know.

        Why after the launch of the forward: the device runs it during the wait.
        """
        if self.previous_step is not None:
            self.previous_step.result()

    def expect_tokens(self, step: LaunchedStep, sampled: SampledTokens) -> list[torch.Tensor]:
        """Sets `step.pending`, which handles the tokens when they arrive; returns the tensors for
        the host."""
        step.pending = PendingOutputs(
            sampled=sampled, processor_states=self.sampler.states_of(step.plan.rows)
        )
        return sampled.tensors


@dataclass(slots=True, kw_only=True)
class PendingOutputs:
    """Outputs that are added to a step's result when the device has finished.

    Attributes:
        sampled: the sampled tokens; None if no row samples.
        processor_states: the states that must accept the tokens, by entry of the plan.
        pooled_entries: entry of the plan -> the shape of its vector. One tensor has the elements of
            all vectors.
        scored_entries: the entry of the plan for each tensor of prompt scores.
    """

    sampled: SampledTokens | None = None
    processor_states: dict[int, ProcessorStates] = field(default_factory=dict)
    pooled_entries: dict[int, torch.Size] = field(default_factory=dict)
    scored_entries: list[int] = field(default_factory=list)

    def fill(self, step: LaunchedStep, tensors: list[torch.Tensor], result: StepResult) -> None:
        """Adds all outputs to the result. `tensors` are the tensors of `sampled`, then one with all
        vectors if there are any, then the prompt scores."""
        if self.pooled_entries:
            from nanoengine.runner.pooling import add_to_result

            add_to_result(self.pooled_entries, tensors[-1 - len(self.scored_entries)], result)
        scores = tensors[len(tensors) - len(self.scored_entries) :]
        for entry, tensor in zip(self.scored_entries, scores, strict=True):
            logprobs = result.prompt_logprobs.setdefault(entry, [])
            logprobs += [to_records(line) for line in tensor.tolist()]
        if self.sampled is not None:
            self._add_tokens(step, self.sampled.fetch(tensors), result)

    def _add_tokens(self, step: LaunchedStep, fetched: FetchedTokens, result: StepResult) -> None:
        """Stores all sampled tokens in the InputBatch. Adds the accepted ones to the result, by
        entry, and passes them to the logits processors."""
        plan, lines = step.plan, step.lines
        step.input_batch.write_host(lines, np.array(fetched.token_ids))
        rejected: set[int] = set()  # entries whose further tokens are dropped
        for line, entry in enumerate(lines.entries.tolist()):
            tokens = result.token_ids[entry]
            drafts = plan.draft_token_ids.get(plan.rows[entry], ())
            # Why errors too: the next step samples this line again, without drafts before it.
            if tokens and (tokens[-1] != drafts[len(tokens) - 1] or line in fetched.errors):
                rejected.add(entry)
            if entry in rejected:
                continue
            tokens.append(fetched.token_ids[line])
            if line in fetched.errors:
                result.errors[entry] = fetched.errors[line]
            if line in fetched.logprobs:
                result.logprobs.setdefault(entry, []).append(fetched.logprobs[line])
        for entry, processor_states in self.processor_states.items():
            processor_states.accept(result.token_ids[entry])
