"""A column of a data frame in, a column of answers out; `values` of pandas is such an array."""

import sys

import numpy as np
from vllm import LLM, SamplingParams

column = np.array(["The lamp of Eva", "The boat of Max", "The song of Ida"], dtype=object)

llm = LLM(model=sys.argv[1], gpu_memory_utilization=0.9, max_model_len=512)
params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(6), seed=np.int64(3))
outputs = llm.generate(column, params)
answers = np.array([output.outputs[0].text for output in outputs], dtype=object)
for prompt, answer in zip(column, answers):
    print(f"{prompt} |{answer}")
assert len(answers) == len(column)
assert [output.prompt for output in outputs] == column.tolist()
