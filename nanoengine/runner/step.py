"""LaunchedStep: a step in flight on the device, and the host's work after it has finished.

    launch (ModelRunner)   rows ─ forward ─ sampling ─ download starts        nothing waits
    result (here)          download has arrived ─ plain numbers ─ stored in the rows

The next step may be launched between the two: it takes the sampled tokens from the pool on the
device (`InputBatch.pool`). By then a row may belong to another sequence. A token is therefore
written only to rows that still belong to the sequence that sampled it.

Other outputs (drafts, log-probabilities, processors that follow the tokens) are in
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
        now: returns the current time, for the marks.
        started: when the launch began, by the host's clock [s].
        times: times measured so far; forward and sampling are added from the marks.
        lines: the lines that sample; not set before the step runs.
        tensors: tensors for the host; `SampledTokens.packed` is the first.
        download: copies them to the host; None: they are on the host.
        marks: times before the forward, after it, and after sampling.
        pending: `PendingOutputs` of the StepSampler; None if all rows are plain.
        stores: functions that wait for this step's copies to a tier.
    """

    plan: StepPlan
    rows: InputBatch
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
                self._time()
            if self.pending is not None:
                self.pending.take(self, tensors, result)
            elif tensors:
                self._take(tensors[0], result)
            for wait in self.stores:
                wait()
            self._result, self.pending, self.download = result, None, None
        return self._result

    def _time(self) -> None:
        first, second, third = self.marks
        if isinstance(first, float):
            self.times.forward_s, self.times.sample_s = second - first, third - second
        else:
            from nanoengine.runner.gpu_clock import event_seconds

            self.times.forward_s, self.times.sample_s = event_seconds(self.marks)

    def _take(self, packed: torch.Tensor, result: StepResult) -> None:
        """Writes tokens [2, L] to the host's rows and sorts them by entry of the plan."""
        lines, (token_ids, valid) = self.lines, packed.numpy()
        if self.download is not None:
            self.rows.write(lines, token_ids)
        of_line = zip(lines.entries.tolist(), token_ids.tolist(), valid.tolist(), strict=True)
        for entry, token_id, is_valid in of_line:
            result.token_ids[entry].append(token_id)
            if not is_valid:
                result.errors[entry] = NO_TOKEN
