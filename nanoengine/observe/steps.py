"""StepObserver: what a run does, step by step, with the sequences themselves.

    scheduler ── on_request, on_plan, on_step ──► step(Step)

A plan names rows, and a row's sequence may be gone once the step is committed. So this notes who
held the rows when a step was planned. Base of `explain`, of the export for Perfetto and of the
viewer's data.

Told by a replay (`trace_reader.Replay.run`), or, of an engine that runs, by `attend` and
`LLMEngine.observers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.observe.metrics import step_seconds
from nanoengine.observe.taps import Taps


class Who(NamedTuple):
    """Whose a sequence is; `fork` is "sequence 12" unless it is the first of its request."""

    request_id: str
    priority: int
    fork: str


class Step(NamedTuple):
    """One step that was committed.

    Attributes:
        time_s: after the commit, since the observer was made.
        rows: row -> the sequence that held it once the step was planned.
        arrived: requests queued since the step before.
        ended: sequences that have ended since the step before.
    """

    plan: StepPlan
    result: StepResult
    time_s: float
    rows: dict[int, Sequence]
    arrived: list[Request]
    ended: list[Sequence]

    @property
    def start_s(self) -> float:
        """When its planning began."""
        return self.time_s - step_seconds(self.result.times)

    def computed(self) -> Iterable[tuple[Sequence, int, int, int]]:
        """Of each row that the step computes: the sequence, its first token, how many tokens and
        how many logits."""
        plan, rows = self.plan, self.rows
        return zip(map(rows.__getitem__, plan.rows), plan.starts, plan.num_scheduled_tokens,
                   plan.num_logits, strict=True)  # fmt: skip


class StepObserver:
    """Calls `step` with each step.

    Args:
        scheduler: of the run.
        clock: returns seconds.

    Attributes:
        who: sequence -> whose it is; those that have ended too.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = scheduler
        self.who: dict[int, Who] = {}
        self.start_s, self._clock = clock(), clock
        self._planned: dict[int, dict[int, Sequence]] = {}  # step -> who holds which row
        self._arrived: list[Request] = []
        self._know(scheduler.running)

    def step(self, step: Step) -> None:
        """Takes one step."""
        raise NotImplementedError

    def on_request(self, request: Request) -> None:
        """A request was queued."""
        self._arrived.append(request)
        self._know(request.sequences)

    def on_plan(self, plan: StepPlan) -> None:
        """A step was planned."""
        self._planned[plan.step] = {seq.row: seq for seq in self.scheduler.running}
        if plan.forks or plan.admitted:
            self._know(self.scheduler.running)

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """A step was committed; one that was planned before this began is passed over."""
        if plan.step in self._planned:
            rows = self._planned[plan.step]
            self._planned = {step: r for step, r in self._planned.items() if step > plan.step}
            arrived, self._arrived = self._arrived, []
            ended = self.scheduler.last_ended
            self._know(ended)
            self.step(Step(plan, result, self._clock() - self.start_s, rows, arrived, ended))

    def attend(self) -> Taps:
        """Is told of the requests and plans of an engine that runs, until the taps are removed; of
        steps it is told as one of `LLMEngine.observers`."""

        def add(call: Any, request: Request, **more: Any) -> None:
            call(request, **more)
            self.on_request(request)

        def schedule(call: Any) -> StepPlan:
            plan: StepPlan = call()
            self.on_plan(plan)
            return plan

        return Taps((self.scheduler, "add", add), (self.scheduler, "schedule", schedule))

    def name(self, seq_id: int) -> str:
        """ "request 7", or "sequence 12 of request 7" if it is not the first of it."""
        if seq_id not in self.who:
            return f"sequence {seq_id}"
        request_id, _, fork = self.who[seq_id]
        return f"{fork} of request {request_id}" if fork else f"request {request_id}"

    def _know(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq.seq_id not in self.who:
                request, fork = seq.request, f"sequence {seq.seq_id}" if seq.index else ""
                self.who[seq.seq_id] = Who(request.request_id, request.priority, fork)
