"""ExtrasScheduling: steps of sequences with drafts, log-probabilities, pooling or forks.

    enable_extras   before a request is queued that `needs_extras`, has drafts or is forked
    schedule        a step's tokens: drafts are trimmed to what fits; forks join their parent
    apply_result    the sampled tokens: accepted drafts, log-probabilities, choices

The Scheduler calls it for sequences with `SequenceOptions`. The code for several sequences per
request is in forks.py.
"""

from __future__ import annotations

from typing import Any

from nanoengine.core.forks import Forks
from nanoengine.core.interfaces import Proposer
from nanoengine.core.plan import StepPlan, StepResult, TokenLogprobs
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence, SequenceOptions


def enable_extras(scheduler: Scheduler) -> ExtrasScheduling:
    """The scheduler's part for sequences with `SequenceOptions`; created at the first call."""
    if scheduler.extras_scheduling is None:
        scheduler.extras_scheduling = ExtrasScheduling(scheduler)
    assert isinstance(scheduler.extras_scheduling, ExtrasScheduling)
    return scheduler.extras_scheduling


def propose_drafts(scheduler: Scheduler, proposer: Proposer) -> None:
    """Requests drafts for the sequences that the next step decodes and whose tokens are known."""
    sequences = [seq for seq in scheduler.running if _may_draft(seq)]
    for seq, drafts in zip(sequences, proposer.propose(sequences), strict=True):
        set_drafts(scheduler, seq, drafts)


def _may_draft(seq: Sequence) -> bool:
    is_next = seq.num_computed_tokens == len(seq.token_ids) - 1 >= seq.num_prompt_tokens
    return is_next and seq.request.chooser is None


def set_drafts(scheduler: Scheduler, seq: Sequence, draft_token_ids: tuple[int, ...]) -> None:
    """Makes the next step verify these tokens after a sequence's own tokens."""
    extras = seq.extras
    if not draft_token_ids and (extras is None or not extras.draft_token_ids):
        return
    enable_extras(scheduler)
    seq.extras = extras = extras or SequenceOptions()
    extras.draft_token_ids = draft_token_ids
    seq.slots_ready_until = 0  # Why: a step with drafts is not a plain decode.


class ExtrasScheduling(Forks):
    """Schedules sequences with `SequenceOptions`, using the scheduler's operations."""

    def schedule(
        self, plan: StepPlan, scheduled: list[Sequence], seq: Sequence, budget: int
    ) -> int:
        """Schedules a running sequence's next tokens, at most `budget`; returns the number."""
        extras, scheduler = seq.extras, self.scheduler
        assert extras is not None
        num_new = seq.num_tokens + len(extras.draft_token_ids) - seq.num_computed_tokens
        if num_new <= 0 or (seq.num_tokens >= seq.max_num_tokens and not seq.is_score_only):
            return 0  # it awaits a choice, or its last token is not committed yet
        if num_new > 1:
            num_new = scheduler.next_chunk(seq, budget, len(extras.draft_token_ids))
            if extras.draft_token_ids:
                num_new = self._trim_drafts(seq, extras, num_new)
        if not scheduler.ensure_blocks(plan, seq, num_new):
            return 0
        self.place(plan, scheduled, seq, num_new)
        return num_new

    def _trim_drafts(self, seq: Sequence, extras: SequenceOptions, num_new: int) -> int:
        """Keeps the drafts that fit step, sequence and pool; returns the number of new tokens."""
        num_known = seq.num_tokens - seq.num_computed_tokens
        manager: Any = self.scheduler.block_manager
        num_drafts = min(num_new - num_known, seq.max_num_tokens - seq.num_tokens - 1)
        if manager.layout.num_states:
            num_drafts = min(num_drafts, manager.max_drafts(len(self.scheduler.running)))
        extras.draft_token_ids = extras.draft_token_ids[: max(num_drafts, 0)]
        num_new = min(num_new, num_known + len(extras.draft_token_ids))
        if extras.draft_token_ids and not manager.may_append(seq, num_new):
            extras.draft_token_ids = ()  # Why: drafts are not worth a preemption.
            num_new = num_known
        return num_new

    def place(self, plan: StepPlan, scheduled: list[Sequence], seq: Sequence, num_new: int) -> None:
        """Adds a sequence to the plan, with the forks at the end of its prompt."""
        drafts = () if seq.extras is None else seq.extras.draft_token_ids
        if drafts:
            plan.draft_token_ids[seq.row] = drafts
        if not self.scheduler.add_to_plan(plan, scheduled, seq, num_new, len(drafts)):
            return
        if seq.request.chooser is not None:
            seq.num_pending_tokens -= 1  # Why: its next token is chosen, not sampled.
        elif seq.params.pooling:
            seq.num_pending_tokens -= 1  # Why: no token follows.
            plan.num_logits[-1] = 0
        elif seq.index == 0 and seq.request.num_pending_forks:
            self.fork_prompt(plan, scheduled, seq)

    def apply_result(
        self, plan: StepPlan, result: StepResult, i: int, seq: Sequence, now: float
    ) -> None:
        """Applies the i-th scheduled sequence's error, choices or tokens."""
        extras, scheduler = seq.extras, self.scheduler
        assert extras is not None
        at_end = plan.starts[i] + plan.num_scheduled_tokens[i] == seq.num_prompt_tokens
        if i in result.prompt_logprobs and seq.index == 0:
            _extend_prompt_logprobs(seq, plan.starts[i], result.prompt_logprobs[i])
        if i in result.errors:
            scheduler.fail_and_invalidate(seq, result.errors[i])
        elif seq.params.pooling:
            if at_end:
                seq.request.pooled = result.pooled.get(i)
                scheduler.end(seq, "length")
        elif plan.num_logits[i] and seq.request.chooser is not None:
            self.store_choices(seq, result.logprobs[i][0][1:])
        elif plan.num_logits[i]:
            num_drafts, tokens = plan.num_logits[i] - 1, result.token_ids[i]
            seq.num_pending_tokens -= 1
            num_known = len(seq.token_ids)
            if num_drafts:
                extras.draft_token_ids = ()
                seq.num_computed_tokens -= num_drafts - (len(tokens) - 1)
                scheduler.stats.drafted_tokens += num_drafts
                scheduler.stats.accepted_tokens += len(tokens) - 1
            for j, token_id in enumerate(tokens):
                if i in result.logprobs:
                    self.record_logprobs(extras, result.logprobs[i][j])
                scheduler.append(seq, token_id, now)
                if seq.is_finished:
                    break
            scheduler.stats.saved_steps += len(seq.token_ids) - num_known - 1
            manager: Any = scheduler.block_manager
            if num_drafts and manager.layout.num_states and not seq.is_finished:
                manager.accept_drafts(seq, len(tokens) - 1)
        elif seq.is_score_only and at_end:
            scheduler.end(seq, "length")


def _extend_prompt_logprobs(seq: Sequence, start: int, new: TokenLogprobs) -> None:
    """Appends new entries only: a preempted prompt is computed and reported again."""
    known = seq.request.prompt_logprobs
    if known is not None:
        first = seq.params.first_scored_position
        known += new[first + len(known) - max(start, first) :]
