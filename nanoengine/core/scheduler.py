"""Scheduler: which sequences compute how many tokens in each step: `schedule`, then `commit`.

    waiting (heap: priority, arrival) ──admit──► running (sorted the same way) ──finish──► done
                    ▲                                  │
                    └───────────preempt────────────────┘

One formula for prefill, chunk, decode and verification: a sequence computes
`min(num_tokens + num_draft_tokens - num_computed_tokens, budget)`. `schedule` never reads the value
of a sampled token, so a step may be planned while the one before it still runs; `commit` brings the
values, one step later if need be. Source: vLLM v1's scheduler (no phases; one budget).

Between steps a sequence may be forked. Where a `TokenChooser` decides the tokens, a sequence whose
tokens are all computed rests: the formula gives 0, so it keeps row and blocks and does nothing.

Called by LLMEngine; asks the BlockManager for blocks; knows no tensors and no features.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable

from nanoengine.core.admission import AdmissionPolicy, WatermarkOnly
from nanoengine.core.block_manager import BlockManager, Verdict
from nanoengine.core.plan import Preemption, StepPlan, StepResult
from nanoengine.core.roster import Roster
from nanoengine.core.row_allocator import admitted
from nanoengine.core.sequence import NO_ROW, Request, Sequence, Status
from nanoengine.core.waiting import LookAhead


class Scheduler(Roster):
    """Plans steps under a token budget, a cap on sequences, and the blocks there are.

    Args:
        block_manager: owns the blocks.
        max_num_seqs: rows; a true cap on running sequences.
        max_num_batched_tokens: token budget of one step, at least max_num_seqs.
        chunked_prefill: False computes a prompt whole or not yet.
        long_prefill_threshold: most prompt tokens of one sequence a step; 0 for no bound.
        policy: may hold back a sequence whose blocks fit; None: admits whoever fits.
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
        super().__init__(
            block_manager,
            max_num_seqs=max_num_seqs,
            policy=WatermarkOnly() if policy is None else policy,
        )
        self._block_size = block_manager.block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.long_prefill_threshold = long_prefill_threshold
        self._in_flight: dict[int, list[Sequence]] = {}

    # --- requests -----------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True while a step has something to do or to commit."""
        return bool(self.running or self._waiting or self._in_flight or self._done)

    def recover(self, requests: Iterable[Request]) -> None:
        """After a failed step: ends all requests, and starts again with an empty pool.

        Why not `abort`: the exception may have come between any two lines, so no counter here
        can be trusted, nor that indexed content was written. The executor's rows are as uncertain:
        the next plan releases all of them.
        """
        for request in requests:
            request.num_forks_due = 0
            for seq in request.sequences:
                if not seq.is_finished:
                    self.block_manager.forget(seq)
                    seq.row = NO_ROW
                    self._set_finished(seq, "abort")
        self.block_manager.discard_all()
        self._clear()
        self._in_flight = {}
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
            self._make_resting_yield(plan, scheduled)
        # Why last: a fork of this step may take the row of a sequence preempted in this step.
        self._rows.tell(plan)
        manager = self.block_manager
        plan.table_updates, manager.updates = manager.updates, []
        plan.block_copies, manager.copies = manager.copies, []
        plan.transfers = manager.tiers.take_transfers(plan, manager.pool)
        self._in_flight[plan.step] = scheduled
        self._drop_ended()
        if not any(self._in_flight.values()):
            manager.tiers.wait()
        return plan

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        """Gives each running sequence its tokens, by priority; returns the budget left."""
        budget, may_append = self.max_num_batched_tokens, self.block_manager.may_append
        rows, starts = plan.rows, plan.starts
        counts, logits = plan.num_scheduled_tokens, plan.num_logits
        before = tuple(self.running)  # Why: forks of this step join `running`, and wait their turn.
        running, num_easy = Status.RUNNING, 0
        for i, seq in enumerate(before):
            if seq.status is not running:
                continue  # preempted by one before it
            start = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens
            num_drafts = len(seq.draft_token_ids)
            num_new = num_tokens + num_drafts - start
            if num_new == 1 and start < seq.slots_ready_until and num_tokens < seq.max_num_tokens:
                # Perf: what `_schedule_one` does to a decode that needs nothing but its slot.
                scheduled.append(seq)
                rows.append(seq.row)
                starts.append(start)
                counts.append(1)
                logits.append(1)
                seq.num_computed_tokens = num_tokens
                seq.num_pending_tokens += 1
                num_easy += 1
                budget -= 1
                continue
            if num_new <= 0 or num_tokens >= seq.max_num_tokens:
                continue  # its last token is still under way
            if num_new > 1:
                self.block_manager.catch_up(seq)
                num_new -= seq.num_computed_tokens - start
                # Why: a token is kept for each sequence behind, so no prompt stalls a decode.
                num_new = min(num_new, budget - (len(before) - 1 - i), seq.max_chunk)
                if self.long_prefill_threshold:
                    num_new = min(num_new, self.long_prefill_threshold)
                if num_drafts:
                    num_new = self._trim_drafts(seq, num_new)
            if not may_append(seq, num_new) and not self._make_room(plan, seq, num_new):
                continue
            self._schedule_one(plan, scheduled, seq, num_new)
            budget -= num_new
        self.stats.decode_tokens += num_easy
        return budget

    def _trim_drafts(self, seq: Sequence, num_new: int) -> int:
        """Keeps the drafts that fit step, sequence and pool; returns the tokens to compute."""
        num_known = seq.num_tokens - seq.num_computed_tokens
        num_drafts = min(num_new - num_known, seq.max_num_tokens - seq.num_tokens - 1)
        if self._has_forks_due(seq):
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
            victim = self.running[-1]
            if len(self.running) == 1:
                self._fail(seq, self._too_small_for(seq.num_computed_tokens + num_new))
                return False
            self._preempt(plan, victim, f"seq {seq.seq_id} needs a block and none is free")
            if victim is seq:
                return False
        return True

    def _make_resting_yield(self, plan: StepPlan, scheduled: list[Sequence]) -> None:
        """Where all that run rest for one that waits, they give up rows and blocks until it fits.

        Why: nobody else would; the choice they rest for needs the waiting one's offer.
        """
        self._drop_ended()
        while self._waiting and self.running and not scheduled:
            victim = self.running[-1]
            assert victim.awaits_choice, victim
            self._preempt(plan, victim, "it rests, and those that wait need its row or blocks")
            self._admit(plan, scheduled, self.max_num_batched_tokens)

    def _preempt(self, plan: StepPlan, victim: Sequence, reason: str) -> None:
        """Takes the lowest-priority, latest sequence's row and blocks; it waits, tokens kept.

        One that rests is parked instead: there is nothing to compute until its token is chosen.
        """
        assert self.running[-1] is victim
        self.running.pop()
        plan.preempted.append(Preemption(victim.seq_id, victim.num_computed_tokens, reason))
        self.stats.preemptions += 1
        victim.num_preempted_tokens = max(victim.num_preempted_tokens, victim.num_computed_tokens)
        awaits_choice = victim.awaits_choice
        victim.num_computed_tokens = 0
        victim.draft_token_ids = ()
        self.block_manager.deallocate(victim)
        self._rows.release(victim)
        if awaits_choice:
            victim.status = Status.PARKED
        else:
            self._waiting.push(victim)

    def _admit(self, plan: StepPlan, scheduled: list[Sequence], budget: int) -> None:
        """Admits waiting sequences by priority and arrival while rows, budget and blocks last."""
        if not self._waiting:
            return
        ahead = LookAhead(self._waiting, self.policy.next_to_admit)
        rows_kept = sum(self._num_forks_due(seq) for seq in self.running if seq.params.n > 1)
        while budget > 0 and (seq := ahead.next(few=len(self.running))) is not None:
            forks = self._num_forks_due(seq)
            if self._rows.num_free - rows_kept < 1 + forks or seq.num_pending_tokens:
                ahead.pass_over(seq)
                break
            admission = self.block_manager.can_allocate(seq, keep_watermark=bool(self.running))
            if admission.verdict is Verdict.NEVER:
                self._waiting.push(seq)  # it ends as a waiting one
                self._fail(seq, self._too_small_for(seq.num_tokens))
                continue
            num_new = seq.num_tokens - admission.num_cached_tokens
            too_long = not self.chunked_prefill and num_new > budget
            if admission.verdict is Verdict.LATER or too_long:
                ahead.pass_over(seq)
                if admission.reason:
                    plan.reasons.append(f"seq {seq.seq_id} waits: {admission.reason}")
                continue
            if self.running and not self.policy.may_admit(
                seq, admission, self.running, self.block_manager
            ):
                ahead.pass_over(seq)  # Why break: what is full soon is so for those behind, too.
                break
            num_new = min(num_new, budget, self.long_prefill_threshold or budget)
            num_new = min(num_new, admission.max_chunk)
            rows_kept += forks
            if admission.reason:
                plan.reasons.append(f"seq {seq.seq_id}: {admission.reason}")
            self._start(plan, seq, admission.num_cached_tokens)
            self.block_manager.allocate(seq, admission)
            has_room = self.block_manager.may_append(seq, num_new)
            assert has_room, seq
            self._schedule_one(plan, scheduled, seq, num_new)
            rows_kept -= forks - self._num_forks_due(seq)
            budget -= num_new
            ahead.overtake()
        if ahead.passed_over and not plan.rows:
            plan.reasons.append(
                f"nothing admitted: {ahead.passed_over[0]} waits for blocks or rows"
            )
        ahead.end()

    def _start(self, plan: StepPlan, seq: Sequence, num_cached_tokens: int) -> None:
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
        plan.rows.append(seq.row)
        plan.starts.append(start)
        plan.num_scheduled_tokens.append(num_new)
        plan.num_logits.append(1 + num_drafts if reaches_end else 0)
        if num_drafts:
            plan.draft_token_ids[seq.row] = seq.draft_token_ids
        if num_new == 1 + num_drafts and start >= seq.num_prompt_tokens:
            self.stats.decode_tokens += num_new
        else:
            self.stats.prefill_tokens += num_new
        if start < seq.num_preempted_tokens:
            again = min(end, seq.num_preempted_tokens) - start
            self.stats.recomputed_tokens += again
        seq.num_computed_tokens = end
        if end // self._block_size > seq.num_registered_blocks:
            self.block_manager.register(seq)
        if reaches_end and seq.request.chooser is None:
            seq.num_pending_tokens += 1
            # Why not with drafts: those that are refused take computed tokens back.
            seq.slots_ready_until = 0 if num_drafts else self.block_manager.slots_ready_until(seq)
            if seq.params.n > 1 and self._has_forks_due(seq):
                self._fork_prompt(plan, scheduled, seq)

    def _fork_prompt(self, plan: StepPlan, scheduled: list[Sequence], parent: Sequence) -> None:
        """Gives a request its other n - 1 sequences: they sample from the parent's logits.

        Those that there are no rows for wait, and compute the end of the prompt once more: a token
        depends on seed, position and logits alone, so it is the same one.
        """
        # Why indices below those of any other fork: who stands between may not preempt them.
        num_placed = self._num_forks_due(parent)
        while parent.request.num_forks_due:
            child = self._make_child(parent, parent.params.n - parent.request.num_forks_due)
            parent.request.num_forks_due -= 1
            if not num_placed:
                self._waiting.push(child)
                continue
            num_placed -= 1
            self._place_beside(child, parent)
            child.num_pending_tokens = 1
            scheduled.append(child)
            plan.rows.append(child.row)
            plan.starts.append(child.num_computed_tokens)
            plan.num_scheduled_tokens.append(0)
            plan.num_logits.append(1)

    # --- commit -------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Takes the sampled tokens of a step; returns the requests that are finished by it."""
        now = time.perf_counter()
        plain = not (result.errors or result.logprobs or result.prompt_logprobs)
        token_ids, num_logits, num_easy = result.token_ids, plan.num_logits, 0
        for i, seq in enumerate(self._in_flight.pop(plan.step, ())):
            if (
                plain
                and seq.slots_ready_until
                and num_logits[i] == 1
                and seq.last_token_time is not None
            ):
                (token_id,) = token_ids[i]
                at_end = len(seq.token_ids) + 1 >= seq.max_num_tokens
                if not (at_end or token_id in seq.stop_ids or seq.follower is not None):
                    # Perf: what `_append` does to a token that goes on and that nobody follows.
                    seq.token_ids.append(token_id)
                    seq.num_pending_tokens -= 1
                    seq.last_token_time = now
                    num_easy += 1
                    continue
            if seq.is_finished:
                continue  # aborted, or stopped by a step committed since
            if i in result.prompt_logprobs:
                self._extend_prompt_logprobs(seq, plan.starts[i], result.prompt_logprobs[i])
            if i in result.errors:
                held = [block_id for table in seq.block_tables for block_id in table]
                self._fail(seq, result.errors[i])
                self.block_manager.distrust(held)  # Why: their content may be what is wrong
            elif plan.num_logits[i] and seq.request.chooser is not None:
                seq.choices = result.logprobs[i][0][1:]
                self._undecided.append(seq.request)
            elif plan.num_logits[i]:
                num_drafts = plan.num_logits[i] - 1
                tokens = result.token_ids[i]
                seq.num_pending_tokens -= 1
                if num_drafts:
                    seq.draft_token_ids = ()
                    seq.num_computed_tokens -= num_drafts - (len(tokens) - 1)
                self._append(seq, tokens, result.logprobs.get(i), now)
        self.stats.output_tokens += num_easy
        self._let_choose()
        self._drop_ended()
        self.block_manager.tiers.commit(plan, result)
        done, self._done = self._done, []
        self.last_finished = done
        self.stats.finished_requests += len(done)
        return done

    # --- small moves --------------------------------------------------------------------------

    def _too_small_for(self, num_tokens: int) -> str:
        manager = self.block_manager
        return (
            f"{num_tokens} tokens need {manager.num_blocks_for(num_tokens)} KV blocks of"
            f" {manager.block_size} tokens, the pool has {manager.pool.num_usable}"
            f" ({manager.num_watermark_blocks} kept as watermark): raise num_kv_blocks or"
            f" kv_cache_gib, or ask for fewer tokens"
        )

    def _let_choose(self) -> None:
        """Calls the choosers whose sequences all rest; ends what a failed one leaves behind."""
        undecided, self._undecided = self._undecided, []
        for request in dict.fromkeys(undecided):
            live = [seq for seq in request.sequences if not seq.is_finished]
            if request.error is not None:  # Why: the others would rest for it for ever
                for seq in live:
                    self._end(seq, "error")
            elif live and request.chooser and all(seq.choices is not None for seq in live):
                request.chooser.choose(request, self)
                assert all(seq.choices is None or seq.is_finished for seq in live), "left to rest"

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
