"""When to draft: the decision on synthetic texts and a simulated machine with a computed clock."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.core.plan import StepPlan, StepResult, StepTimes
from nanoengine.core.sequence import Request, Sequence, SequenceOptions
from nanoengine.core.speculation import set_drafts
from nanoengine.features.speculative.drafting import (
    BACKOFF_STEPS,
    Acceptance,
    Drafting,
    DraftProposal,
    StepCost,
    best_counts,
)
from nanoengine.settings.params import SamplingParams


class Machine:
    """A drafter whose drafts are right with probability `accept`; a step takes `cost(rows)`."""

    needs_every_step = False
    eligible_rows = None
    priors = (0.5, 0.5)

    def __init__(
        self,
        accept: float,
        cost: Callable[[int], float],
        *,
        num_rows: int = 1,
        k: int = 8,
        draft_s: float = 0.0,
        call_s: float = 0.0,
        overlapped: bool = False,
        hiccup: float = 1.0,
    ) -> None:
        self.accept, self.cost, self.k, self.draft_s = accept, cost, k, draft_s
        self.call_s, self.hiccup = call_s, hiccup  # hiccup: slowdown factor of the fourth step
        self.random = Random(0)
        self.now = 0.0
        self.tokens = self.rows = self.steps = self.drafted = self.num_calls = 0
        request = Request("r", [1], SamplingParams(max_tokens=10**6), max_num_tokens=10**6)
        self.sequences = [
            Sequence(request, seq_id=i, index=i, token_ids=[1, 1], row=i) for i in range(num_rows)
        ]
        self.drafting = Drafting(drafter=self, overlapped=overlapped, clock=lambda: self.now)

    def find_candidates(self, sequences):
        self.num_calls += len(sequences)
        self.now += self.call_s * len(sequences)
        return [DraftProposal(self.k, 1) for _ in sequences]

    def draft(self, sequences, counts):
        self.now += self.draft_s * max(counts)
        return [(7,) * count for count in counts]

    def drop_finished(self):
        pass

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def step(self) -> None:
        plan, result = StepPlan(step=self.steps), StepResult(token_ids=[])
        proposed = [()] * len(self.sequences)
        if self.drafting.needs_tokens():
            proposed = self.drafting.propose(self.sequences)
        for seq, drafts in zip(self.sequences, proposed, strict=True):
            right = 0
            while right < len(drafts) and self.random.random() < self.accept:
                right += 1
            plan.add(seq.row, 1, 1 + len(drafts), num_logits=1 + len(drafts))
            if drafts:
                plan.draft_token_ids[seq.row] = drafts
            result.token_ids.append([7] * (1 + right))
            self.tokens += 1 + right
        seconds = self.cost(plan.num_tokens) * (self.hiccup if self.steps == 3 else 1.0)
        result.times = StepTimes(forward_s=seconds)
        self.now += seconds
        self.steps += 1
        self.rows += plan.num_tokens
        self.drafted += plan.num_tokens - len(self.sequences)
        self.drafting.on_step(plan, result, None)

    @property
    def speed_up(self) -> float:
        """Tokens per second relative to a machine that never drafts."""
        num_rows = len(self.sequences)
        return self.tokens / self.now * self.cost(num_rows) / num_rows


def flat(rows: int) -> float:
    """Cost of a memory-bound step: further rows are nearly free."""
    return 1 + 0.05 * (rows - 1)


def steep(rows: int) -> float:
    """Cost of a compute-bound step: each row costs as much as the first."""
    return float(rows)


def cliff(rows: int) -> float:
    """Cost with tiles of three rows: a fourth row takes another tile."""
    return 1.0 + (rows > 3) * 1.4 + 0.02 * rows


BEST_OF_A_TILE = (1 + 0.8 + 0.64) * cliff(1) / cliff(3)
MACHINES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    # the machine, its changes after 300 steps, minimum speed-up from then on
    "good drafts have the maximum length": ({"accept": 0.95}, {}, 4.5),
    "a drafter that takes a step's time": ({"accept": 0.7, "draft_s": 1.0}, {}, 0.9),
    "a quick drafter": ({"accept": 0.7, "draft_s": 0.02}, {}, 1.8),
    "a draft ends before the tile": ({"accept": 0.8, "cost": cliff}, {}, 0.9 * BEST_OF_A_TILE),
    "a text begins to repeat": ({"accept": 0.0}, {"accept": 0.95}, 3),
    "a good text with one long step": ({"accept": 0.95, "hiccup": 50.0}, {}, 3),
    "drafts become expensive": ({"accept": 0.6}, {"cost": steep}, 0.9),
}


@pytest.mark.parametrize("name", MACHINES)
def test_drafting_adapts_when_the_machine_changes(name):
    options, later, min_speed_up = MACHINES[name]
    machine = Machine(**{"cost": flat} | options)
    machine.run(300)
    vars(machine).update(later, tokens=0, now=0.0)
    machine.run(400)
    assert machine.speed_up > min_speed_up


def test_bad_drafts_are_stopped_and_retried_from_time_to_time():
    machine = Machine(0.0, steep)
    machine.run(500)
    assert 2 < machine.drafted < 10
    assert machine.speed_up > 0.98


def test_a_sequence_without_drafts_stays_a_plain_decode():
    scheduler = SimpleNamespace(extras_scheduling=None)
    for extras in (None, SequenceOptions()):
        seq = Machine(0.0, flat).sequences[0]
        seq.extras, seq.slots_ready_until = extras, 16
        set_drafts(scheduler, seq, ())
        assert scheduler.extras_scheduling is None
        assert seq.slots_ready_until == 16


def test_a_large_batch_rarely_retries_drafts_that_never_pay():
    """Also when other sequences replace them: new ones start from the learned acceptance rate."""
    machine = Machine(0.02, steep, num_rows=32)
    machine.run(200)
    for _ in range(10):
        drafted = machine.drafted
        for seq in machine.sequences:
            seq.seq_id += 32
        machine.run(40)
        assert machine.drafted - drafted <= 0.01 * 40 * 32


@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize("share", [0.02, 0.2])
def test_calling_the_drafter_costs_at_most_one_percent(num_rows, share):
    """At most 0.5 % in large batches. `share`: time of a call as a fraction of the step time."""
    lost = 0.01 if num_rows == 1 else 0.005
    machine = Machine(0.0, steep, num_rows=num_rows, k=0, call_s=share)
    machine.run(400)
    assert 1 - 1.5 * lost < machine.speed_up < 1 - 0.5 * lost
    assert machine.num_calls > lost / share * 400 * num_rows


@pytest.mark.parametrize("num_rows", [1, 4, 32, 256])
@pytest.mark.parametrize("right", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_noisy_step_times_do_not_make_drafting_lose_time(num_rows, right, noise):
    """Drafts gain at most what their rows cost, however noisy the estimates are."""
    random, extra = Random(1), 0.1 * num_rows  # extra cost of a step with any drafts

    def cost(rows: int) -> float:
        return (rows + extra * (rows > num_rows)) * (1 + noise * random.random())

    machine = Machine(right, cost, num_rows=num_rows, call_s=0.01)
    machine.run(200)
    plain_s = num_rows * (1 + noise / 2)
    assert machine.tokens / machine.now * plain_s / num_rows > 0.97


def test_a_step_risks_at_most_the_remaining_budget():
    """All drafts of a batch are right until all are wrong."""
    machine = Machine(0.99, flat, num_rows=64)
    machine.run(100)
    machine.accept, machine.cost, before = 0.0, steep, machine.now
    machine.run(50)
    assert machine.now - before < (50 + 16) * steep(64)


def test_retries_of_a_batch_are_spread_over_steps():
    machine, drafted = Machine(0.02, steep, num_rows=32), []
    for _ in range(60):
        before = machine.drafted
        machine.step()
        drafted.append(machine.drafted - before)
    assert max(drafted) == 1
    assert 3 < sum(drafted) <= 20


def test_no_token_is_drafted_before_a_plain_step_was_measured():
    machine = Machine(1.0, flat)
    assert machine.drafting.propose(machine.sequences) == [()]
    machine.step()
    assert machine.drafting.propose(machine.sequences) != [()]


def test_drafts_do_not_exceed_the_maximum_length():
    machine = Machine(1.0, flat)
    machine.run(40)
    machine.sequences[0].max_num_tokens = 5
    (drafts,) = machine.drafting.propose(machine.sequences)
    assert len(drafts) == 2
    machine.sequences[0].max_num_tokens = 3
    assert machine.drafting.propose(machine.sequences) == [()]


def test_a_drafter_without_proposals_rarely_stops_the_overlapped_loop():
    machine = Machine(1.0, flat, k=0, overlapped=True)
    assert machine.drafting.needs_tokens()
    machine.run(BACKOFF_STEPS)
    waits = []
    for _ in range(4 * BACKOFF_STEPS):
        waits.append(machine.drafting.needs_tokens())
        machine.step()
    assert sum(waits) == 8
    machine.k = 8
    machine.run(5)
    assert machine.drafting.needs_tokens()


@settings(max_examples=200, deadline=None)
@given(
    rates=st.lists(st.lists(st.floats(0.05, 0.95), max_size=3), min_size=1, max_size=3),
    costs=st.lists(st.floats(0.0, 1.0), min_size=10, max_size=10),
    draft_s=st.sampled_from([0.0, 0.3]),
    most=st.integers(0, 9),
)
def test_best_counts_equals_an_exhaustive_search(rates, costs, draft_s, most):
    gains = []
    for sequence_rates in rates:
        chance, chances = 1.0, []
        for rate in sequence_rates:
            chance *= rate
            chances.append(chance)
        gains.append(chances)

    def seconds(number: int, longest: int) -> float:
        return 1.0 + sum(costs[:number]) + draft_s * (number > 0)

    def rate(counts: list[int]) -> float:
        tokens = len(gains) + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
        return tokens / seconds(sum(counts), max(counts))

    def all_counts(of: list[list[float]]) -> list[list[int]]:
        if not of:
            return [[]]
        rest = all_counts(of[1:])
        return [[n, *more] for n in range(len(of[0]) + 1) for more in rest]

    found = best_counts(gains, len(gains), seconds, most)
    best = max(rate(counts) for counts in all_counts(gains) if sum(counts) <= most)
    plain = rate([0] * len(gains))
    assert sum(found) <= most
    assert rate(found) >= best - 1e-9 or (not any(found) and best <= plain * 1.02 + 1e-9)


def test_costs_are_medians_with_linear_interpolation():
    cost = StepCost()
    for seconds in (3.0, 9.0, 1.0, 3.0):
        cost.add(4, seconds)
    cost.add(8, 5.0)
    start = (2, 2.0)
    assert cost.seconds(4, start=start, slope=0.1) == 3.0
    assert cost.seconds(6, start=start, slope=0.1) == 4.0
    assert cost.seconds(3, start=start, slope=0.1) == 2.5
    assert cost.seconds(12, start=start, slope=0.1) == 6.0, "half as steep as up to there"
    assert cost.seconds(12, start=start, slope=0.5) == 7.0
    assert cost.limit(2) == 5 and StepCost().limit(2) == 3, "no further than what is near"
    assert cost.seconds(4, start=(2, 3.5), slope=0.1) == 3.5, "more rows never cost less"


def test_acceptance_begins_at_the_prior_and_forgets_old_drafts():
    acceptance = Acceptance(weight=2, window=10)
    assumed = [0.5, 0.6, 0.7]
    assert acceptance.rates(0, assumed) == assumed
    for _ in range(100):
        acceptance.add(0, num_drafts=2, num_accepted=1)
    first, second, third = acceptance.rates(0, assumed)
    assert first > 0.9 and second < 0.11 and third == 0.7
    assert acceptance.rates(1, assumed) == assumed
    for _ in range(30):
        acceptance.add(0, num_drafts=2, num_accepted=0)
    assert acceptance.rates(0, assumed)[0] < 0.2
    assert acceptance.rates(0, assumed)[1] == second, "drafts after a rejected one are not counted"
