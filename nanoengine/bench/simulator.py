"""Simulator: runs the real Scheduler and BlockManager on a workload, without a model.

    requests ──▶ Scheduler ──plan──▶ FilledExecutor (one token per row, no computation) ──▶ commit
                     │                    └─ TimeModel: estimated time of the step, if fitted
                     └─ counts ──▶ SimulationReport

It shows in seconds how a pool size, a budget or an admission policy affects a workload: steps,
preemptions, recomputed tokens, peak blocks. `nanoengine simulate`, the figures of
`python bench.py --plot` and tests call it; it loads neither weights nor torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanoengine.bench.workload import WorkItem
from nanoengine.core.engine_stats import num_waste_slots
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.core.stats import SchedulerStats
from nanoengine.errors import ConfigError
from nanoengine.observe.trace import Trace
from nanoengine.settings.params import SamplingParams

FILL, STOP = 1, 0
"""The token that every step samples, and the token that ends a sequence of hidden length."""
SAMPLE_EVERY = 16
"""Steps between two counts of empty slots; a count visits all running sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds of a step: `step_s + token_s * tokens + context_s * context tokens`.

    Context tokens are the tokens that the step's queries attend to, counted once per sequence.
    """

    step_s: float
    token_s: float
    context_s: float

    @classmethod
    def fit(
        cls, tokens: SequenceOf[int], context: SequenceOf[int], seconds: SequenceOf[float]
    ) -> TimeModel:
        """Least squares over measured steps, with all terms at least zero.

        While terms are negative, the lowest one is set to zero, and the others are fitted again.

        Raises:
            ValueError: fewer than three steps.

        >>> TimeModel.fit([1, 2, 100, 1], [10, 50, 100, 90], [2.0, 3.0, 101.0, 2.0])
        TimeModel(step_s=1.0, token_s=1.0, context_s=0.0)
        """
        if len(seconds) < 3:
            raise ValueError(f"a fit needs at least 3 steps, got {len(seconds)}")
        columns = np.stack([np.ones(len(seconds)), np.asarray(tokens), np.asarray(context)], axis=1)
        measured = np.asarray(seconds)
        while (found := np.linalg.lstsq(columns, measured, rcond=None)[0]).min() < -1e-12:
            columns[:, found.argmin()] = 0
        terms = (round(max(0.0, term), 12) for term in found.tolist())
        return cls(**dict(zip(cls.__slots__, terms, strict=True)))

    def step(self, plan: StepPlan) -> float:
        """Estimated seconds of one step."""
        context = sum(plan.starts) + plan.num_tokens
        return self.step_s + self.token_s * plan.num_tokens + self.context_s * context


@dataclass(slots=True, kw_only=True)
class SimulationReport(SchedulerStats):
    """The effects of a workload on a pool, in addition to the scheduler's counters.

    `failed` requests did not fit the pool. `peak_blocks` and `mean_blocks` count active blocks, of
    `usable_blocks`. `waste_slots` are allocated but hold no token (counted every 16 steps).
    `estimated_s` is None without a fitted time model; `wall_s` is the time of the simulation.
    """

    requests: int = 0
    failed: int = 0
    hit_rate: float = 0.0
    mean_batch: float = 0.0
    max_batch: int = 0
    usable_blocks: int
    peak_blocks: int = 0
    mean_blocks: float = 0.0
    peak_waste_slots: int = 0
    mean_waste_slots: float = 0.0
    estimated_s: float | None = None
    wall_s: float = 0.0


class FilledExecutor:
    """Samples FILL for every row, or STOP at the end of a sequence with a known length.

    `lengths` maps a sequence to its final number of tokens, including the prompt; any other
    sequence continues until its max_tokens.
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """One token per row with a logit."""
        for new in plan.admitted:
            self._length[new.row] = self.lengths.get(new.seq_id, sys.maxsize)
        tokens = []
        for row, start, count, logits in zip(
            plan.rows, plan.starts, plan.num_scheduled_tokens, plan.num_logits, strict=True
        ):
            last = start + count + 1 >= self._length[row]
            tokens.append([STOP if last else FILL] if logits else [])
        return StepResult(token_ids=tokens)


