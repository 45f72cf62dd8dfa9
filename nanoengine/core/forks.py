"""Forks: several sequences per request, and next tokens that a `TokenChooser` selects.

    n > 1      the step that ends a prompt ─► n - 1 forks, which sample from the same logits
    fork       between two steps ─► a copy that shares all blocks of its parent
    choosing   a step's most likely tokens ─► `SequenceOptions.choices` ─► TokenChooser.choose
                                       append_token, fork, drop, finish ◄─┘ ─► the next step

A sequence whose tokens are all computed awaits a choice: the Scheduler's formula gives it 0 tokens,
so it keeps its row and its blocks until it gets a token. If it is preempted in this state, it is
parked outside the queue, because there is nothing to compute for it yet.

Part of the Scheduler, which owns the queue, the rows and the list of running sequences.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import replace

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import StepPlan, TableUpdate, TokenLogprob
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Request, Sequence, SequenceOptions, Status


class Forks:
    """Handles several sequences per request; the `SequenceMoves` of a `TokenChooser`.

    Args:
        scheduler: owns the queue, rows, blocks and running sequences.

    Attributes:
        undecided: requests that have new choices for their chooser.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.undecided: list[Request] = []

    # --- n > 1 --------------------------------------------------------------------------------

    def num_reserved_rows(self, seq: Sequence) -> int:
        """Rows to reserve for forks at the end of this prompt, limited by the number of rows."""
        num_rows = self.scheduler.max_num_seqs
        return min(seq.request.num_pending_forks, num_rows - 1) if seq.index == 0 else 0

    def fork_prompt(self, plan: StepPlan, scheduled: list[Sequence], parent: Sequence) -> None:
        """Creates a request's other n - 1 sequences, which sample from the parent's logits.

        Sequences without a free row wait, and compute the end of the prompt again. They get the
        same tokens, because a token depends only on seed, position and logits.
        """
        # Why indices below n: later forks then follow these in `running`, and can't preempt them in
        # this step.
        num_free = self.num_reserved_rows(parent)
        while parent.request.num_pending_forks:
            child = self._make_child(parent, parent.params.n - parent.request.num_pending_forks)
            parent.request.num_pending_forks -= 1
            if not num_free:
                self.scheduler.waiting.push(child)
                continue
            num_free -= 1
            self._start_child(child, parent)
            child.num_pending_tokens = 1
            scheduled.append(child)
            plan.add(child.row, child.num_computed_tokens, 0, num_logits=1)

    # --- between steps ------------------------------------------------------------------------

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """Creates a sequence of the same request that continues the parent's tokens.

        It shares all blocks of a running parent; the first of them to write into the shared last
        block copies it. Without a free row, or if the parent has none, the child waits. It is then
        admitted like a preempted sequence: tokens still in the prefix cache are not recomputed.

        Args:
            parent: not finished, and without a sampled token that is not committed yet.
            next_token_id: replaces the parent's last token, which is sampled but not computed; if
                the parent awaits a choice, this is the next token. None: as the parent.
        """
        assert not parent.is_finished, parent
        assert parent.num_pending_tokens == 0, parent
        child = self._make_child(parent, parent.request.next_index)
        parent.request.next_index += 1
        scheduler = self.scheduler
        # Why fewer than are free: some are reserved for forks of prompts that are being computed.
        num_spare = len(scheduler.rows.free) - sum(map(self.num_reserved_rows, scheduler.running))
        if parent.status is Status.RUNNING and num_spare > 0:
            self._start_child(child, parent)
        else:
            computed = max(parent.num_computed_tokens, parent.num_preempted_tokens)
            child.num_preempted_tokens = computed
            child.status = Status.PARKED
        extras = child.extras
        assert extras is not None
        if next_token_id is not None and extras.choices is None:
            child.token_ids.pop()
            if extras.logprobs is not None:
                sampled, *extras.choices = extras.logprobs.pop()
                extras.cumulative_logprob -= sampled.logprob
        if child.follower is not None:
            for token_id in child.output_token_ids:
                child.follower.append(token_id)
        if next_token_id is not None:
            self.append_token(child, next_token_id)
        elif child.status is Status.PARKED and extras.choices is None:
            scheduler.waiting.push(child)
        scheduler.drop_ended()
        return child

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Appends the next token to a sequence that awaits a choice, which may end it."""
        extras = seq.extras
        assert extras is not None
        choices, extras.choices = extras.choices, None
        if choices is not None and extras.logprobs is not None:
            chosen = next(entry for entry in choices if entry.token_id == token_id)
            self.record_logprobs(extras, [chosen, *choices])
        if seq.status is Status.RUNNING:
            self.scheduler.rows.replace_token(seq, token_id)
        self.scheduler.append(seq, token_id, time.perf_counter())
        if seq.status is Status.PARKED:
            self.scheduler.waiting.push(seq)

    def record_logprobs(self, extras: SequenceOptions, logprobs: list[TokenLogprob]) -> None:
        """Stores the log-probabilities of the next token: its own, then the candidates'."""
        if extras.logprobs is not None:
            extras.logprobs.append(logprobs)
            extras.cumulative_logprob += logprobs[0].logprob

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; the request continues with the others."""
        self.scheduler.end(seq, reason)

    def drop(self, seq: Sequence) -> None:
        """Ends one of several sequences and removes it from the request's outputs."""
        assert len(seq.request.sequences) > 1, seq
        seq.request.sequences.remove(seq)
        self.scheduler.end(seq, "drop")

    # --- choosing -----------------------------------------------------------------------------

    def store_choices(self, seq: Sequence, choices: list[TokenLogprob]) -> None:
        """Stores a sequence's most likely next tokens for its chooser."""
        assert seq.extras is not None
        seq.extras.choices = choices
        self.undecided.append(seq.request)

    def on_failure(self, seq: Sequence) -> None:
        """With a chooser, a request ends with its first failure, at the next commit."""
        if seq.request.chooser is not None:
            self.undecided.append(seq.request)

    def run_choosers(self) -> None:
        """Calls the choosers of requests whose sequences all await a choice.

        If one sequence of a request has failed, the others end as well: the chooser will never be
        called, so they would wait forever.
        """
        undecided, self.undecided = self.undecided, []
        for request in dict.fromkeys(undecided):
            live = [seq for seq in request.sequences if not seq.is_finished]
            if request.error is not None:
                for seq in live:
                    self.scheduler.end(seq, "error")
            elif live and request.chooser and all(map(_has_choices, live)):
                request.chooser.choose(request, self)
                assert all(seq.is_finished or not _has_choices(seq) for seq in live), "not chosen"

    def break_deadlock(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Preempts running sequences that await a choice until a queued one can be admitted.

        Each of them waits for the queued one, because their chooser needs the choices of all.
        """
        scheduler = self.scheduler
        scheduler.drop_ended()
        while scheduler.num_waiting and scheduler.running and not scheduled:
            assert scheduler.running[-1].awaits_choice, scheduler.running[-1]
            scheduler.preempt(
                plan, "it awaits a choice, and a queued sequence needs its row or blocks"
            )
            scheduler.admit(plan, scheduled, scheduler.max_num_batched_tokens)

    # --- helpers ------------------------------------------------------------------------------

    def _make_child(self, parent: Sequence, index: int) -> Sequence:
        """A copy with its own id, index and seed, and with neither a row nor blocks yet."""
        request = parent.request
        child = Sequence(
            request,
            seq_id=next(self.scheduler.seq_ids),
            index=index,
            token_ids=list(parent.token_ids),
        )
        # Why both: between two steps, also a sequence without extras may be forked.
        extras = parent.extras = parent.extras or SequenceOptions()
        child.extras = replace(
            extras,
            draft_token_ids=(),
            logprobs=None if extras.logprobs is None else list(extras.logprobs),
        )
        child.first_scheduled_time = parent.first_scheduled_time
        child.first_token_time = parent.first_token_time
        child.last_token_time = parent.last_token_time
        request.sequences.append(child)
        return child

    def _start_child(self, child: Sequence, parent: Sequence) -> None:
        """Gives a child a row and the parent's blocks; the next plan contains the fork."""
        self.scheduler.rows.fork(child, parent)
        child.status = Status.RUNNING
        share_blocks(self.scheduler.block_manager, parent, child)
        insort(self.scheduler.running, child, key=lambda s: s.order)


def share_blocks(manager: BlockManager, parent: Sequence, child: Sequence) -> None:
    """Adds the parent's blocks to a child's tables; nothing is copied.

    Blocks without a computed token are not shared, because both sequences would fill them.
    """
    num_blocks = -(-parent.num_computed_tokens // manager.block_size)
    for index, parent_table in enumerate(parent.block_tables):
        table = parent_table[:num_blocks]
        manager.pool.touch(table)
        child.block_tables.append(table)
        manager.updates.append(TableUpdate(child.row, index, 0, tuple(table)))
    parent.slots_ready_until = child.slots_ready_until = 0  # the last block is shared now
    child.max_chunk = parent.max_chunk
    child.num_dropped_blocks = list(parent.num_dropped_blocks)
    child.prefixes = list(parent.prefixes)
    child.num_registered_blocks = parent.num_registered_blocks
    child.num_computed_tokens = parent.num_computed_tokens


def _has_choices(seq: Sequence) -> bool:
    return seq.extras is not None and seq.extras.choices is not None
