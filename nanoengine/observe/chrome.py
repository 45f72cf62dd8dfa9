"""chrome_events: a trace as Trace Event Format, which Perfetto and chrome://tracing draw.

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

from nanoengine.observe.metrics import step_seconds
from nanoengine.observe.trace import TIMES
from nanoengine.observe.trace_fold import Fold
from nanoengine.observe.trace_reader import Recording, TracedStep

ENGINE, QUEUE, ROWS = 1, 2, 3

Event = dict[str, Any]


@dataclass(slots=True)
class Run:
    """Steps in which a row does the same thing for the same sequence, as one slice."""

    name: str
    seq_id: int
    start_us: float
    end_us: float
    first_step: int
    last_step: int
    tokens: int


def chrome_events(recording: Recording) -> Iterator[Event]:
    """The events, in no particular order of time, as the format allows."""
    yield _meta("process_name", ENGINE, 0, "engine")
    yield _meta("process_name", QUEUE, 0, "queue")
    yield _meta("process_name", ROWS, 0, "rows")
    yield _meta("thread_name", ENGINE, 0, "steps")
    yield from _Exporter(recording).events()


class _Exporter:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._runs: dict[int, Run] = {}
        self._waiting: dict[int, float] = {}  # sequence -> since when [us]
        self._flowing: set[int] = set()  # sequences whose flow has begun
        self._end_us = 0.0

    def events(self) -> Iterator[Event]:
        rows: set[int] = set()
        fold = Fold(self._recording.header, self._recording.state)
        for step, fold, _ in Fold.follow(self._recording):
            # Why: in the overlapped loop a step begins before the one before it has ended, and
            # slices of one track must nest.
            start_us = max(1e6 * (step.time_s - step_seconds(step.times)), self._end_us)
            self._end_us = max(1e6 * step.time_s, start_us)
            yield from self._step(step, start_us)
            yield from self._queue(step, start_us, fold)
            for row in [*step.released, *(new.row for new in step.admitted)]:
                yield from self._close(row, fold)
            yield from self._rows(step, start_us, fold)
            for row in step.rows:
                if row not in rows:
                    rows.add(row)
                    yield _meta("thread_name", ROWS, row, f"row {row}")
            yield _counter("sequences", self._end_us,
                           waiting=step.num_waiting, running=step.num_running)  # fmt: skip
            yield _counter("tokens of a step", self._end_us, tokens=sum(step.counts))
            active = sum(count > 0 for count in fold.refs)
            cached = sum(not fold.refs[block] for block in fold.content["device"])
            yield _counter("blocks", self._end_us, active=active, cached=cached)
        for row in list(self._runs):  # Why: no later plan has released these rows.
            fold.sequences[self._runs[row].seq_id].row = None
            yield from self._close(row, fold)

    def _step(self, step: TracedStep, start_us: float) -> Iterator[Event]:
        """The step's slice, and its parts inside it, in the order in which they run."""
        args = {
            "tokens": sum(step.counts),
            "sequences": len(step.rows),
            "preempted": [seq_id for seq_id, _, _ in step.preempted],
            "reasons": step.reasons,
        }
        length_us = self._end_us - start_us
        yield _slice(f"step {step.step}", ENGINE, 0, start_us, length_us, args)
        parts = [(name, 1e6 * getattr(step.times, f"{name}_s")) for name in TIMES]
        # Why: parts that overlapped the step before are cut, so that they stay inside their step.
        left_us, at_us = length_us, start_us
        for name, part_us in parts:
            part_us = min(part_us, left_us)
            if part_us > 0:
                yield _slice(name, ENGINE, 0, at_us, part_us, {})
            at_us, left_us = at_us + part_us, left_us - part_us

    def _queue(self, step: TracedStep, start_us: float, fold: Fold) -> Iterator[Event]:
        for arrival in step.arrived:
            self._waiting[arrival.seq_id] = max(1e6 * arrival.time_s, 0.0)
        for seq_id, _, _ in step.preempted:
            self._waiting[seq_id] = self._end_us
        gone = [new.seq_id for new in step.admitted] + [one.seq_id for one in step.ended]
        for seq_id in gone:
            since_us = self._waiting.pop(seq_id, None)
            if since_us is not None:
                name, length_us = self._name(seq_id, fold), max(start_us - since_us, 0.0)
                yield _slice(f"{name} waits", QUEUE, seq_id, since_us, length_us, {})
                yield self._flow("t", seq_id, QUEUE, seq_id, since_us, fold)

    def _rows(self, step: TracedStep, start_us: float, fold: Fold) -> Iterator[Event]:
        for i, (row, start, count) in enumerate(
            zip(step.rows, step.starts, step.counts, strict=True)
        ):
            seq = fold.running.get(row)
            if seq is None:
                continue
            is_decode = count <= 1 + len(step.drafts.get(row, ())) and step.num_logits[i] > 0
            kind = "decode" if is_decode and start >= seq.num_prompt_tokens else "prefill"
            name = f"{self._name(seq.seq_id, fold)} {kind}"
            run = self._runs.get(row)
            if run is not None and run.name == name and kind == "decode":
                run.end_us, run.last_step, run.tokens = self._end_us, step.step, run.tokens + count
                continue
            yield from self._close(row, fold)
            self._runs[row] = Run(
                name, seq.seq_id, start_us, self._end_us, step.step, step.step, count
            )

    def _close(self, row: int, fold: Fold) -> Iterator[Event]:
        run = self._runs.pop(row, None)
        if run is None:
            return
        args = {"first step": run.first_step, "last step": run.last_step, "tokens": run.tokens}
        yield _slice(run.name, ROWS, row, run.start_us, run.end_us - run.start_us, args)
        yield self._flow("t", run.seq_id, ROWS, row, run.start_us, fold)
        seq = fold.sequences[run.seq_id]
        if seq.row is None and seq.finish_reason is not None:
            yield self._flow("f", run.seq_id, ROWS, row, run.end_us, fold)

    def _flow(
        self, phase: str, seq_id: int, process: int, track: int, at_us: float, fold: Fold
    ) -> Event:
        """One point of the arrow that follows a sequence; it binds to the slice around it."""
        if seq_id not in self._flowing:
            phase = "s"
            self._flowing.add(seq_id)
        return {"ph": phase, "cat": "request", "name": self._name(seq_id, fold), "id": seq_id,
                "pid": process, "tid": track, "ts": round(at_us, 3), "bp": "e"}  # fmt: skip

    def _name(self, seq_id: int, fold: Fold) -> str:
        seq = fold.sequences.get(seq_id)
        request = fold.requests.get(seq.request_id) if seq else None
        if request is None:
            return f"sequence {seq_id}"
        fork = "" if request.seq_id == seq_id else f" ({seq_id})"
        return f"request {request.request_id}{fork}"


def _slice(
    name: str, process: int, track: int, at_us: float, length_us: float, args: dict[str, Any]
) -> Event:
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": round(at_us, 3),
            "dur": round(length_us, 3), "args": args}  # fmt: skip


def _counter(name: str, at_us: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": ENGINE, "ts": round(at_us, 3), "args": values}


def _meta(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
