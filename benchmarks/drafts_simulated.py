"""Gains and losses of drafting on simulated machines: `python benchmarks/drafts_simulated.py`.

The recorded texts of `speculative.py`, and random words in which every match is an accident, are
decoded in steps whose time a formula gives: a constant, a cost per row, a cost if there is any
draft, and a cost per lookup of the drafter. The drafter and the decisions are the engine's; nothing
is computed. So all combinations of machine, batch and text take one minute, and small losses are
visible, which measurements would hide. `--noise 0.1 --bursts 0.2` disturbs the machine as other
programs do: each step takes up to this share longer, and some steps take twice as long.

The output is the ratio of tokens per second with and without drafts: the median of some runs, each
after another run in which the engine has learned its step costs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from speculative import recorded

from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.core.sequence import Request, Sequence
from nanoengine.features.speculative.drafting import Drafting
from nanoengine.features.speculative.ngram import NgramDrafter
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.speculative import NgramDrafts

Text = tuple[list[int], list[int]]  # prompt, answer
LOOK_S = 4e-6
"""Per sequence, measured: 47 us for 8 sequences, 600 us for 128 (Zen 5)."""


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: `step_s`, `row_s` per row, and `draft_s` if it has any draft."""

    step_s: float
    row_s: float
    draft_s: float = 2e-4

    def seconds(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of one step."""
        return self.step_s + self.row_s * (num_rows + num_drafts) + self.draft_s * bool(num_drafts)


MACHINES = {
    "reads weights": Machine(33e-3, 2.2e-3),
    "reads 4 bits": Machine(3e-3, 0.43e-3),
    "computes": Machine(2e-3, 0.5e-3),
    "rows for free": Machine(6e-3, 1e-5, draft_s=1e-3),
}


class Look(NgramDrafter):
    """An n-gram drafter whose calls advance a simulated clock."""

    now = 0.0

    def find_candidates(self, sequences):
        """As NgramDrafter, but it takes time."""
        self.now += LOOK_S * len(sequences)
        return super().find_candidates(sequences)


def by_chance(output_len: int) -> list[Text]:
    """Random words with Zipf frequencies: short matches are frequent and accidental."""
    chance = random.Random(0)
    words = [[min(9999, int(chance.paretovariate(0.9))) + 200 for _ in range(900)] for _ in "12345"]
    return [(text[:300], text[300 : 300 + output_len]) for text in words]


class Simulation:
    """Drafting of one engine on one machine, disturbed or not."""

    def __init__(self, machine: Machine, noise: float, bursts: float) -> None:
        self.machine, self.noise, self.bursts = machine, noise, bursts
        self.drafter = Look(NgramDrafts())
        self.drafting = Drafting(drafter=self.drafter, clock=lambda: self.drafter.now)
        self.numbers = itertools.count()

    def tokens_a_second(self, texts: list[Text], seed: int, drafts: bool) -> float:
        """Decodes all texts in one batch."""
        disturb, began = random.Random(seed), self.drafter.now
        running = dict(enumerate(self._make(row, *text) for row, text in enumerate(texts)))
        while running:
            sequences = [seq for seq, _ in running.values()]
            self.last_finished_requests: list[Request] = []
            proposed: list[tuple[int, ...]] = [()] * len(sequences)
            if drafts and self.drafting.needs_tokens():
                proposed = self.drafting.propose(sequences)
            plan, result = StepPlan(step=0), StepResult(token_ids=[])
            for (seq, answer), found in zip(list(running.values()), proposed, strict=True):
                plan.add(seq.row, 1, 1 + len(found), num_logits=1 + len(found))
                if found:
                    plan.draft_token_ids[seq.row] = found
                result.token_ids.append(right_ones(answer[len(seq.token_ids) :], found))
            num_drafts = plan.num_tokens - len(sequences)
            seconds = self.machine.seconds(len(sequences), num_drafts)
            seconds *= 1 + self.noise * disturb.random() + (disturb.random() < self.bursts)
            result.times = StepTimes(forward_s=seconds)
            self.drafter.now += seconds
            for seq, tokens in zip(sequences, result.token_ids, strict=True):
                seq.token_ids += tokens
                if len(seq.token_ids) >= seq.max_num_tokens:
                    seq.finish("length")
                    self.last_finished_requests.append(seq.request)
                    del running[seq.row]
            if drafts:
                self.drafting.on_step(plan, result, self)
        return sum(len(answer) for _, answer in texts) / (self.drafter.now - began)

    def _make(self, row: int, prompt: list[int], answer: list[int]) -> tuple[Sequence, list[int]]:
        """A sequence at the end of its prompt, and its complete tokens."""
        number, whole = next(self.numbers), prompt + answer
        params = SamplingParams(max_tokens=len(answer))
        request = Request(str(number), prompt, params, max_num_tokens=len(whole))
        return Sequence(request, seq_id=number, index=0, token_ids=list(prompt), row=row), whole


def right_ones(answer: list[int], drafts: tuple[int, ...]) -> list[int]:
    """The accepted drafts, and the token after them."""
    pairs = zip(drafts, answer, strict=False)
    right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return answer[: right + 1]


def ratios(args: argparse.Namespace) -> Iterator[tuple[str, int, dict[str, float]]]:
    """For each machine and batch size: the speed-up by kind of text."""
    for name, machine in MACHINES.items():
        for streams in args.streams:
            kinds = recorded(max(2, streams), args.output_len)
            kinds["chance"] = by_chance(args.output_len)
            found = {}
            for kind, texts in kinds.items():
                batch = list(itertools.islice(itertools.cycle(texts), streams))
                of_kind = []
                for seed in range(args.runs):
                    warm = Simulation(machine, args.noise, args.bursts)
                    warm.tokens_a_second(batch, seed + 100, drafts=True)
                    rates = [warm.tokens_a_second(batch, seed, drafts) for drafts in (True, False)]
                    of_kind.append(rates[0] / rates[1])
                found[kind] = statistics.median(of_kind)
            yield name, streams, found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 32, 128])
    parser.add_argument("--output-len", type=int, default=80)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--bursts", type=float, default=0.0)
    parser.add_argument("--runs", type=int, default=3)
    for name, streams, found in ratios(parser.parse_args()):
        of_kinds = "  ".join(f"{kind} {ratio:5.2f}" for kind, ratio in found.items())
        print(f"{name:14}{streams:5}   {of_kinds}", flush=True)


if __name__ == "__main__":
    main()
