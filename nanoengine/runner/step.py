"""LaunchedStep: a step in flight on the device, and the host's work after it has finished.

    launch (ModelRunner)   batch ─ forward ─ sampling ─ download starts       nothing waits
    result (here)          download has arrived ─ token ids ─ stored in the InputBatch

The next step may be launched between the two: it takes the sampled tokens from the pool on the
device (`InputBatch.pool`). By then a row may belong to another sequence. A token is therefore
stored only in rows that still belong to the sequence that sampled it.

All other outputs (drafts, log-probabilities, tokens for logits processors) are handled in
sampling/step_sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.runner.input_batch import InputBatch, SamplingIndices
from nanoengine.runner.sampling.greedy import NO_TOKEN
from nanoengine.runner.transfers import Download

Mark = float | torch.cuda.Event
"""A point in time: seconds of the host's clock, or an event of a GPU."""


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step in flight; implements `Launched`.

    Attributes:
        input_batch: the runner's.
        now: returns the current time, for the marks.
        started: when the launch began, by the host's clock [s].
        times: times measured so far; forward and sampling are added from the marks.
        lines: the rows of logits that sample; set when the step runs.
        tensors: the outputs; `SampledTokens.packed` is the first.
        download: copies them to the host; None: they are there already.
        marks: times before the forward, after it, and after sampling.
        pending: `PendingOutputs` of the StepSampler; None: all rows are plain.
        stores: functions that wait for this step's stores of blocks to a tier.
    """

    plan: StepPlan
    input_batch: InputBatch
    now: Callable[[], Mark]
    started: float
    times: StepTimes = field(default_factory=StepTimes)
    lines: SamplingIndices = field(init=False, repr=False)
    tensors: list[torch.Tensor] = field(default_factory=list)
    download: Download | None = None
    marks: list[Mark] = field(default_factory=list)
    pending: Any = None
    stores: list[Callable[[], None]] = field(default_factory=list)
    _result: StepResult | None = None

    def result(self) -> StepResult:
        """Waits for the device; returns the same result at each call."""
        if self._result is None:
            result = StepResult(token_ids=[[] for _ in self.plan.rows], times=self.times)
            tensors = self.tensors if self.download is None else self.download.wait()
            if self.marks:
                self._set_times()
            if self.pending is not None:
                self.pending.fill(self, tensors, result)
            elif tensors:
                self._add_tokens(tensors[0], result)
            for wait in self.stores:
                wait()
            self._result, self.pending, self.download = result, None, None
        return self._result

    def _set_times(self) -> None:
        first, second, third = self.marks
        if isinstance(first, float):
            self.times.forward_s, self.times.sample_s = second - first, third - second
        else:
            from nanoengine.runner.gpu_clock import event_seconds

            self.times.forward_s, self.times.sample_s = event_seconds(self.marks)

    def _add_tokens(self, packed: torch.Tensor, result: StepResult) -> None:
        """Stores tokens [2, L] in the InputBatch and in the result, by entry of the plan."""
        lines, (token_ids, valid) = self.lines, packed.numpy()
        if self.download is not None:
            self.input_batch.write_host(lines, token_ids)
        columns = lines.entries.tolist(), token_ids.tolist(), valid.tolist()
        for entry, token_id, is_valid in zip(*columns, strict=True):
            result.token_ids[entry].append(token_id)
            if not is_valid:
                result.errors[entry] = NO_TOKEN
