"""The Scheduler: budget, admission, fairness, preemption; driven through the engine."""

from __future__ import annotations

import pytest

from nanoengine.core.plan import StepPlan
from nanoengine.core.speculation import set_drafts
from nanoengine.core.waiting import MAX_LOOK_AHEAD, MAX_OVERTAKEN
from nanoengine.engine import LLMEngine
from nanoengine.errors import CapacityError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import (
    FakeExecutor,
    assert_outputs,
    make_engine,
    run,
    run_late,
)


def params(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | changes)


def plans(engine: LLMEngine) -> list[StepPlan]:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor.plans


def admission_order(engine: LLMEngine) -> list[int]:
    """Returns sequence ids in the order of their admissions."""
    return [new.seq_id for plan in plans(engine) for new in plan.admitted]


# --- fairness -------------------------------------------------------------------------------------


def test_a_head_that_does_not_fit_is_overtaken_a_bounded_number_of_times():
    # One request uses half of the pool for 60 steps; the first waiting one needs more than that.
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


def test_a_preempted_sequence_may_use_the_watermark():
    engine = make_engine(
        num_blocks=101, watermark_frac=0.05, max_num_batched_tokens=512, enable_prefix_caching=False
    )
    first = engine.add_request("first", range(1, 5), params(20))
    long = engine.add_request("long", [7] * 376, params(18))
    run(engine)
    assert engine.stats().preemptions == 1
    assert [r.sequences[0].finish_reason for r in (first, long)] == ["length", "length"], long.error


def test_drafts_without_a_free_block_are_dropped():
    """Drafts cause no preemption and no failure."""
    engine = make_engine(9, 2, windows=(3, None, 9), max_num_batched_tokens=6)
    request = engine.add_request("0", [1, 2, 3], params(3))
    engine.step()
    set_drafts(engine.scheduler, request.sequences[0], (1,))
    run(engine)
    assert_outputs(request)


def test_the_argument_priority_overrides_the_parameters():
    engine = make_engine(max_num_seqs=1)
    engine.add_request("late", [1], params(1, priority=5))
    engine.add_request("middle", [1], params(1))
    engine.add_request("first", [1], params(1, priority=5), priority=-1)
    assert run(engine) == ["first", "middle", "late"]


def test_the_latest_sequence_of_the_lowest_priority_is_preempted_and_returns_first():
    engine = make_engine(num_blocks=13, max_num_batched_tokens=64, enable_prefix_caching=False)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        engine.add_request(name, range(1, 9), params(12), priority=priority)
    engine.add_request("e", [1] * 30, params(1), priority=1)
    finished = run(engine)
    preempted = [p.seq_id for plan in plans(engine) for p in plan.preempted]
    assert preempted[0] == 3, "d: priority 1, and the latest running sequence"
    assert preempted[1] == 1, "b: then the other sequence of priority 1"
    assert 0 not in preempted
    assert admission_order(engine)[-2:] == [3, 4], "d waits at the head, before e"
    assert finished[:3] == ["a", "c", "b"]


def test_recomputed_tokens_are_counted():
    engine = make_engine(num_blocks=7, enable_prefix_caching=False)
    first = engine.add_request("first", range(1, 9), params(9))
    second = engine.add_request("second", range(21, 29), params(9))
    run(engine)
    stats = engine.stats()
    assert stats.preemptions == 1
    (lost,) = [p.num_computed_tokens for plan in plans(engine) for p in plan.preempted]
    assert stats.recomputed_tokens == lost
    assert stats.prefill_tokens == 8 + 8 + lost + 1
    assert stats.prefill_waste_frac == lost / (17 + lost)
    assert stats.output_tokens == 18
    assert_outputs(first, second)


# --- budget and caps ------------------------------------------------------------------------------


def test_chunks_and_decodes_share_the_budget():
    engine = make_engine(num_blocks=100, max_num_batched_tokens=20)
    engine.add_request("short", range(1, 5), params(9))
    engine.add_request("long", range(1, 49), params(1))
    run(engine)
    scheduled = [list(plan.num_scheduled_tokens) for plan in plans(engine)[:4]]
    assert scheduled == [[4, 16], [1, 19], [1, 9], [1]]


