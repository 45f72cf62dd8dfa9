"""Trace: records the inputs of the core during one run, so that the run can be replayed.

    engine ── add, schedule, commit, abort, ... ──► Scheduler
                     └─► a line: the call's arguments, the sampled tokens

The core is deterministic: its plans depend only on requests, sampled tokens, aborts, forks, drafts,
the choices of choosers, stop strings and the results of a disk tier. A trace contains these, times,
and a digest of each plan, with which a reader detects that its core plans differently.
docs/trace.md describes the format; `trace_reader.read_trace` reads it.

It hooks the public methods of one Scheduler (`hooks.py`), and changes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from itertools import chain
from os import PathLike, fspath
from types import SimpleNamespace
from typing import Any, TextIO

import xxhash

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence, SequenceMoves
from nanoengine.core.speculation import enable_extras
from nanoengine.core.tiers.disk import FinishedCopy, NoDisk
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.observe.hooks import Hooks, after_call
from nanoengine.observe.metrics import times_of
from nanoengine.observe.traced_disk import disk_contents, disk_result
from nanoengine.settings.config import EngineConfig
from nanoengine.version import __version__

FORMAT = (2, 0)
"""Version of the format: a reader of a major version reads all of its minor versions."""
FLUSH_S = 1.0
"""Interval of flushes: a killed process loses at most the lines of this time [s]."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "long_prefill_threshold")
"""Arguments of a Scheduler, without its block manager and its policy."""
PARAMS = ("n", "min_tokens", "stop", "prompt_logprobs", "prompt_logprobs_start")
"""The sampling parameters that the core reads."""
PLAN_LISTS = ("released", "chosen_tokens", "table_updates", "transfers", "block_copies",
              "preempted", "waits")  # fmt: skip
"""Lists of a plan that are empty in most steps. A digest includes them if any is not empty."""

