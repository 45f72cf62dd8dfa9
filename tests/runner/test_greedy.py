"""Greedy tokens and log-probabilities of the whole engine against transformers, family by family.

One forward of transformers over prompt and output shows, by induction, whether greedy decoding
gives the same tokens: at each position its most likely token must be the engine's next one.
"""

import pytest
import torch

from nanoengine.settings.params import SamplingParams
from tests.support.engines import (
    checkpoint,
    make_engine,
    random_prompts,
    reference,
    run,
)

FAMILIES = ["llama", "qwen3_moe", "gemma3"]
LENGTHS = [1, 5, 16, 17, 31, 32, 33, 64, 90]


def reference_logits(directory: str, dtype: torch.dtype, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(directory, dtype)(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_64_tokens_equal_transformers(family, dtype):
    directory = checkpoint(family)
    prompts = random_prompts(16, LENGTHS)
    backend = "cpu" if dtype == "float32" else "naive"
    with_logprobs = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=0)
    engine = make_engine(directory, dtype=dtype, attention_backend=backend)
    requests = run(engine, prompts, with_logprobs)
    engine.close()
    for prompt, request in zip(prompts, requests, strict=True):
        output = request.sequences[0].output_token_ids
        assert len(output) == 64
        logits = reference_logits(directory, getattr(torch, dtype), prompt + output)
        predicted = logits[len(prompt) - 1 : -1]
        assert predicted.argmax(-1).tolist() == output
        logprobs = predicted.log_softmax(-1)[range(64), output]
        reported = torch.tensor(
            [entry[0].logprob for entry in request.sequences[0].extras.logprobs]
        )
        torch.testing.assert_close(reported.double(), logprobs.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"long_prefill_threshold": 7}, {"num_kv_blocks": 9}])
def test_prompt_logprobs_start_limits_the_prompt_logprobs(options):
    """This includes earlier tokens from the prefix cache, and a small pool with preemptions."""
    directory = checkpoint("llama")
    prompt = random_prompts(1, [70])[0]
    prompts = [prompt, [*prompt[:50], *prompt[10:30]], prompt, [*prompt[:50], *prompt[3:30]]]
    params = [
        SamplingParams(
            temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2,
            prompt_logprobs_start=start,
        )
        for start in (0, 50, 33, 99)
    ]  # fmt: skip
    uncached = make_engine(directory, enable_prefix_caching=False)
    expected = [request.prompt_logprobs for request in run(uncached, prompts, params[0])]
    engine = make_engine(directory, block_size=16, max_num_seqs=2, **options)
    for start, logprobs, request in zip(
        (0, 50, 33, 99), expected, run(engine, prompts, params), strict=True
    ):
        found = [[entry.token_id for entry in one] for one in request.prompt_logprobs]
        assert found == [[e.token_id for e in one] for one in logprobs[max(start - 1, 0) :]]
        for one, other in zip(request.prompt_logprobs, logprobs[max(start - 1, 0) :], strict=True):
            assert [e.logprob for e in one] == pytest.approx([e.logprob for e in other])
    assert engine.stats().cache_hit_tokens >= 80
    assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in options)


@pytest.mark.parametrize("long_prefill_threshold", [0, 7])
def test_prompt_logprobs_equal_transformers(long_prefill_threshold):
    directory = checkpoint("llama")
    prompts = random_prompts(5, [2, 17, 40])
    engine = make_engine(directory, long_prefill_threshold=long_prefill_threshold)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    for prompt, request in zip(prompts, run(engine, prompts, params), strict=True):
        logprobs = reference_logits(directory, torch.float64, prompt).log_softmax(-1)[:-1]
        best = logprobs.topk(2).indices.tolist()
        assert len(request.prompt_logprobs) == len(prompt) - 1
        for i, (given, *top) in enumerate(request.prompt_logprobs):
            assert given.token_id == prompt[i + 1]
            assert given.logprob == pytest.approx(float(logprobs[i, prompt[i + 1]]), abs=1e-6)
            assert [entry.token_id for entry in top] == best[i]
