"""Equal prompts prefilled in parallel chunks: each prefix is computed once, in alternation."""

from __future__ import annotations

import pytest

from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import assert_outputs, make_engine, run, run_late

PROMPT = [(3 + 5 * i + i * i) % 43 for i in range(66)]


def num_computed(prompts: list[list[int]], loop, **options) -> int:
    """Returns the tokens computed for prompts that arrive together; checks their outputs."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine = make_engine(257, 4, max_num_batched_tokens=64, **options)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    loop(engine)
    assert_outputs(*requests)
    return engine.executor.num_computed_tokens


@pytest.mark.parametrize("loop", [run, run_late])
@pytest.mark.parametrize("windows", [(None,), (9,), (None, 9)])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_equal_prompts_compute_each_block_once(windows, count, loop):
    options = {"windows": windows, "long_prefill_threshold": 8}
    once = num_computed([PROMPT], loop, **options)
    assert once == 66
    # Each computes the 2 tokens after the last full block itself.
    assert num_computed([PROMPT] * count, loop, **options) == 66 + 2 * (count - 1)


@pytest.mark.parametrize("threshold", [3, 6, 10])
def test_chunks_that_end_inside_a_block_share_full_blocks(threshold):
    together = num_computed([PROMPT] * 2, run, long_prefill_threshold=threshold)
    assert together < 2 * 66 - 4


def test_prompts_share_blocks_until_they_differ():
    other = [*PROMPT[:32], *[1] * 34]
    assert num_computed([PROMPT, other], run, long_prefill_threshold=8) == 66 + 34


def test_an_earlier_prompt_reuses_blocks_of_a_later_one():
    """The later prompt hits the blocks of the first one, and gets more of the budget."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine = make_engine(257, 4, max_num_batched_tokens=20, long_prefill_threshold=4)
    engine.add_request("first", PROMPT, params)
    engine.step()
    engine.add_request("second", PROMPT, params, priority=-1)
    run(engine)
    assert engine.executor.num_computed_tokens == 66 + 2
    stats = engine.stats()
    assert stats.cache_hit_tokens == 66 - 2, "tokens found after admission count as found"


def test_prompt_logprobs_compute_every_position():
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine = make_engine(257, 4, long_prefill_threshold=8)
    for name in "ab":
        engine.add_request(name, PROMPT, params)
    run(engine)
    assert engine.executor.num_computed_tokens == 2 * 66


def test_without_a_prefix_cache_nothing_is_shared():
    options = {"long_prefill_threshold": 8, "enable_prefix_caching": False}
    assert num_computed([PROMPT] * 2, run, **options) == 2 * 66
