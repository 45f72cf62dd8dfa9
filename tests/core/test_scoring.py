"""`max_tokens=0`: the whole prompt is scored, in one step per chunk, without a decode step."""

from __future__ import annotations

import pytest

from nanoengine.errors import RequestError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import make_engine, run, run_late

PROMPT = [(3 + 5 * i + i * i) % 43 for i in range(66)]
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


@pytest.mark.parametrize("loop", [run, run_late])
@pytest.mark.parametrize("chunk", [66, 65, 33, 16, 7, 1])
def test_a_prompt_is_scored_and_nothing_is_sampled(loop, chunk):
    engine = make_engine(257, 4, long_prefill_threshold=chunk)
    request = engine.add_request("a", PROMPT, SCORED)
    loop(engine)
    (seq,) = request.sequences
    assert (seq.output_token_ids, seq.finish_reason) == ([], "length")
    assert engine.executor.num_computed_tokens == 66
    assert engine.stats().output_tokens == engine.stats().decode_tokens == 0
    assert engine.stats().steps <= -(-66 // chunk) + 2, "the late loop plans two empty ones"


def test_a_prompt_of_one_token_has_nothing_to_score():
    engine = make_engine(257, 4)
    request = engine.add_request("a", [7], SCORED)
    run(engine)
    assert (request.prompt_logprobs, request.sequences[0].finish_reason) == ([], "length")


def test_a_prompt_scored_from_a_later_token_uses_the_cache():
    engine = make_engine(257, 4)
    late = SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=60)
    for name in "ab":
        request = engine.add_request(name, PROMPT, late)
        run(engine)
        assert request.finished
    assert engine.executor.num_computed_tokens < 66 + 12


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0, "n": 2}, {"min_tokens": 1}])
def test_max_tokens_0_needs_prompt_logprobs(options):
    with pytest.raises(RequestError, match=r"or 0 with prompt_logprobs and n=1|min_tokens"):
        SamplingParams(max_tokens=0, **options)