logger = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    """Converts what JSON can't hold: settings of a tier, an instance of a caller's class."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain).encode


class Trace(contextlib.AbstractContextManager["Trace"]):
    """Writes the trace of one scheduler, from its first request on. A context manager.

    Args:
        path: the file; with the suffix .gz it is compressed.
        scheduler: the scheduler to trace. It must be new, because a replay starts with a new core.
        about: further entries of the header, on the run: model, config.

    Raises:
        ConfigError: the scheduler has run already, or the file can't be written.

    >>> import os, tempfile
    >>> from nanoengine.bench.simulator import make_scheduler
    >>> path = os.path.join(tempfile.mkdtemp(), "run.trace")
    >>> with Trace(path, scheduler := make_scheduler(num_blocks=9, block_size=4)):
    ...     plan = scheduler.schedule()
    >>> json.loads(open(path).read().splitlines()[1])["plan"]
    0
    """

    def __init__(
        self,
        path: str | PathLike[str],
        scheduler: Scheduler,
        *,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if scheduler.stats.steps or scheduler.has_unfinished:
            raise ConfigError(
                f"trace={fspath(path)!r}: only a new engine can be traced, and this engine has run"
                f" {scheduler.stats.steps} steps or has requests: pass trace when you create it"
            )
        self._scheduler = scheduler
        self._file = _open(fspath(path))
        self._start_s = self._flushed_s = time.perf_counter()
        self._is_closed = False
        self._results: dict[str, list[Any]] = {}  # of other objects, in the current call
        self._committed: tuple[dict[str, Any], StepResult] | None = None  # not written yet
        cache = scheduler.block_manager.prefix_cache
        self._tiers = cache if isinstance(cache, TieredPrefixCache) else None
        # Why: the decisions of a TieredPrefixCache depend on these times.
        self._unrounded = ("load", "forward") if self._tiers else ()
        has_disk = self._tiers is not None and not isinstance(self._tiers.storage, NoDisk)
        self._disk = self._tiers.storage if has_disk else None
        self._hooks = Hooks(
            (scheduler, "add", after_call(self._on_add)),
            (scheduler, "schedule", after_call(self._on_schedule)),
            (scheduler, "commit", after_call(self._on_commit)),
            (scheduler, "end", after_call(self._on_end)),
            (scheduler, "abort", after_call(self._on_abort)),
            (enable_extras(scheduler), "fork", after_call(self._on_fork)),
            (scheduler, "recover", self._on_recover),
            (cache, "reset", after_call(lambda _: self._write_call({"reset": True}))),
            *([(self._disk, "collect", after_call(self._on_collect))] if self._disk else []),
        )
        header = _header(scheduler) | self._disk_contents()
        self._write_call(header | dict(about or {}))

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the file; may be called twice."""
        if not self._is_closed:
            self._write_call({"end": True})
            self._stop()

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Writes the committed step; all of its times are known now."""
        self._write_call()

    # --- inputs of the core -------------------------------------------------------------------

    def _on_add(self, _: None, request: Request, **kwargs: Any) -> None:
        if request.chooser is not None:
            request.chooser = SimpleNamespace(
                choose=functools.partial(self._choose, request.chooser.choose)
            )
        self._write_call(_request(request, self._start_s))

    def _on_schedule(self, plan: StepPlan) -> None:
        drafts = list(plan.draft_token_ids.items())
        line = {"plan": plan.step, "digest": digest(plan)}
        self._write_call(line | {"drafts": drafts} if drafts else line)

    def _on_commit(self, _: object, plan: StepPlan, result: StepResult) -> None:
        tokens = result.token_ids
        flat: list[Any] = [*chain.from_iterable(tokens)]
        if not len(flat) == len(tokens) == plan.num_logits.count(1):
            flat = [one[0] if len(one) == 1 else one for one in tokens]
        now_s = round(time.perf_counter() - self._start_s, 6)
        line = {"step": plan.step, "t": now_s, "sampled": flat} | self._pop_results()
        if result.errors:
            line["errors"] = list(result.errors.items())
        self._write_call()
        self._committed = line, result

    def _on_end(self, _: None, seq: Sequence, reason: str, stop: object = None) -> None:
        """Records where a stop string matched, because the trace has no text."""
        if isinstance(stop, str):
            ended = seq.request.arrival, seq.index, seq.num_output_tokens, stop
            self._results.setdefault("stops", []).append(ended)

    def _on_abort(self, _: None, request: Request) -> None:
        self._write_call({"abort": request.arrival})

    def _on_fork(self, child: Sequence, parent: Sequence, next_token_id: int | None = None) -> None:
        if "chosen" not in self._results:  # else it is a chooser's move
            self._write_call({"fork": [parent.request.arrival, parent.index, next_token_id]})

    def _on_recover(self, call: Any, requests: Any) -> None:
        self._results.clear()  # Why: a failed call has no line.
        call(requests)
        self._write_call({"recover": self._scheduler.stats.steps} | self._disk_contents())

    def _choose(self, call: Any, request: Request, moves: SequenceMoves) -> None:
        recorded: list[Any] = []
        self._results.setdefault("chosen", []).append([request.arrival, recorded])
        call(request, _Moves(moves, recorded))

    def _on_collect(self, finished: list[FinishedCopy], wait_s: float) -> None:
        self._results.setdefault("disk", []).append(disk_result(self._disk, finished))

    def _disk_contents(self) -> dict[str, Any]:
        """The content of the disk tier's directory when it starts."""
        return {"held": disk_contents(self._tiers)} if self._disk else {}

    # --- lines --------------------------------------------------------------------------------

    def _pop_results(self) -> dict[str, Any]:
        """The results of other objects during the call that has just returned."""
        results = {name: value for name, value in self._results.items() if any(value)}
        self._results.clear()
        return results

    def _write_call(self, line: dict[str, Any] | None = None) -> None:
        """Writes the last committed step if it is not written yet, then the line of a call."""
        if self._committed is not None:
            (step, result), self._committed = self._committed, None
            times = times_of(result).items()
            step["s"] = [v if name in self._unrounded else round(v, 6) for name, v in times]
            self._write(step)
        if line is not None:
            self._write(line | self._pop_results())

    def _write(self, line: Mapping[str, Any]) -> None:
        """Writes a line; if the disk is full, the trace ends and the run continues."""
        if self._is_closed:
            return
        try:
            self._file.write(_encode(line) + "\n")
            now = time.perf_counter()
            if now - self._flushed_s > FLUSH_S or "end" in line:
                self._file.flush()
                self._flushed_s = now
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self._file.name, error)
            self._stop()

    def _stop(self) -> None:
        """Stops observing."""
        self._is_closed = True
        self._hooks.remove()
        with contextlib.suppress(OSError):
            self._file.close()


