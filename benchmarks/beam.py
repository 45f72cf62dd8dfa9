"""What forks save a beam search: `python benchmarks/beam.py --model DIRECTORY`.

The same search twice, in one process and one engine, in turns:

    forks      beams are sequences of one request: forked, written copy-on-write, dropped
    resubmit   each step queues every beam as a new request for one token, whose prompt is the beam
               so far; the prefix cache finds all of it but the last block or part of one. This is
               what an engine without forks does offline.

Reported: median wall seconds of each, their ratio, and the tokens that each computed. Both must
find the same sequences, or nothing is reported.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from nanoengine.features.beam import BeamSearchParams
from nanoengine.llm import LLM
from nanoengine.sampling_params import SamplingParams

Beams = list[tuple[float, list[int]]]
"""Sums of log-probabilities with the output tokens, best first."""


def with_forks(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Beams]:
    """The engine's own search."""
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    return [[(s.cumulative_logprob, s.token_ids) for s in output.sequences] for output in outputs]


def by_resubmitting(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Beams]:
    """A search outside the engine; all beams of all prompts go in one call a step."""
    width = params.beam_width
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2 * width)
    searches: list[Beams] = [[(0.0, [])] for _ in prompts]
    for _ in range(params.max_tokens):
        queued = [
            prompt + tokens
            for prompt, beams in zip(prompts, searches, strict=True)
            for _, tokens in beams
        ]
        answers = iter(llm.generate(queued, one, use_tqdm=False))
        for i, beams in enumerate(searches):
            grown = [
                (total + entry.logprob, [*tokens, token_id])
                for total, tokens in beams
                for token_id, entry in (next(answers).outputs[0].logprobs or [{}])[0].items()
            ]
            searches[i] = sorted(grown, key=lambda beam: -beam[0])[:width]
    return searches


def computed_tokens(llm: LLM) -> int:
    """Tokens that forwards have computed since the start."""
    stats = llm.stats()
    return stats.prefill_tokens + stats.decode_tokens


def main() -> None:
    """Runs both in turns and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory or hub id")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--beam-width", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--attention-backend", default="auto")
    args = parser.parse_args()
    rng = random.Random(0)
    params = BeamSearchParams(
        beam_width=args.beam_width, max_tokens=args.max_tokens, length_penalty=0.0, ignore_eos=True
    )
    seconds: dict[str, list[float]] = {"forks": [], "resubmit": []}
    tokens: dict[str, int] = {}
    with LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        attention_backend=args.attention_backend,
        max_model_len=args.prompt_len + args.max_tokens + 1,
    ) as llm:
        for repeat in range(args.repeats + 1):  # the first one warms up
            prompts = [
                [rng.randrange(3, llm.info.vocab_size) for _ in range(args.prompt_len)]
                for _ in range(args.prompts)
            ]
            found = {}
            for name, search in (("forks", with_forks), ("resubmit", by_resubmitting)):
                llm.engine.reset_prefix_cache()
                before, started = computed_tokens(llm), time.perf_counter()
                found[name] = search(llm, prompts, params)
                if repeat:
                    seconds[name].append(time.perf_counter() - started)
                tokens[name] = computed_tokens(llm) - before
            same = [[t for _, t in beams] for beams in found["forks"]] == [
                [t for _, t in beams] for beams in found["resubmit"]
            ]
            if not same:
                raise SystemExit("the two searches differ: nothing to compare")
    print(
        f"{args.prompts} prompts of {args.prompt_len}, {args.beam_width} beams of {args.max_tokens}"
    )
    for name, times in seconds.items():
        print(f"{name:<9} {statistics.median(times):8.3f} s  {tokens[name]:8,} tokens computed")
    ratios = [b / a for a, b in zip(seconds["forks"], seconds["resubmit"], strict=True)]
    print(f"resubmit / forks: {statistics.median(ratios):.2f} (median of {len(ratios)})")


if __name__ == "__main__":
    main()
