"""The engine loop over a FakeExecutor that verifies every KV read and write."""

from __future__ import annotations

import pytest

from nanoengine.core.sequence import Request
from nanoengine.engine import LLMEngine
from nanoengine.sampling_params import SamplingParams
from tests.fake_executor import (
    FakeExecutor,
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
