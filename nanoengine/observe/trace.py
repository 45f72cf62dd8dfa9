"""Trace: an Observer that writes what each step did, a JSON line each, to look at the run later.

    plan, result ── on_step ──────► a line: what has changed since the line before
    requests ────── on_request ───►   arrived
    pools ───────── on_block ─────►   content: what blocks hold from now on

A line holds the plan in its own ints, so a step in which 256 sequences decode a token each writes
little more than these tokens. Block tables, reference counts and outputs follow from all lines so
far: `trace_fold.Fold` rebuilds them. docs/trace.md describes the format; `trace_reader.read_trace`
reads it.

Enters `LLMEngine.observers`, `LLMEngine.on_queued` and `BlockPool.observers`; changes nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, fields, is_dataclass
from itertools import chain
from operator import add
from os import PathLike, fspath
from typing import Any, TextIO

from nanoengine.core.block_pool import Block, BlockPool
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.settings.config import EngineConfig
from nanoengine.version import __version__

FORMAT = (1, 0)
"""Version of the format: a reader of one major version reads all its minor ones."""
FLUSH_S = 1.0
"""A process that is killed loses the lines of this many seconds [s]."""
SWEEP_STEPS = 256
"""Steps between two looks for requests that were aborted while they waited."""
CLEARED = 0
"""In place of a block's id, which the null block's never is: nothing is held any more."""
TIMES = ("schedule", "prepare", "load", "forward", "sample", "commit")
"""The parts of a step, in the order of `ms`; seconds in `StepTimes`."""

logger = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    """What JSON has no form for: a tier's settings, a class of a caller's own."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain).encode


