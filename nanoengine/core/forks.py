"""Forks: a request's sequences part, and a `TokenChooser` decides what each of them goes on with.

    n > 1      the step that ends a prompt ─► n - 1 forks, which sample from the same logits
    fork       between two steps ─► a copy that shares all blocks of its parent
    choosing   a step's most likely tokens ─► `Sequence.choices` ─► TokenChooser.choose
                                       append_token, fork, drop, finish ◄─┘ ─► the next step

A sequence whose tokens are all computed awaits a choice: the Scheduler's formula gives it 0 tokens,
so it keeps its row and its blocks until it is given a token. If it is preempted meanwhile it is
parked, outside of the queue, because there is nothing to compute for it yet.

Part of the Scheduler, which owns the queue, the rows and the list of running sequences.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import StepPlan, TokenLogprob, TokenLogprobs
from nanoengine.core.row_allocator import RowAllocator
from nanoengine.core.sequence import Request, Sequence, Status
from nanoengine.core.waiting import WaitingQueue


@dataclass(slots=True, kw_only=True)
class Forks:
    """What several sequences of one request need; the `SequenceMoves` of a `TokenChooser`.

    Attributes:
        block_manager, rows, waiting, running: the Scheduler's own.
        seq_ids: numbers new sequences.
        append: the Scheduler's; gives a sequence its next tokens, by which it may end.
        end: the Scheduler's; gives a sequence its finish reason.
        undecided: requests whose chooser has something new to look at.
    """

    block_manager: BlockManager
    rows: RowAllocator
    waiting: WaitingQueue
    running: list[Sequence]
    seq_ids: Iterator[int]
    append: Callable[[Sequence, list[int], TokenLogprobs | None, float], None]
    end: Callable[[Sequence, str], None]
    undecided: list[Request] = field(default_factory=list)

    # --- n > 1 --------------------------------------------------------------------------------

    def num_rows_due(self, seq: Sequence) -> int:
        """Rows to keep for forks at the end of this prompt: one each, as far as there are any."""
        return min(seq.request.num_forks_due, self.rows.num_rows - 1) if seq.index == 0 else 0

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
                self.waiting.push(child)
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
        if parent.status is Status.RUNNING and self._num_spare_rows() > 0:
            self._place_beside(child, parent)
        else:
            child.num_preempted_tokens = max(
                parent.num_computed_tokens, parent.num_preempted_tokens
            )
            child.status = Status.PARKED
        if next_token_id is not None and child.choices is None:
            child.token_ids.pop()
            if child.logprobs is not None:
                sampled, *child.choices = child.logprobs.pop()
                child.cumulative_logprob -= sampled.logprob
        if child.follower is not None:
            for token_id in child.output_token_ids:
                child.follower.append(token_id)
        if next_token_id is not None:
            self.append_token(child, next_token_id)
        elif child.status is Status.PARKED and child.choices is None:
            self.waiting.push(child)
        return child

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Gives a sequence that awaits a choice its next token; it may end by it."""
        choices, seq.choices = seq.choices, None
        logprobs = None
        if seq.logprobs is not None and choices is not None:
            chosen = next(entry for entry in choices if entry.token_id == token_id)
            logprobs = [[chosen, *choices]]
        if seq.status is Status.RUNNING:
            self.rows.replace_token(seq, token_id)
        self.append(seq, [token_id], logprobs, time.perf_counter())
        if seq.status is Status.PARKED:
            self.waiting.push(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; its request goes on with the others."""
        self.end(seq, reason)

    def drop(self, seq: Sequence) -> None:
        """Ends one sequence of several and forgets it: its request has no output of it."""
        assert len(seq.request.sequences) > 1, seq
        seq.request.sequences.remove(seq)
        self.end(seq, "drop")

    # --- choosing -----------------------------------------------------------------------------

    def offer(self, seq: Sequence, choices: list[TokenLogprob]) -> None:
        """Keeps a sequence's most likely next tokens until its chooser has seen all of them."""
        seq.choices = choices
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
                    self.end(seq, "error")
            elif live and request.chooser and all(seq.choices is not None for seq in live):
                request.chooser.choose(request, self)
                assert all(seq.choices is None or seq.is_finished for seq in live), "not chosen"

    # --- small moves --------------------------------------------------------------------------

    def _make_child(self, parent: Sequence, index: int) -> Sequence:
        request = parent.request
        child = parent.fork(
            seq_id=next(self.seq_ids), index=index, seed=fork_seed(request.seed, index)
        )
        request.sequences.append(child)
        return child

    def _place_beside(self, child: Sequence, parent: Sequence) -> None:
        """Gives a child a row and the parent's blocks; the next plan tells the executor."""
        self.rows.fork(child, parent)
        child.status = Status.RUNNING
        self.block_manager.fork(parent, child)
        insort(self.running, child, key=lambda s: s.order)

    def _num_spare_rows(self) -> int:
        """Free rows less those kept for the forks of prompts that are being computed."""
        return self.rows.num_free - sum(map(self.num_rows_due, self.running))


def fork_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sequence. Source: SplitMix64's increment.

    >>> fork_seed(7, 0)
    7
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