def simulate(
    work: Iterable[WorkItem],
    scheduler: Scheduler,
    *,
    length_cap: int | None = None,
    time_model: TimeModel | None = None,
    trace: Trace | None = None,
) -> SimulationReport:
    """Runs a workload through a scheduler until all of it is done.

    Args:
        work: pulled lazily, up to `max_num_seqs` requests ahead of the running ones. Finished
            requests are not kept, so memory does not grow with the workload.
        scheduler: a new one; `make_scheduler` builds it.
        length_cap: None: each request's max_tokens is its exact length, which the scheduler may
            use. Else each request has these max_tokens and stops earlier by itself, like a real
            request that ends with EOS.
        time_model: estimates seconds.
        trace: a trace of the same scheduler; with a time model, its steps have estimated times.
    """
    started, executor, queue = time.perf_counter(), FilledExecutor(), iter(work)
    pool = scheduler.block_manager.pool
    report = SimulationReport(usable_blocks=pool.num_usable)
    while True:
        ahead = scheduler.max_num_seqs - scheduler.num_waiting
        for item in islice(queue, max(0, ahead)):
            _add(scheduler, executor, report.requests, item, length_cap)
            report.requests += 1
        if not scheduler.has_unfinished:
            break
        plan = scheduler.schedule()
        active = pool.num_usable - pool.num_free
        report.peak_blocks = max(report.peak_blocks, active)
        report.mean_blocks += active
        report.max_batch = max(report.max_batch, len(plan.rows))
        report.mean_batch += len(plan.rows)
        if plan.step % SAMPLE_EVERY == 0:
            waste = num_waste_slots(scheduler)
            report.peak_waste_slots = max(report.peak_waste_slots, waste)
            report.mean_waste_slots += waste
        result = executor.execute(plan)
        if time_model is not None:
            result.times.forward_s = time_model.step(plan)
            report.estimated_s = (report.estimated_s or 0.0) + result.times.forward_s
        done = scheduler.commit(plan, result)
        if trace is not None:
            trace.on_step(plan, result, scheduler)
        report.failed += sum(request.error is not None for request in done)
        for request in done if length_cap else ():
            del executor.lengths[request.sequences[0].seq_id]
    for name, count in asdict(scheduler.stats).items():
        setattr(report, name, count)
    steps = max(report.steps, 1)
    report.mean_batch /= steps
    report.mean_blocks /= steps
    report.mean_waste_slots /= -(-steps // SAMPLE_EVERY)
    report.hit_rate = scheduler.block_manager.prefix_cache.stats.hit_rate
    report.wall_s = time.perf_counter() - started
    return report


def _add(
    scheduler: Scheduler, executor: FilledExecutor, number: int, item: WorkItem, cap: int | None
) -> None:
    """Queues one item; with a cap, only the executor knows its length."""
    ids, length = list(item.prompt_token_ids), item.max_tokens
    max_tokens, hidden = max(cap or 0, length), cap is not None
    if hidden:
        executor.lengths[number] = len(ids) + length
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=not hidden, temperature=0)
    request = Request(str(number), ids, params, arrival=number, arrival_time=time.perf_counter())
    request.stop_ids = {STOP: None} if hidden else {}
    request.max_num_tokens = len(ids) + max_tokens
    scheduler.add(request)


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    watermark_frac: float = 0.01,
    **options: Any,
) -> Scheduler:
    """A scheduler with a simulated pool; arguments have the names of `EngineConfig`.

    Args:
        options: further arguments of the scheduler, such as `policy`.
    """
    groups = (KVGroup(layers=(0,)),)
    layout = KVLayout(num_blocks=num_blocks, block_size=block_size, block_bytes=1, groups=groups)
    manager = make_block_manager(
        layout,
        enable_prefix_caching=enable_prefix_caching,
        watermark_frac=watermark_frac,
        max_chunk=max_num_batched_tokens,
    )
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return Scheduler(manager, **limits, **options)


def load_time_model(path: Path) -> TimeModel:
    """Fits a time model to the steps of a bench report.

    Raises:
        ConfigError: it is not a report, or has no step records.
    """
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["step_records"]
        return TimeModel.fit(steps["tokens"], steps["context_tokens"], steps["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"step_times={str(path)!r} must be a report of `nanoengine bench --json` with steps"
            f" ({type(error).__name__}: {error})"
        ) from error


# --- the report -----------------------------------------------------------------------------------

TABLE = """\
requests        {r.requests:,}, {r.failed:,} of them too large for the pool
steps           {r.steps:,}, {r.mean_batch:.1f} sequences on average, {r.max_batch} at most
tokens          {r.prefill_tokens:,} prefilled, {r.output_tokens:,} generated
preemptions     {r.preemptions:,}
prefill waste   {r.prefill_waste_frac:.1%}: {r.recomputed_tokens:,} tokens recomputed
prefix cache    {r.hit_rate:.1%} of the tokens looked up
blocks          {r.mean_blocks:,.0f} in use on average, {r.peak_blocks:,} at most, of {usable}
empty slots     {r.mean_waste_slots:,.0f} on average, {r.peak_waste_slots:,} at most
estimated       {estimated}
simulated in    {r.wall_s:.2f} s"""


def format_report(report: SimulationReport) -> str:
    """The report as aligned text."""
    seconds, estimated = report.estimated_s, "no --step-times"
    if seconds is not None:
        estimated = f"{seconds:,.2f} s, {report.output_tokens / seconds:,.1f} output tok/s"
    return TABLE.format(r=report, usable=f"{report.usable_blocks:,}", estimated=estimated)
