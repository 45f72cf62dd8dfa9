"""Places: where the blocks of a prompt are found, on the device and in the tiers below it.

Made by the BlockManager for each admission, read by Tiers to choose what to load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.kv_groups import longest_common_hit, num_dropped_blocks
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefixes import Prefix


class Level(IntEnum):
    """Where a block's content is, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class TierBlock(NamedTuple):
    """A block id of one tier's pool."""

    level: Level
    block_id: int


class Content(NamedTuple):
    """What a full block holds: the key of every pool's index, and of copies under way."""

    group: int
    prefix: Prefix


def content_of(block: Block) -> Content:
    """What an indexed block holds."""
    assert block.prefix is not None, block
    return Content(block.group, block.prefix)


@dataclass(slots=True)
class Found:
    """For each KV group, where the full blocks of a prompt are.

    `device[g][i]` is the i-th block's id on the device, or the null block; what is not there but in
    a tier is in `below[g]`, by i. A group's list ends where no longer prefix is to be had.
    """

    layout: KVLayout
    device: list[list[int]] = field(default_factory=list)
    below: list[dict[int, TierBlock]] = field(default_factory=list)

    def reach(self, level: Level) -> int:
        """The longest prefix, in blocks, that every group can start from with hits to `level`."""

        num_blocks = min(map(len, self.device))
        if all(map(all, self.device)):  # Why: mostly so; no group's list has a null entry.
            return num_blocks

        def has(g: int, n: int) -> list[bool]:
            below, device = self.below[g], self.device[g]
            return [
                device[i] != NULL_BLOCK or (i in below and below[i].level <= level)
                for i in range(n)
            ]

        return longest_common_hit(self.layout.groups, has, num_blocks, self.layout.block_size)

    def take(self, length: int) -> tuple[list[list[int]], list[tuple[int, int, TierBlock]]]:
        """The tables that start with the first `length` blocks, and what is loaded into them.

        A load is (group, index, place); its entry, like those before a window, is the null block.
        """
        tables, loads = [], []
        for g, group in enumerate(self.layout.groups):
            size = self.layout.block_size
            dropped = num_dropped_blocks(group, length * size, size)
            tables.append([NULL_BLOCK] * dropped + self.device[g][dropped:length])
            if self.below[g]:
                loads += [(g, i, p) for i, p in self.below[g].items() if dropped <= i < length]
        return tables, loads
