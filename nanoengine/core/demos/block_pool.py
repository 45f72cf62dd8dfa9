"""The pool alone: blocks are handed out, shared, freed, kept for their content, and evicted."""

from __future__ import annotations

from nanoengine.core.block_pool import BlockPool
from nanoengine.core.prefixes import Prefixes


def main() -> None:
    """Prints the pool after each call, a character a block."""
    pool, prefixes = BlockPool(num_blocks=12), Prefixes()
    print("0 null   . empty   c cached   1 2 ... active, with that many references\n")
    print(f"{pool}  a new pool: the null block and 11 empty ones")
    table = pool.allocate(4)
    print(f"{pool}  a prompt takes blocks {table}")
    full = prefixes.follow(prefixes.root(None), list(range(12)), 4)
    pool.register(table[:3], 0, full)
    print(f"{pool}  three of them are full: their content is in the index now")
    pool.share(table)
    print(f"{pool}  a fork shares all four")
    pool.free(reversed(table))
    print(f"{pool}  one of the two ends")
    pool.free(reversed(table))
    print(f"{pool}  the other ends: full blocks stay cached, the partial one is empty")
    hits = pool.lookup_all(0, full[:2])
    pool.touch(hits)
    print(f"{pool}  a prompt that begins alike hits blocks {hits}")
    taken = pool.allocate(9)
    print(f"{pool}  nine more: the empty ones first, then block {taken[-1]} is evicted")
    assert pool.lookup(0, full[2]) is None
    pool.free(reversed(hits))
    print(f"{pool}  the hit ends; what it held stays, the tail in front of the head in the queue")
    print(f"{'':{pool.num_blocks}}  next to be evicted: {pool.next_evicted(2)}")
    pool.check()
