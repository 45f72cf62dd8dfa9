"""Scheduler: which sequences compute how many tokens in each step: `schedule`, then `commit`.

    waiting (heap: priority, arrival) ──admit──► running (sorted the same way) ──end──► finished
                    ▲                                  │
                    └───────────preempt────────────────┘

One formula for prefill, chunk, decode and verification: a sequence computes
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. `schedule` never reads the value
of a sampled token, so a step may be planned while the one before it still runs; `commit` brings the
values, one step later if need be. Source: vLLM v1's scheduler (no phases; one budget).

Called by LLMEngine; asks the BlockManager for blocks, and `Forks` where a request has several
sequences. Knows no tensors and no features. An engine runs the FastScheduler, which makes the same
plans.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections.abc import Iterable

from nanoengine.core.admission import AdmissionPolicy, WatermarkOnly
from nanoengine.core.block_manager import BlockManager, Verdict
from nanoengine.core.forks import Forks
from nanoengine.core.plan import Preemption, StepPlan, StepResult, TokenLogprobs
from nanoengine.core.row_allocator import RowAllocator, admitted
from nanoengine.core.sequence import NO_ROW, Request, Sequence, Status
from nanoengine.core.stats import SchedulerStats
from nanoengine.core.waiting import LookAhead, WaitingQueue


class Scheduler:
    """Plans steps under a token budget, a cap on sequences, and the blocks there are.

    Args:
        block_manager: owns the blocks.
        max_num_seqs: rows; a true cap on running sequences.
        max_num_batched_tokens: token budget of one step, at least max_num_seqs.
        chunked_prefill: False computes a prompt whole or not yet.
        long_prefill_threshold: most prompt tokens of one sequence a step; 0 for no bound.
        policy: may hold back a sequence whose blocks fit; None: admits whoever fits.

    Attributes:
        running: sequences that hold a row, by priority and arrival.
        forks: what several sequences of one request need.
        last_finished: requests that the latest commit finished, for observers.
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
        self.policy = WatermarkOnly() if policy is None else policy
        self.stats = SchedulerStats()
        self._block_size = block_manager.block_size
        self._seq_ids = itertools.count()
        self._clear()

    def _clear(self) -> None:
        self.running: list[Sequence] = []
        self.last_finished: list[Request] = []
        self._waiting = WaitingQueue()
        self._rows = RowAllocator(self.max_num_seqs)
        self.forks = Forks(
            block_manager=self.block_manager,
            rows=self._rows,
            waiting=self._waiting,
            running=self.running,
            seq_ids=self._seq_ids,
            append=self._append,
            end=self._end,
        )
        self._in_flight: dict[int, list[Sequence]] = {}  # by step, until it is committed
        self._done: list[Request] = []  # finished, and not told yet
        self._any_ended = False  # `running` still holds sequences that have ended

    @property
    def has_unfinished(self) -> bool:
        """True while a step has something to do or to commit."""
        return bool(self.running or self._waiting or self._in_flight or self._done)

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
        kv = slice(self.block_manager.prefix_cache.num_kv_groups)
        return sum(
            max(len(table) * size - seq.num_computed_tokens, 0)
            for seq in self.running
            for table in seq.block_tables[kv]
        )

    # --- requests -----------------------------------------------------------------------------

    def add(
        self, request: Request, *, seed: int, stop_ids: frozenset[int], max_num_tokens: int
    ) -> None:
        """Queues a request that the engine has validated."""
        request.seed = seed
        first = Sequence(
            request,
            seq_id=next(self._seq_ids),
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

    def fork(self, parent: Sequence, next_token_id: int | None = None) -> Sequence:
        """Adds a sequence to a parent's request, between steps: see `Forks.fork`."""
        child = self.forks.fork(parent, next_token_id)
        self._drop_ended()
        return child

    def recover(self, requests: Iterable[Request]) -> None:
        """After a failed step: ends all requests, and starts again with an empty pool.

        Why not `abort`: the exception may have come between any two lines. So neither the counters
        here nor the indexed content can be trusted, nor the executor's rows: the next plan releases
        all of them.
        """
        for request in requests:
            request.num_forks_due = 0
            for seq in request.sequences:
                if not seq.is_finished:
                    self.block_manager.forget(seq)
                    seq.row = NO_ROW
                    seq.finish("abort")
                    self.policy.on_finish(seq)
        self.block_manager.discard_all()
        self._clear()
        self._rows.release_all()

    # --- schedule -----------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running sequences first, then admissions with what is left.

        Counters advance here, so that the next step can be planned before this one is committed.
        """
        plan = StepPlan(step=self.stats.steps)
        self.stats.steps += 1
        scheduled: list[Sequence] = []
        budget = self._schedule_running(plan, scheduled)
        if not plan.preempted:
            self._admit(plan, scheduled, budget)
        if not scheduled and not any(self._in_flight.values()):
            self._break_deadlock(plan, scheduled)
        # Why last: a fork of this step may take the row of a sequence preempted in this step.
        self._rows.tell(plan)
        manager = self.block_manager
        plan.table_updates, manager.updates = manager.updates, []
        plan.block_copies, manager.copies = manager.copies, []
        plan.transfers = manager.prefix_cache.take_transfers(plan)
        self._in_flight[plan.step] = scheduled
        self._drop_ended()
        if not any(self._in_flight.values()):
            manager.prefix_cache.wait()
        return plan

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        """Gives each running sequence its tokens, by priority; returns the budget left."""
        budget = self.max_num_batched_tokens
        before = tuple(self.running)  # Why: forks of this step join `running`, and wait their turn.
        for i, seq in enumerate(before):
            if seq.status is Status.RUNNING:  # else it was preempted by one before it
                # Why: a token is kept for each sequence behind, so no prompt stalls a decode.
                num_behind = len(before) - 1 - i
                budget -= self._schedule_next(plan, scheduled, seq, budget - num_behind)
        return budget

    def _schedule_next(
        self, plan: StepPlan, scheduled: list[Sequence], seq: Sequence, budget: int
    ) -> int:
        """Gives a running sequence its next tokens, at most `budget`; returns how many."""
        start = seq.num_computed_tokens
        num_new = seq.num_tokens + len(seq.draft_token_ids) - start
        if num_new <= 0 or seq.num_tokens >= seq.max_num_tokens:
            return 0  # it awaits a choice, or its last token is still under way
        if num_new > 1:
            self.block_manager.catch_up(seq)
            num_new -= seq.num_computed_tokens - start
            num_new = min(num_new, budget, seq.max_chunk, self.long_prefill_threshold or budget)
            if seq.draft_token_ids:
                num_new = self._trim_drafts(seq, num_new)
        if not self._make_room(plan, seq, num_new):
            return 0
        self._schedule_one(plan, scheduled, seq, num_new)
        return num_new

    def _trim_drafts(self, seq: Sequence, num_new: int) -> int:
        """Keeps the drafts that fit step, sequence and pool; returns the tokens to compute."""
        num_known = seq.num_tokens - seq.num_computed_tokens
        num_drafts = min(num_new - num_known, seq.max_num_tokens - seq.num_tokens - 1)
        if self.forks.are_due(seq):
            num_drafts = 0  # Why: its forks sample from the last position of the prompt
        seq.draft_token_ids = seq.draft_token_ids[: max(num_drafts, 0)]
        num_new = min(num_new, num_known + len(seq.draft_token_ids))
        if seq.draft_token_ids and not self.block_manager.may_append(seq, num_new):
            seq.draft_token_ids = ()  # Why: a guess is no reason to preempt anyone.
            num_new = num_known
        return num_new

    def _make_room(self, plan: StepPlan, seq: Sequence, num_new: int) -> bool:
        """Finds blocks for a running sequence, at the cost of those behind it if need be."""
        while not self.block_manager.may_append(seq, num_new):
            if len(self.running) == 1:
                self._fail(seq, self._too_small_for(seq.num_computed_tokens + num_new))
                return False
            reason = f"seq {seq.seq_id} needs a block and none is free"
            if self._preempt(plan, reason) is seq:
                return False
        return True

    def _break_deadlock(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Preempts running beams until one that is still queued can be admitted.

        Deadlock breaker for beam search: every running beam waits for one that is still queued,
        because their chooser needs the choices of all of them.
        """
        self._drop_ended()
        while self._waiting and self.running and not scheduled:
            assert self.running[-1].awaits_choice, self.running[-1]
            self._preempt(plan, "it awaits a choice, and one that is queued needs row or blocks")
            self._admit(plan, scheduled, self.max_num_batched_tokens)

    def _preempt(self, plan: StepPlan, reason: str) -> Sequence:
        """Takes row and blocks of the latest sequence of the lowest priority, and returns it.

        It keeps its tokens and waits. One that awaits a choice is parked instead, because until
        then there is nothing to compute of it.
        """
        victim = self.running.pop()
        plan.preempted.append(Preemption(victim.seq_id, victim.num_computed_tokens, reason))
        self.stats.preemptions += 1
        awaits_choice = victim.awaits_choice
        self.block_manager.deallocate(victim)
        self._rows.release(victim)
        victim.forget_computed()
        if awaits_choice:
            victim.status = Status.PARKED
        else:
            self._waiting.push(victim)
        return victim

    def _admit(self, plan: StepPlan, scheduled: list[Sequence], budget: int) -> None:
        """Admits waiting sequences by priority and arrival while rows, budget and blocks last."""
        if not self._waiting:
            return
        ahead = LookAhead(self._waiting, self.policy.next_to_admit)
        rows_due = self.forks.num_rows_due
        rows_kept = sum(rows_due(seq) for seq in self.running if seq.params.n > 1)
        while budget > 0 and (seq := ahead.next(few=len(self.running))) is not None:
            forks = rows_due(seq)
            if self._rows.num_free - rows_kept < 1 + forks or seq.num_pending_tokens:
                ahead.pass_over(seq, "token" if seq.num_pending_tokens else "row")
                break
            admission = self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))
            if admission.verdict is Verdict.NEVER:
                self._waiting.push(seq)  # it ends as a waiting one
                self._fail(seq, self._too_small_for(seq.num_tokens))
                continue
            num_new = seq.num_tokens - admission.num_cached_tokens
            too_long = not self.chunked_prefill and num_new > budget
            if admission.verdict is Verdict.LATER or too_long:
                ahead.pass_over(seq, "budget" if too_long else admission.lacks)
                if admission.reason:
                    plan.reasons.append(f"seq {seq.seq_id} waits: {admission.reason}")
                continue
            if self.running and not self.policy.may_admit(
                seq, admission, self.running, self.block_manager
            ):
                ahead.pass_over(seq, "policy")
                break  # Why: what is full soon is so for those behind, too.
            threshold = self.long_prefill_threshold or budget
            num_new = min(num_new, budget, admission.max_chunk, threshold)
            rows_kept += forks
            if admission.reason:
                plan.reasons.append(f"seq {seq.seq_id}: {admission.reason}")
            self._start(plan, seq, admission.num_cached_tokens)
            self.block_manager.allocate(seq, admission)
            has_room = self.block_manager.may_append(seq, num_new)
            assert has_room, seq
            self._schedule_one(plan, scheduled, seq, num_new)
            rows_kept -= forks - rows_due(seq)
            budget -= num_new
            ahead.overtake()
        if ahead.passed_over and not plan.rows:
            plan.reasons.append(
                f"nothing admitted: {ahead.passed_over[0]} waits for blocks or rows"
            )
        plan.waits = ahead.end()

    def _start(self, plan: StepPlan, seq: Sequence, num_cached_tokens: int) -> None:
        """Gives an admitted sequence a row and its place among those that run."""
        self._rows.take(seq)
        seq.status = Status.RUNNING
        seq.num_overtaken = 0
        insort(self.running, seq, key=lambda s: s.order)
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.perf_counter()
            seq.request.num_cached_tokens = num_cached_tokens
        plan.admitted.append(admitted(seq, num_cached_tokens))

    def _schedule_one(
        self, plan: StepPlan, scheduled: list[Sequence], seq: Sequence, num_new: int
    ) -> None:
        """Writes one sequence into the plan and advances its counters."""
        start = seq.num_computed_tokens
        num_drafts = len(seq.draft_token_ids)
        end = start + num_new
        reaches_end = end == seq.num_tokens + num_drafts
        scheduled.append(seq)
        plan.add(seq.row, start, num_new, num_logits=1 + num_drafts if reaches_end else 0)
        if num_drafts:
            plan.draft_token_ids[seq.row] = seq.draft_token_ids
        if num_new == 1 + num_drafts and start >= seq.num_prompt_tokens:
            self.stats.decode_tokens += num_new
        else:
            self.stats.prefill_tokens += num_new
        if start < seq.num_preempted_tokens:
            self.stats.recomputed_tokens += min(end, seq.num_preempted_tokens) - start
        seq.num_computed_tokens = end
        if end // self._block_size > seq.num_registered_blocks:
            self.block_manager.prefix_cache.register(seq)
        if reaches_end and seq.request.chooser is None:
            seq.num_pending_tokens += 1
            if seq.params.n > 1 and self.forks.are_due(seq):
                self.forks.fork_prompt(plan, scheduled, seq)

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Takes the sampled tokens of a step; returns the requests that are finished by it."""
        self._take_results(plan, result, self._in_flight.pop(plan.step, []))
        self.forks.let_choose()
        self._drop_ended()
        self.block_manager.prefix_cache.commit(plan, result)
        self.last_finished, self._done = self._done, []
        self.stats.finished_requests += len(self.last_finished)
        return self.last_finished

    def _take_results(self, plan: StepPlan, result: StepResult, scheduled: list[Sequence]) -> None:
        """Gives each scheduled sequence what the step has sampled for it."""
        now = time.perf_counter()
        for i, seq in enumerate(scheduled):
            self._take_result(plan, result, i, seq, now)

    def _take_result(
        self, plan: StepPlan, result: StepResult, i: int, seq: Sequence, now: float
    ) -> None:
        """Gives the i-th scheduled sequence its error, its choices or its tokens, if it has any."""
        if seq.is_finished:
            return  # aborted, or stopped by a step committed since
        if i in result.prompt_logprobs and seq.index == 0:
            seq.request.extend_prompt_logprobs(plan.starts[i], result.prompt_logprobs[i])
        if i in result.errors:
            held = [block_id for table in seq.block_tables for block_id in table]
            self._fail(seq, result.errors[i])
            # Why: their content may be what is wrong.
            self.block_manager.prefix_cache.invalidate(held)
        elif plan.num_logits[i] and seq.request.chooser is not None:
            self.forks.offer(seq, result.logprobs[i][0][1:])
        elif plan.num_logits[i]:
            num_drafts = plan.num_logits[i] - 1
            tokens = result.token_ids[i]
            seq.num_pending_tokens -= 1
            num_known = len(seq.token_ids)
            if num_drafts:
                seq.draft_token_ids = ()
                seq.num_computed_tokens -= num_drafts - (len(tokens) - 1)
                self.stats.drafted_tokens += num_drafts
                self.stats.accepted_tokens += len(tokens) - 1
            self._append(seq, tokens, result.logprobs.get(i), now)
            self.stats.saved_steps += len(seq.token_ids) - num_known - 1

    def _append(
        self, seq: Sequence, tokens: list[int], logprobs: TokenLogprobs | None, now: float
    ) -> None:
        """Gives a sequence its next tokens, up to one that ends it."""
        if seq.first_token_time is None:
            seq.first_token_time = now
        seq.last_token_time = now
        for j, token_id in enumerate(tokens):
            self.stats.output_tokens += 1
            ending = seq.append(token_id, None if logprobs is None else logprobs[j])
            if ending is not None:
                return self._end(seq, *ending)
        return None

    # --- ends ---------------------------------------------------------------------------------

    def _end(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Gives a sequence its finish reason; its row and blocks are free from now on."""
        if seq.status is Status.RUNNING:
            self.block_manager.deallocate(seq)
            self._rows.release(seq)
            self._any_ended = True
        elif seq.status is Status.WAITING:
            self._waiting.discount()
        seq.finish(reason, stop_reason)
        self.policy.on_finish(seq)
        if reason != "abort" and seq.request.finished:
            self._done.append(seq.request)

    def _fail(self, seq: Sequence, message: str) -> None:
        """Ends a sequence with an error of its own; other requests notice nothing.

        Where a chooser decides, the whole request ends with it, at the next commit.
        """
        seq.request.error = message
        if seq.request.chooser is not None:
            self.forks.undecided.append(seq.request)
        self._end(seq, "error")

    def _too_small_for(self, num_tokens: int) -> str:
        """The message for a sequence that the pool can never hold."""
        manager = self.block_manager
        return (
            f"{num_tokens} tokens need {manager.num_blocks_for(num_tokens)} KV blocks of"
            f" {manager.block_size} tokens, the pool has {manager.pool.num_usable}"
            f" ({manager.num_watermark_blocks} kept as watermark): raise num_kv_blocks or"
            f" kv_cache_gib, or ask for fewer tokens"
        )

    def _drop_ended(self) -> None:
        """Takes out of `running` whoever has ended; `Forks` holds the same list."""
        if self._any_ended:
            self.running[:] = [seq for seq in self.running if seq.status is Status.RUNNING]
            self._any_ended = False

    # --- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if an invariant of queue, rows or blocks is broken."""
        self.block_manager.check(self.running)
        self._rows.check(self.running)
        self._waiting.check()
        assert all(seq.status is Status.RUNNING for seq in self.running)
        assert [s.order for s in self.running] == sorted(s.order for s in self.running)
        for seq in self.running:
            assert seq.num_computed_tokens <= seq.num_tokens + len(seq.draft_token_ids), seq


if __name__ == "__main__":
    __import__("runpy").run_module("nanoengine.core.demos.scheduler")["main"]()
