"""Drafting: decides from measurements whether to draft, for which sequences and how many tokens.

    propose   Drafter.look ─► Guess (tokens, kind) ─► expected tokens of each draft
              ─► the drafts that increase the expected tokens per second ─► the plan
    on_step   number of accepted drafts ─► Acceptance     time of the step ─► StepCost

A rejected draft costs a row of a step, and for most text most drafts are rejected. So drafts are
made only if they are expected to pay. Each sequence records how often its drafts were accepted, by
kind of guess and by place in the draft. The engine records the cost of a step by its number of
rows. Drafts that do not pay are tried again from time to time.

Both are estimates, and calling a drafter costs time even if it finds nothing. So an
`SpeculationBudget` holds the time that drafting may still lose: at most one percent of the time of
    all steps, plus what
accepted drafts have saved. A step with drafts risks no more than that. If nothing is left, the
drafter is not called.

This file only affects speed: a draft is accepted only if it is the token that would be sampled
anyway. `Drafting` is a `Proposer` and an `Observer` of the engine. A `Drafter` selects the tokens:
`ngram.py`, `draft_model.py`.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean, median_low
from typing import NamedTuple

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.sequence import Sequence
from nanoengine.observe.metrics import step_seconds
from nanoengine.settings.speculative import MAX_DRAFTS

MARGIN = 1.02
"""Expected speed-up below which nothing is drafted: timings are not more accurate than this."""
ASSUMED_ROW_COST = 0.05
"""Assumed cost of each further row until it is measured, as a share of a step without drafts."""
FEWEST_GAIN = 0.02
"""Drafts with fewer expected tokens are not considered."""
FIRST_PATIENCE, MOST_PATIENCE = 4, 128
"""Number of guesses that a sequence skips before it tries one again; doubled until one pays."""
ONE_MORE_EVERY = 48
"""One in this many steps with drafts tries one more draft: a measurement may be wrong."""
MOST_DRAFTED_STEPS = 128
"""After this many steps with drafts, a step without is run to update its cost."""
LOSS_SHARE, MAY_LOSE_OF_MANY, MANY = 0.01, 0.005, 8
"""Share of the time of all steps that drafting may lose; and of steps with MANY rows or more.
Why less: there one sequence's tries are valid for all, and less can be gained."""
FIRST_LEFT, MOST_LEFT, MOST_OWED = 0.5, 4.0, 0.5
"""Initial value and limits of an account, in units of a step's time. Why limits: gains from one
text should not pay for the next one for long, and one long step may have other causes."""
BACKOFF_STEPS = 64
"""Number of steps without drafts after which the drafter is called once per this many steps."""


class DraftProposal(NamedTuple):
    """A drafter could draft `count` tokens; guesses of one `kind` are accepted about equally often.

    `tokens` are the drafts; if empty, `Drafter.draft` computes as many as requested.
    """

    count: int
    kind: int
    tokens: tuple[int, ...] = ()


NO_GUESS = DraftProposal(0, 0)


