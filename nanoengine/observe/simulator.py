"""Simulator: the real Scheduler and BlockManager over a workload, without a model.

    requests ──▶ Scheduler ──plan──▶ FilledExecutor (a token a row, nothing computed) ──▶ commit
                     │                    └─ TimeModel: what the step would take, if one was fitted
                     └─ counts ──▶ SimulationReport

It answers in seconds what a pool size, a budget or an admission policy does to a workload: steps,
preemptions, work done twice, blocks at the peak. Called by `nanoengine simulate` and by tests; it
loads no weights and no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from nanoengine.core.admission import AdmissionPolicy
from nanoengine.core.engine_stats import num_waste_slots
from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request
from nanoengine.observe.trace import Trace
from nanoengine.settings.params import SamplingParams

FILL, STOP = 1, 0
"""The token that every step samples, and the one that ends a sequence of hidden length."""
SAMPLE_EVERY = 16
"""Steps between two looks at the empty slots: they are counted over all running sequences."""


class Work(Protocol):
    """One request: its prompt, and how many tokens it generates."""

    @property
    def prompt_token_ids(self) -> SequenceOf[int]:
        """The prompt."""

    @property
    def max_tokens(self) -> int:
        """Tokens that it generates, exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """Seconds of a step: `step_s + token_s * tokens + context_s * context tokens`.

    Context tokens are those that the step's queries attend to, read once a sequence.
    """

    step_s: float
    token_s: float
    context_s: float

    @classmethod
    def fit(
        cls, tokens: SequenceOf[int], context: SequenceOf[int], seconds: SequenceOf[float]
    ) -> TimeModel:
        """Least squares over measured steps, no term below zero.

        Why by trying: three terms leave seven choices of those that are not zero. Each is fitted,
        and the best fit without a negative term is the answer.

        Raises:
            ValueError: fewer than three steps.

        >>> TimeModel.fit([1, 2, 100, 1], [10, 50, 100, 90], [2.0, 3.0, 101.0, 2.0])
        TimeModel(step_s=1.0, token_s=1.0, context_s=0.0)
        """
        if len(seconds) < 3:
            raise ValueError(f"a fit needs at least 3 steps, got {len(seconds)}")
        columns = np.stack([np.ones(len(seconds)), np.asarray(tokens), np.asarray(context)], axis=1)
        target = np.asarray(seconds, dtype=np.float64)
        best, best_error = np.zeros(3), float("inf")
        for mask in range(1, 8):
            kept = [i for i in range(3) if mask >> i & 1]
            found = np.linalg.lstsq(columns[:, kept], target, rcond=None)[0]
            error = float(((columns[:, kept] @ found - target) ** 2).sum())
            if (found >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(3), error
                best[kept] = found
        return cls(**dict(zip(cls.__slots__, (round(float(x), 12) for x in best), strict=True)))

    def step(self, plan: StepPlan) -> float:
        """Estimated seconds of one step."""
        context = sum(plan.starts) + plan.num_tokens
        return self.step_s + self.token_s * plan.num_tokens + self.context_s * context


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What a workload did to a pool.

    `failed` requests did not fit the pool. `peak_blocks` and `mean_blocks` are active ones, of
    `usable_blocks`. `waste_slots` are allocated but hold no token (looked at every 16 steps).
    `estimated_s` is None without a fitted time model; `wall_s` is what the simulation took.
    """

    requests: int
    failed: int
    steps: int
    output_tokens: int
    prefill_tokens: int
    recomputed_tokens: int
    preemptions: int
    prefill_waste_frac: float
    hit_rate: float
    mean_batch: float
    max_batch: int
    usable_blocks: int
    peak_blocks: int
    mean_blocks: float
    peak_waste_slots: int
    mean_waste_slots: float
    estimated_s: float | None
    wall_s: float


class FilledExecutor:
    """Answers every row that samples with FILL, or with STOP where its sequence's length is known.

    `lengths` maps a sequence to its tokens at the end, prompt included; a sequence that is not in
    it goes on until its max_tokens.
    """

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}
        self._length: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """One token for each row with a logit."""
        if not self.lengths:
            return StepResult(token_ids=[[FILL] if n else [] for n in plan.num_logits])
        for new in plan.admitted:
            self._length[new.row] = self.lengths[new.seq_id]
        tokens = []
        for row, start, count, logits in zip(
            plan.rows, plan.starts, plan.num_scheduled_tokens, plan.num_logits, strict=True
        ):
            last = start + count + 1 >= self._length[row]
            tokens.append([STOP if last else FILL] if logits else [])
        return StepResult(token_ids=tokens)


def simulate(
    work: Iterable[Work],
    scheduler: Scheduler,
    *,
    length_cap: int | None = None,
    time_model: TimeModel | None = None,
    trace: Trace | None = None,
) -> SimulationReport:
    """Runs a workload through a scheduler until all of it is done.

    Args:
        work: pulled lazily, up to `max_num_seqs` requests ahead of what runs; nothing is kept of
            one that has finished, so memory does not grow with the workload.
        scheduler: a fresh one; `make_scheduler` builds it.
        length_cap: None: each request's max_tokens is its exact length, and the scheduler may know
            it. Else every request asks for this many tokens and stops by itself earlier, as in a
            real job with an end-of-sequence token.
        time_model: estimates seconds.
        trace: of the same scheduler; its steps have estimated times, if there is a time model.
    """
    started = time.perf_counter()
    executor, queue = FilledExecutor(), iter(work)
    requests = failed = peak = most = sum_batch = sum_blocks = 0
    samples = peak_waste = sum_waste = 0
    estimated_s = 0.0
    pool, stats = scheduler.block_manager.pool, scheduler.stats
    while True:
        ahead = scheduler.max_num_seqs - scheduler.num_waiting
        for item in islice(queue, max(0, ahead)):
            request = _add(scheduler, executor, requests, item, length_cap)
            if trace is not None:
                trace.on_request(request)
            requests += 1
        if not scheduler.has_unfinished:
            break
        plan = scheduler.schedule()
        active = pool.num_usable - pool.num_free
        peak, sum_blocks = max(peak, active), sum_blocks + active
        most, sum_batch = max(most, len(plan.rows)), sum_batch + len(plan.rows)
        if plan.step % SAMPLE_EVERY == 0:
            waste = num_waste_slots(scheduler)
            peak_waste, sum_waste = max(peak_waste, waste), sum_waste + waste
            samples += 1
        result = executor.execute(plan)
        if time_model is not None:
            result.times.forward_s = time_model.step(plan)
            estimated_s += result.times.forward_s
        done = scheduler.commit(plan, result)
        if trace is not None:
            trace.on_step(plan, result, scheduler)
        failed += sum(request.error is not None for request in done)
        for request in done if length_cap else ():
            del executor.lengths[request.sequences[0].seq_id]
    steps = max(stats.steps, 1)
    return SimulationReport(
        requests=requests,
        failed=failed,
        steps=stats.steps,
        output_tokens=stats.output_tokens,
        prefill_tokens=stats.prefill_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        preemptions=stats.preemptions,
        prefill_waste_frac=stats.prefill_waste_frac,
        hit_rate=scheduler.block_manager.prefix_cache.stats.hit_rate,
        mean_batch=sum_batch / steps,
        max_batch=most,
        usable_blocks=pool.num_usable,
        peak_blocks=peak,
        mean_blocks=sum_blocks / steps,
        peak_waste_slots=peak_waste,
        mean_waste_slots=sum_waste / max(samples, 1),
        estimated_s=estimated_s if time_model is not None else None,
        wall_s=time.perf_counter() - started,
    )


def _add(
    scheduler: Scheduler, executor: FilledExecutor, number: int, item: Work, cap: int | None
) -> Request:
    """Queues one item; with a cap its length is known to the executor only."""
    length = len(item.prompt_token_ids) + item.max_tokens
    asked = item.max_tokens if cap is None else max(cap, item.max_tokens)
    if cap is not None:
        executor.lengths[number] = length
    request = Request(
        str(number),
        list(item.prompt_token_ids),
        SamplingParams(max_tokens=asked, ignore_eos=cap is None, temperature=0),
        arrival=number,
        arrival_time=time.perf_counter(),
    )
    scheduler.add(
        request,
        seed=0,
        stop_ids=frozenset() if cap is None else frozenset((STOP,)),
        max_num_tokens=len(item.prompt_token_ids) + asked,
    )
    return request


def make_scheduler(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = True,
    watermark_frac: float = 0.01,
    chunked_prefill: bool = True,
    long_prefill_threshold: int = 0,
    policy: AdmissionPolicy | None = None,
) -> Scheduler:
    """A scheduler over an imagined pool; the names are those of `EngineConfig`."""
    groups = (KVGroup(layers=(0,)),)
    layout = KVLayout(num_blocks=num_blocks, block_size=block_size, block_bytes=1, groups=groups)
    manager = make_block_manager(
        layout,
        enable_prefix_caching=enable_prefix_caching,
        watermark_frac=watermark_frac,
        max_chunk=max_num_batched_tokens,
        chunked=chunked_prefill,
    )
    return Scheduler(
        manager,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        chunked_prefill=chunked_prefill,
        long_prefill_threshold=long_prefill_threshold,
        policy=policy,
    )
