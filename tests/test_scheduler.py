"""The Scheduler: budget, admission, fairness, preemption; driven through the engine."""

from __future__ import annotations

from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import MAX_OVERTAKEN
from nanoengine.engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from tests.fake_executor import FakeExecutor, make_engine, run


def params(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | changes)


def plans(engine: LLMEngine) -> list[StepPlan]:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor.plans


def admission_order(engine: LLMEngine) -> list[int]:
    """Sequence ids in the order of their admissions."""
    return [new.seq_id for plan in plans(engine) for new in plan.admitted]


# --- fairness -------------------------------------------------------------------------------------


def test_a_head_that_does_not_fit_is_overtaken_a_bounded_number_of_times():
    # The runner holds half of the pool for 60 steps; the head needs more than the other half.
    engine = make_engine(num_blocks=41, max_num_seqs=8, max_num_batched_tokens=256)
    engine.add_request("runner", range(1, 17), params(60))
    engine.step()
    engine.add_request("head", [2] * 150, params(1))
    for i in range(40):
        engine.add_request(f"small {i}", [3 + i] * 3, params(2))
    run(engine)
    order = admission_order(engine)
    assert order.index(1) - 1 == MAX_OVERTAKEN
    assert sorted(order) == list(range(42))


# --- preemption -----------------------------------------------------------------------------------


def test_a_preempted_sequence_is_not_refused_for_the_watermark():
    engine = make_engine(
        num_blocks=101, watermark_frac=0.05, max_num_batched_tokens=512, enable_prefix_caching=False
    )
    first = engine.add_request("first", range(1, 5), params(20))
    long = engine.add_request("long", [7] * 376, params(18))
    run(engine)
    assert engine.stats().preemptions == 1
    assert [r.sequences[0].finish_reason for r in (first, long)] == ["length", "length"], long.error


def test_priority_comes_from_the_params_unless_given_apart():
    engine = make_engine(max_num_seqs=1)
    engine.add_request("late", [1], params(1, priority=5))
    engine.add_request("middle", [1], params(1))
    engine.add_request("first", [1], params(1, priority=5), priority=-1)
    assert run(engine) == ["first", "middle", "late"]