class Drafter:
    """Guesses the next tokens; this base class has none. `priors`: the initial acceptance per kind.

    `always`: it must be called before each step, with all tokens known. `only_for`: rows that it
    could guess for; None means all. While there are none, nothing is called or measured.
    """

    priors: tuple[float, ...] = ()
    always: bool = False
    only_for: Collection[int] | None = ()

    def look(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """What it could draft for each sequence."""
        return [NO_GUESS] * len(sequences)

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """At most `counts` tokens for each of these sequences, whose guesses have no tokens."""
        raise NotImplementedError

    def forget_ended(self) -> None:
        """Frees the data of sequences that have ended."""


class Acceptance:
    """How often drafts are accepted, by kind and place; older drafts have decreasing weight.

    Args:
        weight: the assumed acceptance weighs as much as this many drafts.
        window: approximate number of drafts that count.
    """

    def __init__(self, *, weight: float, window: float) -> None:
        self._weight, self._keep = weight, 1 - 1 / window
        self._counts: dict[int, list[tuple[float, float]]] = {}  # by kind, place: accepted, all

    def rates(self, kind: int, assumed: SequenceOf[float]) -> list[float]:
        """The share of drafts that are accepted at each place, given that all earlier ones are;
        without measurements, the assumed share."""
        weight = self._weight
        found = [
            (right + weight * share) / (tried + weight)
            for (right, tried), share in zip(self._counts.get(kind, ()), assumed, strict=False)
        ]
        found += assumed[len(found) :]
        return found

    def add(self, kind: int, num_drafts: int, num_right: int) -> None:
        """Counts the drafts of one step, up to the first rejected one."""
        counts = self._counts.setdefault(kind, [])
        for place in range(min(num_drafts, num_right + 1)):
            if place == len(counts):
                counts.append((0.0, 0.0))
            right, tried = counts[place]
            counts[place] = (right * self._keep + (place < num_right), tried * self._keep + 1)


class StepCost:
    """Seconds by size: a typical value of the latest measurements, interpolated linearly.

    Args:
        typical: reduces measurements to one value. Why the lower median for comparing sizes: other
            work of the machine makes a step longer, never shorter.
    """

    def __init__(self, typical: Callable[[Iterable[float]], float] = median_low) -> None:
        self._typical = typical
        self._latest: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []

    def add(self, size: int, seconds: float) -> None:
        """Adds one measurement."""
        size = bucket(size)
        if size not in self._latest:
            self._latest[size] = deque(maxlen=9)
            insort(self._sizes, size)
        self._latest[size].append(seconds)
        self._seconds[size] = self._typical(self._latest[size])

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def limit(self, start: int) -> int:
        """The largest size to try: slightly above the last one that was measured without a gap
        after `start`. So a size that is far too large is never tried."""
        reached = start
        for size in self._sizes:
            if size > reached + max(2, reached // 8):
                break
            reached = max(reached, size)
        return reached + max(1, reached // 8)

    def seconds(
        self, size: int, *, start: tuple[int, float] = (0, 0.0), slope: float = 0.0
    ) -> float:
        """The cost of `size`, at least the cost of `start`, a pair (size, seconds).

        After the last measurement it continues with `slope` more seconds per size, or half as
        steeply as between the start and there.
        """
        low, low_s = start
        place = bisect_left(self._sizes, bucket(size))
        if place and self._sizes[place - 1] > low:
            low = self._sizes[place - 1]
            low_s = max(self._seconds[low], low_s)
        if place == len(self._sizes):
            first, first_s = start
            steepness = (low_s - first_s) / (low - first) / 2 if low > first else 0.0
            return low_s + max(slope, steepness) * (size - low)
        high = self._sizes[place]
        high_s = max(self._seconds[high], start[1])
        return high_s if size >= high else low_s + (high_s - low_s) * (size - low) / (high - low)


class SpeculationBudget:
    """Seconds that drafting may still lose; none before a step without drafts was measured.

    Attributes:
        left: below 0 if more was lost than allowed.
    """

    def __init__(self) -> None:
        self.left = 0.0
        self._is_open = False

    def add(self, plain_s: float, gained_s: float, num_rows: int) -> None:
        """Adds a step that takes `plain_s` without drafts; `gained_s` is what drafting has gained
        in it, below 0 for a loss."""
        left = self.left if self._is_open else FIRST_LEFT * plain_s
        left += (LOSS_SHARE if num_rows < MANY else MAY_LOSE_OF_MANY) * plain_s + gained_s
        self._is_open = True
        self.left = max(-MOST_OWED * plain_s, min(left, MOST_LEFT * plain_s))


def bucket(size: int) -> int:
    """Rounds up sizes that are measured together: exact up to 16, then in steps of an eighth.

    >>> [bucket(size) for size in (1, 16, 17, 18, 33, 37, 300)]
    [1, 16, 18, 18, 36, 40, 320]
    """
    step = max(1, 1 << size.bit_length() - 4) if size > 16 else 1
    return -(-size // step) * step


def best_counts(
    gains: SequenceOf[SequenceOf[float]],
    num_rows: int,
    seconds: Callable[[int, int], float],
    most: int,
) -> list[int]:
    """The number of drafts of each sequence that maximises the expected tokens per second.

    Args:
        gains: per sequence, the expected tokens of its first, second, ... draft, decreasing.
        num_rows: rows without drafts; each yields one token.
        seconds: (total drafts, longest draft) -> cost of the step.
        most: maximum total number of drafts.
    """
    ranked = sorted(
        ((gain, -place, i) for i, of_one in enumerate(gains) for place, gain in enumerate(of_one)),
        reverse=True,
    )
    plain = num_rows / seconds(0, 0)
    tokens, longest, best, best_number = float(num_rows), 0, plain * MARGIN, 0
    for number, (gain, place, _) in enumerate(ranked[:most], start=1):
        tokens += gain
        longest = max(longest, 1 - place)
        if (rate := tokens / seconds(number, longest)) > best:
            best, best_number = rate, number
    counts = [0] * len(gains)
    for _, _, i in ranked[:best_number]:
        counts[i] += 1
    return counts


@dataclass(slots=True, kw_only=True)
class DraftHistory:
    """The drafting history of one sequence. `kind` is the kind of its last guess."""

    seq: Sequence
    patience: int
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(weight=3, window=16))
    kind: int = 0
    idle: int = 0  # guesses skipped since the last draft


@dataclass(slots=True, kw_only=True)
class Drafting:
    """Calls a drafter, and decides which drafts are worth it.

    Attributes:
        drafter: makes the guesses.
        overlapped: whether calling it makes a step wait for the previous one.
        clock: returns seconds, to measure the cost of drafting itself.
    """

    drafter: Drafter
    overlapped: bool = False
    clock: Callable[[], float] = time.perf_counter
    overall: Acceptance = field(default_factory=lambda: Acceptance(weight=4, window=200))
    _plain: StepCost = field(default_factory=StepCost)  # steps without drafts, by rows
    _plain_mean: StepCost = field(default_factory=lambda: StepCost(fmean))  # the same
    _drafted: StepCost = field(default_factory=StepCost)  # steps with drafts, by rows
    _drafter: StepCost = field(default_factory=StepCost)  # the drafter, by its longest draft
    _tracked: dict[int, DraftHistory] = field(default_factory=dict)  # by sequence
    _asked: dict[int, DraftHistory] = field(
        default_factory=dict
    )  # by row, in the step being planned
    _num_drafted_steps: int = 0  # since the last step without drafts
    _num_without: int = 0  # consecutive steps without drafts
    _patience: int = FIRST_PATIENCE  # initial patience of new sequences
    _num_idle: int = 0  # guesses of all sequences skipped since the last try
    _account: SpeculationBudget = field(default_factory=SpeculationBudget)
    _deciding_s: float = 0.0  # of the step being planned

    # --- the Proposer -------------------------------------------------------------------------

    def needs_tokens(self) -> bool:
        """False if it has nothing to propose, or if calling the drafter would lose too much. With
        overlapped steps it is also False for most steps after a long time without drafts."""
        if self.drafter.always:
            return True
        if self._account.left < 0 or self._is_unasked:
            return False
        # Why two in a row: the overlapped loop calls this before and after the last commit.
        return not self._is_backed_off or self._num_without % BACKOFF_STEPS < 2

    def propose(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        """The drafts that are expected to pay, for each sequence."""
        began = self.clock()
        self._asked.clear()
        guesses = self.drafter.look(sequences)
        counts = self._counts(sequences, guesses)
        drafts = [guess.tokens[:n] for guess, n in zip(guesses, counts, strict=True)]
        unknown = [i for i, guess in enumerate(guesses) if counts[i] and not guess.tokens]
        if unknown:
            started, asked = self.clock(), [counts[i] for i in unknown]
            found = self.drafter.draft([sequences[i] for i in unknown], asked)
            self._drafter.add(max(asked), self.clock() - started)
            for i, tokens in zip(unknown, found, strict=True):
                drafts[i] = tokens
        self._deciding_s = self.clock() - began
        return drafts

    @property
    def _is_unasked(self) -> bool:
        """Whether there is no row that the drafter could guess for."""
        return self.drafter.only_for is not None and not self.drafter.only_for

    @property
    def _is_backed_off(self) -> bool:
        return self.overlapped and self._num_without >= BACKOFF_STEPS

    def _counts(
        self, sequences: SequenceOf[Sequence], guesses: SequenceOf[DraftProposal]
    ) -> list[int]:
        """Number of tokens to draft for each sequence."""
        num_rows = len(sequences)
        counts = [0] * num_rows
        if not self._plain or self._num_drafted_steps >= MOST_DRAFTED_STEPS:
            self._num_drafted_steps = 0
            return counts
        guessed, gains = [], []
        assumed: dict[int, list[float]] = {}  # by kind: the rates over all sequences
        for i, (seq, guess) in enumerate(zip(sequences, guesses, strict=True)):
            one = self._track(seq)
            left = seq.max_num_tokens - seq.num_tokens - 1
            if guess.count and left > 0:
                self._asked[seq.row] = one
                one.kind = guess.kind
                guessed.append(i)
                if guess.kind not in assumed:
                    priors = [self.drafter.priors[guess.kind]] * MAX_DRAFTS
                    assumed[guess.kind] = self.overall.rates(guess.kind, priors)
                rates = one.acceptance.rates(guess.kind, assumed[guess.kind])
                chances = accumulate(rates[: min(guess.count, left)], operator.mul)
                gains.append([chance for chance in chances if chance >= FEWEST_GAIN])
        if not guessed:
            return counts
        seconds = self._seconds_of(num_rows)
        most = self._drafted.limit(num_rows) - num_rows
        while most and seconds(most, 1) - seconds(0, 0) > self._account.left:
            most = most * 3 // 4
        if not most:
            return counts
        best = best_counts(gains, num_rows, seconds, most)
        for i, count, of_one in zip(guessed, best, gains, strict=True):
            counts[i] = self._pays_or_retries(self._asked[sequences[i].row], count, num_rows)
            if 0 < count < len(of_one) and self._num_drafted_steps % ONE_MORE_EVERY == 1:
                counts[i] += 1
        return counts

    def _seconds_of(self, num_rows: int) -> Callable[[int, int], float]:
        """Returns a function for the seconds of a step and its drafter, by number of drafts."""
        plain_s = self._plain.seconds(num_rows)
        slope = plain_s * min(ASSUMED_ROW_COST, 1 / num_rows)

        def seconds(num_drafts: int, longest: int) -> float:
            if not num_drafts:
                return plain_s
            size, start = num_rows + num_drafts, (num_rows, plain_s)
            step_s = self._drafted.seconds(size, start=start, slope=slope)
            return step_s + self._drafter.seconds(longest)

        return seconds

    def _pays_or_retries(self, one: DraftHistory, count: int, num_rows: int) -> int:
        """`count`, or from time to time one draft if none would pay: text and machine change.

        Why not for all sequences out of patience: each costs a row, and one is valid for all.
        """
        if count:
            one.idle, one.patience = 0, FIRST_PATIENCE
            return count
        one.idle += 1
        self._num_idle += 1
        is_due = one.idle > one.patience and self._num_idle > FIRST_PATIENCE * num_rows
        if not is_due and self._num_idle <= MOST_PATIENCE:
            return 0
        one.idle, one.patience = 0, min(2 * one.patience, MOST_PATIENCE)
        self._num_idle = 0
        return 1

    def _track(self, seq: Sequence) -> DraftHistory:
        one = self._tracked.get(seq.seq_id)
        if one is None:
            one = self._tracked[seq.seq_id] = DraftHistory(seq=seq, patience=self._patience)
        return one

    # --- the Observer -------------------------------------------------------------------------

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Learns from a step how many drafts were accepted, and the cost of its rows."""
        if getattr(scheduler, "last_finished_requests", None):
            self._tracked = {i: t for i, t in self._tracked.items() if not t.seq.is_finished}
            self.drafter.forget_ended()
        deciding_s, self._deciding_s = self._deciding_s, 0.0
        if self._is_unasked:
            return
        num_drafts = 0
        if plan.draft_token_ids:
            for entry, row in enumerate(plan.rows):
                drafts = plan.draft_token_ids.get(row)
                if drafts and entry not in result.errors and row in self._asked:
                    num_drafts += len(drafts)
                    self._learn(self._asked[row], len(drafts), len(result.token_ids[entry]) - 1)
        self._num_without = 0 if plan.draft_token_ids else self._num_without + 1
        num_rows = len(plan.rows)
        if num_rows and not plan.admitted and plan.num_tokens == num_rows + num_drafts:
            # Why without schedule_s: it contains the time to decide, which is counted separately.
            seconds = step_seconds(result.times) - result.times.schedule_s
            self._measure(num_rows, num_drafts, seconds)
            self._account_for(result, num_rows, seconds if num_drafts else 0.0, deciding_s)

    def _measure(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        if num_drafts:
            self._drafted.add(num_rows + num_drafts, seconds)
            self._num_drafted_steps += 1
        else:
            self._plain.add(num_rows, seconds)
            self._plain_mean.add(num_rows, seconds)
            self._num_drafted_steps = 0

    def _account_for(
        self, result: StepResult, num_rows: int, drafted_s: float, deciding_s: float
    ) -> None:
        """Compares the time of a step with drafts with the time for its tokens without drafts.

        Why the mean: disturbances of other steps also affect this one.
        """
        plain_s, gained_s = self._plain_mean.seconds(num_rows), -deciding_s
        if drafted_s:
            gained_s += plain_s * sum(map(len, result.token_ids)) / num_rows - drafted_s
        self._account.add(plain_s, gained_s, num_rows)

    def _learn(self, one: DraftHistory, num_drafts: int, num_right: int) -> None:
        for acceptance in (one.acceptance, self.overall):
            acceptance.add(one.kind, num_drafts, num_right)
        if num_right:
            self._patience = max(self._patience // 2, FIRST_PATIENCE)
        elif one.patience > FIRST_PATIENCE:  # a try that failed
            self._patience = min(4 * self._patience, MOST_PATIENCE)
