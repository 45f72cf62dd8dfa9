"""read_trace: a trace as typed records, each line checked; docs/trace.md describes the format.

    file ──► Recording ── header, state, a TracedStep a line, end
                              └─ rows, starts and counts in full, where the file has changes alone

A run may have been killed, so a last line that breaks off is read past, and `is_torn` says so.
Anything else that is wrong with a file is a `TraceError` that names the line. Whoever wants tables,
reference counts or outputs folds the steps: `trace_fold.Fold`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import IO, Any, NamedTuple

from nanoengine.core.plan import (
    BlockCopy,
    ChosenToken,
    Preemption,
    StepTimes,
    TableUpdate,
    Transfer,
)
from nanoengine.errors import TraceError
from nanoengine.observe.trace import FORMAT, TIMES
from nanoengine.settings.checks import shown


class Group(NamedTuple):
    """One KV group: its layers, and its sliding window [tokens] or None."""

    layers: tuple[int, ...]
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What the run was made of.

    Attributes:
        version: of the format, and `engine` of nanoengine.
        date: when the trace began, UTC.
        num_blocks: of the device's pool, the null block included.
        num_states: whose ids follow those of the blocks.
        block_size: tokens of a block.
        scheduler: its settings by name, as docs/trace.md lists them.
        tiers: name -> usable blocks.
        model, config: as the run was told; empty where there was neither.
    """

    version: str
    engine: str
    date: str
    num_blocks: int
    num_states: int
    block_size: int
    groups: tuple[Group, ...]
    scheduler: dict[str, Any]
    tiers: dict[str, int]
    model: dict[str, Any]
    config: dict[str, Any]


class Arrival(NamedTuple):
    """A request that was queued, `time_s` after the trace began; `seq_id` is its first sequence."""

    request_id: str
    seq_id: int
    time_s: float
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    n: int = 1
    has_chooser: bool = False


class Admitted(NamedTuple):
    """A sequence that took a row, with all tokens known so far."""

    row: int
    seq_id: int
    num_cached_tokens: int
    token_ids: list[int]


class Forked(NamedTuple):
    """A row that begins as a copy of another one's."""

    row: int
    parent_row: int
    seq_id: int


class EndedSequence(NamedTuple):
    """Why a sequence ended; of its output the first `num_output_tokens` count.

    `detail` is the stop id, the stop string or the error.
    """

    seq_id: int
    reason: str
    num_output_tokens: int
    detail: int | str | None = None


class Output(NamedTuple):
    """The output of a sequence whose tokens the steps don't tell."""

    seq_id: int
    request_id: str
    token_ids: list[int]


class ContentEvent(NamedTuple):
    """A block holds the content of this name from now on; None: nothing any more.

    The null block stands for all blocks of the pool.
    """

    pool: str
    block_id: int
    group: int = 0
    content: int | None = None


