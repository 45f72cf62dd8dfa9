"""Seeded samples come out the same again, whatever runs beside them; a clone changes nothing."""

import dataclasses
import sys

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], seed=None)
seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=42, max_tokens=12)
free = SamplingParams(temperature=1.0, seed=-1, max_tokens=12)

(alone,) = llm.generate("Long ago", seeded.clone())
beside = llm.generate(["The fox", "Long ago", "The lake"], [free, seeded, free])
print(alone.outputs[0].text, "|", beside[1].outputs[0].text)
assert alone.outputs[0].token_ids == beside[1].outputs[0].token_ids

texts = {
    seed: llm.generate("Long ago", dataclasses.replace(seeded, seed=seed))[0].outputs[0].text
    for seed in range(4)
}
print(texts)
assert len(set(texts.values())) > 1
