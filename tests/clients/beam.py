"""Beam search over a few prompts."""

import sys

from vllm import LLM, BeamSearchParams

llm = LLM(model=sys.argv[1], max_num_seqs=8, enforce_eager=True)
params = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=1.0)
outputs = llm.beam_search(
    [{"prompt": "Once upon a time"}, {"prompt": "The road went"}], params, use_tqdm=False
)
for output in outputs:
    assert len(output.sequences) == 4
    for sequence in output.sequences:
        print(repr(sequence.text))
assert outputs[0].sequences[0].text != outputs[1].sequences[0].text
greedy = llm.beam_search("The road went", BeamSearchParams(1, 10, True), use_tqdm=False)
assert len(greedy[0].sequences) == 1
