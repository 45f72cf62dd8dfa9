"""Several samples of each prompt, with the log-probabilities of their tokens."""

import math
import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_num_seqs=8, max_logprobs=20)
params = SamplingParams(
    n=3, temperature=0.9, top_k=40, max_tokens=12, logprobs=3, prompt_logprobs=1, seed=11
)
for output in llm.generate(["Once upon a time", "The fox"], params):
    assert len(output.outputs) == 3
    assert output.prompt_logprobs[0] is None
    surprise = -sum(
        entry[token_id].logprob
        for token_id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    )
    perplexity = math.exp(surprise / (len(output.prompt_token_ids) - 1))
    print(f"{output.prompt!r}: perplexity {perplexity:.1f}")
    for completion in output.outputs:
        total = 0.0
        for token_id, candidates in zip(completion.token_ids, completion.logprobs):
            assert token_id in candidates
            assert len(candidates) in (3, 4)
            total += candidates[token_id].logprob
            best = min(candidates.values(), key=lambda one: one.rank)
            assert best.rank == 1
            assert isinstance(best.decoded_token, str)
        assert abs(total - completion.cumulative_logprob) < 1e-3
        print(f"  {completion.index}: {completion.text!r} {completion.cumulative_logprob:.2f}")

whole = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
(output,) = llm.generate("The fox", whole)
total = sum(math.exp(one.logprob) for one in output.outputs[0].logprobs[0].values())
print(f"the whole vocabulary: {total:.4f}")
assert abs(total - 1) < 1e-3
