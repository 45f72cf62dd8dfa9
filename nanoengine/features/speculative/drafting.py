"""Drafting: decides from measurements whether to draft, for which sequences and how many tokens.

    propose   Drafter.find_candidates ─► DraftProposal ─► expected tokens of each draft
              ─► the drafts that increase the expected tokens per second ─► the plan
    on_step   number of accepted drafts ─► Acceptance     time of the step ─► StepCost

A draft token costs one more position of a step, even if it is rejected, and for most text most
drafts are rejected. So tokens are drafted only if they are expected to pay. Each sequence records
how often its drafts were accepted, by kind of proposal and by position in the draft. The engine
records the cost of a step by its number of positions. Drafts that do not pay are tried again from
time to time.

Both are estimates, and calling a drafter costs time even if it finds nothing. So a
`SpeculationBudget` holds the time that drafting may still lose: at most one percent of the time of
all steps, plus what accepted drafts have saved. A step with drafts risks no more than that. If the
budget is used up, the drafter is not called.

This file only affects speed: a draft is accepted only if it is the token that would be sampled
anyway. `Drafting` is a `Proposer` and an `Observer` of the engine. A `Drafter` selects the tokens:
`ngram.py`, `mtp.py`.
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

MIN_SPEEDUP = 1.02
"""Expected speed-up below which nothing is drafted: timings are not more accurate than this."""
ASSUMED_ROW_COST = 0.05
"""Assumed cost of each further row until it is measured, as a share of a step without drafts."""
MIN_GAIN = 0.02
"""Drafts with fewer expected tokens are not considered."""
FIRST_BACKOFF, MAX_BACKOFF = 4, 128
"""Number of proposals that a sequence skips before it drafts again; doubled until drafts pay."""
PROBE_INTERVAL = 48
"""One in this many steps with drafts tries one more draft: a measurement may be wrong."""
MAX_DRAFTED_STEPS = 128
"""After this many steps with drafts, a step without is run to update its cost."""
LOSS_SHARE, BATCH_LOSS_SHARE, BATCH_ROWS = 0.01, 0.005, 8
"""Share of the time of all steps that drafting may lose; and of steps with BATCH_ROWS rows or more.
Why less for these: what one sequence learns is valid for all, and less can be gained."""
INITIAL_BUDGET, MAX_BUDGET, MAX_DEBT = 0.5, 4.0, 0.5
"""Initial value and limits of a budget, in units of a step's time. Why limits: gains from one text
should not pay for the next one for long, and one long step may have other causes."""
BACKOFF_STEPS = 64
"""Number of steps without drafts after which the drafter is called once per this many steps."""


class DraftProposal(NamedTuple):
    """A drafter can draft `count` tokens; drafts of one `kind` are accepted about equally often.

    `tokens` are the drafts; if empty, `Drafter.draft` computes as many as requested.
    """

    count: int
    kind: int
    tokens: tuple[int, ...] = ()


NO_PROPOSAL = DraftProposal(0, 0)


class Drafter:
    """Drafts the next tokens; this base class drafts none.

    `priors` is the initial acceptance per kind. With `needs_every_step` it must be called before
    each step, with all tokens known. It may have candidates for `eligible_rows`; None means all.
    While there are none, nothing is called or measured.
    """

    priors: tuple[float, ...] = ()
    needs_every_step: bool = False
    eligible_rows: Collection[int] | None = ()

    def find_candidates(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """What it can draft for each sequence."""
        return [NO_PROPOSAL] * len(sequences)

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """At most `counts` tokens for each of these sequences, whose proposals have no tokens."""
        raise NotImplementedError

    def drop_finished(self) -> None:
        """Frees the data of sequences that have ended."""


class Acceptance:
    """How often drafts are accepted, by kind and position; older drafts have decreasing weight.

    Args:
        weight: the assumed acceptance weighs as much as this many drafts.
        window: approximate number of drafts that count.
    """

    def __init__(self, *, weight: float, window: float) -> None:
        self._weight, self._decay = weight, 1 - 1 / window
        # By kind and position: accepted drafts, all drafts.
        self._counts: dict[int, list[tuple[float, float]]] = {}

    def rates(self, kind: int, assumed: SequenceOf[float]) -> list[float]:
        """The share of drafts that are accepted at each position, given that all earlier ones are;
        without measurements, the assumed share."""
        weight = self._weight
        found = [
            (accepted + weight * share) / (tried + weight)
            for (accepted, tried), share in zip(self._counts.get(kind, ()), assumed, strict=False)
        ]
        found += assumed[len(found) :]
        return found

    def add(self, kind: int, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of one step, up to the first rejected one."""
        counts = self._counts.setdefault(kind, [])
        for position in range(min(num_drafts, num_accepted + 1)):
            if position == len(counts):
                counts.append((0.0, 0.0))
            accepted, tried = (count * self._decay for count in counts[position])
            counts[position] = (accepted + (position < num_accepted), tried + 1)


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
        index = bisect_left(self._sizes, bucket(size))
        if index and self._sizes[index - 1] > low:
            low = self._sizes[index - 1]
            low_s = max(self._seconds[low], low_s)
        if index == len(self._sizes):
            first, first_s = start
            steepness = (low_s - first_s) / (low - first) / 2 if low > first else 0.0
            return low_s + max(slope, steepness) * (size - low)
        high = self._sizes[index]
        high_s = max(self._seconds[high], start[1])
        return high_s if size >= high else low_s + (high_s - low_s) * (size - low) / (high - low)


