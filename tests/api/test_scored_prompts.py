"""`max_tokens=0` on the demo model: prompt scores equal the scores of a request that decodes."""

from __future__ import annotations

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.assets import demo_model_path

PROMPTS = ["Once upon a time there was a little dog who wanted to play.", "Tom", "The cat sat"]


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"max_num_batched_tokens": 5}])
def test_scores_equal_those_of_a_request_that_generates(options):
    with LLM(demo_model_path(), num_kv_blocks=32, max_num_seqs=2, **options) as llm:
        score_only = SamplingParams(max_tokens=0, prompt_logprobs=2)
        scored = llm.generate(PROMPTS, score_only, use_tqdm=False)
        stats = llm.stats()
        assert stats.output_tokens == stats.decode_tokens == 0
        assert stats.prefill_tokens == sum(len(one.prompt_token_ids) for one in scored)
        longer = SamplingParams(max_tokens=1, prompt_logprobs=2)
        for one, other in zip(scored, llm.generate(PROMPTS, longer, use_tqdm=False), strict=True):
            assert one.prompt_logprobs == other.prompt_logprobs
            (completion,) = one.outputs
            assert (completion.token_ids, completion.text) == ([], "")
            assert completion.finish_reason == "length"
        (growing,) = llm.stream(PROMPTS[0], score_only, kind="delta")
        assert growing.prompt_logprobs == scored[0].prompt_logprobs
