"""What a disk tier has answered, for a trace; ReplayedDisk answers it again.

    DiskBlocks ── collect() ──► DiskStorage        a tap writes "disk" into the line of the call
    DiskBlocks ── collect() ──► ReplayedDisk ◄── "disk" in the line of the call

How long a copy takes, and whether it fails, is not decided by the core, so a replay needs these
answers.
"""

from __future__ import annotations

import math
from typing import Any

from nanoengine.core.prefixes import Prefix, Prefixes
from nanoengine.core.tiers.disk import DiskCopy, DiskStorage, Finished
from nanoengine.core.tiers.found import Content
from nanoengine.core.tiers.tiered_cache import TieredPrefixCache


def disk_answer(storage: DiskStorage, finished: list[Finished]) -> list[Any]:
    """A call of `collect`, for a trace: whether the disk takes no more, and [group, digest, ok,
    seconds] of each copy that has finished; [] if neither."""
    noted = [(*_name(copy), ok, s) for copy, ok, s in finished if copy.kind != "remove"]
    return [not storage.can_write, *noted] if noted or not storage.can_write else []


def disk_contents(cache: TieredPrefixCache) -> dict[str, Any]:
    """What the disk's pool holds, in its order.

    "prefixes" are [parent, tokens], a parent being an earlier one's number or a root's name;
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
        held: the directory's content, as `disk_contents` returns it.
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
