"""What forks save with n > 1: `python benchmarks/parallel_sampling.py --model small`.

The workload n8: 16 prompts of 512 tokens, n = 8, 64 output tokens; `--scale` reduces the prompts.

    n            one request with n sequences: the prompt is computed once, its blocks are shared
    n requests   n requests with one prompt: the prefix cache shares all full blocks except the last
    no cache     the same without the prefix cache: shows the total effect of sharing

The n requests have the seeds of the n sequences, so that all three have the same outputs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

from side_by_side import Clock, Run, compare, model_options, parser, report

from nanoengine import LLM, SamplingParams
from nanoengine.core.sequence import fork_seed


def timed(llm: LLM, args: argparse.Namespace, prompts: list[list[int]], *, forked: bool) -> Run:
    """All completions of all prompts, with an empty cache."""
    llm.reset_prefix_cache()
    before = llm.stats()
    base = SamplingParams(temperature=1.0, max_tokens=args.output_len, ignore_eos=True)
    if forked:
        queued = prompts
        params = [replace(base, n=args.n, seed=i) for i in range(len(prompts))]
    else:
        queued = [prompt for prompt in prompts for _ in range(args.n)]
        params = [
            replace(base, seed=fork_seed(i, j)) for i in range(len(prompts)) for j in range(args.n)
        ]
    clock = Clock()
    outputs = llm.generate(queued, params, use_tqdm=False)
    seconds = clock.read()
    after = llm.stats()
    return Run(
        seconds=seconds,
        tokens=[list(answer.token_ids) for output in outputs for answer in output.outputs],
        counts={
            "prefill tokens": after.prefill_tokens - before.prefill_tokens,
            "output tokens": after.output_tokens - before.output_tokens,
        },
    )


def main() -> None:
    """Runs the three variants, alternating."""
    options = parser(__doc__)
    options.add_argument("--scale", type=float, default=1.0, help="share of the 16 prompts")
    options.add_argument("--n", type=int, default=8)
    options.add_argument("--prompt-len", type=int, default=512)
    options.add_argument("--output-len", type=int, default=64)
    args = options.parse_args()
    draw = random.Random(0)
    prompts = [
        [draw.randrange(10, 200) for _ in range(args.prompt_len)]
        for _ in range(max(1, round(16 * args.scale)))
    ]
    with model_options(args) as model:
        sizes: dict[str, Any] = {"max_model_len": args.prompt_len + args.output_len}
        with (
            LLM(**model, **sizes) as llm,
            LLM(**model, **sizes, enable_prefix_caching=False) as uncached,
        ):
            found = compare(
                f"n = {args.n}: {len(prompts)} prompts of {args.prompt_len}, {args.output_len} out",
                {
                    "n": lambda: timed(llm, args, prompts, forked=True),
                    "n requests": lambda: timed(llm, args, prompts, forked=False),
                    "no cache": lambda: timed(uncached, args, prompts, forked=False),
                },
                args.rounds,
            )
        report(args, [found])


if __name__ == "__main__":
    main()
