"""Metrics: an observer that keeps one small record per step, and summarizes a run.

The benchmark uses it; it shows where the time of a run was spent. It reads plans and results, never
tensors, and changes nothing.

    step ──▶ on_step ──▶ StepRecord ──▶ summarize(records) ──▶ RunSummary
             (copies a few lists)       (all arithmetic, after the run)

A *prefill* token was known when its sequence was admitted (the prompt, and after a preemption also
the output so far). A *decode* token was sampled since then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from nanoengine.core.plan import StepPlan, StepResult, StepTimes

TIMES = tuple(one.name.removesuffix("_s") for one in fields(StepTimes))
"""The parts of a step, in order."""


class AdmissionRecord(NamedTuple):
    """Sequence `seq_id` was assigned `row` with `num_known` tokens."""

    row: int
    seq_id: int
    num_known: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The data of one step. The lists have one entry per scheduled row, as in `StepPlan`.

    `time_s` is the time after the commit, from `time.perf_counter`; `num_sampled` counts the new
    tokens per row.
    """

    time_s: float
    rows: SequenceOf[int]
    starts: SequenceOf[int]
    num_scheduled: SequenceOf[int]
    num_logits: SequenceOf[int]
    num_sampled: SequenceOf[int]
    admitted: SequenceOf[AdmissionRecord]
    times: StepTimes


class Metrics:
    """Collects one `StepRecord` per step; add it to `LLMEngine.observers`.

    Perf: about 5 us per step with 256 sequences, because lists are only walked after the run.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Keeps the step; stores lengths of token lists, because those lists grow later."""
        admitted = [AdmissionRecord(a.row, a.seq_id, len(a.token_ids)) for a in plan.admitted]
        starts = dict(zip(plan.rows, plan.starts, strict=True)) if plan.forks else {}
        for fork in plan.forks:
            admitted.append(AdmissionRecord(fork.row, fork.seq_id, starts.get(fork.row, 0)))
        self.records.append(
            StepRecord(
                time_s=time.perf_counter(),
                rows=plan.rows,
                starts=plan.starts,
                num_scheduled=plan.num_scheduled_tokens,
                num_logits=plan.num_logits,
                num_sampled=[len(tokens) for tokens in result.token_ids],
                admitted=admitted,
                times=result.times,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The totals of a run; seconds are wall time inside steps.

    `prefill_s` and `decode_s` divide each step's time in proportion to its tokens of each kind.
    `mean_batch` is the mean number of sequences that compute a token, over all steps. `itl_s` holds
    the inter-token latency of every token except the first of a sequence; the tokens of one step
    (accepted drafts) share their latency equally.
    """

    num_steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_s: float
    decode_s: float
    mean_batch: float
    max_batch: int
    times: StepTimes
    itl_s: list[float] = field(repr=False)


def summarize(records: SequenceOf[StepRecord]) -> RunSummary:
    """Sums up a run; the records must include the first step of each sequence."""
    holders: dict[int, AdmissionRecord] = {}  # per row
    last_token_s: dict[int, float] = {}
    prefills, totals, itl_s = list[int](), list[int](), list[float]()
    prefill_s = decode_s = 0.0
    for record in records:
        holders |= {new.row: new for new in record.admitted}
        scheduled = zip(record.rows, record.starts, record.num_scheduled, strict=True)
        prefill = sum(min(max(holders[row].num_known - start, 0), n) for row, start, n in scheduled)
        total, seconds = sum(record.num_scheduled), step_seconds(record.times)
        share = prefill / total if total else 0.0
        prefill_s += seconds * share
        decode_s += seconds * (1 - share)
        prefills.append(prefill)
        totals.append(total)
        for row, count in zip(record.rows, record.num_sampled, strict=True):
            if count:
                seq_id = holders[row].seq_id
                if seq_id in last_token_s:
                    itl_s += [(record.time_s - last_token_s[seq_id]) / count] * count
                last_token_s[seq_id] = record.time_s
    batches = [sum(count > 0 for count in record.num_scheduled) for record in records]
    parts = StepTimes.__dataclass_fields__
    return RunSummary(
        num_steps=len(records),
        prefill_tokens=sum(prefills),
        decode_tokens=sum(totals) - sum(prefills),
        prefill_s=prefill_s,
        decode_s=decode_s,
        mean_batch=float(np.mean(batches)) if batches else 0.0,
        max_batch=max(batches, default=0),
        times=StepTimes(**{n: sum(getattr(one.times, n) for one in records) for n in parts}),
        itl_s=itl_s,
    )


def times_of(result: StepResult) -> dict[str, float]:
    """The seconds per part of a step."""
    return {name: getattr(result.times, f"{name}_s") for name in TIMES}


def step_seconds(times: StepTimes) -> float:
    """The total seconds of a step.

    >>> step_seconds(StepTimes(schedule_s=0.25, forward_s=0.5))
    0.75
    """
    return float(sum(getattr(times, name) for name in StepTimes.__dataclass_fields__))


def percentiles(
    values: SequenceOf[float], ranks: SequenceOf[int] = (50, 90, 99)
) -> dict[str, float]:
    """Percentiles with linear interpolation, named p50, p90, ...; empty if there are no values.

    >>> percentiles([1.0, 2.0, 3.0], ranks=(50, 90))
    {'p50': 2.0, 'p90': 2.8}
    """
    if not values:
        return {}
    found = np.percentile(np.asarray(values, dtype=np.float64), list(ranks))
    return {f"p{rank}": float(value) for rank, value in zip(ranks, found, strict=True)}
