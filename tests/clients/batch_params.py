"""A batch whose prompts have parameters of their own, some of them given by position."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=1, enforce_eager=True)

requests = [
    ("The hill was", SamplingParams(temperature=0.0, max_tokens=8)),
    ("The hill was", SamplingParams(temperature=0.0, max_tokens=4)),
    ("The lake was", SamplingParams(1, 0.1, 0.1, 1.05, 0.7, 0.9, 20, max_tokens=12, seed=1)),
    ("The lake was", SamplingParams(temperature=1.0, top_k=-1, min_p=0.05, max_tokens=12, seed=2)),
    ("A bird", SamplingParams(temperature=0.0, max_tokens=24, stop=".")),
    ("A bird", SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6, ignore_eos=True)),
]
prompts = [prompt for prompt, _ in requests]
params = [one for _, one in requests]
outputs = llm.generate(prompts, params)
for (prompt, one), output in zip(requests, outputs):
    completion = output.outputs[0]
    print(prompt, "->", completion.text, f"[{completion.finish_reason}, {one.max_tokens}]")
    assert len(completion.token_ids) <= one.max_tokens
assert outputs[0].outputs[0].text.startswith(outputs[1].outputs[0].text)
assert "." not in outputs[4].outputs[0].text
assert len(outputs[5].outputs[0].token_ids) == 6
