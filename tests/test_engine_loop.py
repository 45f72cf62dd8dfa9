"""The engine loop over a FakeExecutor that verifies every KV read and write."""

from __future__ import annotations

import sys
from random import Random

import pytest

from nanoengine.core.sequence import Request
from nanoengine.engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from tests.fake_executor import (
    ExecutorFailure,
    FakeExecutor,
    chain,
    expected_output,
    make_engine,
    next_token,
    prefix_hashes,
    run,
    run_late,
)


def params(max_tokens: int | None = 20, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


def fake(engine: LLMEngine) -> FakeExecutor:
    assert isinstance(engine.executor, FakeExecutor)
    return engine.executor


def assert_outputs(*requests: Request) -> None:
    """Every sequence has the tokens it would have alone."""
    for request in requests:
        assert len(request.sequences) == request.params.n
        for seq in request.sequences:
            assert seq.finish_reason in ("stop", "length"), (seq, request.error)
            assert seq.output_token_ids == expected_output(
                request.prompt_token_ids,
                seq.seed,
                seq.max_num_tokens - seq.num_prompt_tokens,
                seq.stop_ids,
                request.params.min_tokens,
            ), seq


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


@LOOPS
def test_a_fork_takes_the_row_of_a_sequence_preempted_in_the_same_step(loop):
    engine = make_engine(num_blocks=6, long_prefill_threshold=8)
    first = engine.add_request("first", range(1, 5), params(3))
    forked = engine.add_request("forked", range(11, 23), params(1, n=2))
    victim = engine.add_request("victim", range(31, 35), params(2))
    loop(engine)
    plan = next(plan for plan in fake(engine).plans if plan.forks)
    assert [preempted.seq_id for preempted in plan.preempted] == [victim.sequences[0].seq_id]
    assert [fork.row for fork in plan.forks] == [2] == plan.released
    assert_outputs(first, forked, victim)


@LOOPS
def test_a_preempted_sequence_leaves_no_table_update_behind(loop):
    engine = make_engine(num_blocks=9, windows=(None, 5), max_num_batched_tokens=16)
    first = engine.add_request("first", range(1, 6), params(3))
    second = engine.add_request("second", range(11, 19), params(3))
    loop(engine)
    assert fake(engine).plans[1].preempted[0].seq_id == second.sequences[0].seq_id
    assert_outputs(first, second)


@pytest.mark.parametrize("where", ["start", "rows", "end"])
def test_peer_bug_07_nothing_leaks_after_an_exception(where):
    engine = make_engine(num_blocks=20)
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
    engine.scheduler.check()
    assert engine.scheduler.block_manager.pool.counts()["empty"] == 19
    new = [engine.add_request(f"old {i}", range(1, 15), params(n=2)) for i in range(6)]
    assert sorted(run(engine)) == [f"old {i}" for i in range(6)]
    assert_outputs(*new)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that `nanoengine/core` runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, arg):
        if "nanoengine/core" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("at", range(3, 900, 13))
def test_ctrl_c_between_any_two_lines_leaves_the_engine_usable(at):
    engine = make_engine(num_blocks=20, windows=(None, 5), max_num_batched_tokens=32)
    for i in range(6):
        engine.add_request(str(i), [*range(1, 10), *range(10, 15 + i)], params(n=2))
    engine.step()
    tracer = sys.gettrace()
    sys.settrace(Interrupter(at))
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                engine.step()
    finally:
        sys.settrace(tracer)
    assert not engine.has_unfinished()
    engine.scheduler.check()
    new = [engine.add_request(str(i), range(1, 15 + i), params(n=2)) for i in range(6)]
    run(engine)
    assert_outputs(*new)


def propose(engine: LLMEngine, random: Random) -> None:
    """Gives running sequences drafts, right ones up to a random place and wrong ones after it."""
    for seq in engine.scheduler.running:
        if seq.num_computed_tokens == seq.num_tokens - 1:
            prefix, drafts = prefix_hashes(seq.token_ids)[-1], []
            for _ in range(random.randrange(6)):
                token_id = next_token(prefix, seq.seed) if random.random() < 0.8 else 1
                drafts.append(token_id)
                prefix = chain(prefix, token_id)
            seq.draft_token_ids = tuple(drafts)


@pytest.mark.parametrize("threshold", [0, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (6,)])
def test_drafts_never_change_the_output(threshold, windows):
    random = Random(3)
    engine = make_engine(
        num_blocks=40, max_num_batched_tokens=12, windows=windows, long_prefill_threshold=threshold
    )
    requests = [
        engine.add_request(str(i), range(1, 8 + i), params(9 + i, n=1 + i % 2)) for i in range(8)
    ]
    while engine.has_unfinished():
        propose(engine, random)
        engine.step()
    assert_outputs(*requests)
    steps = [plan for plan in fake(engine).plans if plan.draft_token_ids]
    assert len(steps) > 5
    longest = max(seq.max_num_tokens for request in requests for seq in request.sequences)
    for plan in steps:
        ends = [s + n for s, n in zip(plan.starts, plan.num_scheduled_tokens, strict=True)]
        assert max(ends) < longest, "a draft lies past the end of its sequence"
