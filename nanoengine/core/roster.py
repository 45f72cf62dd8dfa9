"""Roster: the sequences of all requests, and how they change outside of a step's plan.

    waiting (queue) ── running (a row, blocks) ── finished
         ▲                    │
         └── parked ◄─────────┘   (preempted while it rests, until it is given a token)

A sequence is added, goes on by a token, is forked, given a chosen token, ended. The Scheduler is a
Roster that plans steps; `TokenChooser`s call it between steps. Knows no budget and no plan.
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass

from nanoengine.core.admission import AdmissionPolicy
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import TokenLogprob
from nanoengine.core.row_allocator import RowAllocator
from nanoengine.core.sequence import Request, Sequence, Status
from nanoengine.core.waiting import WaitingQueue


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start.

    `prefill_tokens` counts computed tokens that were not sampled in this life of the sequence
    (prompts, and everything recomputed after a preemption); `recomputed_tokens` are those of them
    that had been computed before; `decode_tokens` the rest.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished_requests: int = 0

    @property
    def prefill_waste_frac(self) -> float:
        """Share of prefill work that preemptions made necessary again."""
        return self.recomputed_tokens / self.prefill_tokens if self.prefill_tokens else 0.0


class Roster:
    """Who waits, who runs in which row, and who has ended.

    Args:
        block_manager: owns the blocks.
        max_num_seqs: rows; a true cap on running sequences.
        policy: told of each sequence that ends.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, policy: AdmissionPolicy
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.stats = SchedulerStats()
        self._num_seqs_made = 0
        self._clear()

    def _clear(self) -> None:
        self.running: list[Sequence] = []
        self.last_finished: list[Request] = []  # by the latest commit, for observers
        self._waiting = WaitingQueue()
        self._rows = RowAllocator(self.max_num_seqs)
        self._done: list[Request] = []
        self._undecided: list[Request] = []  # their chooser has something new to look at
        self._any_ended = False

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self.running)

    def num_waste_slots(self) -> int:
        """Slots that are allocated to running sequences but hold no token (yet)."""
        size = self.block_manager.block_size
        return sum(
            len(table) * size - min(seq.num_computed_tokens, len(table) * size)
            for seq in self.running
            for table in seq.block_tables
        )

    # --- requests -----------------------------------------------------------------------------

    def add(
        self, request: Request, *, seed: int, stop_ids: frozenset[int], max_num_tokens: int
    ) -> None:
        """Queues a request that the engine has validated."""
        request.seed = seed
        first = Sequence(
            request,
            seq_id=self._next_seq_id(),
            index=0,
            token_ids=list(request.prompt_token_ids),
            seed=seed,
            stop_ids=stop_ids,
            max_num_tokens=max_num_tokens,
        )
        request.sequences.append(first)
        self._waiting.push(first)

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; its blocks and rows are free at once."""
        for seq in request.sequences:
            if not seq.is_finished:
                self._end(seq, "abort")
        request.num_forks_due = 0
        if request in self._done:  # it has failed in a step that is not committed yet
            self._done.remove(request)
        self._drop_ended()

    # --- forks and chosen tokens --------------------------------------------------------------

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """A new sequence of the same request that goes on from the parent's tokens.

        It shares all blocks of a parent that runs; the first of them to write into the shared last
        block copies it. Without a free row, or where the parent has none, the child waits, and is
        admitted like one that was preempted: what the prefix cache has kept is not computed again.

        Args:
            parent: not finished, and not sampled by a step that is not committed yet.
            next_token_id: takes the place of the parent's last token, which is sampled but not
                computed; for a resting parent it comes next. None: go on as the parent does.
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
        if next_token_id is not None:
            if child.choices is None:
                child.token_ids.pop()
                if child.logprobs is not None:
                    sampled, *child.choices = child.logprobs.pop()
                    child.cumulative_logprob -= sampled.logprob
            self._follow_again(child)
            self.append_token(child, next_token_id)
        else:
            self._follow_again(child)
            if child.status is Status.PARKED and child.choices is None:
                self._waiting.push(child)
        return child

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Appends the next token of a resting sequence; it may end by it."""
        choices, seq.choices = seq.choices, None
        logprobs = None
        if seq.logprobs is not None and choices is not None:
            given = next(entry for entry in choices if entry.token_id == token_id)
            logprobs = [[given, *choices]]
        if seq.status is Status.RUNNING:
            self._rows.replace_token(seq, token_id)
        self._append(seq, [token_id], logprobs, time.perf_counter())
        if seq.status is Status.PARKED:
            self._waiting.push(seq)
        self._drop_ended()

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends one sequence; its request goes on with the others."""
        self._end(seq, reason)
        self._drop_ended()

    def drop(self, seq: Sequence) -> None:
        """Ends one sequence of several and forgets it: its request has no output of it."""
        assert len(seq.request.sequences) > 1, seq
        request = seq.request
        request.sequences.remove(seq)
        self.finish(seq, "abort")
        if request.finished and request not in self._done:
            self._done.append(request)

    def _make_child(self, parent: Sequence, index: int) -> Sequence:
        request = parent.request
        child = parent.fork(
            seq_id=self._next_seq_id(), index=index, seed=fork_seed(request.seed, index)
        )
        request.sequences.append(child)
        return child

    def _place_beside(self, child: Sequence, parent: Sequence) -> None:
        """Gives a child a row and the parent's blocks; the next plan tells the executor."""
        self._rows.fork(child, parent)
        child.status = Status.RUNNING
        self.block_manager.fork(parent, child)
        insort(self.running, child, key=lambda s: s.order)

    def _follow_again(self, seq: Sequence) -> None:
        """Shows a forked sequence's sink the output it starts with."""
        if seq.follower is not None:
            for token_id in seq.output_token_ids:
                seq.follower.append(token_id)

    def _num_spare_rows(self) -> int:
        """Free rows less those kept for the forks of prompts that are being computed."""
        return self._rows.num_free - sum(self._num_forks_due(seq) for seq in self.running)

    # --- tokens and ends ----------------------------------------------------------------------

    def _append(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[list[TokenLogprob]] | None,
        now: float,
    ) -> None:
        if seq.first_token_time is None:
            seq.first_token_time = now
        seq.last_token_time = now
        for j, token_id in enumerate(tokens):
            seq.token_ids.append(token_id)
            self.stats.output_tokens += 1
            if logprobs is not None and seq.logprobs is not None:
                seq.logprobs.append(logprobs[j])
                seq.cumulative_logprob += logprobs[j][0].logprob
            num_tokens = len(seq.token_ids)
            if num_tokens >= seq.min_num_tokens and token_id in seq.stop_ids:
                is_stop_id = token_id in (seq.params.stop_token_ids or ())
                return self._end(seq, "stop", token_id if is_stop_id else None)
            if seq.follower is not None:
                stop_string = seq.follower.append(token_id)
                if stop_string is not None:
                    return self._end(seq, "stop", stop_string)
            if num_tokens >= seq.max_num_tokens:
                return self._end(seq, "length")
        return None

    def _extend_prompt_logprobs(
        self, seq: Sequence, start: int, new: list[list[TokenLogprob]]
    ) -> None:
        """Appends those not known yet: a preempted prompt is computed, and reported, again."""
        known = seq.request.prompt_logprobs
        if known is not None and seq.index == 0:
            known += new[len(known) - start :]

    def _has_forks_due(self, seq: Sequence) -> bool:
        """True if more sequences are to be forked from this one, at the end of its prompt."""
        return seq.index == 0 and seq.request.num_forks_due > 0

    def _num_forks_due(self, seq: Sequence) -> int:
        """Rows kept for sequences to be forked from this one: one each, as far as there are any."""
        return min(seq.request.num_forks_due, self.max_num_seqs - 1) if seq.index == 0 else 0

    def _end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Gives a sequence its finish reason; its row and blocks are free from now on."""
        if seq.status is Status.RUNNING:
            self.block_manager.deallocate(seq)
            self._rows.release(seq)
            self._any_ended = True
        elif seq.status is Status.WAITING:
            self._waiting.discount()
        self._set_finished(seq, reason, stop_reason)
        if reason != "abort" and seq.request.finished:
            self._done.append(seq.request)

    def _set_finished(
        self, seq: Sequence, reason: str, stop_reason: int | str | None = None
    ) -> None:
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        seq.finish_time = time.perf_counter()
        self.policy.on_finish(seq)

    def _fail(self, seq: Sequence, message: str) -> None:
        """Ends a sequence with an error of its own; nobody else notices.

        Where a chooser decides, the whole request ends with it, at the next commit.
        """
        seq.request.error = message
        if seq.request.chooser is not None:
            self._undecided.append(seq.request)
        self._end(seq, "error")

    def _drop_ended(self) -> None:
        if self._any_ended:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
            self._any_ended = False

    def _next_seq_id(self) -> int:
        self._num_seqs_made += 1
        return self._num_seqs_made - 1


def fork_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th sequence. Source: SplitMix64's increment.

    >>> fork_seed(7, 0)
    7
    """
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
