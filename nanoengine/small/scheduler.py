"""Scheduler: which sequences compute how many tokens in a step.

    waiting ──admit──► running ──finish──► done
       ▲                  │
       └─────preempt──────┘

There is no prefill phase and no decode phase. Each sequence computes
`min(num_tokens - num_computed_tokens, remaining budget)` tokens, so one step mixes new prompts,
chunks of long prompts and decodes.

The blocks of a running sequence grow with it. When none is free, the sequence that arrived last is
preempted: its blocks are freed, it keeps its tokens, and computes them again later.
"""

from __future__ import annotations

from collections import deque

from nanoengine.core.plan import AdmittedSequence, Preemption, StepPlan, StepResult
from nanoengine.small.block_manager import BlockManager
from nanoengine.small.sequence import NO_ROW, Sequence


class Scheduler:
    """Plans steps under three limits: tokens per step, running sequences, and blocks.

    Args:
        block_manager: owns the blocks.
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: the token budget per step, at least max_num_seqs, so that every
            running sequence gets a token in every step.
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of arrival
        self.num_steps = 0
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._released: list[int] = []  # rows freed since the last plan
        self._scheduled: list[Sequence] = []  # by the plan in flight

    @property
    def has_unfinished(self) -> bool:
        """True while there is a step to run."""
        return bool(self.waiting or self.running)

    def schedule(self) -> StepPlan:
        """Plans a step: running sequences first, then waiting ones that fit."""
        plan, budget = StepPlan(step=self.num_steps), self.max_num_batched_tokens
        self.num_steps += 1
        self._scheduled = []
        for seq in list(self.running):
            # Why the budget suffices: only the latest sequence can have more than one token to
            # compute, because no sequence is admitted after a chunk that used up the budget.
            num_new = min(seq.num_tokens - seq.num_computed_tokens, budget)
            if seq.row != NO_ROW and self._ensure_blocks(plan, seq, num_new):
                self._schedule_one(plan, seq, num_new)
                budget -= num_new
        if not plan.preempted:  # Why: a preempted sequence would be readmitted at once.
            self._admit(plan, budget)
        plan.table_updates, self.block_manager.updates = self.block_manager.updates, []
        plan.released, self._released = self._released, []
        return plan

    def _ensure_blocks(self, plan: StepPlan, seq: Sequence, num_new: int) -> bool:
        """Allocates blocks for a running sequence; False if it was preempted itself."""
        while not self.block_manager.may_append(seq, num_new):
            victim = self.running.pop()
            reason = f"seq {seq.seq_id} needs a block and none is free"
            plan.preempted.append(Preemption(victim.seq_id, victim.num_computed_tokens, reason))
            self._release(victim)
            self.waiting.appendleft(victim)
            if victim is seq:
                return False
        return True

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admits sequences in the order of arrival, while rows, budget and blocks suffice."""
        while self.waiting and self._free_rows and budget > 0:
            seq = self.waiting[0]
            hits = self.block_manager.find_prefix(seq)
            if not self.block_manager.can_allocate(seq, hits):
                break
            self.running.append(self.waiting.popleft())
            seq.row = self._free_rows.pop()
            self.block_manager.allocate(seq, hits)
            new = AdmittedSequence(seq.row, seq.seq_id, tuple(seq.token_ids), seq.num_prompt_tokens,
                                   seq.num_cached_tokens, seq.params, seq.seed)  # fmt: skip
            plan.admitted.append(new)
            num_new = min(seq.num_tokens - seq.num_computed_tokens, budget)
            self._schedule_one(plan, seq, num_new)
            budget -= num_new

    def _schedule_one(self, plan: StepPlan, seq: Sequence, num_new: int) -> None:
        """Adds one sequence to the plan and advances its counter."""
        start = seq.num_computed_tokens
        seq.num_computed_tokens = start + num_new
        self.block_manager.register(seq, start)
        self._scheduled.append(seq)
        plan.rows.append(seq.row)
        plan.starts.append(start)
        plan.num_scheduled_tokens.append(num_new)
        # A chunk that does not reach the last token samples nothing.
        plan.num_logits.append(int(seq.num_computed_tokens == seq.num_tokens))

    def _release(self, seq: Sequence) -> None:
        """Frees a sequence's blocks and row."""
        self.block_manager.deallocate(seq)
        self._free_rows.append(seq.row)
        self._released.append(seq.row)
        seq.row = NO_ROW

    def commit(self, result: StepResult) -> list[Sequence]:
        """Appends sampled tokens to the sequences; returns the ones that finished."""
        finished = []
        for seq, token_ids in zip(self._scheduled, result.token_ids, strict=True):
            for token_id in token_ids:
                seq.append(token_id)
            if seq.finish_reason is not None:
                self.running.remove(seq)
                self._release(seq)
                finished.append(seq)
        return finished