def trace_engine(
    engine: LLMEngine,
    path: str | PathLike[str],
    *,
    config: EngineConfig | None = None,
) -> Trace:
    """Traces a new engine, until the trace or the engine is closed.

    Raises:
        ConfigError: the engine has run already, or the file can't be written.
    """
    keys = ("model_name", "dtype", "device", "attention_backend", "max_model_len", "quantization")
    about = {
        "model": {name: getattr(engine.info, name) for name in keys},
        "config": {one.name: getattr(config, one.name) for one in fields(config)} if config else {},
    }
    trace = Trace(path, engine.scheduler, about=about)
    engine.observers.append(trace)
    return trace


def digest(plan: StepPlan) -> int:
    """A 32-bit digest, which is equal for equal plans."""
    numbers = [*plan.rows, *plan.starts, *plan.num_scheduled_tokens, *plan.num_logits]
    summed = xxhash.xxh32(struct.pack(f"<{len(numbers)}q", *numbers))
    rest = [
        [(new.row, new.seq_id, new.num_cached_tokens, len(new.token_ids)) for new in plan.admitted],
        [fork[:3] for fork in plan.forks],
        list(plan.draft_token_ids.items()),
        *(getattr(plan, name) for name in PLAN_LISTS),
    ]
    if any(rest):
        summed.update(_encode(rest).encode())
    return summed.intdigest()


def _header(scheduler: Scheduler) -> dict[str, Any]:
    """The settings of the core."""
    manager, policy = scheduler.block_manager, scheduler.policy
    cache, settings = manager.prefix_cache, vars(policy) if policy else {}
    header = {
        "trace": ".".join(map(str, FORMAT)),
        "engine": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": manager.layout,
        "scheduler": {name: getattr(scheduler, name) for name in LIMITS}
        | {
            "prefix_caching": cache.enabled,
            "watermark_blocks": manager.num_watermark_blocks,
            "admission": type(policy).__name__ if policy else "WatermarkOnly",
        },
        "policy": {name: value for name, value in settings.items() if name[0] != "_"},
        "tiers": {},
    }
    if isinstance(cache, TieredPrefixCache):
        tiers = cache.tier_stats()
        header["tiers"] = {
            t.name: t.empty_blocks + t.cached_blocks + t.active_blocks for t in tiers
        }
        states = cache.host.num_states
        header["tier_settings"] = {"host_states": states, "cost": cache.cost}
    return header


def _request(request: Request, start_s: float) -> dict[str, Any]:
    """A request as the core sees it; default values are left out."""
    seq, params = request.sequences[0], request.params
    defaults = {one.name: one.default for one in fields(params)}
    line: dict[str, Any] = {
        "prompt": request.prompt_token_ids,
        "most": seq.max_num_tokens,
        "stop": sorted(seq.stop_ids),
        "priority": request.priority,
        "salt": request.cache_salt,
        "params": {name: getattr(params, name) for name in PARAMS
                   if getattr(params, name) != defaults[name]},
        "follower": request.make_follower is not None,
        "chooser": request.chooser is not None,
        "pooling": params.pooling,
    }  # fmt: skip
    if params.structured_outputs is not None:
        line["params"].pop("min_tokens", None)  # Why: the grammar decides when the text may end.
    line = {name: value for name, value in line.items() if value}
    arrived_s = round(request.arrival_time - start_s, 6)
    return {"add": request.arrival, "id": request.request_id, "t": arrived_s} | line


class _Moves:
    """`SequenceMoves` that records each move before it is made."""

    def __init__(self, moves: SequenceMoves, recorded: list[Any]) -> None:
        self._moves, self._recorded = moves, recorded

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def move(seq: Sequence, *args: Any, **kwargs: Any) -> Any:
            self._recorded.append([name, seq.index, *args, *kwargs.values()])
            return getattr(self._moves, name)(seq, *args, **kwargs)

        return move


def _open(path: str) -> TextIO:
    """Opens the file for writing; its directory must exist.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        if path.endswith(".gz"):  # Why level 1: twice as fast, files are a fifth larger.
            return gzip.open(path, "wt", compresslevel=1, encoding="utf-8", newline="\n")
        return open(path, "w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"trace={path!r} can't be written: {error}") from error
