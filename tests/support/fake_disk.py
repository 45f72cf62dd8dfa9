"""FakeDisk: a DiskStorage whose copies complete later, and fail now and then.

Bytes are read and written only when a copy completes, so code that releases a block before then
fails.
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import Any

from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_tree import PrefixTree
from nanoengine.core.tiers.cost import CostModel, LoadCost
from nanoengine.core.tiers.disk import DiskCopy, FinishedCopy
from nanoengine.core.tiers.lookup import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache


class FakeDisk:
    """Files are entries of a dict; `host` is the fake executor's host memory."""

    def __init__(self, host: dict[int, list[int | None]], random: Random) -> None:
        self.host = host
        self.random = random
        self.can_write = True
        self.files: dict[Content, list[int | None]] = {}
        self.queue: deque[DiskCopy] = deque()
        self.ended: list[FinishedCopy] = []
        self.closed = False

    def scan(self, prefixes: PrefixTree) -> list[Content]:
        return list(self.files)

    def submit(self, copy: DiskCopy) -> None:
        assert not self.closed
        self.queue.append(copy)

    def finish(self, ok: bool = True) -> None:
        """Completes the first pending copy."""
        copy = self.queue.popleft()
        if copy.kind == "remove":
            ok = self.files.pop(copy.content, None) is not None
        elif copy.kind == "write" and ok:
            self.files[copy.content] = list(self.host[copy.host_id])
        elif copy.kind == "read":
            slots = self.files.get(copy.content)
            ok = ok and slots is not None
            # Why: a read that fails may leave anything in its host block.
            self.host[copy.host_id] = list(slots) if ok and slots else [-1]
            if not ok:
                self.files.pop(copy.content, None)
        self.ended.append(FinishedCopy(copy, ok, 0.001))

    def collect(self, wait_s: float) -> list[FinishedCopy]:
        for _ in range(min(self.random.choice([0, 0, 1, 2, 6]), len(self.queue))):
            self.finish(ok=self.random.random() < 0.9)
        while self.queue and (wait_s == math.inf or (wait_s and not self.ended)):
            self.finish()
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.collect(math.inf)
        self.closed = True


class QuickDisk(FakeDisk):
    """Each copy is complete when it is polled, and none fails."""

    def collect(self, wait_s: float) -> list[FinishedCopy]:
        while self.queue:
            self.finish()
        ended, self.ended = self.ended, []
        return ended


def make_tiers(layout: KVLayout, disk: FakeDisk, **options: Any) -> TieredPrefixCache:
    """A host tier and a disk tier that load every block they have."""
    cost = CostModel(host=LoadCost(1, policy="load"), disk=LoadCost(1, policy="load"))
    options = {"num_host_blocks": 40, "num_disk_blocks": 40, "cost": cost} | options
    return TieredPrefixCache(layout, disk=disk, **options)
