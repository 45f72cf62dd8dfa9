"""Shard: which part of a tensor-parallel model this process holds.

A value, never a global, so that two ranks can live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world_size`.

    >>> Shard(1, 2).slice(8)
    slice(4, 8, None)
    """

    rank: int = 0
    world_size: int = 1

    def split(self, size: int, what: str = "dimension") -> int:
        """The size of one part. Raises ValueError if `size` does not divide evenly."""
        if size % self.world_size:
            raise ValueError(f"{what} of {size} does not divide over {self.world_size} ranks")
        return size // self.world_size

    def of_heads(self, num_heads: int) -> Shard:
        """The shard by which KV heads are split: this one, or where ranks are more than heads, one
        that neighbours share, since the query heads of each attend one and the same head.

        >>> [Shard(rank, 4).of_heads(2) for rank in (1, 2)]
        [Shard(rank=0, world_size=2), Shard(rank=1, world_size=2)]
        """
        if num_heads >= self.world_size:
            return self
        return Shard(self.rank * num_heads // self.world_size, num_heads)

    def slice(self, size: int, what: str = "dimension") -> slice:
        """Where this rank's part lies in a dimension of `size`."""
        part = self.split(size, what)
        return slice(self.rank * part, (self.rank + 1) * part)
