"""More samples of one prompt than sequences run at once: they wait for their turn."""

import sys
from collections import Counter

from vllm import LLM, SamplingParams

llm = LLM(model=sys.argv[1], max_num_seqs=4)
params = SamplingParams(n=10, temperature=1.0, max_tokens=3, seed=5)
(output,) = llm.generate("The favourite colour of Anna:", params)
votes = Counter(completion.text.strip() for completion in output.outputs)
print(votes.most_common(3))
assert [completion.index for completion in output.outputs] == list(range(10))
assert sum(votes.values()) == 10
