"""TierStats: what is counted of one tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TierStats:
    """One tier's blocks now, and those that were moved since the start.

    Attributes:
        name: "host" or "disk".
        block_bytes: of one block; times a count of blocks, what was moved.
        hit_blocks: found in this tier and asked for.
        loaded_blocks: of these, how many have reached the tier above.
        stored_blocks: arrived from the tier above.
        failed_copies: lost to a disk error or a damaged file.
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
