"""Tokenize outside of the engine, and hand over token ids."""

import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

model = sys.argv[1]
llm = LLM(model=model, max_num_seqs=16, gpu_memory_utilization=0.8)
tokenizer = llm.get_tokenizer()

texts = ["The secret word of Mia: lantern.", "The pet of Ben: turtle."]
prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text)) for text in texts]
params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=True)
by_ids = llm.generate(prompts, params, True)
by_text = llm.generate([TextPrompt(prompt=text) for text in texts], params, lora_request=None)
for one, other in zip(by_ids, by_text):
    decoded = tokenizer.decode(one.outputs[0].token_ids, skip_special_tokens=True)
    print(repr(decoded))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert one.outputs[0].text == decoded
