"""Sliding windows in tiny pools: what fits alone in small chunks is never refused."""

from __future__ import annotations

import pytest

from nanoengine.core.extras import set_drafts
from nanoengine.errors import CapacityError
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import expected_output, make_engine, run, run_late

GREEDY = {"ignore_eos": True}


@pytest.mark.parametrize(("windows", "num_blocks"), [((4,), 6), ((None, 4), 19)])
@pytest.mark.parametrize("loop", [run, run_late])
def test_a_preempted_window_sequence_comes_back_in_chunks_that_fit(windows, num_blocks, loop):
    """It had grown token by token; computed again in one chunk it would need more than the pool."""
    engine = make_engine(
        num_blocks, 2, windows=windows, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    first = engine.add_request("first", [1, 2, 3, 4], SamplingParams(max_tokens=24, **GREEDY))
    for _ in range(17):
        engine.step()
    preferred = [
        engine.add_request(
            f"{i}", [5] * (4 + i), SamplingParams(max_tokens=14, **GREEDY), priority=-1
        )
        for i in range(2)
    ]
    loop(engine)
    for request in (first, *preferred):
        (seq,) = request.sequences
        assert (request.error, seq.finish_reason) == (None, "length")
        expected = expected_output(
            request.prompt_token_ids, seq.seed, request.params.max_tokens, ()
        )
        assert seq.output_token_ids == expected
    assert engine.scheduler.stats.recomputed_tokens > 16, "it was meant to be preempted at length"


def test_a_long_prompt_is_computed_in_chunks_that_its_window_fits():
    engine = make_engine(9, 2, windows=(4,), max_num_batched_tokens=64)
    request = engine.add_request("0", [1 + i % 9 for i in range(50)], SamplingParams(max_tokens=3))
    run(engine)
    assert request.error is None
    assert max(plan.num_tokens for plan in engine.executor.plans) == 8
    whole = make_engine(9, 2, windows=(4,), max_num_batched_tokens=64, chunked_prefill=False)
    with pytest.raises(CapacityError, match="needs 25 KV blocks of 2 tokens, the pool has 8"):
        whole.add_request("0", [1 + i % 9 for i in range(50)], SamplingParams(max_tokens=3))


def test_drafts_that_the_pool_has_no_block_for_are_dropped():
    """They are guesses: nobody is preempted for them, and nobody fails by them."""
    engine = make_engine(9, 2, windows=(3, None, 9), max_num_batched_tokens=6)
    request = engine.add_request("0", [1, 2, 3], SamplingParams(max_tokens=3, **GREEDY))
    engine.step()
    (seq,) = engine.scheduler.running
    set_drafts(engine.scheduler, seq, (1,))
    run(engine)
    assert (request.error, seq.finish_reason) == (None, "length")
    assert seq.output_token_ids == expected_output([1, 2, 3], seq.seed, 3, ())
