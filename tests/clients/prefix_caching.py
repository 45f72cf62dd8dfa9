"""Questions about one long passage: the second round finds the passage in the cache."""

import sys
import time

from vllm import LLM, SamplingParams

PASSAGE = (
    "The secret word of Mia: lantern. A cold wind blew over the bridge. The home town of Tom: "
    "Dover. Grace and Leo talked about the weather. The favourite colour of Anna: purple. Some "
    "birds sang near the lake. The pet of Ben: turtle. The place of the clock: attic. It was a "
    "bright morning in spring. The work of Felix: baker. The road went past the mill. The "
    "favourite food of Clara: pancakes. Nobody knew why the hill was so quiet."
)
questions = {
    "What is the secret word of Mia?": "lantern",
    "What is the home town of Tom?": "Dover",
    "What is the pet of Ben?": "turtle",
    "What is the work of Felix?": "baker",
}
prompts = [f"{PASSAGE}\n\nQuestion: {question}\nAnswer:" for question in questions]
params = SamplingParams(temperature=0.0, max_tokens=16)
texts = {}
for caching in (False, True):
    llm = LLM(
        model=sys.argv[1],
        enable_prefix_caching=caching,
        block_size=16,
        gpu_memory_utilization=0.4,
    )
    llm.generate(prompts[0], params, use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(f"prefix caching {caching}: {time.perf_counter() - start:.3f} s")
    texts[caching] = [output.outputs[0].text.strip() for output in outputs]
    cached = [output.num_cached_tokens for output in outputs]
    print(texts[caching], cached)
    assert all(bool(tokens) == caching for tokens in cached)
    assert llm.reset_prefix_cache()
    del llm
assert texts[True] == texts[False]
assert all(word in text for word, text in zip(questions.values(), texts[True]))
