"""FastScheduler: the Scheduler with a shortcut for decodes that need nothing but their slot.

Of `block_size` decodes of a sequence all but two need no block, no copy and no entry in the prefix
cache. The Scheduler finds that out by asking the BlockManager each time. This one asks once a
block, and keeps the answer in `Sequence.slots_ready_until`. It makes the same plans, which
tests/core/test_engine_machine.py compares step by step. Chosen by build.py; read the Scheduler.

Perf: with 1,024 running sequences a plan takes 0.3 ms in place of 1.6, a commit 0.3 in place of 1.2
(one core of an AMD EPYC; docs/experiments.md).
"""

from __future__ import annotations

import time

from nanoengine.core.plan import StepPlan, StepResult
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence, Status


class FastScheduler(Scheduler):
    """Makes the Scheduler's plans in less time."""

    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        budget, num_easy = self.max_num_batched_tokens, 0
        rows, starts = plan.rows, plan.starts
        counts, logits = plan.num_scheduled_tokens, plan.num_logits
        before, running = tuple(self.running), Status.RUNNING
        num_behind = len(before)
        for seq in before:
            num_behind -= 1
            if seq.status is not running:
                continue
            start = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) + seq.num_pending_tokens
            if (
                start < seq.slots_ready_until
                and num_tokens - start == 1
                and not seq.draft_token_ids
                and num_tokens < seq.max_num_tokens
            ):
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
            num_new = self._schedule_next(plan, scheduled, seq, budget - num_behind)
            budget -= num_new
            if num_new:
                is_decode = num_new == logits[-1] == 1 and start >= seq.num_prompt_tokens
                # Why pending: where a chooser decides, no token follows by itself.
                seq.slots_ready_until = (
                    self.block_manager.slots_ready_until(seq)
                    if is_decode and seq.num_pending_tokens
                    else 0
                )
        self.stats.decode_tokens += num_easy
        return budget

    def _take_results(self, plan: StepPlan, result: StepResult, scheduled: list[Sequence]) -> None:
        if result.errors or result.logprobs or result.prompt_logprobs:
            return super()._take_results(plan, result, scheduled)
        now = time.perf_counter()
        token_ids, num_logits, num_easy = result.token_ids, plan.num_logits, 0
        for i, seq in enumerate(scheduled):
            # Why the first: one that has ended, or was preempted, has no slots.
            if seq.slots_ready_until and num_logits[i] == 1 and seq.last_token_time is not None:
                (token_id,) = token_ids[i]
                at_end = len(seq.token_ids) + 1 >= seq.max_num_tokens
                if not (at_end or token_id in seq.stop_ids or seq.follower is not None):
                    seq.token_ids.append(token_id)
                    seq.num_pending_tokens -= 1
                    seq.last_token_time = now
                    num_easy += 1
                    continue
            self._take_result(plan, result, i, seq, now)
        self.stats.output_tokens += num_easy
        return None
