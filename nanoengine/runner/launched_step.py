"""LaunchedStep: a step that the device has been given, and what the host does when it has finished.

    launch (ModelRunner)   rows ─ forward ─ sampling ─ downloads start        nothing waits
    result (here)          downloads have arrived ─ plain numbers ─ rows and processors learn them

The next step may be launched between the two: it takes the sampled tokens from the pool on the
device (`RowBuffers.pool`). By then a row may have another owner, so tokens are told only
to those rows that still belong to the sequence which sampled them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nanoengine.core.plan import StepPlan, StepResult, StepTimes, TokenLogprob
from nanoengine.runner.row_buffers import Ints, RowBuffers, SamplingLines
from nanoengine.runner.sampler import Followers, SampledTokens, to_records
from nanoengine.runner.transfers import Download, Stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Log-probabilities of prompt tokens of one entry of a plan: which of the step's downloads
    hold them, and how many top ones are reported."""

    entry: int
    num_top: int
    downloads: range


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step under way. The Executor door's `Launched`.

    Attributes:
        times: what is known so far; the stopwatch adds forward and sampling.
        lines, owners, sampled, followers: of the rows that sample; None if there are none.
        download: the tensors of `sampled`, then those that `scores` names.
        stores: each waits for copies to a tier that belong to this step.
    """

    plan: StepPlan
    rows: RowBuffers
    times: StepTimes = field(default_factory=StepTimes)
    lines: SamplingLines | None = None
    owners: Ints | None = None
    sampled: SampledTokens | None = None
    followers: Followers | None = None
    scores: list[PromptScores] = field(default_factory=list)
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
        if self.sampled is not None:
            self._tell_tokens(self.sampled, tensors, result)
        for scores in self.scores:
            found: list[list[TokenLogprob]] = []
            for i in scores.downloads:
                found += [to_records(line, scores.num_top) for line in tensors[i].tolist()]
            result.prompt_logprobs[scores.entry] = found
        for wait in self.stores:
            wait()
        if self.stopwatch is not None:
            self.times.forward_s, self.times.sample_s = self.stopwatch.seconds()
        return result

    def _tell_tokens(self, sampled: SampledTokens, tensors: list, result: StepResult) -> None:
        """Sorts tokens by sequence, keeps accepted ones, and tells rows and processors."""
        lines, plan = self.lines, self.plan
        assert lines is not None and self.owners is not None and self.followers is not None
        fetched = sampled.fetch(tensors)
        self.rows.write(lines.rows, lines.positions, np.array(fetched.token_ids), self.owners)
        for line, entry in enumerate(lines.entries.tolist()):
            tokens = result.token_ids[entry]
            drafts = plan.draft_token_ids.get(plan.rows[entry], ())
            if tokens and tokens[-1] != drafts[len(tokens) - 1]:
                continue  # the draft before this line was wrong
            tokens.append(fetched.token_ids[line])
            if line in fetched.errors:
                result.errors[entry] = fetched.errors[line]
            if line in fetched.logprobs:
                result.logprobs.setdefault(entry, []).append(fetched.logprobs[line])
        self.followers.accept(result.token_ids)
