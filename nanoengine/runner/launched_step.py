"""LaunchedStep: a step that the device has been given, and what the host does when it has finished.

    launch (ModelRunner)   rows ─ forward ─ sampling ─ download starts        nothing waits
    result (here)          download has arrived ─ plain numbers ─ rows and processors learn them

The next step may be launched between the two: it takes the sampled tokens from the pool on the
device (`RowBuffers.pool`). By then a row may have another owner, so a token is told only to a row
that still belongs to the sequence which sampled it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.runner.logits import RowEdits
from nanoengine.runner.row_buffers import RowBuffers, SamplingLines
from nanoengine.runner.sampler import SampledTokens, accept_tokens
from nanoengine.runner.scores import to_records
from nanoengine.runner.transfers import Download, Stopwatch


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step under way. The Executor door's `Launched`.

    Attributes:
        times: what is known so far; the stopwatch adds forward and sampling.
        lines, sampled: who samples, and what; None if nobody does.
        edits: what processors remember of rows, and must see the tokens, by entry of the plan.
        scored_entries: for each tensor of prompt scores, the entry of the plan that it belongs to.
        download: the tensors of `sampled`, then those of the prompt scores.
        stores: each waits for copies to a tier that belong to this step.
    """

    plan: StepPlan
    rows: RowBuffers
    times: StepTimes = field(default_factory=StepTimes)
    lines: SamplingLines | None = None
    sampled: SampledTokens | None = None
    edits: dict[int, RowEdits] = field(default_factory=dict)
    scored_entries: list[int] = field(default_factory=list)
    download: Download | None = None
    stopwatch: Stopwatch | None = None
    stores: list[Callable[[], None]] = field(default_factory=list)
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for the device; the same result each time."""
        if self._result is None:
            self._result = self._finish()
            self.sampled = self.download = None
        return self._result

    def _finish(self) -> StepResult:
        result = StepResult(token_ids=[[] for _ in self.plan.rows], times=self.times)
        tensors = self.download.wait() if self.download is not None else []
        if self.lines is not None and self.sampled is not None:
            self._tell_tokens(self.lines, self.sampled, tensors, result)
        scores = tensors[len(tensors) - len(self.scored_entries) :]
        for entry, tensor in zip(self.scored_entries, scores, strict=True):
            found = result.prompt_logprobs.setdefault(entry, [])
            found += [to_records(line) for line in tensor.tolist()]
        for wait in self.stores:
            wait()
        if self.stopwatch is not None:
            self.times.forward_s, self.times.sample_s = self.stopwatch.seconds()
        return result

    def _tell_tokens(
        self,
        lines: SamplingLines,
        sampled: SampledTokens,
        tensors: list[torch.Tensor],
        result: StepResult,
    ) -> None:
        """Sorts tokens by sequence, keeps accepted ones, and tells rows and processors."""
        plan, fetched = self.plan, sampled.fetch(tensors)
        token_ids = np.array(fetched.token_ids)
        self.rows.write(lines.rows, lines.positions, token_ids, lines.seq_ids)
        over: set[int] = set()  # entries that go no further in this step
        for line, entry in enumerate(lines.entries.tolist()):
            tokens = result.token_ids[entry]
            drafts = plan.draft_token_ids.get(plan.rows[entry], ())
            # Why errors: the next step meets this one again, behind nothing but known tokens.
            if tokens and (tokens[-1] != drafts[len(tokens) - 1] or line in fetched.errors):
                over.add(entry)  # the draft before this line was wrong
            if entry in over:
                continue
            tokens.append(fetched.token_ids[line])
            if line in fetched.errors:
                result.errors[entry] = fetched.errors[line]
            if line in fetched.logprobs:
                result.logprobs.setdefault(entry, []).append(fetched.logprobs[line])
        accept_tokens(self.edits, result.token_ids)
