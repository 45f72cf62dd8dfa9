"""SchedulerStats: what the Scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start.

    `prefill_tokens` counts computed tokens that were not sampled in this life of the sequence
    (prompts, and everything recomputed after a preemption); `recomputed_tokens` are those of them
    that had been computed before; `decode_tokens` the rest, drafts among them, right or wrong.
    `saved_steps` counts steps that a sequence did not take, because a draft had its token already.
    """

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    saved_steps: int = 0
    preemptions: int = 0
    finished_requests: int = 0

    @property
    def prefill_waste_frac(self) -> float:
        """Share of prefill work that preemptions made necessary again."""
        return self.recomputed_tokens / self.prefill_tokens if self.prefill_tokens else 0.0
