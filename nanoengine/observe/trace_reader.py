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
from nanoengine.core.policies import Hysteresis, Predictive
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence, SequenceMoves
from nanoengine.core.speculation import enable_extras, set_drafts
from nanoengine.core.tiers.cost import CostModel, LoadCost, Rate
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.errors import TraceError
from nanoengine.observe.trace import FORMAT, LIMITS, digest
from nanoengine.observe.traced_disk import ReplayedDisk
from nanoengine.settings.checks import repr_short
from nanoengine.settings.params import SamplingParams
from nanoengine.version import __version__

POLICIES = {"WatermarkOnly": lambda: None, "Hysteresis": Hysteresis, "Predictive": Predictive}
CALLS = {"add", "plan", "step", "abort", "fork", "recover", "evict", "reset"}
"""Each line has one of these keys; other lines, from later minor versions, are skipped."""
MOVES = {"append_token", "fork", "finish", "drop"}
"""The moves of a chooser."""

Told = dict[str, Any]
"""A line of a trace."""
HEADER: Told = {"first": 0, "engine": "?", "date": "?"} | {
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
    header: Told
    lines: list[tuple[int, Told]] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """The numbers of the committed steps that are to be shown."""
        steps = (told["step"] for _, told in self.lines if type(told.get("step")) is int)
        return [step for step in steps if step >= self.header["first"]]

    @property
    def is_torn(self) -> bool:
        """True if the run was killed, or still continues."""
        return not self.lines or "end" not in self.lines[-1][1]

    def replay(self) -> Replay:
        """A replay, advanced to just before the first step to show is planned.

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
                    told = _parsed(line)
                    if recording is None:
                        recording = Recording(path=path, header=_header(path, told))
                    elif "trace" in told:
                        raise ValueError("another trace begins")
                    else:
                        recording.lines.append((number, told))
                except (ValueError, RecursionError) as error:
                    if recording is None:
                        raise TraceError(f"{path} is no trace of nanoengine ({error})") from error
                    if line.endswith(b"\n"):  # else the writing process was killed
                        raise TraceError(f"{path}, line {number}, is damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"{path} can't be read: {error}") from error
    if recording is None:
        raise TraceError(f"{path} is empty: no trace of nanoengine")
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
        held = recording.header.get("held")
        self._disk = None if held is None else ReplayedDisk(held)
        with _damage(recording, 1):
            self.scheduler = _scheduler(recording.header, self._disk)
        self._left = deque(recording.lines)
        first = recording.header["first"]
        while first and self._left and self._left[0][1].get("plan") != first:
            self._call(*self._left.popleft())

    def clock(self) -> float:
        """Returns `time_s`, as the clock of observers."""
        return self.time_s

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
        while self._left:
            number, told = self._left.popleft()
            for event, *values in self._call(number, told):
                for observer in observers:
                    if hasattr(observer, event):
                        getattr(observer, event)(*values)
                if event == "on_step":
                    yield values[0], values[1]

    def _call(self, number: int, told: Told) -> list[tuple[Any, ...]]:
        """Makes the call of a line; returns the calls of observers."""
        with _damage(self._recording, number):
            self._stops |= {(a, i, n): str(stop) for a, i, n, stop in told.get("stops", ())}
            self._chosen = list(told.get("chosen", ()))
            if self._disk is not None:
                self._disk.answers = list(told.get("disk", ()))
            made = {kind: getattr(self, f"_{kind}")(told) for kind in told.keys() & CALLS}
        return [(EVENTS[kind], *values) for kind, values in made.items() if values]

    # --- calls --------------------------------------------------------------------------------

    def _add(self, told: Told) -> tuple[Any, ...]:
        self.time_s = float(told["t"])
        follower = functools.partial(self._follower, told["add"])
        params = SamplingParams(**{"max_tokens": None} | told.get("params", {}))
        if "pooling" in told:
            from nanoengine.settings.pooling import PooledParams

            params = PooledParams(pooling=told["pooling"])
        request = Request(
            str(told["id"]),
            _ints(told["prompt"]),
            params,
            arrival=told["add"],
            arrival_time=self.time_s,
            priority=told.get("priority", 0),
            cache_salt=told.get("salt"),
            stop_ids=dict.fromkeys(_ints(told.get("stop", []))),
            max_num_tokens=told["most"],
            make_follower=follower if told.get("follower") else None,
            chooser=self if told.get("chooser") else None,
        )
        self._has_choosers |= request.chooser is not None
        self._requests[request.arrival] = request
        if request.needs_extras:
            enable_extras(self.scheduler)
        self.scheduler.add(request)
        return (request,)

    def _plan(self, told: Told) -> tuple[Any, ...]:
        drafted = dict(told.get("drafts", ()))
        for seq in self.scheduler.running if drafted else ():
            if seq.row in drafted:
                set_drafts(self.scheduler, seq, tuple(_ints(drafted[seq.row])))
        plan = self.scheduler.schedule()
        if (plan.step, digest(plan)) != (told["plan"], told["digest"]):
            engine, path = self._recording.header["engine"], self._recording.path
            raise TraceError(
                f"{path} can't be followed beyond step {told['plan']}: of the same requests and"
                f" tokens nanoengine {__version__} plans another step than nanoengine {engine},"
                " which wrote it. Read it with that version; if it is this one, it is damaged"
            )
        self._planned[plan.step] = plan
        return (plan,)

    def _step(self, told: Told) -> tuple[Any, ...]:
        self.time_s = float(told["t"])
        plan = self._planned.pop(told["step"])
        tokens = [_ints(one if type(one) is list else [one]) for one in told["sampled"]]
        if len(tokens) != len(plan.rows):
            raise ValueError(f"{len(tokens)} rows have sampled, {len(plan.rows)} are planned")
        seconds = zip(StepTimes.__dataclass_fields__, map(float, told["s"]), strict=True)
        result = StepResult(
            token_ids=tokens,
            errors={index: str(error) for index, error in told.get("errors", ())},
            times=StepTimes(**dict(seconds)),
        )
        if self._has_choosers:
            # Why empty: the chooser gets no candidates, because the trace has its choices.
            nothing: TokenLogprobs = [[] for _ in range(max(plan.num_logits, default=0))]
            result.logprobs = dict.fromkeys(range(len(tokens)), nothing)
        for request in self.scheduler.commit(plan, result):
            del self._requests[request.arrival]
        return plan, result, self.scheduler

    def _abort(self, told: Told) -> None:
        self.scheduler.abort(self._requests.pop(told["abort"]))

    def _fork(self, told: Told) -> None:
        arrival, index, next_token_id = told["fork"]
        parent = _sequence(self._requests[arrival], index)
        enable_extras(self.scheduler).fork(parent, next_token_id)

    def _recover(self, told: Told) -> None:
        if self._disk is not None:
            self._disk.held = told["held"]
        self.scheduler.recover(self._requests.values())
        self.scheduler.stats.steps = told["recover"]  # Why: the failed call may have been a plan.
        self._requests.clear()

    def _evict(self, told: Told) -> None:
        self.scheduler.block_manager.prefix_cache.evict(told["evict"])

    def _reset(self, told: Told) -> None:
        self.scheduler.block_manager.prefix_cache.reset()

    def _follower(self, arrival: int, index: int) -> Any:
        """An `OutputFollower` without text, which returns the stop strings of the trace."""
        numbers = itertools.count(1)  # of output tokens
        return SimpleNamespace(
            append=lambda token_id: self._stops.pop((arrival, index, next(numbers)), None)
        )

    def choose(self, request: Request, moves: SequenceMoves) -> None:
        """Repeats the traced moves of a chooser; this is the `TokenChooser` of all requests."""
        arrival, noted = self._chosen.pop(0)
        assert arrival == request.arrival, request
        for name, index, *values in noted:
            assert name in MOVES, name
            getattr(moves, name)(_sequence(request, index), *values)


def _scheduler(header: Told, disk: ReplayedDisk | None) -> Scheduler:
    """A new core with the settings of the header."""
    told, limits = header["layout"], header["scheduler"]
    groups = (KVGroup(**one | {"layers": tuple(one["layers"])}) for one in told["groups"])
    layout, cache = KVLayout(**told | {"groups": tuple(groups)}), None
    if "tier_settings" in header:
        settings, num_blocks = header["tier_settings"], header["tiers"]
        cost = settings["cost"]
        loads = {tier: LoadCost(**cost[tier] | {"rate": Rate(**cost[tier]["rate"])})
                 for tier in ("host", "disk")}  # fmt: skip
        cache = TieredPrefixCache(
            layout,
            num_host_blocks=num_blocks["host"],
            cost=CostModel(**loads, prefill=Rate(**cost["prefill"])),
            lazy=settings["lazy"],
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
    is_packed = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    with contextlib.suppress(EOFError, zlib.error):
        yield from enumerate(gzip.GzipFile(fileobj=raw) if is_packed else raw, 1)


def _parsed(line: bytes) -> Told:
    told = json.loads(line, parse_constant=_number, parse_float=_number)
    if not isinstance(told, dict):
        raise ValueError(f"it must be a JSON object, got {repr_short(told)}")
    return told


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of seconds")
    return number


def _header(path: str, told: Told) -> Told:
    version = told.get("trace")
    if not isinstance(version, str) or not version.replace(".", "", 1).isdecimal():
        raise ValueError("its first line has no version")
    if int(version.partition(".")[0]) != FORMAT[0]:
        raise TraceError(
            f"{path} is a trace of version {version}, written by nanoengine {told.get('engine')};"
            f" this one reads version {FORMAT[0]}.x: read it with that one"
        )
    header = HEADER | told
    if any(type(header[name]) is not type(usual) for name, usual in HEADER.items()):
        raise ValueError("its first line is no header")
    return header


def _ints(value: Any) -> list[int]:
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise ValueError(f"a list of integers is needed, got {repr_short(value)}")
    return value