class HeldRow(NamedTuple):
    """A running sequence at the moment when a trace began amid a run."""

    row: int
    seq_id: int
    request_id: str
    num_computed_tokens: int
    token_ids: list[int]
    block_tables: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """What was held when a trace began amid a run; steps up to `planned` were planned by then."""

    planned: int
    requests: list[Arrival]
    rows: list[HeldRow]
    content: list[ContentEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step. `rows`, `starts`, `counts`, `num_logits` and `sampled` run in parallel.

    Attributes:
        time_s: after the commit, since the trace began.
        num_waiting, num_running: after the step.
        siblings: (sequence, request) of admitted ones that are not a request's first.
        drafts: row -> the tokens that were proposed; all but the last of the row's `sampled` are
            those of them that were right.
        errors: index -> why that row has no valid token.
        waits: (sequence, what it lacked) of the queue's first, as in `StepPlan.waits`.
        The others are as in `StepPlan`.
    """

    step: int
    time_s: float
    times: StepTimes
    num_waiting: int
    num_running: int
    rows: list[int]
    starts: list[int]
    counts: list[int]
    num_logits: list[int]
    sampled: list[list[int]]
    arrived: list[Arrival] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    siblings: list[tuple[int, str]] = field(default_factory=list)
    forked: list[Forked] = field(default_factory=list)
    chosen: list[ChosenToken] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    copied: list[BlockCopy] = field(default_factory=list)
    moved: list[Transfer] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    preempted: list[Preemption] = field(default_factory=list)
    waits: list[tuple[int, str]] = field(default_factory=list)
    ended: list[EndedSequence] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    content: list[ContentEvent] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class TraceEnd(NamedTuple):
    """What happened after the last step that was traced."""

    arrived: list[Arrival]
    ended: list[EndedSequence]
    outputs: list[Output]


@dataclass(slots=True, kw_only=True)
class Recording:
    """A whole trace. `end` is its last line; None: the file breaks off."""

    header: TraceHeader
    state: HeldState | None = None
    steps: list[TracedStep] = field(default_factory=list)
    end: TraceEnd | None = None

    @property
    def is_torn(self) -> bool:
        """True if the run was killed, or goes on."""
        return self.end is None


def read_trace(path: str | PathLike[str]) -> Recording:
    """Reads a trace, compressed or not.

    Raises:
        TraceError: the file can't be read, is no trace, one of another major version, or damaged.
    """
    path = fspath(path)
    recording, reader = None, _StepReader()
    try:
        with open(path, "rb") as raw:
            for number, line, is_whole in _lines(raw):
                try:
                    told = _object(line)
                    if recording is None:
                        recording = Recording(header=_header(path, told))
                    elif "trace" in told:
                        raise ValueError("another trace begins")
                    elif "step" in told:
                        recording.steps.append(reader.read(told))
                        _check_order(recording.steps[-2:])
                    elif "state" in told:
                        recording.state = reader.read_state(told["state"])
                    elif "end" in told:
                        recording.end = TraceEnd(_arrivals(told["end"]), *_ends(told["end"]))
                except (ValueError, KeyError, TypeError, IndexError) as error:
                    if is_whole or recording is None:
                        why = f"{type(error).__name__}: {error}"
                        if recording is None:
                            raise TraceError(f"{path} is no trace of nanoengine ({why})") from error
                        raise TraceError(f"{path}, line {number}, is damaged: {why}") from error
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error}") from error
    if recording is None:
        raise TraceError(f"{path} is empty: no trace of nanoengine")
    return recording


def _check_order(steps: list[TracedStep]) -> None:
    if len(steps) > 1 and steps[1].step <= steps[0].step:
        raise ValueError(f"step {steps[1].step} comes behind step {steps[0].step}")


def _lines(raw: IO[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Number, text and whether it ends as a line does, up to where the file breaks off."""
    is_packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    lines: IO[bytes] = gzip.GzipFile(fileobj=raw) if is_packed else raw  # type: ignore[assignment]
    number = 0
    try:
        while line := lines.readline():
            number += 1
            yield number, line, line.endswith(b"\n")
    except (EOFError, zlib.error):
        return


def _header(path: str, told: dict[str, Any]) -> TraceHeader:
    version = told.get("trace")
    if not isinstance(version, str) or not version.replace(".", "", 1).isdecimal():
        raise ValueError("its first line has no version")
    major = int(version.partition(".")[0])
    if major != FORMAT[0]:
        raise TraceError(
            f"{path} is a trace of version {version}, written by nanoengine {told.get('engine')};"
            f" this one reads version {FORMAT[0]}.x: read it with that one"
        )
    layout = told["layout"]
    return TraceHeader(
        version=version,
        engine=str(told["engine"]),
        date=str(told["date"]),
        num_blocks=_int(layout["num_blocks"]),
        num_states=_int(layout.get("num_states", 0)),
        block_size=_int(layout["block_size"]),
        groups=tuple(
            Group(tuple(_ints(group["layers"])), group["sliding_window"])
            for group in layout["groups"]
        ),
        scheduler=dict(told["scheduler"]),
        tiers=dict(told["tiers"]),
        model=dict(told.get("model", {})),
        config=dict(told.get("config", {})),
    )


class _StepReader:
    """Reads steps in order, because a line leaves out what follows from the one before."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._starts: dict[int, int] = {}  # by row, expected
        self._waits: list[tuple[int, str]] = []

    def read_state(self, told: dict[str, Any]) -> HeldState:
        rows = [
            HeldRow(_int(row), _int(seq_id), str(request_id), _int(computed), _ints(token_ids),
                    [_ints(table) for table in tables])
            for row, seq_id, request_id, computed, token_ids, tables in told["rows"]
        ]  # fmt: skip
        self._starts.update((held.row, held.num_computed_tokens) for held in rows)
        return HeldState(
            planned=_int(told["planned"]),
            requests=_arrivals({"arrived": told["requests"]}),
            rows=rows,
            content=_content(told["content"]),
        )

    def read(self, told: dict[str, Any]) -> TracedStep:
        self._rows = rows = _ints(told.get("rows", self._rows))
        admitted = [
            Admitted(_int(row), _int(seq_id), _int(cached), _ints(token_ids))
            for row, seq_id, cached, token_ids in told.get("admitted", ())
        ]
        self._starts.update((new.row, new.num_cached_tokens) for new in admitted)
        starts = [self._starts.get(row, 0) for row in rows]
        counts, num_logits = [1] * len(rows), [1] * len(rows)
        for name, values in (("starts", starts), ("counts", counts), ("logits", num_logits)):
            for index, value in told.get(name, ()):
                values[_int(index)] = _int(value)
        ends = (start + count for start, count in zip(starts, counts, strict=True))
        self._starts.update(zip(rows, ends, strict=True))
        sampled = [one if type(one) is list else [_int(one)] for one in told.get("sampled", ())]
        if len(sampled) != len(rows):
            raise ValueError(f"{len(sampled)} rows have sampled, {len(rows)} are planned")
        if "waits" in told:
            self._waits = [(_int(seq_id), str(lacks)) for seq_id, lacks in told["waits"]]
        ended, outputs = _ends(told)
        return TracedStep(
            step=_int(told["step"]),
            time_s=float(told["t"]),
            times=StepTimes(
                **{f"{n}_s": ms / 1e3 for n, ms in zip(TIMES, told["ms"], strict=True)}
            ),
            num_waiting=_int(told["waiting"]),
            num_running=_int(told["running"]),
            rows=rows,
            starts=starts,
            counts=counts,
            num_logits=num_logits,
            sampled=[_ints(tokens) for tokens in sampled],
            arrived=_arrivals(told),
            released=_ints(told.get("released", [])),
            admitted=admitted,
            siblings=[(_int(i), str(request_id)) for i, request_id in told.get("siblings", ())],
            forked=[Forked(*_ints(one)) for one in told.get("forked", ())],
            chosen=[ChosenToken(*_ints(one)) for one in told.get("chosen", ())],
            tables=[
                TableUpdate(_int(row), _int(group), _int(start), tuple(_ints(block_ids)))
                for row, group, start, block_ids in told.get("tables", ())
            ],
            copied=[BlockCopy(*_ints(one)) for one in told.get("copied", ())],
            moved=[
                Transfer(str(kind), str(tier), tuple(_ints(device)), tuple(_ints(below)))
                for kind, tier, device, below in told.get("moved", ())
            ],
            drafts={_int(row): _ints(tokens) for row, tokens in told.get("drafts", ())},
            errors={_int(index): str(error) for index, error in told.get("errors", ())},
            preempted=[
                Preemption(_int(seq_id), _int(computed), str(reason))
                for seq_id, computed, reason in told.get("preempted", ())
            ],
            waits=self._waits,
            ended=ended,
            outputs=outputs,
            content=_content(told.get("content", {})),
            reasons=[str(reason) for reason in told.get("reasons", ())],
        )


def _arrivals(told: dict[str, Any]) -> list[Arrival]:
    return [
        Arrival(
            str(one["id"]),
            _int(one["seq"]),
            float(one["t"]),
            _int(one["prompt"]),
            _int(one["max"]),
            _int(one.get("priority", 0)),
            _int(one.get("n", 1)),
            bool(one.get("chooser", False)),
        )
        for one in told.get("arrived", ())
    ]


def _ends(told: dict[str, Any]) -> tuple[list[EndedSequence], list[Output]]:
    return (
        [
            EndedSequence(_int(one[0]), str(one[1]), _int(one[2]), *one[3:])
            for one in told.get("ended", ())
        ],
        [
            Output(_int(seq_id), str(request_id), _ints(token_ids))
            for seq_id, request_id, token_ids in told.get("outputs", ())
        ],
    )


def _content(told: dict[str, Any]) -> list[ContentEvent]:
    return [
        ContentEvent(str(pool), *_ints(one)) if type(one) is list else ContentEvent(pool, _int(one))
        for pool, events in told.items()
        for one in events
    ]


def _object(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(told, dict):
        raise ValueError(f"it must be a JSON object, got {shown(told)}")
    return told


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"an integer is needed, got {shown(value)}")
    return value


def _ints(value: Any) -> list[int]:
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise ValueError(f"a list of integers is needed, got {shown(value)}")
    return value
