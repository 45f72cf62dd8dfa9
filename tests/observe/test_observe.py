"""The observers that produce the benchmark's figures, on handwritten plans."""

from __future__ import annotations

import pytest

from nanoengine.core.plan import (
    AdmittedSequence,
    Fork,
    Preemption,
    StepPlan,
    StepResult,
    StepTimes,
)
from nanoengine.observe import metrics
from nanoengine.observe.metrics import Metrics, percentiles, summarize
from nanoengine.settings.params import SamplingParams

SCHEDULER = object()


def admit(row: int, seq_id: int, num_tokens: int, num_cached: int = 0) -> AdmittedSequence:
    return AdmittedSequence(
        row=row,
        seq_id=seq_id,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_cached_tokens=num_cached,
        params=SamplingParams(),
        seed=0,
    )


def plan_and_result(
    step: int, rows: list[tuple[int, int, int]], tokens: list[list[int]], **plan: object
) -> tuple[StepPlan, StepResult]:
    """Builds both from `rows` of (row, start, tokens computed); rows that sample have one logit."""
    return (
        StepPlan(
            step=step,
            rows=[row for row, _, _ in rows],
            starts=[start for _, start, _ in rows],
            num_scheduled_tokens=[count for _, _, count in rows],
            num_logits=[1 if t else 0 for t in tokens],
            **plan,
        ),
        StepResult(token_ids=tokens, times=StepTimes(schedule_s=0.25, forward_s=0.75)),
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Returns the list of times that `Metrics` reads, one per step."""
    times: list[float] = []
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: times.pop(0))
    return times


def test_metrics_split_prefill_from_decode_and_measure_gaps(clock: list[float]) -> None:
    clock += [10.0, 11.0, 13.0]
    observer = Metrics()
    # Sequence 7 has 6 tokens, 2 cached; sequence 8 has 4. A mixed step follows, then both decode.
    steps = [
        plan_and_result(0, [(0, 2, 4)], [[50]], admitted=[admit(0, 7, 6, 2)]),
        plan_and_result(1, [(0, 6, 1), (1, 0, 3)], [[51], []], admitted=[admit(1, 8, 4)]),
        plan_and_result(2, [(0, 7, 1), (1, 3, 1)], [[52], [60]]),
    ]
    for plan, result in steps:
        observer.on_step(plan, result, SCHEDULER)
    summary = summarize(observer.records)
    assert (summary.prefill_tokens, summary.decode_tokens) == (4 + 3 + 1, 1 + 1)
    assert summary.prefill_s == pytest.approx(1.0 + 0.75 + 0.5)
    assert summary.decode_s == pytest.approx(0.25 + 0.5)
    assert summary.itl_s == [1.0, 2.0]
    assert summary.mean_batch == pytest.approx(5 / 3)
    assert summary.max_batch == 2
    assert summary.times == StepTimes(schedule_s=0.75, forward_s=2.25)


def test_metrics_count_recomputation_as_prefill_and_keep_the_gap(clock: list[float]) -> None:
    clock += [0.0, 1.0, 5.0]
    observer = Metrics()
    gone = [Preemption(7, 5, "no block")]
    steps = [
        plan_and_result(0, [(0, 0, 4)], [[50]], admitted=[admit(0, 7, 4)]),
        plan_and_result(1, [], [], preempted=gone),
        plan_and_result(2, [(1, 0, 5)], [[51]], released=[0], admitted=[admit(1, 7, 5)]),
    ]
    for plan, result in steps:
        observer.on_step(plan, result, SCHEDULER)
    summary = summarize(observer.records)
    assert (summary.prefill_tokens, summary.decode_tokens) == (9, 0)
    assert summary.itl_s == [5.0]


def test_metrics_share_the_gap_among_accepted_drafts(clock: list[float]) -> None:
    clock += [0.0, 3.0]
    observer = Metrics()
    for plan, result in (
        plan_and_result(0, [(0, 0, 4)], [[50]], admitted=[admit(0, 7, 4)]),
        plan_and_result(1, [(0, 4, 3)], [[51, 52, 53]]),
    ):
        observer.on_step(plan, result, SCHEDULER)
    assert summarize(observer.records).itl_s == [1.0, 1.0, 1.0]


def test_forks_belong_to_their_own_sequence(clock: list[float]) -> None:
    clock += [0.0, 2.0]
    observer = Metrics()
    for plan, result in (
        plan_and_result(
            0,
            [(0, 0, 4), (1, 4, 0)],
            [[50], [60]],
            admitted=[admit(0, 7, 4)],
            forks=[Fork(row=1, parent_row=0, seq_id=8, seed=1)],
        ),
        plan_and_result(1, [(0, 4, 1), (1, 4, 1)], [[51], [61]]),
    ):
        observer.on_step(plan, result, SCHEDULER)
    summary = summarize(observer.records)
    assert (summary.prefill_tokens, summary.decode_tokens) == (4, 2)
    assert summary.itl_s == [2.0, 2.0]
    assert summary.mean_batch == 1.5


def test_percentiles() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == pytest.approx(
        {"p50": 3.0, "p90": 4.6, "p99": 4.96}
    )
    assert percentiles([]) == {}
