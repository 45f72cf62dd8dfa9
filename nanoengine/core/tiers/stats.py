"""TierStats: counters of one tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TierStats:
    """One tier's current block counts, and the blocks moved since the start.

    Attributes:
        name: "host" or "disk".
        block_bytes: bytes per block.
        hit_blocks: blocks found in this tier and requested.
        loaded_blocks: requested blocks that have reached the tier above.
        stored_blocks: blocks that arrived from the tier above.
        failed_copies: blocks lost to a disk error or a damaged file.
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
