"""Forks: a request's sequences part, and a `TokenChooser` decides what each of them goes on with.

    n > 1      the step that ends a prompt ─► n - 1 forks, which sample from the same logits
    fork       between two steps ─► a copy that shares all blocks of its parent
    choosing   a step's most likely tokens ─► `Extras.choices` ─► TokenChooser.choose
                                       append_token, fork, drop, finish ◄─┘ ─► the next step

A sequence whose tokens are all computed awaits a choice: the Scheduler's formula gives it 0 tokens,
so it keeps its row and its blocks until it is given a token. If it is preempted meanwhile it is
parked, outside of the queue, because there is nothing to compute for it yet.

Part of the Scheduler, which owns the queue, the rows and the list of running sequences.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import replace

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import StepPlan, TableUpdate, TokenLogprob
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Extras, Request, Sequence, Status


class Forks:
    """What several sequences of one request need; the `SequenceMoves` of a `TokenChooser`.

    Args:
        scheduler: whose queue, rows, blocks and running sequences these are.

    Attributes:
        undecided: requests whose chooser has something new to look at.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.undecided: list[Request] = []

    # --- n > 1 --------------------------------------------------------------------------------

    def num_rows_due(self, seq: Sequence) -> int:
        """Rows to keep for forks at the end of this prompt: one each, as far as there are any."""
        num_rows = self.scheduler.max_num_seqs
        return min(seq.request.num_forks_due, num_rows - 1) if seq.index == 0 else 0

    def are_due(self, seq: Sequence) -> bool:
        """True if more sequences are to be forked from this one, at the end of its prompt."""
        return seq.index == 0 and seq.request.num_forks_due > 0

    def fork_prompt(self, plan: StepPlan, scheduled: list[Sequence], parent: Sequence) -> None:
        """Gives a request its other n - 1 sequences: they sample from the parent's logits.

        Those that there are no rows for wait, and compute the end of the prompt once more: a token
        depends on seed, position and logits alone, so it is the same one.
        """
        # Why indices below those of any other fork: who stands between may not preempt them.
        num_placed = self.num_rows_due(parent)
        while parent.request.num_forks_due:
            child = self._make_child(parent, parent.params.n - parent.request.num_forks_due)
            parent.request.num_forks_due -= 1
            if not num_placed:
                self.scheduler.waiting.push(child)
                continue
            num_placed -= 1
            self._place_beside(child, parent)
            child.num_pending_tokens = 1
            scheduled.append(child)
            plan.add(child.row, child.num_computed_tokens, 0, num_logits=1)

    # --- between steps ------------------------------------------------------------------------

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """A new sequence of the same request that goes on from the parent's tokens.

        It shares all blocks of a parent that runs; the first of them to write into the shared last
        block copies it. Without a free row, or where the parent has none, the child waits, and is
        admitted like one that was preempted: what the prefix cache has kept is not computed again.

        Args:
            parent: not finished, and not sampled by a step that is not committed yet.
            next_token_id: takes the place of the parent's last token, which is sampled but not
                computed; of a parent that awaits a choice, the next one. None: as the parent.
        """
        assert not parent.is_finished, parent
        assert parent.num_pending_tokens == 0, parent
        child = self._make_child(parent, parent.request.next_index)
        parent.request.next_index += 1
        scheduler = self.scheduler
        # Why fewer than are free: some are kept for the forks of prompts that are being computed.
        num_spare = len(scheduler.rows.free) - sum(map(self.num_rows_due, scheduler.running))
        if parent.status is Status.RUNNING and num_spare > 0:
            self._place_beside(child, parent)
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
        """Gives a sequence that awaits a choice its next token; it may end by it."""
        extras = seq.extras
        assert extras is not None
        choices, extras.choices = extras.choices, None
        if choices is not None and extras.logprobs is not None:
            chosen = next(entry for entry in choices if entry.token_id == token_id)
            self.note(extras, [chosen, *choices])
        if seq.status is Status.RUNNING:
            self.scheduler.rows.replace_token(seq, token_id)
        self.scheduler.append(seq, token_id, time.perf_counter())
        if seq.status is Status.PARKED:
            self.scheduler.waiting.push(seq)

    def note(self, extras: Extras, logprobs: list[TokenLogprob]) -> None:
        """Keeps the log-probabilities of the token that comes next: its own, then the others'."""
        if extras.logprobs is not None:
            extras.logprobs.append(logprobs)
            extras.cumulative_logprob += logprobs[0].logprob

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; its request goes on with the others."""
        self.scheduler.end(seq, reason)

    def drop(self, seq: Sequence) -> None:
        """Ends one sequence of several and forgets it: its request has no output of it."""
        assert len(seq.request.sequences) > 1, seq
        seq.request.sequences.remove(seq)
        self.scheduler.end(seq, "drop")

    # --- choosing -----------------------------------------------------------------------------

    def offer(self, seq: Sequence, choices: list[TokenLogprob]) -> None:
        """Keeps a sequence's most likely next tokens until its chooser has seen all of them."""
        assert seq.extras is not None
        seq.extras.choices = choices
        self.undecided.append(seq.request)

    def on_failure(self, seq: Sequence) -> None:
        """Where a chooser decides, a request ends with its first failure, at the next commit."""
        if seq.request.chooser is not None:
            self.undecided.append(seq.request)

    def let_choose(self) -> None:
        """Calls the choosers whose sequences all await a choice.

        Where one sequence of a request has failed, the others end with it: its chooser will never
        be called, so they would wait for ever.
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
        """Preempts running sequences that await a choice until one that is queued can be admitted.

        Each of them waits for the queued one, because their chooser needs the choices of all.
        """
        scheduler = self.scheduler
        scheduler.drop_ended()
        while scheduler.num_waiting and scheduler.running and not scheduled:
            assert scheduler.running[-1].awaits_choice, scheduler.running[-1]
            scheduler.preempt(
                plan, "it awaits a choice, and one that is queued needs row or blocks"
            )
            scheduler.admit(plan, scheduled, scheduler.max_num_batched_tokens)

    # --- small moves --------------------------------------------------------------------------

    def _make_child(self, parent: Sequence, index: int) -> Sequence:
        """A copy with its own id, index and seed, that has no row and no blocks yet."""
        request = parent.request
        child = Sequence(
            request,
            seq_id=next(self.scheduler.seq_ids),
            index=index,
            token_ids=list(parent.token_ids),
        )
        # Why both: what parts may have parted from what has no extras, between two steps.
        extras = parent.extras = parent.extras or Extras()
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

    def _place_beside(self, child: Sequence, parent: Sequence) -> None:
        """Gives a child a row and the parent's blocks; the next plan tells the executor."""
        self.scheduler.rows.fork(child, parent)
        child.status = Status.RUNNING
        share_blocks(self.scheduler.block_manager, parent, child)
        insort(self.scheduler.running, child, key=lambda s: s.order)


def share_blocks(manager: BlockManager, parent: Sequence, child: Sequence) -> None:
    """Gives a child the parent's blocks; both share them, and nothing is copied.

    Blocks without a computed token are not shared, because both would fill them.
    """
    num_blocks = -(-parent.num_computed_tokens // manager.block_size)
    for index, whole in enumerate(parent.block_tables):
        table = whole[:num_blocks]
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
