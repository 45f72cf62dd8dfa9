"""Scheduler: decides how many tokens each sequence computes in a step (`schedule`, `commit`).

    waiting (heap: priority, arrival) ──admit──► running (sorted the same way) ──end──► finished
                    ▲                                  │
                    └───────────preempt────────────────┘

Prefill, chunked prefill, decode and verification use one formula: a sequence computes
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. `schedule` never reads the value
of a sampled token, so a step may be planned while the previous one still runs. `commit` brings the
values, possibly one step later. Source: vLLM v1's scheduler (no phases; one budget).

Fast decodes: most decodes, all but two per block, need no new block, copy or prefix-cache entry.
So once per block the Scheduler asks the BlockManager for the position up to which this holds, and
stores it in `Sequence.slots_ready_until`. Decodes before this position only advance counters.
Perf: with 1,024 running sequences a plan takes 0.3 ms, and 1.6 ms if each decode calls the
BlockManager (one EPYC core).

Called by LLMEngine; allocates blocks through the BlockManager. Independent of tensors and features.
See also speculation.py (drafts, log-probabilities), forks.py (n > 1, forks, chosen tokens),
policies.py (delayed admission), tiers/ (host memory, disk).
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Iterable
from typing import Any

from nanoengine.core.block_manager import BlockManager, Verdict
from nanoengine.core.plan import Preemption, StepPlan, StepResult
from nanoengine.core.row_allocator import RowAllocator, admitted_sequence
from nanoengine.core.sequence import NO_ROW, Request, Sequence, Status
from nanoengine.core.stats import SchedulerStats
from nanoengine.core.waiting import AdmissionPolicy, FinishedStats, LookAhead, WaitingQueue


class Scheduler:
    """Plans steps under a token budget, a maximum number of sequences, and the free blocks.

    Args:
        block_manager: owns the blocks.
        max_num_seqs: maximum number of running sequences; each holds a row, see plan.py.
        max_num_batched_tokens: token budget of one step, at least max_num_seqs.
        chunked_prefill: if False, a prompt waits until it fits into one step.
        long_prefill_threshold: maximum prompt tokens per sequence and step; 0 for no limit.
        policy: may delay a sequence whose blocks fit; None admits every sequence that fits.

    Attributes:
        running: sequences that hold a row, by priority and arrival.
        extras_scheduling: `speculation.ExtrasScheduling`, for sequences with `SequenceOptions`;
            None until `speculation.enable_extras` creates it.
        last_finished_requests: requests that the latest commit finished; for observers.
        last_ended_seqs: sequences that ended between the previous commit and the end of the latest
            one; for observers.
        newly_ended_seqs: sequences that have ended since the latest commit.
        finished_stats: statistics of ended sequences, for policies.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        long_prefill_threshold: int = 0,
        policy: AdmissionPolicy | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.long_prefill_threshold = long_prefill_threshold
        self.policy = policy
        self.extras_scheduling: Any = None
        self.stats = SchedulerStats()
        self.finished_stats = FinishedStats()
        if policy is not None:
            policy.watch(self.finished_stats)
        self.seq_ids = itertools.count()
        self.last_ended_seqs, self.newly_ended_seqs = list[Sequence](), list[Sequence]()
        self._clear()

    def _clear(self) -> None:
        self.running: list[Sequence] = []
        self.last_finished_requests: list[Request] = []
        self.waiting = WaitingQueue()
        self.rows = RowAllocator(self.max_num_seqs)
        self._in_flight: dict[int, list[Sequence]] = {}  # step -> its sequences, until commit
        self._finished: list[Request] = []  # not returned by `commit` yet
        self._any_ended = False  # `running` still contains ended sequences

    @property
    def has_unfinished(self) -> bool:
        """True while there is a step to run or to commit."""
        return bool(self.running or self.num_waiting or self._in_flight or self._finished)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for admission."""
        return self.waiting.num_waiting

    @property
    def num_running(self) -> int:
        """Number of sequences that hold a row."""
        return len(self.running)

    # --- requests -----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request that the engine has validated."""
        token_ids = list(request.prompt_token_ids)
        first = Sequence(request, seq_id=next(self.seq_ids), index=0, token_ids=token_ids)
        assert first.extras is None or self.extras_scheduling is not None, "enable_extras first"
        request.sequences.append(first)
        self.waiting.push(first)

    def abort(self, request: Request) -> None:
        """Ends a request in any state; its blocks and rows are freed at once."""
        for seq in request.sequences:
            if not seq.is_finished:
                self.end(seq, "abort")
        request.num_pending_forks = 0
        if request in self._finished:  # it has failed in a step that is not committed yet
            self._finished.remove(request)
        self.drop_ended()

    def recover(self, requests: Iterable[Request]) -> None:
        """After a failed step: ends all requests, and starts again with an empty pool.

        Why not `abort`: the exception may have occurred between any two lines. So neither the
        counters here, nor the indexed content, nor the executor's rows can be trusted. The next
        plan releases all rows.
        """
        for request in requests:
            request.num_pending_forks = 0
            for seq in request.sequences:
                if not seq.is_finished:
                    self.block_manager.clear_tables(seq)
                    seq.row = NO_ROW
                    self._finish(seq, "abort")
        self.block_manager.discard_all()
        self._clear()
        self.rows.release_all()

    # --- schedule -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running sequences, then admissions with the remaining budget.

        Counters advance here, so the next step can be planned before this one is committed.
        """
        plan = StepPlan(step=self.stats.steps)
        self.stats.steps += 1
        scheduled: list[Sequence] = []
        budget = self._schedule_running(plan, scheduled)
        if self.waiting.num_waiting and not plan.preempted:
            self.admit(plan, scheduled, budget)
        extras = self.extras_scheduling
        if extras is not None and not scheduled and not any(self._in_flight.values()):
            extras.break_deadlock(plan, scheduled)
        # Why last: a fork of this step may use the row of a sequence preempted in this step.
        if self.rows.has_changes:
            self.rows.write_changes(plan)
        manager = self.block_manager
        plan.table_updates, manager.updates = manager.updates, []
        plan.block_copies, manager.copies = manager.copies, []
        tiers = manager.prefix_cache.tiers
        if tiers is not None:
            plan.transfers = tiers.take_transfers(plan)
        self._in_flight[plan.step] = scheduled
        if self._any_ended:
            self.drop_ended()
        if tiers is not None and not any(self._in_flight.values()):
            tiers.wait()
        return plan

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        """Schedules running sequences by priority; returns the remaining budget."""
        budget, num_fast_decodes = self.max_num_batched_tokens, 0
        rows, starts = plan.rows, plan.starts
        counts, logits = plan.num_scheduled_tokens, plan.num_logits
        # Why a copy: forks of this step join `running`, but do not run yet.
        sequences, running = tuple(self.running), Status.RUNNING
        num_later = len(sequences)
        for seq in sequences:
            num_later -= 1
            if seq.status is not running:
                continue  # preempted by an earlier sequence of this step
            start = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens
            if start < seq.slots_ready_until and start + 1 == num_tokens < seq.max_num_tokens:
                scheduled.append(seq)
                rows.append(seq.row)
                starts.append(start)
                counts.append(1)
                logits.append(1)
                seq.num_computed_tokens = num_tokens
                seq.num_pending_tokens += 1
                num_fast_decodes += 1
                budget -= 1
                continue
            # Why: one token per later sequence is reserved, so that no prompt stalls a decode.
            num_new = self._schedule_next(plan, scheduled, seq, budget - num_later)
            budget -= num_new
            if num_new:
                is_decode = num_new == logits[-1] == 1 and start >= seq.num_prompt_tokens
                # Why pending: with a chooser, no decode follows until it has chosen.
                has_next = is_decode and seq.num_pending_tokens > 0
                seq.slots_ready_until = self.block_manager.slots_ready_until(seq) if has_next else 0
        self.stats.decode_tokens += num_fast_decodes
        return budget

    def _schedule_next(
        self, plan: StepPlan, scheduled: list[Sequence], seq: Sequence, budget: int
    ) -> int:
        """Schedules a running sequence's next tokens, at most `budget`; returns the number."""
        if seq.extras is not None:
            num_new: int = self.extras_scheduling.schedule(plan, scheduled, seq, budget)
            return num_new
        num_new = seq.num_tokens - seq.num_computed_tokens
        if num_new <= 0 or seq.num_tokens >= seq.max_num_tokens:
            return 0  # its last token is not committed yet
        if num_new > 1:
            num_new = self.next_chunk(seq, budget)
        if not self.ensure_blocks(plan, seq, num_new):
            return 0
        self.add_to_plan(plan, scheduled, seq, num_new)
        return num_new

    def next_chunk(self, seq: Sequence, budget: int, num_drafts: int = 0) -> int:
        """How many of a sequence's tokens, including its drafts, the next step may compute."""
        self.block_manager.reuse_filled_blocks(seq)
        num_new = seq.num_tokens + num_drafts - seq.num_computed_tokens
        return min(num_new, budget, seq.max_chunk, self.long_prefill_threshold or budget)

    def ensure_blocks(self, plan: StepPlan, seq: Sequence, num_new: int) -> bool:
        """Allocates blocks for a running sequence; may preempt later ones, or this one."""
        while not self.block_manager.may_append(seq, num_new):
            if len(self.running) == 1:
                self._fail_too_large(seq, seq.num_computed_tokens + num_new)
                return False
            reason = f"seq {seq.seq_id} needs a block and none is free"
            if self.preempt(plan, reason) is seq:
                return False
        return True

    def add_to_plan(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        seq: Sequence,
        num_new: int,
        num_drafts: int = 0,
    ) -> bool:
        """Adds a sequence to the plan and advances its counters; returns whether it will sample."""
        start = seq.num_computed_tokens
        end = start + num_new
        samples = end == seq.num_tokens + num_drafts < seq.max_num_tokens
        scheduled.append(seq)
        plan.add(seq.row, start, num_new, num_logits=1 + num_drafts if samples else 0)
        if num_new == 1 + num_drafts and start >= seq.num_prompt_tokens:
            self.stats.decode_tokens += num_new
        else:
            self.stats.prefill_tokens += num_new
        if start < seq.num_preempted_tokens:
            self.stats.recomputed_tokens += min(end, seq.num_preempted_tokens) - start
        seq.num_computed_tokens = end
        if end // self.block_manager.block_size > seq.num_registered_blocks:
            self.block_manager.prefix_cache.register(seq)
        if samples:
            seq.num_pending_tokens += 1
        return samples

    def preempt(self, plan: StepPlan, reason: str) -> Sequence:
        """Preempts and returns the last sequence in `running`: lowest priority, then latest.

        Its row and blocks are freed. It keeps its tokens and waits for admission. If it awaits a
        choice, it is parked instead, because it has nothing to compute yet.
        """
        victim = self.running.pop()
        plan.preempted.append(Preemption(victim.seq_id, victim.num_computed_tokens, reason))
        self.stats.preemptions += 1
        awaits_choice = victim.extras is not None and victim.awaits_choice
        self.block_manager.deallocate(victim)
        self.rows.release(victim)
        victim.reset_computed()
        if awaits_choice:
            victim.status = Status.PARKED
        else:
            self.waiting.push(victim)
        return victim

    # --- admission ----------------------------------------------------------------------------

    def admit(self, plan: StepPlan, scheduled: list[Sequence], budget: int) -> None:
        """Admits waiting sequences in order while rows, budget and blocks suffice."""
        policy, extras, manager = self.policy, self.extras_scheduling, self.block_manager
        look_ahead = LookAhead(self.waiting, policy)
        num_forks, num_reserved = 0, 0
        if extras is not None:
            num_reserved = sum(map(extras.num_reserved_rows, self.running))
        while budget > 0 and (seq := look_ahead.next(len(self.running))) is not None:
            if extras is not None:
                num_forks = extras.num_reserved_rows(seq)
            if len(self.rows.free) - num_reserved < 1 + num_forks or seq.num_pending_tokens:
                look_ahead.pass_over(seq, "token" if seq.num_pending_tokens else "row")
                break
            admission = manager.can_allocate(seq, keep_watermark=bool(self.running))
            if admission.verdict is Verdict.NEVER:
                self.waiting.push(seq)  # Why: `end` expects it in the queue.
                self._fail_too_large(seq, seq.num_tokens)
                continue
            num_new, prefix = seq.num_tokens - admission.num_cached_tokens, admission.prefix
            too_long = not self.chunked_prefill and num_new > budget
            if admission.verdict is Verdict.LATER or too_long:
                missing = "blocks" if prefix.is_ready else "read"
                look_ahead.pass_over(seq, "budget" if too_long else missing)
                if prefix.reason:
                    plan.reasons.append(f"seq {seq.seq_id} waits: {prefix.reason}")
                continue
            active_policy = policy if self.running else None
            if active_policy and not active_policy.may_admit(seq, admission, self.running, manager):
                look_ahead.pass_over(seq, "policy")
                break  # Why: the pool will be too full for later ones, too.
            threshold = self.long_prefill_threshold or budget
            num_new = min(num_new, budget, admission.max_chunk, threshold)
            if prefix.reason:
                plan.reasons.append(f"seq {seq.seq_id}: {prefix.reason}")
            self._start_running(plan, seq, admission.num_cached_tokens)
            manager.allocate(seq, admission)
            is_allocated = manager.may_append(seq, num_new)
            assert is_allocated, seq
            if seq.extras is None:
                self.add_to_plan(plan, scheduled, seq, num_new)
            else:
                extras.place(plan, scheduled, seq, num_new)
                num_reserved += extras.num_reserved_rows(seq)
            budget -= num_new
            look_ahead.count_overtaken()
        if look_ahead.passed_over and not plan.rows:
            first = look_ahead.passed_over[0]
            plan.reasons.append(f"nothing admitted: {first} waits for blocks or rows")
        plan.waits = look_ahead.requeue()

    def _start_running(self, plan: StepPlan, seq: Sequence, num_cached_tokens: int) -> None:
        """Assigns a row to an admitted sequence, and inserts it into `running`."""
        self.rows.allocate(seq)
        seq.status = Status.RUNNING
        seq.num_overtaken = 0
        insort(self.running, seq, key=lambda s: s.order)
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.perf_counter()
            seq.request.num_cached_tokens = num_cached_tokens
        plan.admitted.append(admitted_sequence(seq, num_cached_tokens))

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Appends the sampled tokens of a step; returns the requests that finished in it."""
        self._apply_results(plan, result, self._in_flight.pop(plan.step, []))
        if self.extras_scheduling is not None:
            self.extras_scheduling.run_choosers()
        if self._any_ended:
            self.drop_ended()
        if self.block_manager.prefix_cache.tiers is not None:
            self.block_manager.prefix_cache.tiers.commit(plan, result)
        self.last_finished_requests, self._finished = self._finished, []
        if self.newly_ended_seqs or self.last_ended_seqs:
            self.last_ended_seqs, self.newly_ended_seqs = self.newly_ended_seqs, []
        self.stats.finished_requests += len(self.last_finished_requests)
        return self.last_finished_requests

    def _apply_results(self, plan: StepPlan, result: StepResult, scheduled: list[Sequence]) -> None:
        """Appends the step's sampled tokens to each scheduled sequence."""
        now, num_logits, num_fast_decodes = time.perf_counter(), plan.num_logits, 0
        is_plain = not (result.errors or result.logprobs or result.prompt_logprobs)
        for i, seq in enumerate(scheduled):
            # A sequence that has ended or was preempted has slots_ready_until 0.
            if is_plain and seq.slots_ready_until and num_logits[i] == 1 and seq.last_token_time:
                (token_id,) = result.token_ids[i]
                at_end = len(seq.token_ids) + 1 >= seq.max_num_tokens
                if not (at_end or token_id in seq.stop_ids or seq.follower is not None):
                    seq.token_ids.append(token_id)
                    seq.num_pending_tokens -= 1
                    seq.last_token_time = now
                    num_fast_decodes += 1
                    continue
            if seq.is_finished:
                continue  # it ended after this step was scheduled
            if seq.extras is not None:
                self.extras_scheduling.apply_result(plan, result, i, seq, now)
            elif i in result.errors:
                self.fail_and_invalidate(seq, result.errors[i])
            elif num_logits[i]:
                seq.num_pending_tokens -= 1
                self.append(seq, result.token_ids[i][0], now)
        self.stats.output_tokens += num_fast_decodes

    def append(self, seq: Sequence, token_id: int, now: float) -> None:
        """Appends the next token to a sequence; the sequence may end with it."""
        if seq.first_token_time is None:
            seq.first_token_time = now
        seq.last_token_time = now
        self.stats.output_tokens += 1
        ending = seq.append(token_id)
        if ending is not None:
            self.end(seq, *ending)

    # --- ends ---------------------------------------------------------------------------------

    def end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence with a finish reason, and frees its row and blocks."""
        if seq.status is Status.RUNNING:
            self.block_manager.deallocate(seq)
            self.rows.release(seq)
            self._any_ended = True
        elif seq.status is Status.WAITING:
            self.waiting.num_waiting -= 1
        self._finish(seq, reason, stop_reason)
        if reason != "abort" and seq.request.finished:
            self._finished.append(seq.request)

    def _finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        seq.finish(reason, stop_reason)
        self.newly_ended_seqs.append(seq)
        self.finished_stats.count += 1
        if reason in ("stop", "length"):
            self.finished_stats.lengths.append(seq.num_output_tokens)

    def fail(self, seq: Sequence, message: str) -> None:
        """Ends a sequence with an error; other requests are not affected."""
        seq.request.error = message
        self.end(seq, "error")
        if seq.extras is not None:
            self.extras_scheduling.on_failure(seq)

    def _fail_too_large(self, seq: Sequence, num_tokens: int) -> None:
        from nanoengine.core.request_options import too_large_message

        what = f"a sequence of {num_tokens} tokens"
        self.fail(seq, too_large_message(what, num_tokens, self.block_manager))

    def fail_and_invalidate(self, seq: Sequence, message: str) -> None:
        """Ends a sequence whose step failed, and drops its blocks' content, which may be wrong."""
        block_ids = [block_id for table in seq.block_tables for block_id in table]
        self.fail(seq, message)
        self.block_manager.prefix_cache.invalidate(block_ids)

    def drop_ended(self) -> None:
        """Removes ended sequences from `running`."""
        self.running[:] = [seq for seq in self.running if seq.status is Status.RUNNING]
        self._any_ended = False