def test_long_prefill_threshold_limits_each_chunk():
    engine = make_engine(num_blocks=100, long_prefill_threshold=16, enable_prefix_caching=False)
    for i in range(2):
        engine.add_request(str(i), range(1, 41), params(1))
    run(engine)
    scheduled = [list(plan.num_scheduled_tokens) for plan in plans(engine)]
    assert scheduled == [[16, 16], [16, 16], [8, 8]]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits():
    engine = make_engine(num_blocks=100, max_num_batched_tokens=40, chunked_prefill=False)
    for i in range(3):
        engine.add_request(str(i), [i + 1] * 25, params(2))
    run(engine)
    scheduled = [list(plan.num_scheduled_tokens) for plan in plans(engine)]
    assert scheduled == [[25], [1, 25], [1, 25], [1]]


def test_a_long_windowed_prompt_runs_in_chunks_that_fit_the_pool():
    engine = make_engine(9, 2, windows=(4,), max_num_batched_tokens=64)
    request = engine.add_request("0", [1 + i % 9 for i in range(50)], SamplingParams(max_tokens=3))
    run(engine)
    assert request.error is None
    assert max(plan.num_tokens for plan in engine.executor.plans) == 8
    whole = make_engine(9, 2, windows=(4,), max_num_batched_tokens=64, chunked_prefill=False)
    with pytest.raises(CapacityError, match="needs 25 KV blocks of 2 tokens, but the pool has 8"):
        whole.add_request("0", [1 + i % 9 for i in range(50)], SamplingParams(max_tokens=3))


def test_a_long_prefill_never_stalls_a_decode():
    engine = make_engine(num_blocks=400, max_num_batched_tokens=16)
    engine.add_request("urgent and long", [1] * 300, params(1), priority=-1)
    decodes = [engine.add_request(f"decode {i}", [2 + i], params(50)) for i in range(4)]
    while not all(request.sequences[0].num_output_tokens for request in decodes):
        engine.step()
    before = [request.sequences[0].num_output_tokens for request in decodes]
    engine.add_request("long", [9] * 300, params(1), priority=-2)
    for step in range(1, 10):
        engine.step()
        now = [request.sequences[0].num_output_tokens for request in decodes]
        assert now == [count + step for count in before]
        assert plans(engine)[-1].num_tokens == 16, "prompts use the rest of the budget"


def test_a_prompt_that_does_not_fit_blocks_no_other():
    engine = make_engine(num_blocks=21)
    engine.add_request("runner", range(1, 41), params(30))
    engine.step()
    engine.add_request("large", [9] * 70, params(1), cache_salt="its own")
    for i in range(3):
        engine.add_request(f"small {i}", [i + 1] * 4, params(3))
    assert run(engine)[:3] == ["small 0", "small 1", "small 2"]


def test_the_look_ahead_is_bounded():
    engine = make_engine(num_blocks=21, max_num_seqs=32)
    engine.add_request("runner", range(1, 42), params(4))
    engine.step()
    tried = []
    manager = engine.scheduler.block_manager
    original = manager.can_allocate
    type(manager).can_allocate = lambda self, seq, **options: (
        tried.append(seq.seq_id) or original(seq, **options)
    )
    try:
        for i in range(30):
            engine.add_request(f"large {i}", [i + 1] * 60, params(1))
        engine.step()
    finally:
        type(manager).can_allocate = original.__func__
    assert tried == list(range(1, MAX_LOOK_AHEAD + 2))


# --- sharing --------------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_compute_their_prefix_once():
    # 2 x 100 tokens with blocks of 16 schedule 100 and 4
    for loop in (run, run_late):
        engine = make_engine(block_size=16, max_num_batched_tokens=256)
        requests = [engine.add_request(str(i), [*range(1, 41)] * 2 + [7] * 20, params(5))
                    for i in range(2)]  # fmt: skip
        loop(engine)
        assert plans(engine)[0].num_scheduled_tokens == [100, 4]
        assert_outputs(*requests)


def test_the_next_turn_of_a_chat_hits_prompt_and_answer():
    # prompt 100 + 200 generated, next prompt 300 long -> 12 tokens computed
    engine = make_engine(block_size=16, max_num_batched_tokens=256)
    first = engine.add_request("first", [*range(1, 41), *range(1, 41), *range(1, 21)], params(200))
    run(engine)
    second = engine.add_request("second", first.sequences[0].token_ids, params(1))
    run(engine)
    assert second.num_cached_tokens == 288
    assert plans(engine)[-1].num_scheduled_tokens == [12]


def test_rows_are_reserved_for_the_forks_of_running_prompts():
    engine = make_engine(num_blocks=60, max_num_batched_tokens=16, max_num_seqs=4)
    engine.add_request("forks", range(1, 42), params(4, n=3))
    for i in range(3):
        engine.add_request(str(i), [i + 1] * 2, params(9))
    assert len(run(engine)) == 4
    assert admission_order(engine)[:2] == [0, 1]
