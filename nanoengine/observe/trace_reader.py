"""read_trace, Recording, Replay: read a trace and replay its run.

    file ── read_trace ──► Recording ── replay ──► Replay.scheduler     sequences, tables, pools
                                                        └── steps(observers) ──► plan, result

A Replay builds the Scheduler, BlockManager and pools of the run, without a model, and repeats the
traced calls. The state at any step can be read from these objects, and an observer of a run also
works with its replay.

A core that plans differently would replay another run. So each plan is compared with the traced
digest, and the replay ends at the first difference.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import math
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike, fspath
from types import SimpleNamespace
from typing import IO, Any

from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.plan import StepPlan, StepResult, StepTimes, TokenLogprobs
from nanoengine.core.policies import Predictive
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence, SequenceMoves
from nanoengine.core.speculation import enable_extras, set_drafts
from nanoengine.core.tiers.cost import CostModel, LoadCost, Rate
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.errors import TraceError
from nanoengine.observe.trace import FORMAT, LIMITS, digest
from nanoengine.observe.traced_disk import ReplayedDisk
from nanoengine.settings.checks import quoted
from nanoengine.settings.params import SamplingParams
from nanoengine.version import __version__

POLICIES = {"WatermarkOnly": lambda: None, "Predictive": Predictive}
CALLS = {"add", "plan", "step", "abort", "fork", "recover", "reset"}
"""Each line has one of these keys; other lines, from later minor versions, are skipped."""
MOVES = {"append_token", "fork", "finish", "drop"}
"""The moves of a chooser."""

TraceLine = dict[str, Any]
"""A line of a trace."""
HEADER: TraceLine = {"engine": "?", "date": "?"} | {
    name: {} for name in ("layout", "scheduler", "policy", "tiers", "model", "config")
}
"""Defaults of a header."""
EVENTS = {"add": "on_request", "plan": "on_plan", "step": "on_step"}
"""Key of a line -> the observers' method."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """A complete trace.

    Attributes:
        path: the file.
        header: its first line, as docs/trace.md describes it.
        lines: the other lines, each with its number in the file.
    """

    path: str
    header: TraceLine
    lines: list[tuple[int, TraceLine]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The numbers of the committed steps."""
        return [entry["step"] for _, entry in self.lines if type(entry.get("step")) is int]

    @property
    def is_torn(self) -> bool:
        """True if the run was killed, or still continues."""
        return not self.lines or "end" not in self.lines[-1][1]

    def replay(self) -> Replay:
        """A replay, before its first step.

        Raises:
            TraceError: see `Replay.steps`.
        """
        return Replay(self)


def read_trace(path: str | PathLike[str]) -> Recording:
    """Reads a trace, compressed or not.

    Raises:
        TraceError: the file can't be read, is no trace, has another major version, or is damaged.
    """
    path, recording = fspath(path), None
    try:
        with open(path, "rb") as raw:
            for number, line in _lines(raw):
                try:
                    entry = _parsed(line)
                    if recording is None:
                        recording = Recording(path=path, header=_header(path, entry))
                    elif "trace" in entry:
                        raise ValueError("another trace begins")
                    else:
                        recording.lines.append((number, entry))
                except (ValueError, RecursionError) as error:
                    if recording is None:
                        raise TraceError(f"{path} is not a nanoengine trace ({error})") from error
                    if line.endswith(b"\n"):  # else the writing process was killed
                        raise TraceError(f"{path}, line {number}, is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error}") from error
    if recording is None:
        raise TraceError(f"{path} is empty, not a nanoengine trace")
    return recording


