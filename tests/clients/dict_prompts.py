"""Prompts as dicts: of text, of token ids, with a salt, and mixed with plain strings."""

import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], trust_remote_code=False, dtype="float", disable_log_stats=True)
params = SamplingParams(temperature=0, max_tokens=10)

text = "Once upon a time, there was a"
(first,) = llm.generate({"prompt": text}, params)
ids = first.prompt_token_ids
outputs = llm.generate(
    [
        text,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": text, "prompt_token_ids": ids},
        {"prompt": text, "cache_salt": "tenant-1"},
    ],
    sampling_params=params,
    use_tqdm=False,
)
for output in outputs:
    print(output.request_id, output.prompt_token_ids[:4], output.outputs[0].text)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].text == first.outputs[0].text
    assert output.finished
