"""nanoengine on the small model that comes with it: no download, a few seconds on a laptop's CPU.

Run it with `python example.py`, or with a checkpoint of your own: `python example.py DIRECTORY`.
`--device cpu` runs it on the CPU although there is a GPU.
"""

from __future__ import annotations

import argparse

from nanoengine import LLM, RequestOutput, SamplingParams
from nanoengine.assets import demo_model_path
from nanoengine.observe.metrics import Metrics, summarize

PASSAGE = (
    "The secret word of Mia: lantern. A cold wind blew over the bridge. The home town of Tom: "
    "Dover. Grace and Leo talked about the weather. The favourite colour of Anna: purple. Some "
    "birds sang near the lake. The pet of Ben: turtle. The place of the clock: attic. It was a "
    "bright morning in spring. The work of Felix: baker. The road went past the mill. The "
    "favourite food of Clara: pancakes. Nobody knew why the hill was so quiet."
)
QUESTIONS = (
    "What is the secret word of Mia?",
    "What is the home town of Tom?",
    "What is the favourite colour of Anna?",
    "What is the pet of Ben?",
    "What is the place of the clock?",
    "What is the work of Felix?",
)
GREEDY = SamplingParams(temperature=0, max_tokens=128)
SAMPLED = SamplingParams(n=2, temperature=0.8, top_p=0.95, seed=7, max_tokens=128)


def show(title: str, outputs: list[RequestOutput]) -> None:
    """Prints the end of each prompt and all its completions."""
    print(f"\n{title}")
    for output in outputs:
        prompt = (output.prompt or "").strip().splitlines()[-2:]
        print(f"  {' / '.join(prompt)[-76:]}   [{output.num_cached_tokens} prompt tokens cached]")
        for completion in output.outputs:
            print(f"    -> {completion.text.strip()}  ({completion.finish_reason})")


def main() -> None:
    """A story, questions on one passage, a chat, two samples of one prompt, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=demo_model_path(), help="a checkpoint")
    parser.add_argument("--device", default="auto", help="cpu or cuda; auto: a GPU if there is one")
    args, metrics = parser.parse_args(), Metrics()
    # Why small blocks: short prompts share more of them.
    with LLM(args.model, device=args.device, block_size=16) as llm:
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        llm.engine.observers.append(metrics)  # After a warm-up: the first steps compile kernels.

        # One prompt is a string, several are a list. Outputs come back in the order of the prompts.
        show(
            "A story",
            llm.generate("Once upon a time, there was a little fox", GREEDY, use_tqdm=False),
        )

        # All prompts begin with the passage. Its KV blocks are computed once and then shared.
        prompts = [f"{PASSAGE}\n\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
        show("Questions on one passage", llm.generate(prompts, GREEDY, use_tqdm=False))

        # A chat is a list of messages; the model's own template makes the prompt of it.
        talk = [{"role": "user", "content": "Tell a story about a brave rabbit."}]
        show("A chat", llm.chat(talk, GREEDY, use_tqdm=False))

        # n = 2 prefills the prompt once and forks it; a seed makes it come out the same again.
        show(
            "Two samples of one prompt",
            llm.generate("Long ago, a kind bear named", SAMPLED, use_tqdm=False),
        )

        stats, run, info = llm.stats(), summarize(metrics.records), llm.info
        print(
            f"\n{info.device}, {info.dtype}:"
            f" prefill {run.prefill_tokens / run.prefill_s:,.0f} tok/s,"
            f" decode {run.decode_tokens / run.decode_s:,.0f} tok/s;"
            f" {stats.cached_blocks} of {info.num_kv_blocks} KV blocks hold a cached prefix;"
            f" {stats.cache_hit_rate:.0%} of prompt tokens were cache hits;"
            f" {stats.preemptions} preemptions"
        )


if __name__ == "__main__":
    main()