class Replay:
    """Replays the core of a traced run.

    Attributes:
        scheduler: a real one; its block manager, pools and sequences have the state of the run.
        time_s: the time of the last replayed call, since the trace began.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._requests: dict[int, Request] = {}  # by arrival, not finished
        self._planned: dict[int, StepPlan] = {}  # not committed
        self._stops: dict[tuple[int, ...], str] = {}
        self._chosen: list[Any] = []  # by choosers in the current call
        self._has_choosers = False
        self.time_s = 0.0
        contents = recording.header.get("held")
        self._disk = None if contents is None else ReplayedDisk(contents)
        with _damage(recording, 1):
            self.scheduler = _scheduler(recording.header, self._disk)
        self._remaining = deque(recording.lines)

    def run(self, *observers: object) -> None:
        """Replays to the end of the recording; see `steps`."""
        for _ in self.steps(*observers):
            pass

    def steps(self, *observers: object) -> Iterator[tuple[StepPlan, StepResult]]:
        """Yields each further step after its commit.

        Before that, observers are called, with the methods that they have: `on_request(request)`,
        `on_plan(plan)`, and `on_step(plan, result, scheduler)` after the commit.

        Raises:
            TraceError: the trace is damaged, or this core plans differently.
        """
        while self._remaining:
            number, entry = self._remaining.popleft()
            for event, *values in self._call(number, entry):
                for observer in observers:
                    if hasattr(observer, event):
                        getattr(observer, event)(*values)
                if event == "on_step":
                    yield values[0], values[1]

    def _call(self, number: int, entry: TraceLine) -> list[tuple[Any, ...]]:
        """Makes the call of a line; returns the calls of observers."""
        with _damage(self._recording, number):
            self._stops |= {(a, i, n): str(stop) for a, i, n, stop in entry.get("stops", ())}
            self._chosen = list(entry.get("chosen", ()))
            if self._disk is not None:
                self._disk.results = list(entry.get("disk", ()))
            outcomes = {kind: getattr(self, f"_{kind}")(entry) for kind in entry.keys() & CALLS}
        return [(EVENTS[kind], *values) for kind, values in outcomes.items() if values]

    # --- calls --------------------------------------------------------------------------------

    def _add(self, entry: TraceLine) -> tuple[Any, ...]:
        self.time_s = float(entry["t"])
        follower = functools.partial(self._follower, entry["add"])
        params = SamplingParams(**{"max_tokens": None} | entry.get("params", {}))
        if "pooling" in entry:
            from nanoengine.settings.pooling import PooledParams

            params = PooledParams(pooling=entry["pooling"])
        request = Request(
            str(entry["id"]),
            _ints(entry["prompt"]),
            params,
            arrival=entry["add"],
            arrival_time=self.time_s,
            priority=entry.get("priority", 0),
            cache_salt=entry.get("salt"),
            stop_ids=dict.fromkeys(_ints(entry.get("stop", []))),
            max_num_tokens=entry["most"],
            make_follower=follower if entry.get("follower") else None,
            chooser=self if entry.get("chooser") else None,
        )
        self._has_choosers |= request.chooser is not None
        self._requests[request.arrival] = request
        if request.needs_extras:
            enable_extras(self.scheduler)
        self.scheduler.add(request)
        return (request,)

    def _plan(self, entry: TraceLine) -> tuple[Any, ...]:
        drafted = dict(entry.get("drafts", ()))
        for seq in self.scheduler.running if drafted else ():
            if seq.row in drafted:
                set_drafts(self.scheduler, seq, tuple(_ints(drafted[seq.row])))
        plan = self.scheduler.schedule()
        if (plan.step, digest(plan)) != (entry["plan"], entry["digest"]):
            engine, path = self._recording.header["engine"], self._recording.path
            raise TraceError(
                f"{path} can't be replayed from step {entry['plan']} on: nanoengine {__version__}"
                f" plans another step from the same inputs than nanoengine {engine}, which wrote"
                " it. Read it with that version; if the versions are equal, the trace is damaged"
            )
        self._planned[plan.step] = plan
        return (plan,)

    def _step(self, entry: TraceLine) -> tuple[Any, ...]:
        self.time_s = float(entry["t"])
        plan = self._planned.pop(entry["step"])
        tokens = [_ints(one if type(one) is list else [one]) for one in entry["sampled"]]
        if len(tokens) != len(plan.rows):
            raise ValueError(f"{len(tokens)} rows have sampled, {len(plan.rows)} are planned")
        seconds = zip(StepTimes.__dataclass_fields__, map(float, entry["s"]), strict=True)
        result = StepResult(
            token_ids=tokens,
            errors={index: str(error) for index, error in entry.get("errors", ())},
            times=StepTimes(**dict(seconds)),
        )
        if self._has_choosers:
            # Why empty: the chooser gets no candidates, because the trace has its choices.
            no_candidates: TokenLogprobs = [[] for _ in range(max(plan.num_logits, default=0))]
            result.logprobs = dict.fromkeys(range(len(tokens)), no_candidates)
        for request in self.scheduler.commit(plan, result):
            del self._requests[request.arrival]
        return plan, result, self.scheduler

    def _abort(self, entry: TraceLine) -> None:
        self.scheduler.abort(self._requests.pop(entry["abort"]))

    def _fork(self, entry: TraceLine) -> None:
        arrival, index, next_token_id = entry["fork"]
        parent = _sequence(self._requests[arrival], index)
        enable_extras(self.scheduler).fork(parent, next_token_id)

    def _recover(self, entry: TraceLine) -> None:
        if self._disk is not None:
            self._disk.contents = entry["held"]
        self.scheduler.recover(self._requests.values())
        self.scheduler.stats.steps = entry["recover"]  # Why: the failed call may have been a plan.
        self._requests.clear()

    def _reset(self, entry: TraceLine) -> None:
        self.scheduler.block_manager.prefix_cache.reset()

    def _follower(self, arrival: int, index: int) -> Any:
        """An `OutputFollower` without text, which returns the stop strings of the trace."""
        numbers = itertools.count(1)  # of output tokens
        return SimpleNamespace(
            append=lambda token_id: self._stops.pop((arrival, index, next(numbers)), None)
        )

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        """Repeats the traced moves of a chooser; this is the `TokenChooser` of all requests."""
        arrival, recorded = self._chosen.pop(0)
        assert arrival == request.arrival, request
        for name, index, *values in recorded:
            assert name in MOVES, name
            getattr(moves, name)(_sequence(request, index), *values)


def _scheduler(header: TraceLine, disk: ReplayedDisk | None) -> Scheduler:
    """A new core with the settings of the header."""
    fields, limits = header["layout"], header["scheduler"]
    groups = (KVGroup(**one | {"layers": tuple(one["layers"])}) for one in fields["groups"])
    layout, cache = KVLayout(**fields | {"groups": tuple(groups)}), None
    if "tier_settings" in header:
        settings, num_blocks = header["tier_settings"], header["tiers"]
        cost = settings["cost"]
        loads = {tier: LoadCost(**cost[tier] | {"rate": Rate(**cost[tier]["rate"])})
                 for tier in ("host", "disk")}  # fmt: skip
        cache = TieredPrefixCache(
            layout,
            num_host_blocks=num_blocks["host"],
            cost=CostModel(**loads, prefill=Rate(**cost["prefill"])),
            disk=disk,
            num_disk_blocks=num_blocks.get("disk", 1),
            num_host_states=settings["host_states"],
        )
    manager = make_block_manager(
        layout,
        prefix_cache=cache,
        enable_prefix_caching=limits["prefix_caching"],
        max_chunk=limits["max_num_batched_tokens"],
        chunked=limits["chunked_prefill"],
    )
    manager.num_watermark_blocks = limits["watermark_blocks"]
    policy = POLICIES[limits["admission"]](**header["policy"])
    return Scheduler(manager, policy=policy, **{name: limits[name] for name in LIMITS})


def _sequence(request: Request, index: int) -> Sequence:
    return next(seq for seq in request.sequences if seq.index == index)


@contextlib.contextmanager
def _damage(recording: Recording, number: int) -> Iterator[None]:
    """Reports any exception as a damaged line, because the call succeeded in the traced run."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise TraceError(f"{recording.path}, line {number}, is damaged: {why}") from error


def _lines(raw: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Numbers and lines, up to the point where the file breaks off."""
    is_gzip = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    with contextlib.suppress(EOFError, zlib.error):
        yield from enumerate(gzip.GzipFile(fileobj=raw) if is_gzip else raw, 1)


def _parsed(line: bytes) -> TraceLine:
    entry = json.loads(line, parse_constant=_number, parse_float=_number)
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {quoted(entry)}")
    return entry


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _header(path: str, entry: TraceLine) -> TraceLine:
    version = entry.get("trace")
    if not isinstance(version, str) or not version.replace(".", "", 1).isdecimal():
        raise ValueError("its first line has no version")
    if int(version.partition(".")[0]) != FORMAT[0]:
        raise TraceError(
            f"{path} is a trace of version {version}, written by nanoengine {entry.get('engine')};"
            f" this nanoengine reads version {FORMAT[0]}.x: read it with that nanoengine"
        )
    header = HEADER | entry
    if any(type(header[name]) is not type(default) for name, default in HEADER.items()):
        raise ValueError("its first line is not a header")
    return header


def _ints(value: Any) -> list[int]:
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise ValueError(f"expected a list of integers, got {quoted(value)}")
    return value
