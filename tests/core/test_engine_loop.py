"""The engine loop over a FakeExecutor that verifies every KV read and write."""

from __future__ import annotations

import sys

import pytest

from nanoengine.core.checks import check
from nanoengine.engine import LLMEngine
from nanoengine.errors import (
    CapacityError,
    EngineDeadError,
    PromptTooLongError,
    RequestError,
)
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import (
    ExecutorFailure,
    FakeExecutor,
    assert_outputs,
    expected_output,
    make_engine,
    run,
    run_late,
)


def params(max_tokens: int | None = 20, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


def fake(engine: LLMEngine) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


LOOPS = pytest.mark.parametrize("loop", [run, run_late])


@LOOPS
@pytest.mark.parametrize("num_prompt_tokens", [7, 8, 9])
def test_parallel_sampling_forks_one_prefill(loop, num_prompt_tokens):
    engine = make_engine()
    request = engine.add_request("a", range(1, 1 + num_prompt_tokens), params(n=4, ignore_eos=True))
    loop(engine)
    assert_outputs(request)
    assert len({seq.seed for seq in request.sequences}) == 4
    assert fake(engine).plans[0].num_tokens == num_prompt_tokens
    assert fake(engine).num_copies == (3 if num_prompt_tokens % 4 else 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["start", "rows", "end"])
def test_a_failed_step_leaves_no_request_and_no_block(where, overlap):
    engine = make_engine(num_blocks=20, overlap=overlap)
    old = [
        engine.add_request(f"old {i}", range(1, 15), params(n=2, ignore_eos=True)) for i in range(6)
    ]
    engine.step()
    engine.step()
    fake(engine).fail_at = where
    with pytest.raises(ExecutorFailure):
        engine.step()
    assert not engine.has_unfinished()
    assert all(seq.finish_reason == "abort" for request in old for seq in request.sequences)
    check(engine.scheduler)
    assert engine.scheduler.block_manager.pool.counts()["empty"] == 19
    new = [engine.add_request(f"old {i}", range(1, 15), params(n=2)) for i in range(6)]
    assert sorted(run(engine)) == [f"old {i}" for i in range(6)]
    assert_outputs(*new)


def chained_error(error: BaseException, cause: BaseException, *, is_context: bool) -> BaseException:
    """Returns an error chained as by CPython when compiled code returns with an exception set."""
    error.__cause__, error.__context__ = (None, cause) if is_context else (cause, cause)
    return error


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["launch", "result", "finish_in_flight"])
@pytest.mark.parametrize("is_context", [False, True])
def test_an_interrupt_inside_a_kernel_raises_keyboard_interrupt(overlap, where, is_context):
    """Regression: "SystemError: ... returned a result with an exception set" was raised instead."""
    engine = make_engine(overlap=overlap)
    raised = chained_error(
        SystemError("a kernel returned a result with an exception set"),
        KeyboardInterrupt(),
        is_context=is_context,
    )

    def fail(*args):
        raise raised

    request = engine.add_request("a", range(1, 9), params(9, ignore_eos=True))
    engine.step()
    name = "launch" if where == "launch" else "result"
    setattr(fake(engine), name, fail)
    steps = engine.finish_in_flight if where == "finish_in_flight" else engine.step
    if where == "finish_in_flight" and not overlap:
        engine.finish_in_flight()  # nothing is in flight
        steps = engine.step
    with pytest.raises(KeyboardInterrupt) as caught:
        steps()
    assert caught.value.__cause__ is raised
    assert request.sequences[0].finish_reason == "abort"
    assert not engine.has_unfinished()


def test_a_system_error_without_an_interrupt_is_raised_unchanged():
    """Only a SystemError caused by an interrupt becomes a KeyboardInterrupt."""
    for cause in (None, ValueError()):
        engine = make_engine()
        engine.add_request("a", [1, 2], params())
        raised = SystemError("odd")
        raised.__cause__ = cause

        def fail(*args, raised=raised):
            raise raised

        fake(engine).launch = fail
        with pytest.raises(SystemError, match="odd"):
            engine.step()


