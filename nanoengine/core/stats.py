"""What is counted since the start: by the Scheduler and by the PrefixCache.

Read by `LLMEngine.stats()`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 1000
"""Admissions that the recent hit rate looks back on."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the start.

    `prefill_tokens` counts computed tokens that were not sampled in this life of the sequence
    (prompts, and everything recomputed after a preemption); `recomputed_tokens` are those of them
    that had been computed before; `decode_tokens` the rest, drafts among them, right or wrong.
    `drafted_tokens` were verified, `accepted_tokens` of them right.
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


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Tokens that were looked up in the prefix cache and found there.

    Readmissions, of sequences back from preemption, are counted apart: they would flatter the rate.
    Tokens that a prompt takes over from another one later (`BlockManager.catch_up`) count as found.

    `misses` counts the admissions that did not find all of their full blocks, by why the first one
    was missing:

    cold      no sequence has computed it lately
    evicted   it was cached, and its block was needed
    salt      it is cached under another cache salt
    short     there is none: the prompt has no full block before its last token

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
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count_late(self, hit: int, *, again: bool) -> None:
        """Counts tokens found after admission; `again` for a sequence back from preemption."""
        if again:
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
        """Share of queried tokens that were found, readmissions not counted."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def recent_hit_rate(self) -> float:
        """The same over the last 1,000 admissions."""
        queried = sum(queried for queried, _ in self._recent)
        return sum(hit for _, hit in self._recent) / queried if queried else 0.0
