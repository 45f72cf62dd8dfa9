"""CacheStats: how often prompts are found in the prefix cache, and why not; TierStats: what moved.

Kept by the BlockManager at each admission, and by Tiers; read by `LLMEngine.stats()`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 1000
"""Admissions that the recent hit rate looks back on."""


@dataclass(slots=True, kw_only=True)
class CacheStats:
    """Tokens looked up in the prefix cache at admission, and found; readmissions apart.

    Found are also those that another sequence has computed by the time it is their turn.
    `misses` counts the admissions that did not find all their full blocks, by what the first
    missing one was: "cold" (never seen), "evicted" (was here), "salt" (here under another salt), or
    "short": the prompt has no full block before its last token.

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
        """Counts tokens found after admission; `again`: by a sequence back from preemption."""
        if again:
            self.readmit_hit_tokens += hit
        else:
            self.hit_tokens += hit

    def count(self, queried: int, hit: int, *, miss: str | None = None) -> None:
        """Counts one admission; `miss` says why not all was found."""
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


@dataclass(slots=True, kw_only=True)
class TierStats:
    """One tier's block counts now, and what has moved since the start.

    `hit_blocks` were found here and asked for, `loaded_blocks` of them reached the level above;
    `stored_blocks` arrived from it; `failed_copies` were lost to a disk error or a damaged file.
    """

    name: str
    block_bytes: int
    empty_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    failed_copies: int = 0
