"""Residency: how long cached content stays in the pool, is idle, and waits for its reuse.

It shows whether the pool is too large or too small. If content is idle for a long time before it is
removed, a smaller pool is enough. If reuse gaps are as long as lifetimes, content is often removed
just before its next use, and a larger pool would have more hits.

Add it to `BlockPool.observers`. By default, it observes one block in 16.

    stored ──── in use ──── freed ─────────► reused ──── freed ──────────► removed
    │                         └─ reuse gap ─┘              └── idle time ──┘ │
    └──────────────────────────────── lifetime ──────────────────────────────┘
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from nanoengine.core.block_pool import Block


class Residency:
    """Histograms of seconds in powers of two.

    Args:
        every: samples the blocks whose id is a multiple of this; 1 observes all blocks.
        clock: returns seconds.

    The key of an entry is its upper bound: `{0.5: 3}` counts three spans of more than 0.25 s and at
    most 0.5 s.
    """

    def __init__(self, every: int = 16, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lifetime_s: dict[float, int] = {}
        self.idle_s: dict[float, int] = {}
        self.reuse_gap_s: dict[float, int] = {}
        self._every = every
        self._clock = clock
        self._stored: dict[int, float] = {}
        self._freed: dict[int, float] = {}

    def on_block(self, event: str, block: Block) -> None:
        """Notes the time of the event, and the span that it ends."""
        block_id = block.block_id
        if event == "cleared":
            self._stored.clear()
            self._freed.clear()
        elif block_id % self._every == 0:
            now = self._clock()
            if event in ("stored", "freed"):
                (self._stored if event == "stored" else self._freed)[block_id] = now
                return
            spans = self.reuse_gap_s if event == "reused" else self.idle_s
            self._count(spans, now, self._freed.pop(block_id, None))
            if event == "removed":
                self._count(self.lifetime_s, now, self._stored.pop(block_id, None))

    def _count(self, histogram: dict[float, int], now: float, start: float | None) -> None:
        if start is not None:
            bound = 2.0 ** math.ceil(math.log2(max(now - start, 2**-20)))
            histogram[bound] = histogram.get(bound, 0) + 1

    def __str__(self) -> str:
        """One line per histogram."""
        names = "lifetime", "idle before removal", "reuse gap"
        spans = self.lifetime_s, self.idle_s, self.reuse_gap_s
        return "\n".join(
            f"{name:<20}"
            + "  ".join(f"<= {bound:g} s: {count}" for bound, count in sorted(histogram.items()))
            for name, histogram in zip(names, spans, strict=True)
        )
