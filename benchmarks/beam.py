"""What forks save in a beam search: `python benchmarks/beam.py --model small`.

The same search runs twice, alternating in one process and one engine:

    forks      beams are sequences of one request: forked, written copy-on-write, dropped
    resubmit   each step queues every beam as a new request for one token, whose prompt is the beam
               so far; the prefix cache hits all of it except the last block. This is what an
               engine without forks does offline.

Both find the same sequences, except beams whose scores are equal up to rounding; the share of equal
sequences is reported.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from side_by_side import Clock, Run, compare, model_options, parser, report

from nanoengine.features.beam import BeamSearchParams
from nanoengine.llm import LLM
from nanoengine.settings.params import SamplingParams

Beams = list[tuple[float, list[int]]]
"""Sums of log-probabilities with the output tokens, best first."""
Search = Callable[[LLM, list[list[int]], BeamSearchParams], list[Beams]]


def with_forks(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Beams]:
    """The engine's beam search."""
    outputs = llm.beam_search(prompts, params, use_tqdm=False)
    return [[(s.cumulative_logprob, s.token_ids) for s in output.sequences] for output in outputs]


def by_resubmitting(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> list[Beams]:
    """A search outside the engine; each step is one call with all beams of all prompts."""
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


def timed(llm: LLM, search: Search, prompts: list[list[int]], params: BeamSearchParams) -> Run:
    """One search from an empty cache."""
    llm.reset_prefix_cache()
    before, clock = llm.stats(), Clock()
    found = search(llm, prompts, params)
    seconds, after = clock.read(), llm.stats()
    return Run(
        seconds=seconds,
        tokens=[tokens for beams in found for _, tokens in beams],
        counts={
            "prefill tokens": after.prefill_tokens - before.prefill_tokens,
            "decode tokens": after.decode_tokens - before.decode_tokens,
        },
    )


def main() -> None:
    """Runs both, alternating, and prints a table."""
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--prompt-len", type=int, default=128)
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--beam-width", type=int, default=4)
    args = options.parse_args()
    draw = random.Random(0)
    params = BeamSearchParams(
        beam_width=args.beam_width, max_tokens=args.max_tokens, length_penalty=0.0, ignore_eos=True
    )
    prompts = [
        [draw.randrange(10, 200) for _ in range(args.prompt_len)] for _ in range(args.prompts)
    ]
    with model_options(args) as model:
        longest = args.prompt_len + args.max_tokens + 1
        with LLM(**model, max_model_len=longest) as llm:
            found = compare(
                f"beams: {args.prompts} prompts of {args.prompt_len}, {args.beam_width} beams of"
                f" {args.max_tokens}",
                {
                    "forks": lambda: timed(llm, with_forks, prompts, params),
                    "resubmit": lambda: timed(llm, by_resubmitting, prompts, params),
                },
                args.rounds,
            )
        report(args, [found])


if __name__ == "__main__":
    main()
