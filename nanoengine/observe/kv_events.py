"""KVEvents: what enters and leaves the prefix cache, in order, so that others can mirror it.

A router, for example, that knows which engine caches which prefix can send a prompt where most of
it is cached. Each event comes before those that depend on it: a block is stored before it is
removed, and in one request a parent before its child. Enters `BlockPool.observers`.
"""

from __future__ import annotations

from typing import NamedTuple

from nanoengine.core.block_pool import Block


class BlockStored(NamedTuple):
    """A block's content can be hit from now on.

    The hash names the block's tokens and all before them. `parent_hash` is that of the block before
    it; of a first block it is empty, or made from the request's cache salt.
    """

    block_id: int
    group: int
    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]


class BlockRemoved(NamedTuple):
    """A block's content is gone; another block may hold the same."""

    block_id: int
    group: int
    block_hash: bytes


class AllCleared(NamedTuple):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllCleared


class KVEvents:
    """Collects events until `drain` takes them.

    >>> from nanoengine.core.block_pool import BlockPool
    >>> from nanoengine.core.prefixes import Prefixes
    >>> pool, events, prefixes = BlockPool(num_blocks=3), KVEvents(), Prefixes()
    >>> pool.observers.append(events)
    >>> _ = pool.register(pool.allocate(1), 0, [prefixes.extend(prefixes.root(None), [5, 6])])
    >>> events.drain()[0].token_ids, events.drain()
    ((5, 6), [])
    """

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def on_block(self, event: str, block: Block) -> None:
        """Collects what concerns content; "freed" and "reused" are about references only."""
        if event == "cleared":
            self._events.append(AllCleared())
        elif event in ("stored", "removed"):
            prefix = block.prefix
            assert prefix is not None and prefix.parent is not None, block
            what = block.block_id, block.group, prefix.digest
            self._events.append(
                BlockRemoved(*what)
                if event == "removed"
                else BlockStored(*what, prefix.parent.digest, tuple(prefix.token_ids))
            )

    def drain(self) -> list[KVEvent]:
        """All events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