LOOP = ("_overlapped_step", "_commit_in_flight", "_launch", "_commit")


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that `nanoengine/core` or the engine loop runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename.replace("\\", "/")
        in_loop = name.endswith("nanoengine/engine.py") and frame.f_code.co_name in LOOP
        if "nanoengine/core" not in name and not in_loop:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize(
    ("at", "overlap"),
    [*((i, False) for i in range(3, 900, 13)), *((i, True) for i in range(3, 900, 17))],
)
def test_ctrl_c_between_any_two_lines_leaves_the_engine_usable(at, overlap):
    engine = make_engine(
        num_blocks=20, windows=(None, 5), max_num_batched_tokens=32, overlap=overlap
    )
    for i in range(6):
        engine.add_request(str(i), [*range(1, 10), *range(10, 15 + i)], params(n=2))
    engine.step()
    tracer = sys.gettrace()
    sys.settrace(Interrupter(at))
    try:
        with pytest.raises(KeyboardInterrupt):
            run(engine)
    finally:
        sys.settrace(tracer)
    assert not engine.has_unfinished()
    check(engine.scheduler)
    new = [engine.add_request(str(i), range(1, 15 + i), params(n=2)) for i in range(6)]
    run(engine)
    assert_outputs(*new)


# --- requests: refusals, and how sequences end ----------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "changes", "error", "message"),
    [
        ([], {}, RequestError, "empty"),
        ([1, -1], {}, RequestError, r"\[0, 50\), got -1"),
        ([1, 50], {}, RequestError, r"\[0, 50\), got 50"),
        ([1, "2"], {}, RequestError, "integers, got '2'"),
        ([True], {}, RequestError, "integers, got True"),
        ([1] * 100, {}, PromptTooLongError, "100 tokens; max_model_len=100 allows 99"),
        (
            [1] * 81,
            {},
            CapacityError,
            "81 tokens needs 21 KV blocks of 4 tokens, but the pool has 20",
        ),
        ([1], {"stop_token_ids": [50]}, RequestError, "stop_token_ids"),
        ([1], {"logit_bias": {77: 1.0}}, RequestError, "logit_bias"),
        ([1], {"allowed_token_ids": [1, 50]}, RequestError, "allowed_token_ids"),
        ([1], {"logprobs": 51}, RequestError, "logprobs must be at most 50"),
        ([1], {"prompt_logprobs": 51}, RequestError, "prompt_logprobs must be at most 50"),
    ],
)
def test_an_invalid_request_raises_and_leaves_nothing(prompt, changes, error, message):
    engine = make_engine(num_blocks=21, max_model_len=100)
    good = engine.add_request("good", [1, 2, 3], params())
    with pytest.raises(error, match=message):
        engine.checker.check(prompt, params(**changes))
    with pytest.raises(error, match=message):
        engine.add_request("bad", prompt, params(**changes))
    assert engine.num_unfinished == 1
    assert run(engine) == ["good"]
    assert_outputs(good)


def test_a_request_id_can_be_reused_after_its_request_has_finished():
    engine = make_engine()
    engine.add_request("a", [1], params())
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", [1], params())
    run(engine)
    engine.add_request("a", [1], params())
    assert run(engine) == ["a"]


@LOOPS
def test_a_sequence_that_outgrows_the_pool_fails_alone(loop):
    engine = make_engine(num_blocks=9)
    small = engine.add_request("small", [1] * 4, params(6))
    large = engine.add_request("large", [2] * 20, params(100, ignore_eos=True))
    assert loop(engine) == ["small", "large"]
    assert_outputs(small)
    (seq,) = large.sequences
    assert seq.finish_reason == "error"
    assert "33 tokens needs 9 KV blocks of 4 tokens, but the pool has 8" in large.error
    assert "num_kv_blocks" in large.error
    expected = expected_output([2] * 20, seq.seed, 100, ())
    assert seq.output_token_ids == expected[: seq.num_output_tokens]
    assert seq.num_output_tokens in (12, 13), "its output is kept"


@LOOPS
def test_max_model_len_ends_a_sequence(loop):
    engine = make_engine(max_model_len=20)
    request = engine.add_request("a", range(1, 13), params(None, ignore_eos=True))
    loop(engine)
    assert_outputs(request)
    assert request.sequences[0].num_output_tokens == 8
    assert request.sequences[0].finish_reason == "length"
    ends = [
        start + count
        for plan in fake(engine).plans
        for start, count in zip(plan.starts, plan.num_scheduled_tokens, strict=True)
    ]
    assert max(ends) == 19, "the last token is sampled, never computed"


