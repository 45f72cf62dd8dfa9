"""The results of a disk tier, for a trace; ReplayedDisk returns them again.

    DiskBlocks ── collect() ──► DiskStorage        a hook writes "disk" into the line of the call
    DiskBlocks ── collect() ──► ReplayedDisk ◄── "disk" in the line of the call

The core does not decide how long a copy takes or whether it fails, so a replay needs the results.
"""

from __future__ import annotations

import math
from typing import Any

from nanoengine.core.prefix_tree import Prefix, PrefixTree
from nanoengine.core.tiers.disk import DiskCopy, DiskStorage, FinishedCopy
from nanoengine.core.tiers.lookup import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache


def disk_result(storage: DiskStorage, finished: list[FinishedCopy]) -> list[Any]:
    """The result of a call of `collect`, for a trace: whether the disk refuses writes, then [group,
    digest, ok, seconds] per finished copy; [] if there is neither."""
    noted = [(*_name(copy), ok, s) for copy, ok, s in finished if copy.kind != "remove"]
    return [not storage.can_write, *noted] if noted or not storage.can_write else []


def disk_contents(cache: TieredPrefixCache) -> dict[str, Any]:
    """The content of the disk's pool, in order.

    "prefixes" are [parent, tokens]; a parent is the number of an earlier one or the name of a root.
    "blocks" are [group, number of the prefix].
    """
    numbers: dict[Prefix, int] = {}
    prefixes: list[Any] = []
    blocks = []
    for block in cache.disk.pool.blocks:
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
    return {"prefixes": prefixes, "blocks": blocks, "can_write": cache.storage.can_write}


class ReplayedDisk:
    """A `DiskStorage` without a disk.

    Attributes:
        contents: the content of the directory, as `disk_contents` returns it.
        results: the results of the next calls of `collect`.
    """

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents, self.can_write = contents, bool(contents["can_write"])
        self.results: list[Any] = []
        self._copies: dict[tuple[int, str], DiskCopy] = {}

    def scan(self, prefixes: PrefixTree) -> list[Content]:
        known: list[Prefix] = []
        for parent, token_ids in self.contents["prefixes"]:
            before = (
                known[parent] if type(parent) is int else prefixes.root_of_digest(parent.encode())
            )
            known.append(prefixes.extend(before, token_ids))
        return [Content(group, known[number]) for group, number in self.contents["blocks"]]

    def submit(self, copy: DiskCopy) -> None:
        if copy.kind != "remove":
            self._copies[_name(copy)] = copy

    def collect(self, wait_s: float) -> list[FinishedCopy]:
        if not self.results and wait_s == math.inf and self._copies:
            raise ValueError("the results of the disk tier are missing")
        is_full, *finished = (self.results.pop(0) if self.results else []) or [False]
        self.can_write = not is_full
        return [FinishedCopy(self._copies.pop((group, digest)), ok, seconds)
                for group, digest, ok, seconds in finished]  # fmt: skip

    def close(self) -> None:
        """Nothing to close."""


def _name(copy: DiskCopy) -> tuple[int, str]:
    """The key of a copy: there is at most one read or write per content at a time."""
    return copy.content.group, copy.content.prefix.digest.hex()
