"""StepObserver: what a run does, step by step, with the sequences themselves.

    scheduler ── on_request, on_plan, on_step ──► step(Step)

A plan names rows, and a row's sequence may be gone once the step is committed. So this notes who
held the rows when a step was planned. Base of `explain` and of the viewer's data.

Called by a replay (`trace_reader.Replay.run`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.observe.metrics import step_seconds

Computed = tuple[Sequence, int, int, int]
"""What a step computes: of which sequence, its first token, how many tokens, how many logits."""


def is_decode(seq: Sequence, start: int, num_tokens: int, num_logits: int) -> bool:
    """Whether a row computes a token that was sampled, with the drafts behind it."""
    return num_tokens <= num_logits and start >= seq.num_prompt_tokens


class Who(NamedTuple):
    """Whose a sequence is: its request, and its place among the sequences of that.

    Why not the sequence: a run has any number of them, each with its tokens.
    """

    request_id: str
    priority: int
    index: int


class Step(NamedTuple):
    """One step that was committed.

    Attributes:
        time_s: after the commit, since the observer was made.
        rows: row -> the sequence that held it once the step was planned.
        seen: what `look` saw then, behind that of steps that have failed since the last commit.
        arrived: requests queued since the step before.
        ended: sequences that have ended since the step before.
    """

    plan: StepPlan
    result: StepResult
    time_s: float
    rows: dict[int, Sequence]
    seen: list[Any]
    arrived: list[Request]
    ended: list[Sequence]

    @property
    def start_s(self) -> float:
        """When its planning began."""
        return self.time_s - step_seconds(self.result.times)

    def computed(self) -> Iterable[Computed]:
        """What it computes, row by row of the plan."""
        plan, sequences = self.plan, map(self.rows.__getitem__, self.plan.rows)
        numbers = plan.starts, plan.num_scheduled_tokens, plan.num_logits
        return zip(sequences, *numbers, strict=True)

    def loads(self) -> dict[int, str]:
        """Block -> the tier that it is loaded from."""
        loads = (move for move in self.plan.transfers if move.kind == "load")
        return {block_id: move.tier for move in loads for block_id in move.device_ids}


class StepObserver:
    """Calls `look` when a step is planned, and `step` when it is committed.

    Args:
        scheduler: of the run.
        clock: returns seconds; `Replay.clock` those since the trace began.

    Attributes:
        who: sequence -> whose it is; those that have ended too.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scheduler = scheduler
        self.who: dict[int, Who] = {}
        self._requests: dict[str, Request] = {}  # that have not ended
        self.start_s, self._clock = clock(), clock
        self._planned: dict[int, tuple[dict[int, Sequence], Any]] = {}  # step -> rows, seen
        self._arrived: list[Request] = []
        self._know(scheduler.running)

    def look(self, plan: StepPlan, rows: dict[int, Sequence]) -> Any:
        """Returns what `step` needs of the blocks as the plan leaves them; `rows` as in `Step`."""

    def step(self, step: Step) -> None:
        """Takes one step."""
        raise NotImplementedError

    def on_request(self, request: Request) -> None:
        """A request was queued."""
        self._arrived.append(request)
        self._know(request.sequences)

    def on_plan(self, plan: StepPlan) -> None:
        """A step was planned."""
        rows = {seq.row: seq for seq in self.scheduler.running}
        if plan.forks or plan.admitted:
            self._know(rows.values())
        if any(gone.seq_id not in self.who for gone in plan.preempted):
            # Why: one that was forked between two steps has been in no plan yet.
            self._know(chain.from_iterable(r.sequences for r in self._requests.values()))
        self._planned[plan.step] = rows, self.look(plan, rows)

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """A step was committed; one that was planned before this began is passed over."""
        if plan.step in self._planned:
            planned = [self._planned.pop(n) for n in sorted(self._planned) if n <= plan.step]
            rows, seen = planned[-1][0], [seen for _, seen in planned]
            arrived, self._arrived = self._arrived, []
            ended, time_s = self.scheduler.last_ended, self._clock() - self.start_s
            self._know(ended)
            self.step(Step(plan, result, time_s, rows, seen, arrived, ended))
            for seq in ended:
                if seq.request.finished:
                    self._requests.pop(seq.request.request_id, None)

    def name(self, seq_id: int) -> str:
        """ "request 7", or "sequence 12 of request 7" if it is not the first of it."""
        if seq_id not in self.who:
            return f"sequence {seq_id}"
        who = self.who[seq_id]
        fork = f"sequence {seq_id} of " if who.index else ""
        return f"{fork}request {who.request_id}"

    def _know(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq.seq_id not in self.who:
                request = seq.request
                self.who[seq.seq_id] = Who(request.request_id, request.priority, seq.index)
                if not request.finished:
                    self._requests[request.request_id] = request