class SpeculationBudget:
    """Seconds that drafting may still lose; none before a step without drafts was measured.

    Attributes:
        remaining_s: below 0 if more was lost than allowed.
    """

    def __init__(self) -> None:
        self.remaining_s = 0.0
        self._is_funded = False

    def add(self, plain_s: float, gained_s: float, num_rows: int) -> None:
        """Adds a step that takes `plain_s` without drafts; `gained_s` is what drafting has gained
        in it, below 0 for a loss."""
        budget = self.remaining_s if self._is_funded else INITIAL_BUDGET * plain_s
        budget += (LOSS_SHARE if num_rows < BATCH_ROWS else BATCH_LOSS_SHARE) * plain_s + gained_s
        self._is_funded = True
        self.remaining_s = max(-MAX_DEBT * plain_s, min(budget, MAX_BUDGET * plain_s))


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
    max_drafts: int,
) -> list[int]:
    """The number of drafts of each sequence that maximises the expected tokens per second.

    Args:
        gains: per sequence, the expected tokens of its first, second, ... draft, decreasing.
        num_rows: rows without drafts; each yields one token.
        seconds: (total drafts, longest draft) -> cost of the step.
        max_drafts: maximum total number of drafts.
    """
    ranked = sorted(
        ((gain, -position, i) for i, row in enumerate(gains) for position, gain in enumerate(row)),
        reverse=True,
    )
    plain = num_rows / seconds(0, 0)
    tokens, longest, best, best_number = float(num_rows), 0, plain * MIN_SPEEDUP, 0
    for number, (gain, position, _) in enumerate(ranked[:max_drafts], start=1):
        tokens += gain
        longest = max(longest, 1 - position)
        if (rate := tokens / seconds(number, longest)) > best:
            best, best_number = rate, number
    counts = [0] * len(gains)
    for _, _, i in ranked[:best_number]:
        counts[i] += 1
    return counts


@dataclass(slots=True, kw_only=True)
class DraftHistory:
    """The drafting history of one sequence. `kind` is the kind of its last proposal."""

    seq: Sequence
    backoff: int
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(weight=3, window=16))
    kind: int = 0
    num_skipped: int = 0  # proposals skipped since the last draft


