"""Counters since the start, of the Scheduler and of the PrefixCache.

Read by `LLMEngine.stats()`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

NUM_RECENT = 1000
"""Number of admissions that the recent hit rate covers."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start.

    `prefill_tokens` counts computed tokens that were not sampled since the sequence's last
    admission (prompts, and all tokens recomputed after a preemption). `recomputed_tokens` are the
    part of them that had been computed before. `decode_tokens` are all others, including accepted
    and rejected drafts. `drafted_tokens` were verified, and `accepted_tokens` of them accepted.
    `saved_steps` counts the steps that sequences skipped because a draft was accepted.
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
        """Share of prefill work that was repeated because of preemptions."""
        return self.recomputed_tokens / self.prefill_tokens if self.prefill_tokens else 0.0


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Tokens that were looked up in the prefix cache, and tokens found there.

    Readmissions after preemption are counted separately, because they would inflate the rate.
    Tokens of blocks that a running prompt reuses (`BlockManager.reuse_filled_blocks`) count as
    found.

    `misses` counts the admissions that did not find all of their full blocks, by the reason why the
    first missing block was not cached:

    cold      no sequence has computed it recently
    evicted   it was cached, and its block was needed for other content
    salt      it is cached under another cache salt
    short     the prompt has no full block before its last token

    >>> stats = CacheStats()
    >>> stats.count(100, 64); stats.count(100, 0, miss="cold")
    >>> stats.hit_rate, stats.recent_hit_rate, stats.misses["cold"]
    (0.32, 0.32, 1)
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    readmit_queried_tokens: int = 0
    readmit_hit_tokens: int = 0
    misses: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("cold", "evicted", "salt", "short"), 0)
    )
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))

    def count_late_hits(self, hit: int, *, readmitted: bool) -> None:
        """Counts tokens found after the admission, or the readmission after a preemption."""
        if readmitted:
            self.readmit_hit_tokens += hit
        else:
            self.hit_tokens += hit

    def count(self, queried: int, hit: int, *, miss: str | None = None) -> None:
        """Counts the tokens of one admission; `miss` is the reason if not all were found."""
        self.queried_tokens += queried
        self.hit_tokens += hit
        self._recent.append((queried, hit))
        if miss is not None:
            self.misses[miss] += 1

    @property
    def hit_rate(self) -> float:
        """Share of queried tokens that were found, without readmissions."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """The same over the last 1,000 admissions."""
        queried = sum(queried for queried, _ in self._recent)
        return sum(hit for _, hit in self._recent) / queried if queried else 0.0
