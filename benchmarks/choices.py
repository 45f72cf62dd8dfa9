"""What a multiple-choice question costs: `python benchmarks/choices.py`; needs nanoengine[eval].

Questions with a context and a few choices, scored through lm-evaluation-harness
(`nanoengine.bench.evaluation`), with several block sizes: the share of prompt tokens that are
computed, and seconds. The sizes alternate; a time is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from nanoengine.assets import demo_model_path
from nanoengine.bench.evaluation import NanoEngineLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.suite.shapes import SHAPES, write_shape

Request = tuple[None, list[int], list[int]]


def make_requests(questions: int, choices: int, context: int, choice: int) -> list[Request]:
    """Random token ids; the choices of a question share only its context, and are in random
    order."""
    draw = random.Random(0)
    requests: list[Request] = []
    for _ in range(questions):
        shared = draw.choices(range(300, 400), k=context)
        requests += [
            (None, shared, draw.choices(range(300, 400), k=choice)) for _ in range(choices)
        ]
    draw.shuffle(requests)
    return requests


def measure(model: NanoEngineLM, requests: list[Request]) -> tuple[int, float]:
    """Computed prompt tokens, and seconds."""
    model.llm.reset_prefix_cache()
    before, start = model.llm.stats().prefill_tokens, time.perf_counter()
    model._loglikelihood_tokens(requests, disable_tqdm=True)
    return model.llm.stats().prefill_tokens - before, time.perf_counter() - start


def main() -> None:
    """Prints one line per block size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", *SHAPES), default="small")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--choices", type=int, default=4)
    parser.add_argument("--context", type=int, default=500, help="tokens of a question")
    parser.add_argument("--choice", type=int, default=5, help="tokens of a choice")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    requests = make_requests(args.questions, args.choices, args.context, args.choice)
    num_prompt_tokens = sum(len(context) + len(choice) for _, context, choice in requests)
    with tempfile.TemporaryDirectory() as directory:
        options = {"pretrained": str(demo_model_path())}
        if args.model != "demo":
            write_shape(args.model, Path(directory))
            options |= {"pretrained": directory, "tokenizer": str(demo_model_path())}
            options |= {"load_format": "dummy"}
        models = {size: NanoEngineLM(**options, block_size=size) for size in args.block_sizes}
    found: dict[int, list[tuple[int, float]]] = {size: [] for size in models}
    for number in range(args.rounds + 1):
        for size, model in models.items():
            computed = measure(model, requests)
            if number:  # The first round compiles.
                found[size].append(computed)
    facts = {
        size: {
            "prompt tokens": num_prompt_tokens,
            "computed": runs[0][0],
            "ratio": num_prompt_tokens / runs[0][0],
            "seconds": statistics.median(seconds for _, seconds in runs),
            "all seconds": [seconds for _, seconds in runs],
        }
        for size, runs in found.items()
    }
    for size, result in facts.items():
        print(
            f"block_size {size:>3}: {result['computed']:,} of {num_prompt_tokens:,} prompt tokens"
            f" computed, {result['ratio']:.2f} times fewer, in {result['seconds']:.3f} s"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({**vars(args), "json": None, "found": facts}, indent=1))


if __name__ == "__main__":
    main()