@dataclass(slots=True, kw_only=True)
class Drafting:
    """Calls a drafter, and decides which drafts are worth it.

    Attributes:
        drafter: makes the proposals.
        overlapped: whether calling it makes a step wait for the previous one.
        clock: returns seconds, to measure the cost of drafting itself.
    """

    drafter: Drafter
    overlapped: bool = False
    clock: Callable[[], float] = time.perf_counter
    overall: Acceptance = field(default_factory=lambda: Acceptance(weight=4, window=200))
    _plain_cost: StepCost = field(default_factory=StepCost)  # steps without drafts, by rows
    _plain_mean_cost: StepCost = field(default_factory=lambda: StepCost(fmean))  # the same
    _drafted_cost: StepCost = field(default_factory=StepCost)  # steps with drafts, by rows
    _drafter_cost: StepCost = field(default_factory=StepCost)  # by its longest draft
    _histories: dict[int, DraftHistory] = field(default_factory=dict)  # by sequence
    # By row, in the step being planned.
    _proposed: dict[int, DraftHistory] = field(default_factory=dict)
    _num_drafted_steps: int = 0  # since the last step without drafts
    _num_plain_steps: int = 0  # consecutive steps without drafts
    _backoff: int = FIRST_BACKOFF  # initial backoff of new sequences
    _num_skipped: int = 0  # proposals of all sequences skipped since the last try
    _budget: SpeculationBudget = field(default_factory=SpeculationBudget)
    _drafting_s: float = 0.0  # of the step being planned

    # --- the Proposer -------------------------------------------------------------------------

    def needs_tokens(self) -> bool:
        """False if it has nothing to propose, or if calling the drafter would lose too much. With
        overlapped steps it is also False for most steps after a long time without drafts."""
        if self.drafter.needs_every_step:
            return True
        if self._budget.remaining_s < 0 or self._has_no_eligible_row:
            return False
        # Why two in a row: the overlapped loop calls this before and after the last commit.
        return not self._is_backed_off or self._num_plain_steps % BACKOFF_STEPS < 2

    def propose(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, ...]]:
        """The drafts that are expected to pay, for each sequence."""
        began = self.clock()
        self._proposed.clear()
        proposals = self.drafter.find_candidates(sequences)
        counts = self._num_drafts(sequences, proposals)
        drafts = [proposal.tokens[:n] for proposal, n in zip(proposals, counts, strict=True)]
        unknown = [i for i, proposal in enumerate(proposals) if counts[i] and not proposal.tokens]
        if unknown:
            started, num_drafts = self.clock(), [counts[i] for i in unknown]
            found = self.drafter.draft([sequences[i] for i in unknown], num_drafts)
            self._drafter_cost.add(max(num_drafts), self.clock() - started)
            for i, tokens in zip(unknown, found, strict=True):
                drafts[i] = tokens
        self._drafting_s = self.clock() - began
        return drafts

    @property
    def _has_no_eligible_row(self) -> bool:
        """Whether the drafter can draft for no row."""
        return self.drafter.eligible_rows is not None and not self.drafter.eligible_rows

    @property
    def _is_backed_off(self) -> bool:
        return self.overlapped and self._num_plain_steps >= BACKOFF_STEPS

    def _num_drafts(
        self, sequences: SequenceOf[Sequence], proposals: SequenceOf[DraftProposal]
    ) -> list[int]:
        """Number of tokens to draft for each sequence."""
        num_rows = len(sequences)
        counts = [0] * num_rows
        if not self._plain_cost or self._num_drafted_steps >= MAX_DRAFTED_STEPS:
            self._num_drafted_steps = 0
            return counts
        indices, gains = [], []
        assumed: dict[int, list[float]] = {}  # by kind: the rates over all sequences
        for i, (seq, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            history = self._history(seq)
            left = seq.max_num_tokens - seq.num_tokens - 1
            if proposal.count and left > 0:
                self._proposed[seq.row] = history
                history.kind = proposal.kind
                indices.append(i)
                if proposal.kind not in assumed:
                    priors = [self.drafter.priors[proposal.kind]] * MAX_DRAFTS
                    assumed[proposal.kind] = self.overall.rates(proposal.kind, priors)
                rates = history.acceptance.rates(proposal.kind, assumed[proposal.kind])
                chances = accumulate(rates[: min(proposal.count, left)], operator.mul)
                gains.append([chance for chance in chances if chance >= MIN_GAIN])
        if not indices:
            return counts
        seconds = self._seconds_of(num_rows)
        max_drafts = self._drafted_cost.limit(num_rows) - num_rows
        while max_drafts and seconds(max_drafts, 1) - seconds(0, 0) > self._budget.remaining_s:
            max_drafts = max_drafts * 3 // 4
        if not max_drafts:
            return counts
        best = best_counts(gains, num_rows, seconds, max_drafts)
        for i, count, chances in zip(indices, best, gains, strict=True):
            counts[i] = self._pays_or_retries(self._proposed[sequences[i].row], count, num_rows)
            if 0 < count < len(chances) and self._num_drafted_steps % PROBE_INTERVAL == 1:
                counts[i] += 1
        return counts

    def _seconds_of(self, num_rows: int) -> Callable[[int, int], float]:
        """Returns a function for the seconds of a step and its drafter, by number of drafts."""
        plain_s = self._plain_cost.seconds(num_rows)
        slope = plain_s * min(ASSUMED_ROW_COST, 1 / num_rows)

        def seconds(num_drafts: int, longest: int) -> float:
            if not num_drafts:
                return plain_s
            size, start = num_rows + num_drafts, (num_rows, plain_s)
            step_s = self._drafted_cost.seconds(size, start=start, slope=slope)
            return step_s + self._drafter_cost.seconds(longest)

        return seconds

    def _pays_or_retries(self, history: DraftHistory, count: int, num_rows: int) -> int:
        """`count`, or from time to time one draft if none would pay: text and machine change.

        Why not for all sequences whose backoff has passed: each draft costs time, and one measures
        the acceptance for all.
        """
        if count:
            history.num_skipped, history.backoff = 0, FIRST_BACKOFF
            return count
        history.num_skipped += 1
        self._num_skipped += 1
        is_due = history.num_skipped > history.backoff
        is_due = is_due and self._num_skipped > FIRST_BACKOFF * num_rows
        if not is_due and self._num_skipped <= MAX_BACKOFF:
            return 0
        history.num_skipped, history.backoff = 0, min(2 * history.backoff, MAX_BACKOFF)
        self._num_skipped = 0
        return 1

    def _history(self, seq: Sequence) -> DraftHistory:
        history = self._histories.get(seq.seq_id)
        if history is None:
            history = self._histories[seq.seq_id] = DraftHistory(seq=seq, backoff=self._backoff)
        return history

    # --- the Observer -------------------------------------------------------------------------

    def on_step(self, plan: StepPlan, result: StepResult, scheduler: object) -> None:
        """Learns from a step how many drafts were accepted, and the cost of its rows."""
        if getattr(scheduler, "last_finished_requests", None):
            self._histories = {i: t for i, t in self._histories.items() if not t.seq.is_finished}
            self.drafter.drop_finished()
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        if self._has_no_eligible_row:
            return
        num_drafts = 0
        if plan.draft_token_ids:
            for entry, row in enumerate(plan.rows):
                drafts = plan.draft_token_ids.get(row)
                if drafts and entry not in result.errors and row in self._proposed:
                    num_drafts += len(drafts)
                    num_accepted = len(result.token_ids[entry]) - 1
                    self._record_acceptance(self._proposed[row], len(drafts), num_accepted)
        self._num_plain_steps = 0 if plan.draft_token_ids else self._num_plain_steps + 1
        num_rows = len(plan.rows)
        if num_rows and not plan.admitted and plan.num_tokens == num_rows + num_drafts:
            # Why without schedule_s: it contains the time to decide, which is counted separately.
            seconds = step_seconds(result.times) - result.times.schedule_s
            self._record_cost(num_rows, num_drafts, seconds)
            self._update_budget(result, num_rows, seconds if num_drafts else 0.0, drafting_s)

    def _record_cost(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        if num_drafts:
            self._drafted_cost.add(num_rows + num_drafts, seconds)
            self._num_drafted_steps += 1
        else:
            self._plain_cost.add(num_rows, seconds)
            self._plain_mean_cost.add(num_rows, seconds)
            self._num_drafted_steps = 0

    def _update_budget(
        self, result: StepResult, num_rows: int, drafted_s: float, drafting_s: float
    ) -> None:
        """Compares the time of a step with drafts with the time for its tokens without drafts.

        Why the mean: disturbances of other steps also affect this one.
        """
        plain_s, gained_s = self._plain_mean_cost.seconds(num_rows), -drafting_s
        if drafted_s:
            gained_s += plain_s * sum(map(len, result.token_ids)) / num_rows - drafted_s
        self._budget.add(plain_s, gained_s, num_rows)

    def _record_acceptance(self, history: DraftHistory, num_drafts: int, num_accepted: int) -> None:
        for acceptance in (history.acceptance, self.overall):
            acceptance.add(history.kind, num_drafts, num_accepted)
        if num_accepted:
            self._backoff = max(self._backoff // 2, FIRST_BACKOFF)
        elif history.backoff > FIRST_BACKOFF:  # a try that failed
            self._backoff = min(4 * self._backoff, MAX_BACKOFF)
