"""What drafting gains: `python benchmarks/speculative.py --model qwen3-0.6b --dtype float32`.

Recorded texts of three kinds are decoded with and without drafts, alternating, by one engine:

    edits    input: code; output: the same code after a commit
    json     input: a function and the names of fields; output: a JSON object
    prose    input: the beginning of a page; output: its continuation

Weights are random, so the model's text would be meaningless. So each sampled token is replaced by
the recorded one after the complete computation. The compute is real, and drafts are accepted as
with a model that writes this text. Tokens are words, digits and signs of the texts, numbered in the
order of their occurrence: about as long as tokens of a large vocabulary.

The first round fills the prefix cache, so that the other rounds time decodes. The engine also
learns its step costs in it; `--cold` resets these, and the acceptance of earlier drafts, before
each round. Without drafts each round is run twice: the difference between the two is the noise of
the machine. Three texts of 80 tokens take one stream of `qwen3-0.6b` about two minutes per kind.

`--rows` measures the cost of a step with 1 to 8 rows instead, with drafts that are all rejected.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from side_by_side import Clock, Run, compare, model_options, parser, report

from nanoengine import LLM, SamplingParams
from nanoengine.core.sequence import Sequence
from nanoengine.features.speculative.drafting import Drafting
from nanoengine.observe.metrics import Metrics
from nanoengine.runner import model_runner

TEXTS = Path(__file__).parent / "texts" / "recorded.json"
TOKEN = re.compile(r" ?[A-Za-z]+|\d|[^\sA-Za-z\d]+|\s+")


class Replay:
    """Replaces an engine's sampled tokens by tokens of recorded texts; it is between the runner and
    the sampler."""

    def __init__(self, llm: LLM) -> None:
        self.answers: dict[tuple[int, ...], list[int]] = {}  # prompt -> prompt and output
        self.of_row: dict[int, list[int]] = {}
        runner = llm.engine.executor
        self._update, runner._update_batch = runner._update_batch, self.update
        batch = runner.input_batch
        self._make_batch, batch.make_batch = batch.make_batch, self.make_batch
        special = runner.ensure_step_sampler()
        for owner, name in (
            (model_runner, "most_likely_tokens"),
            (special, "_most_likely"),
            (special, "sample"),
        ):
            setattr(owner, name, functools.partial(self.exchanged, getattr(owner, name)))

    def update(self, plan: Any) -> None:
        for new in plan.admitted:
            self.of_row[new.row] = self.answers[tuple(new.token_ids[: new.num_prompt_tokens])]
        self._update(plan)

    def make_batch(self, *args: Any) -> Any:
        batch, self.lines = self._make_batch(*args)
        return batch, self.lines

    def exchanged(self, sample: Callable[..., Any], *args: Any) -> Any:
        """What `sample` returns, with the recorded tokens in place of its own."""
        sampled = sample(*args)
        if sampled is not None:
            token_ids = (sampled if isinstance(sampled, torch.Tensor) else sampled.packed)[0]
            lines = zip(self.lines.rows, self.lines.positions, strict=True)
            for i, (row, position) in enumerate(lines):
                whole = self.of_row[int(row)]
                token_ids[i] = whole[min(int(position), len(whole) - 1)]
        return sampled


class WrongDrafts:
    """Proposes `count` tokens that are never accepted."""

    count = 0

    def propose(self, sequences: list[Sequence]) -> list[tuple[int, ...]]:
        return [(3,) * self.count for _ in sequences]

    def needs_tokens(self) -> bool:
        return True


def recorded(num_streams: int, output_len: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """(prompt, output) as ids, for each kind: all texts for one stream, else `num_streams` of them.

    Ids of words begin at 200; the first id of each prompt is unique, so that no two streams share a
    prefix.
    """
    kinds = json.loads(TEXTS.read_text(encoding="utf-8"))
    ids: dict[str, int] = {}

    def numbered(text: str) -> list[int]:
        return [ids.setdefault(word, len(ids) + 200) for word in TOKEN.findall(text)]

    found = {}
    for kind, texts in kinds.items():
        count = len(texts) if num_streams == 1 else num_streams
        found[kind] = [
            ([5 + i, *numbered(text["prompt"])], numbered(text["answer"])[:output_len])
            for i, text in zip(range(count), itertools.cycle(texts), strict=False)
        ]
    return found


def job(
    llm: LLM, replay: Replay, texts: list[tuple[list[int], list[int]]], one_by_one: bool
) -> Callable[[Drafting | None], Run]:
    """Generates all texts, with or without a proposer."""
    for prompt, answer in texts:
        replay.answers[tuple(prompt)] = prompt + answer
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in texts]
    params = [
        SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
        for _, answer in texts
    ]

    def run(proposer: Drafting | None) -> Run:
        engine = llm.engine
        engine.proposer = proposer
        engine.observers[:] = [] if proposer is None else [proposer]
        before, clock = llm.stats(), Clock()
        if one_by_one:
            outputs = [
                llm.generate(prompt, each, use_tqdm=False)[0]
                for prompt, each in zip(prompts, params, strict=True)
            ]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = clock.read()
        after = llm.stats()
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        assert tokens == [answer for _, answer in texts], "the recorded text was meant to come"
        names = ("output_tokens", "steps", "drafted_tokens", "accepted_tokens")
        return Run(
            seconds=seconds,
            tokens=tokens,
            counts={name: getattr(after, name) - getattr(before, name) for name in names},
        )

    return run


def comparisons(llm: LLM, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each kind of text, with each number of streams."""
    replay, warm = Replay(llm), llm.engine.proposer
    assert isinstance(warm, Drafting)

    def proposer() -> Drafting:
        return Drafting(drafter=warm.drafter) if args.cold else warm

    for streams in args.streams:
        for kind, texts in recorded(streams, args.output_len).items():
            if kind in args.kinds:
                run = job(
                    llm, replay, texts[: max(args.most_texts, streams)], one_by_one=streams == 1
                )
                variants = {
                    "drafts": lambda run=run: run(proposer()),
                    "none": lambda run=run: run(None),
                    "none again": lambda run=run: run(None),
                }
                found = compare(f"{kind}, {streams} at once", variants, args.rounds)
                ratio = found["wall"]["ratio"]["none"]
                print(f"{found['name']}: {ratio['median']:.2f} times as fast", flush=True)
                yield found


