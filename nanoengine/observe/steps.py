"""StepObserver: follows a replay step by step, with the sequences of each step.

    Replay.run ── on_request, on_plan, on_step ──► step(Step)

A plan names rows, and the sequence of a row may be gone after the commit. So this class notes the
sequence of each row when a step is planned. `explain` and the viewer's data derive from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.sequence import Request, Sequence
from nanoengine.observe.metrics import step_seconds
from nanoengine.observe.trace_reader import Replay

Computed = tuple[Sequence, int, int, int]
"""One row of a step: its sequence, its first token, its number of tokens and of logits."""


def is_decode(seq: Sequence, start: int, num_tokens: int, num_logits: int) -> bool:
    """Whether a sequence computes its last sampled token, and possibly draft tokens after it."""
    return num_tokens <= num_logits and start >= seq.num_prompt_tokens


class Label(NamedTuple):
    """The request of a sequence, and the index of the sequence within it.

    Why not the sequence itself: a long run has many sequences, each with its tokens in memory.
    """

    request_id: str
    priority: int
    index: int


class Step(NamedTuple):
    """One committed step.

    Attributes:
        time_s: the time after the commit, since the trace began.
        rows: row -> its sequence when the step was planned.
        inspected: the results of `inspect_plan` for this step and, before it, for failed steps
            since the last commit.
        arrived: requests queued since the previous step.
        ended: sequences that ended since the previous step.
    """

    plan: StepPlan
    result: StepResult
    time_s: float
    rows: dict[int, Sequence]
    inspected: list[Any]
    arrived: list[Request]
    ended: list[Sequence]

    @property
    def start_s(self) -> float:
        """The time when its planning began."""
        return self.time_s - step_seconds(self.result.times)

    def computed(self) -> Iterable[Computed]:
        """The computation per row, in the order of the plan."""
        plan, sequences = self.plan, map(self.rows.__getitem__, self.plan.rows)
        numbers = plan.starts, plan.num_scheduled_tokens, plan.num_logits
        return zip(sequences, *numbers, strict=True)

    def loads(self) -> dict[int, str]:
        """Block -> the tier that it is loaded from."""
        loads = (move for move in self.plan.transfers if move.kind == "load")
        return {block_id: move.tier for move in loads for block_id in move.device_ids}


class StepObserver:
    """Calls `inspect_plan` when a step is planned, and `step` when it is committed.

    Args:
        replay: the replay to follow, before its first step.

    Attributes:
        scheduler: the scheduler of the replay.
        labels: sequence -> its request and index; includes sequences that have ended.
    """

    def __init__(self, replay: Replay) -> None:
        self.scheduler, self._replay = replay.scheduler, replay
        self.labels: dict[int, Label] = {}
        self._requests: dict[str, Request] = {}  # unfinished ones
        self._planned: dict[int, tuple[dict[int, Sequence], Any]] = {}  # step -> rows, seen
        self._arrived: list[Request] = []

    def inspect_plan(self, plan: StepPlan, rows: dict[int, Sequence]) -> Any:
        """Returns what `step` needs to know about blocks after planning; `rows` as in `Step`."""

    def step(self, step: Step) -> None:
        """Handles one committed step."""
        raise NotImplementedError

    def on_request(self, request: Request) -> None:
        """A request was queued."""
        self._arrived.append(request)
        self._add_labels(request.sequences)

    def on_plan(self, plan: StepPlan) -> None:
        """A step was planned."""
        rows = {seq.row: seq for seq in self.scheduler.running}
        if plan.forks or plan.admitted:
            self._add_labels(rows.values())
        if any(preempted.seq_id not in self.labels for preempted in plan.preempted):
            # Why: a sequence that was forked between two steps has not been in a plan yet.
            self._add_labels(chain.from_iterable(r.sequences for r in self._requests.values()))
        self._planned[plan.step] = rows, self.inspect_plan(plan, rows)

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """A step was committed."""
        planned = [self._planned.pop(n) for n in sorted(self._planned) if n <= plan.step]
        rows, inspected = planned[-1][0], [inspected for _, inspected in planned]
        arrived, self._arrived = self._arrived, []
        ended, time_s = self.scheduler.last_ended_seqs, self._replay.time_s
        self._add_labels(ended)
        self.step(Step(plan, result, time_s, rows, inspected, arrived, ended))
        for seq in ended:
            if seq.request.finished:
                self._requests.pop(seq.request.request_id, None)

    def name(self, seq_id: int) -> str:
        """ "request 7", or "sequence 12 of request 7" if it is not the first of its request."""
        if seq_id not in self.labels:
            return f"sequence {seq_id}"
        label = self.labels[seq_id]
        fork = f"sequence {seq_id} of " if label.index else ""
        return f"{fork}request {label.request_id}"

    def _add_labels(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq.seq_id not in self.labels:
                request = seq.request
                self.labels[seq.seq_id] = Label(request.request_id, request.priority, seq.index)
                if not request.finished:
                    self._requests[request.request_id] = request
