"""SlowScheduler: the formula per sequence and step, as an oracle for the Scheduler's fast path.

It calls the BlockManager at each decode, and uses the general path for each token.
"""

from __future__ import annotations

from nanoengine.core.plan import StepPlan
from nanoengine.core.scheduler import Scheduler
from nanoengine.core.sequence import Sequence, Status


class SlowScheduler(Scheduler):
    def _schedule_running(self, plan: StepPlan, scheduled: list[Sequence]) -> int:
        budget = self.max_num_batched_tokens
        sequences = tuple(self.running)
        for i, seq in enumerate(sequences):
            if seq.status is Status.RUNNING:
                num_later = len(sequences) - 1 - i
                budget -= self._schedule_next(plan, scheduled, seq, budget - num_later)
            assert seq.slots_ready_until == 0
        return budget
