"""TracedDisk: what a disk tier's files have answered, for a trace; ReplayedDisk answers it again.

    DiskBlocks ── collect() ──► TracedDisk ──► DiskStorage        the copies that have finished
                                    └─► "disk" in the line of the call
    DiskBlocks ── collect() ──► ReplayedDisk ◄── "disk" in the line of the call

How long a copy takes, and whether it fails, is the disk's business: the core can't be led through a
run again without its answers.
"""

from __future__ import annotations

import math
from typing import Any

from nanoengine.core.prefix_cache import PrefixCache
from nanoengine.core.prefixes import Prefix, Prefixes
from nanoengine.core.tiers.disk import DiskCopy, Finished, NoDisk
from nanoengine.core.tiers.found import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache


class TracedDisk:
    """A `DiskStorage` that notes what another one answers.

    Args:
        cache: whose storage this one stands in front of.
        answers: its "disk" gets, for each call of `collect`, whether the disk takes no more and
            [group, digest, ok, seconds] of each copy that has finished; [] if neither.

    Attributes:
        can_write: as of the last `collect`, because the disk's own thread may change it at any
            time, and a replay could not know when.
    """

    def __init__(self, cache: TieredPrefixCache, answers: dict[str, list[Any]]) -> None:
        self._cache, self._answers = cache, answers
        self._storage = storage = cache.storage
        self.scan, self.submit, self.close = storage.scan, storage.submit, storage.close
        self.can_write = storage.can_write
        cache.storage = cache.disk.storage = self

    def remove(self) -> None:
        """The cache asks its storage itself again."""
        self._cache.storage = self._cache.disk.storage = self._storage

    def collect(self, wait_s: float) -> list[Finished]:
        finished = self._storage.collect(wait_s)
        self.can_write = self._storage.can_write
        noted = [(*_name(copy), ok, s) for copy, ok, s in finished if copy.kind != "remove"]
        is_full = not self.can_write
        self._answers.setdefault("disk", []).append([is_full, *noted] if is_full or noted else [])
        return finished

    def contents(self) -> dict[str, Any]:
        """What the disk's pool holds, in its order.

        "prefixes" are [parent, tokens], a parent being an earlier one's number or a root's name;
        "blocks" are [group, number of the prefix].
        """
        numbers: dict[Prefix, int] = {}
        prefixes: list[Any] = []
        blocks = []
        for block in self._cache.disk.pool.blocks:
            chain, at = [], block.prefix
            while at is not None and at.parent is not None and at not in numbers:
                chain.append((at, at.parent))
                at = at.parent
            for prefix, parent in reversed(chain):
                named = numbers[parent] if parent in numbers else parent.digest.decode()
                numbers[prefix] = len(prefixes)
                prefixes.append([named, prefix.token_ids])
            if block.prefix is not None:
                blocks.append([block.group, numbers[block.prefix]])
        return {"prefixes": prefixes, "blocks": blocks, "can_write": self.can_write}


def trace_disk(cache: PrefixCache, answers: dict[str, list[Any]]) -> TracedDisk | None:
    """Stands in front of a cache's disk; None if it has none."""
    if not isinstance(cache, TieredPrefixCache) or isinstance(cache.storage, NoDisk):
        return None
    return TracedDisk(cache, answers)


class ReplayedDisk:
    """A `DiskStorage` without a disk.

    Attributes:
        held: the directory's content, as `TracedDisk.contents` tells it.
        answers: what the calls of `collect` return that come next.
    """

    def __init__(self, held: dict[str, Any]) -> None:
        self.held, self.can_write = held, bool(held["can_write"])
        self.answers: list[Any] = []
        self._copies: dict[tuple[int, str], DiskCopy] = {}

    def scan(self, prefixes: Prefixes) -> list[Content]:
        known: list[Prefix] = []
        for parent, token_ids in self.held["prefixes"]:
            before = (
                known[parent] if type(parent) is int else prefixes.root_of_name(parent.encode())
            )
            known.append(prefixes.extend(before, token_ids))
        return [Content(group, known[number]) for group, number in self.held["blocks"]]

    def submit(self, copy: DiskCopy) -> None:
        if copy.kind != "remove":
            self._copies[_name(copy)] = copy

    def collect(self, wait_s: float) -> list[Finished]:
        if not self.answers and wait_s == math.inf and self._copies:
            raise ValueError("the answers of the disk are missing")
        is_full, *finished = (self.answers.pop(0) if self.answers else []) or [False]
        self.can_write = not is_full
        return [Finished(self._copies.pop((group, digest)), ok, seconds)
                for group, digest, ok, seconds in finished]  # fmt: skip

    def close(self) -> None:
        """Nothing to close."""


def _name(copy: DiskCopy) -> tuple[int, str]:
    """What a copy is known by: of a content there is one read or write at a time."""
    return copy.content.group, copy.content.prefix.digest.hex()