@LOOPS
def test_stop_ids_come_from_the_model_and_the_request(loop):
    engine = make_engine(eos_token_ids=(0, 3), max_model_len=500)
    requests = [
        engine.add_request(str(i), [1 + i], params(400, **changes))
        for i, changes in enumerate(
            [{}, {"stop_token_ids": [7]}, {"ignore_eos": True, "stop_token_ids": [8]},
             {"min_tokens": 60}]
        )
    ]  # fmt: skip
    loop(engine)
    assert_outputs(*requests)
    ends = [request.sequences[0] for request in requests]
    assert all(seq.finish_reason == "stop" for seq in ends)
    for seq in ends:
        last = seq.token_ids[-1]
        is_requested = last in (seq.params.stop_token_ids or ())
        assert seq.stop_reason == (last if is_requested else None)
    assert ends[3].num_output_tokens >= 60


@LOOPS
@pytest.mark.parametrize(("min_tokens", "length"), [(0, 1), (1, 1), (2, 2), (5, 5)])
def test_the_token_that_reaches_min_tokens_may_end_the_output(loop, min_tokens, length):
    """The token that reaches min_tokens may itself end the output."""
    engine = make_engine()
    fake(engine).sample = lambda prefix, seed: 0  # always EOS
    request = engine.add_request("a", [1, 2], params(9, min_tokens=min_tokens))
    loop(engine)
    (seq,) = request.sequences
    assert (seq.output_token_ids, seq.finish_reason) == ([0] * length, "stop")


@LOOPS
def test_an_eos_id_ends_a_structured_output_before_min_tokens(loop):
    """Regression: the output was filled with EOS ids, since after a complete text only EOS is
    allowed."""
    engine = make_engine()
    fake(engine).sample = lambda prefix, seed: 0  # always EOS
    choice = params(9, min_tokens=5, structured_outputs={"choice": ["x"]})
    request = engine.add_request("a", [1, 2], choice)
    loop(engine)
    (seq,) = request.sequences
    assert (seq.output_token_ids, seq.finish_reason) == ([0], "stop")


class StopAfter:
    """A follower that ends its sequence at the n-th token."""

    def __init__(self, count: int) -> None:
        self.left = count

    def append(self, token_id: int) -> str | None:
        self.left -= 1
        return None if self.left else "stop string"


@LOOPS
def test_a_follower_ends_its_own_sequence(loop):
    engine = make_engine()
    request = engine.add_request(
        "a",
        [1, 2],
        params(9, n=3, ignore_eos=True),
        make_follower=lambda index: StopAfter(2 + index),
    )
    other = engine.add_request("b", [1, 2], params(9))
    loop(engine)
    assert_outputs(other)
    assert [seq.num_output_tokens for seq in request.sequences] == [2, 3, 4]
    assert {seq.stop_reason for seq in request.sequences} == {"stop string"}


def test_a_failed_request_aborted_before_its_commit_is_not_returned():
    engine = make_engine(num_blocks=9)
    engine.add_request("large", [2] * 20, params(100, ignore_eos=True))
    scheduler = engine.scheduler
    while not scheduler.running or scheduler.running[0].num_computed_tokens < 32:
        engine.step()
    plan = scheduler.schedule()
    engine.abort("large")
    assert scheduler.commit(plan, fake(engine).launch(plan).result()) == []


def test_abort_all_keeps_the_cache_and_close_ends_the_engine():
    engine = make_engine()
    requests = [engine.add_request(str(i), range(1, 20), params(30)) for i in range(3)]
    engine.step()
    engine.abort_all()
    assert not engine.has_unfinished() and not engine.scheduler.has_unfinished
    assert all(request.sequences[0].finish_reason == "abort" for request in requests)
    assert engine.stats().cached_blocks == 4, (
        "aborted requests keep their blocks in the prefix cache"
    )
    again = engine.add_request("again", range(1, 20), params())
    run(engine)
    assert again.num_cached_tokens == 16
    assert_outputs(again)
    engine.close()
    engine.close()
    assert fake(engine).closed
    for call in (engine.step, lambda: engine.add_request("b", [1], params())):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_observers_are_called_once_per_step_with_its_counters():
    class Log:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def on_step(self, plan, result, scheduler) -> None:
            assert scheduler.stats.steps == plan.step + 1
            assert result.times.schedule_s > 0 and result.times.commit_s > 0
            self.tokens.append(plan.num_tokens)

    log = Log()
    engine = make_engine(observers=[log])
    engine.add_request("a", range(1, 20), params(4, ignore_eos=True))
    engine.add_request("b", range(1, 20), params(4, ignore_eos=True))
    run(engine)
    assert log.tokens == [19 + 3, 2, 2, 2]
    stats = engine.stats()
    assert (stats.steps, stats.prefill_tokens, stats.decode_tokens) == (4, 22, 6)
    assert (stats.output_tokens, stats.finished_requests) == (8, 2)
    assert stats.cache_hit_rate == 16 / 38