def row_costs(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a step with 1 to 8 rows of one stream, alternating."""
    replay, wrong, metrics = Replay(llm), WrongDrafts(), Metrics()
    (prompt, answer), *_ = recorded(1, 1000)["edits"]
    replay.answers[tuple(prompt)] = prompt + answer
    llm.engine.proposer, llm.engine.observers[:] = wrong, [metrics]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seconds: dict[int, list[float]] = {rows: [] for rows in range(1, 9)}
    for number in range(args.rounds + 1):
        for rows in seconds:
            wrong.count = rows - 1
            metrics.records.clear()
            llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            times = [
                r.times.forward_s + r.times.sample_s + r.times.prepare_s
                for r in metrics.records
                if sum(r.num_scheduled) == rows
            ]
            if number:
                seconds[rows] += times[1:]
    medians = {rows: statistics.median(times) for rows, times in seconds.items()}
    print(f"{'rows':>6}{'ms per step':>12}{'of one row':>12}")
    for rows, median in medians.items():
        print(f"{rows:>6}{1e3 * median:12.2f}{median / medians[1]:12.2f}")
    return {"seconds": medians, "of_one_row": {r: s / medians[1] for r, s in medians.items()}}


def main() -> None:
    """Compares, or measures rows."""
    options = parser(__doc__)
    options.add_argument("--dtype", default="auto")
    options.add_argument("--quantization", default=None)
    options.add_argument("--speculative", default="ngram")
    options.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    options.add_argument("--kinds", nargs="+", default=["edits", "json", "prose"])
    options.add_argument("--output-len", type=int, default=80, help="most tokens of an answer")
    options.add_argument("--most-texts", type=int, default=3, help="of one stream")
    options.set_defaults(rounds=2)
    options.add_argument("--cold", action="store_true")
    options.add_argument("--rows", action="store_true")
    args = options.parse_args()
    with (
        model_options(args) as model,
        LLM(
            **model,
            dtype=args.dtype,
            quantization=args.quantization,
            speculative=args.speculative,
            max_model_len=2048,
            max_num_seqs=max(args.streams),
        ) as llm,
    ):
        started = time.perf_counter()
        if args.rows:
            found = row_costs(llm, args)
            if args.json:
                args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        else:
            report(args, list(comparisons(llm, args)))
        print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
