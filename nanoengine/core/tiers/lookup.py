"""TieredLookup: where the blocks of a prompt are, on the device and in the tiers below it.

    group 0     device   7   3   0   0   0                   prefix_length(DEVICE) = 2 blocks
                below    -   -   host 4  host 9  disk 2      HOST: 4, DISK: 5 blocks

Created by the TieredPrefixCache, which selects the blocks to load from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from nanoengine.core.block_pool import Block
from nanoengine.core.groups.cache import Load
from nanoengine.core.groups.rules import longest_common_hit, num_dropped_blocks
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_tree import Prefix


class Level(IntEnum):
    """The tiers that can hold a block's content, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Content(NamedTuple):
    """The content of a full block; the key of the block in every tier."""

    group: int
    prefix: Prefix


def content_of(block: Block) -> Content:
    """The content of an indexed block."""
    assert block.prefix is not None, block
    return Content(block.group, block.prefix)


@dataclass(slots=True)
class TieredLookup:
    """Per KV group, where the full blocks of a prompt are.

    Attributes:
        device: `device[g][i]` is the i-th block on the device, or the null block. A list ends where
            no longer prefix is possible.
        below: `below[g][i]` is the i-th block in a tier, if it is there and not on the device.
    """

    layout: KVLayout
    device: list[list[int]] = field(default_factory=list)
    below: list[dict[int, Load]] = field(default_factory=list)

    def prefix_length(self, level: Level) -> int:
        """The longest prefix, in blocks, that tiers down to `level` have for all groups."""
        found = [
            [hit or (i in below and below[i].level <= level) for i, hit in enumerate(device)]
            for device, below in zip(self.device, self.below, strict=True)
        ]
        return longest_common_hit(self.layout.groups, found, self.layout.block_size)

    def loads(self, length: int) -> list[Load]:
        """The blocks to load for a prefix of `length` blocks; none outside of a window."""
        size, loads = self.layout.block_size, []
        for group, below in zip(self.layout.groups, self.below, strict=True):
            dropped = num_dropped_blocks(group, length * size, size)
            loads += [load for i, load in below.items() if dropped <= i < length]
        return loads
