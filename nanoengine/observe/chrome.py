"""chrome_events: a run as Trace Event Format, which Perfetto and chrome://tracing draw.

    process "engine"     a slice a step; inside it schedule, prepare, load, forward, sample, commit
                         counters: sequences, tokens of the step, blocks
    process "queue"      a slice a wait
    process "rows"       a track a row: prefill chunks, decodes, one slice for decodes in a row
    flows                an arrow from a request's arrival through its waits and rows to its end

Source of the format: "Trace Event Format" by the Chromium project (phases X, C, M, s, t, f).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanoengine.core.plan import StepPlan
from nanoengine.core.sequence import Sequence
from nanoengine.observe.metrics import times_of
from nanoengine.observe.steps import Step, StepObserver, is_decode
from nanoengine.observe.trace_reader import Recording

ENGINE, QUEUE, ROWS = 1, 2, 3

Event = dict[str, Any]


def chrome_events(recording: Recording) -> Iterator[Event]:
    """The events, in no particular order of time, as the format allows."""
    for process, name in ((ENGINE, "engine"), (QUEUE, "queue"), (ROWS, "rows")):
        yield _meta("process_name", process, 0, name)
    yield _meta("thread_name", ENGINE, 0, "steps")
    replay = recording.replay()
    exporter = _Exporter(replay.scheduler, replay.clock)
    for _ in replay.steps(exporter):
        yield from exporter.events
        exporter.events.clear()
    for row in list(exporter.runs):  # Why: no later plan has released these rows.
        exporter.close(row)
    yield from exporter.events


@dataclass(slots=True)
class Run:
    """Steps in which a row does the same thing for the same sequence, as one slice."""

    name: str
    seq: Sequence
    start_us: float
    first_step: int
    end_us: float = 0.0
    last_step: int = 0
    tokens: int = 0


class _Exporter(StepObserver):
    """Makes the events of each step."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.events: list[Event] = []
        self.runs: dict[int, Run] = {}
        self._rows: set[int] = set()  # with a track
        self._waiting: dict[int, float] = {}  # sequence -> since when [us]
        self._flowing: set[int] = set()  # sequences whose flow has begun
        self._end_us = 0.0

    def look(self, plan: StepPlan, rows: object) -> dict[str, int]:
        """The blocks that are in use once the step is planned."""
        return self.scheduler.block_manager.pool.counts()

    def step(self, step: Step) -> None:
        """The step's slice with its parts, its waits and rows, and the counters."""
        plan = step.plan
        # Why: in the overlapped loop a step begins before the one before it has ended, and slices
        # of one track must nest.
        start_us = max(1e6 * step.start_s, self._end_us)
        self._end_us = max(1e6 * step.time_s, start_us)
        args = {
            "tokens": plan.num_tokens,
            "sequences": len(plan.rows),
            "preempted": [gone.seq_id for gone in plan.preempted],
            "reasons": plan.reasons,
        }
        self._slice(f"step {plan.step}", ENGINE, 0, start_us, self._end_us, args)
        at_us = start_us
        for name, seconds in times_of(step.result).items():
            # Why cut: parts that overlapped the step before stay inside their own.
            end_us = min(at_us + 1e6 * seconds, self._end_us)
            if end_us > at_us:
                self._slice(name, ENGINE, 0, at_us, end_us, {})
            at_us = end_us
        self._queue(step, start_us)
        for row in [*plan.released, *(new.row for new in plan.admitted)]:
            self.close(row)
        self._note_rows(step, start_us)
        scheduler, blocks = self.scheduler, step.seen[-1]
        for what, values in (
            ("sequences", {"waiting": scheduler.num_waiting, "running": scheduler.num_running}),
            ("tokens of a step", {"tokens": plan.num_tokens}),
            ("blocks", {"active": blocks["active"], "cached": blocks["cached"]}),
        ):
            self.events.append({"ph": "C", "name": what, "pid": ENGINE,
                                "ts": round(self._end_us, 3), "args": values})  # fmt: skip

    def _queue(self, step: Step, start_us: float) -> None:
        for request in step.arrived:
            since_us = 1e6 * (request.arrival_time - self.start_s)
            self._waiting[request.sequences[0].seq_id] = max(since_us, 0.0)
        for gone in step.plan.preempted:
            self._waiting[gone.seq_id] = self._end_us
        for seq_id in [new.seq_id for new in step.plan.admitted] + [s.seq_id for s in step.ended]:
            if seq_id in self._waiting:
                since_us = self._waiting.pop(seq_id)
                until_us = max(start_us, since_us)
                self._slice(f"{self.name(seq_id)} waits", QUEUE, seq_id, since_us, until_us, {})
                self._flow("t", seq_id, QUEUE, seq_id, since_us)

    def _note_rows(self, step: Step, start_us: float) -> None:
        for row, computed in zip(step.plan.rows, step.computed(), strict=True):
            seq, _, num_tokens, _ = computed
            if row not in self._rows:
                self._rows.add(row)
                self.events.append(_meta("thread_name", ROWS, row, f"row {row}"))
            kind = "decode" if is_decode(*computed) else "prefill"
            name, run = f"{self.name(seq.seq_id)} {kind}", self.runs.get(row)
            if run is None or run.name != name or kind == "prefill":
                self.close(row)
                run = self.runs[row] = Run(name, seq, start_us, step.plan.step)
            run.end_us, run.last_step = self._end_us, step.plan.step
            run.tokens += num_tokens

    def close(self, row: int) -> None:
        """Ends what a row does."""
        run = self.runs.pop(row, None)
        if run is not None:
            args = {"first step": run.first_step, "last step": run.last_step, "tokens": run.tokens}
            self._slice(run.name, ROWS, row, run.start_us, run.end_us, args)
            self._flow("t", run.seq.seq_id, ROWS, row, run.start_us)
            if run.seq.is_finished:
                self._flow("f", run.seq.seq_id, ROWS, row, run.end_us)

    def _slice(
        self, name: str, process: int, track: int, at_us: float, end_us: float, args: Event
    ) -> None:
        self.events.append({"ph": "X", "name": name, "pid": process, "tid": track,
                            "ts": round(at_us, 3), "dur": round(end_us - at_us, 3),
                            "args": args})  # fmt: skip

    def _flow(self, phase: str, seq_id: int, process: int, track: int, at_us: float) -> None:
        """One point of the arrow that follows a sequence; it binds to the slice around it."""
        if seq_id not in self._flowing:
            phase = "s"
            self._flowing.add(seq_id)
        self.events.append({"ph": phase, "cat": "request", "name": self.name(seq_id), "id": seq_id,
                            "pid": process, "tid": track, "ts": round(at_us, 3),
                            "bp": "e"})  # fmt: skip


def _meta(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