class Trace:
    """Writes the trace of one scheduler's steps. A context manager; `close` ends the file.

    A trace may begin at any step: its first line then says what is held at that moment.

    Args:
        path: of the file; with the suffix .gz it is compressed.
        scheduler: whose steps are traced.
        steps: the first step to write, and the one to stop before; None: no end.
        about: what else the header tells of the run: model, config.

    >>> import os, tempfile
    >>> from nanoengine.bench.simulator import make_scheduler
    >>> path = os.path.join(tempfile.mkdtemp(), "run.trace")
    >>> with Trace(path, make_scheduler(num_blocks=9, block_size=4)) as trace:
    ...     trace.on_step(StepPlan(step=0), StepResult(token_ids=[]), object())
    >>> json.loads(open(path).read().splitlines()[1])["step"]
    0
    """

    def __init__(
        self,
        path: str | PathLike[str],
        scheduler: Scheduler,
        *,
        steps: tuple[int, int | None] = (0, None),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._first, self._end = steps
        self._scheduler = scheduler
        self._file = _open(fspath(path))
        self._start_s = self._flushed_s = time.perf_counter()
        self._is_over = False
        self._watched: dict[str, _Watched] = {}
        self._content: list[tuple[int, str, Any]] = []  # (steps planned by then, pool, event)
        self._arrived: list[dict[str, Any]] = []
        self._requests: dict[int, Request] = {}  # by first sequence, not finished
        self._live: dict[int, Sequence] = {}  # known and not ended
        self._ended: set[int] = set()  # of requests that go on
        self._told: set[int] = set()  # admitted or forked in some line
        self._held: dict[int, Sequence | None] = {}  # by row, as the executor sees it
        self._ends: dict[int, int] = {}  # by row: where its next token is expected to start
        self._rows: list[int] = []
        self._waits: list[tuple[int, str]] = []
        self._write(_header(scheduler, about or {}))
        if scheduler.stats.steps >= self._first:
            self._begin()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what has ended without a step, and closes the file; closing twice is harmless."""
        if not self._is_over:
            end: dict[str, Any] = {"arrived": self._arrived, "ended": [], "outputs": []}
            if self._watched:
                self._sweep(end)
            self._write({"end": {name: entries for name, entries in end.items() if entries}})
            self._end_now()

    # --- what happens -------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        """Notes a request that is queued."""
        if self._is_over:
            return
        first = request.sequences[0]
        self._requests[first.seq_id], self._live[first.seq_id] = request, first
        if self._watched:
            self._arrived.append(self._request(request))

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Writes the line of a step, from the first one asked for to the last."""
        if self._is_over:
            return
        if not self._watched:
            if self._scheduler.stats.steps >= self._first:
                self._begin()
            elif plan.step % SWEEP_STEPS == 0:
                self._forget_finished()
            return
        now = time.perf_counter()
        times = result.times
        record: dict[str, Any] = {
            "step": plan.step,
            "t": round(now - self._start_s, 6),
            "ms": [round(1e3 * getattr(times, f"{name}_s"), 3) for name in TIMES],
            "waiting": self._scheduler.num_waiting,
            "running": self._scheduler.num_running,
            "arrived": self._arrived,
            "ended": [],
            "outputs": [],
        }
        self._arrived = []
        self._note_sequences(plan, record)
        self._note_rows(plan, record)
        record["sampled"] = [one[0] if len(one) == 1 else one for one in result.token_ids]
        record["errors"] = list(result.errors.items())
        record["content"] = self._take_content(plan.step + 1)
        record["tables"] = plan.table_updates
        record["copied"] = plan.block_copies
        record["moved"] = plan.transfers
        record["reasons"] = plan.reasons
        if plan.waits != self._waits:
            record["waits"] = self._waits = plan.waits
        self._note_ends(plan, record)
        self._write({k: v for k, v in record.items() if v or k in _ALWAYS})
        if self._end is not None and plan.step + 1 >= self._end:
            self.close()

    # --- the parts of a line ------------------------------------------------------------------

    def _note_sequences(self, plan: StepPlan, record: dict[str, Any]) -> None:
        """Who takes rows, gives them back and is preempted; in the plan's order."""
        record["preempted"] = plan.preempted
        record["released"] = plan.released
        for row in plan.released:
            seq = self._held.pop(row, None)
            if seq is not None and seq.is_finished and seq.seq_id in self._live:
                self._note_end(seq, record)
        siblings = []
        for new in plan.admitted:
            seq = self._find(new.seq_id)
            self._take_row(new.row, new.seq_id, seq)
            self._ends[new.row] = new.num_cached_tokens
            if seq is not None and seq.index:
                siblings.append([new.seq_id, seq.request.request_id])
        record["siblings"] = siblings
        record["admitted"] = [
            [a.row, a.seq_id, a.num_cached_tokens, a.token_ids] for a in plan.admitted
        ]
        for fork in plan.forks:
            self._take_row(fork.row, fork.seq_id, self._find(fork.seq_id, fork.parent_row))
            self._ends[fork.row] = -1
        record["forked"] = [fork[:3] for fork in plan.forks]
        record["chosen"] = plan.chosen_tokens

    def _note_rows(self, plan: StepPlan, record: dict[str, Any]) -> None:
        """Which rows compute what, as far as it is not what they did in the line before."""
        rows, starts, counts, ends = plan.rows, plan.starts, plan.num_scheduled_tokens, self._ends
        if rows != self._rows:
            record["rows"] = self._rows = rows
        expected = [ends[row] for row in rows]
        if starts != expected:
            record["starts"] = [
                [i, start] for i, (start, e) in enumerate(zip(starts, expected, strict=True))
                if start != e
            ]  # fmt: skip
        ends.update(zip(rows, map(add, starts, counts), strict=True))
        record["counts"] = _but_ones(counts)
        record["logits"] = _but_ones(plan.num_logits)
        record["drafts"] = list(plan.draft_token_ids.items())

    def _note_ends(self, plan: StepPlan, record: dict[str, Any]) -> None:
        """The sequences of requests that this step has finished."""
        for request in self._scheduler.last_finished:
            self._note_finished(request, record)
        if plan.step % SWEEP_STEPS == 0:
            self._sweep(record)

    def _sweep(self, record: dict[str, Any]) -> None:
        """Finds those that were aborted while they waited: no plan and no commit tells of them."""
        for request in [one for one in self._requests.values() if one.finished]:
            self._note_finished(request, record)

    def _note_finished(self, request: Request, record: dict[str, Any]) -> None:
        for seq in request.sequences:
            if seq.seq_id in self._live or seq.seq_id not in self._ended:
                self._note_end(seq, record)
        self._ended.difference_update(seq.seq_id for seq in request.sequences)
        self._requests.pop(request.sequences[0].seq_id, None)

    def _note_end(self, seq: Sequence, record: dict[str, Any]) -> None:
        """Why a sequence has ended, and how many of its tokens count."""
        request = seq.request
        detail = request.error if seq.finish_reason == "error" else seq.stop_reason
        entry = [seq.seq_id, seq.finish_reason, seq.num_output_tokens]
        record["ended"].append(entry if detail is None else [*entry, detail])
        untold = seq.seq_id not in self._told and (seq.index or seq.num_output_tokens)
        if untold or request.chooser is not None:  # Why: no plan has told all of its tokens.
            record["outputs"].append([seq.seq_id, request.request_id, seq.output_token_ids])
        self._live.pop(seq.seq_id, None)
        self._told.discard(seq.seq_id)
        self._ended.add(seq.seq_id)

    def _forget_finished(self) -> None:
        """Drops what has ended before the trace began."""
        self._requests = {i: one for i, one in self._requests.items() if not one.finished}
        self._live = {i: seq for i, seq in self._live.items() if not seq.is_finished}

    def _request(self, request: Request) -> dict[str, Any]:
        """What is told of a request, once."""
        seq = request.sequences[0]
        told = {
            "id": request.request_id,
            "seq": seq.seq_id,
            "t": round(request.arrival_time - self._start_s, 6),
            "prompt": len(request.prompt_token_ids),
            "max": seq.max_num_tokens - len(request.prompt_token_ids),
        }
        if request.priority:
            told["priority"] = request.priority
        if request.params.n > 1:
            told["n"] = request.params.n
        if request.chooser is not None:
            told["chooser"] = True
        return told

    def _take_row(self, row: int, seq_id: int, seq: Sequence | None) -> None:
        self._held[row] = seq
        self._told.add(seq_id)
        if seq is not None:
            self._live[seq_id] = seq

    def _find(self, seq_id: int, parent_row: int | None = None) -> Sequence | None:
        """The sequence of this id; None if it has gone since it was planned."""
        if seq_id in self._live:
            return self._live[seq_id]
        parent = None if parent_row is None else self._held.get(parent_row)
        requests = self._requests.values() if parent is None else [parent.request]
        several = [request.sequences for request in requests if len(request.sequences) > 1]
        return next((seq for seq in chain.from_iterable(several) if seq.seq_id == seq_id), None)

    def _take_content(self, num_planned: int) -> dict[str, list[Any]]:
        """By pool, what its blocks hold or have lost, up to the time that the step was the last one
        planned; in the overlapped loop the next one is planned by now."""
        self._watch_tiers()
        events, taken = self._content, dict[str, list[Any]]()
        num_taken = 0
        for planned, pool, event in events:
            if planned > num_planned:
                break
            taken.setdefault(pool, []).append(event)
            num_taken += 1
        del events[:num_taken]
        return taken

    # --- the beginning ------------------------------------------------------------------------

    def _begin(self) -> None:
        """Watches the pools from now on, and writes what is held already, if anything is."""
        manager = self._scheduler.block_manager
        self._watch("device", manager.pool)
        self._watch_tiers()
        held = self._take_content(self._scheduler.stats.steps)
        running = self._scheduler.running
        if not (held or running or self._scheduler.stats.steps):
            return
        for seq in running:
            self._take_row(seq.row, seq.seq_id, seq)
            self._ends[seq.row] = seq.num_computed_tokens
        for seq in running:
            self._requests[seq.request.sequences[0].seq_id] = seq.request
        self._forget_finished()
        self._write(
            {
                "state": {
                    "planned": self._scheduler.stats.steps - 1,
                    "requests": [self._request(request) for request in self._requests.values()],
                    "rows": [
                        [seq.row, seq.seq_id, seq.request.request_id, seq.num_computed_tokens,
                         seq.token_ids, seq.block_tables]
                        for seq in running
                    ],
                    "content": held,
                }
            }
        )  # fmt: skip

    def _watch(self, name: str, pool: BlockPool) -> None:
        """Watches one pool, and notes what it holds already."""
        planned = self._scheduler.stats.steps
        if name in self._watched:
            self._content.append((planned, name, CLEARED))
        watched = self._watched[name] = _Watched(name, pool, self._scheduler, self._content)
        pool.observers.append(watched)
        for block in pool.blocks:
            if block.prefix is not None:
                watched.on_block("stored", block)

    def _watch_tiers(self) -> None:
        """Watches the pools of the tiers; after a failed step these are new ones."""
        cache = self._scheduler.block_manager.prefix_cache
        if isinstance(cache, TieredPrefixCache):
            pools = {"host": cache.host, "disk": cache.disk.pool}
            for tier in cache.tiers.tier_stats() if cache.tiers is not None else ():
                pool, watched = pools[tier.name], self._watched.get(tier.name)
                if watched is None or watched.pool is not pool:
                    self._watch(tier.name, pool)

    def _end_now(self) -> None:
        """Stops watching; nothing is written any more."""
        self._is_over = True
        for watched in self._watched.values():
            watched.pool.observers.remove(watched)
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        """Writes a line; a disk that takes no more ends the trace, and not the run."""
        try:
            self._file.write(_encode(line) + "\n")
            now = time.perf_counter()
            if now - self._flushed_s > FLUSH_S:
                self._file.flush()
                self._flushed_s = now
        except OSError as error:
            logger.warning("the trace %s ends here: %s", self._file.name, error)
            self._end_now()


class _Watched:
    """What the blocks of one pool hold: a `BlockObserver` that notes it, in order."""

    def __init__(
        self, name: str, pool: BlockPool, scheduler: Scheduler, events: list[tuple[int, str, Any]]
    ) -> None:
        self.pool = pool
        self._name = name
        self._stats = scheduler.stats
        self._events = events

    def on_block(self, event: str, block: Block) -> None:
        """Notes content that comes and goes; who refers to a block follows from the tables."""
        told: Any
        if event == "stored":
            assert block.prefix is not None, block
            told = (block.block_id, block.group, content_key(block.prefix.digest))
        elif event == "removed":
            told = block.block_id
        elif event == "cleared":
            told = CLEARED
        else:
            return
        self._events.append((self._stats.steps, self._name, told))


def content_key(digest: bytes) -> int:
    """The name of a block's content in a trace: 48 bits of its digest, exact in any JSON reader."""
    return int.from_bytes(digest[:6], "big")


def trace_engine(
    engine: LLMEngine,
    path: str | PathLike[str],
    *,
    steps: tuple[int, int | None] = (0, None),
    config: EngineConfig | None = None,
) -> Trace:
    """Traces an engine's steps from now on, until the trace, or the engine, is closed."""
    info = engine.info
    told = ("model_name", "dtype", "device", "attention_backend", "max_model_len", "quantization")
    about = {
        "model": {name: getattr(info, name) for name in told},
        "config": {one.name: getattr(config, one.name) for one in fields(config)} if config else {},
    }
    trace = Trace(path, engine.scheduler, steps=steps, about=about)
    engine.observers.append(trace)
    engine.on_queued.append(trace.on_request)
    return trace


_ALWAYS = frozenset(("step", "t", "ms", "waiting", "running", "rows", "waits"))
"""Written also where they are 0 or empty; the last two only where they have changed."""


def _but_ones(values: SequenceOf[int]) -> list[list[int]]:
    """[index, value] of those that are not 1."""
    if values.count(1) == len(values):
        return []
    return [[i, value] for i, value in enumerate(values) if value != 1]


def _header(scheduler: Scheduler, about: Mapping[str, Any]) -> dict[str, Any]:
    """The first line: what the run was made of."""
    manager = scheduler.block_manager
    tiers = manager.prefix_cache.tiers
    return {
        "trace": ".".join(map(str, FORMAT)),
        "engine": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "layout": asdict(manager.layout),
        "scheduler": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "chunked_prefill": scheduler.chunked_prefill,
            "long_prefill_threshold": scheduler.long_prefill_threshold,
            "prefix_caching": manager.prefix_cache.enabled,
            "watermark_blocks": manager.num_watermark_blocks,
            "admission": type(scheduler.policy).__name__ if scheduler.policy else "WatermarkOnly",
        },
        "tiers": {
            tier.name: tier.empty_blocks + tier.cached_blocks + tier.active_blocks
            for tier in (tiers.tier_stats() if tiers is not None else ())
        },
        **about,
    }


def _open(path: str) -> TextIO:
    """The file to write; its directory must be there.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        if path.endswith(".gz"):  # Why level 1: twice as quick, for files a fifth larger.
            return gzip.open(path, "wt", compresslevel=1, encoding="utf-8", newline="\n")
        return open(path, "w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"trace={path!r} can't be written: {error}") from error
