"""Multiple choice: only the choices' first tokens may be sampled, and logprobs rank them."""

import sys

from vllm import LLM, SamplingParams

PASSAGE = (
    "The secret word of Mia: lantern. A cold wind blew over the bridge. The home town of Tom: "
    "Dover. Grace and Leo talked about the weather. The favourite colour of Anna: purple. Some "
    "birds sang near the lake. The pet of Ben: turtle. The place of the clock: attic. It was a "
    "bright morning in spring. The work of Felix: baker. The road went past the mill. The "
    "favourite food of Clara: pancakes. Nobody knew why the hill was so quiet."
)
questions = {
    "the secret word of Mia": "lantern",
    "the home town of Tom": "Dover",
    "the pet of Ben": "turtle",
    "the work of Felix": "baker",
}

llm = LLM(model=sys.argv[1], gpu_memory_utilization=0.5, swap_space=0, dtype="auto")
tokenizer = llm.get_tokenizer()
choices = {
    word: tokenizer.encode(" " + word, add_special_tokens=False)[0] for word in questions.values()
}
assert len(set(choices.values())) == len(choices)
params = SamplingParams(
    temperature=0, max_tokens=1, allowed_token_ids=list(choices.values()), logprobs=-1
)
prompts = [f"{PASSAGE}\n\nQuestion: What is {what}?\nAnswer: T{what[1:]}:" for what in questions]
for output, answer in zip(llm.generate(prompts, params), questions.values()):
    first = output.outputs[0].logprobs[0]
    scores = {word: round(first[token_id].logprob, 2) for word, token_id in choices.items()}
    print(answer, scores)
    assert output.outputs[0].token_ids == [choices[answer]]
    assert max(scores, key=scores.get) == answer
