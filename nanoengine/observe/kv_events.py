"""KVEvents: what enters and leaves the prefix cache, in order, so that others can mirror it.

A router, for example, that knows which engine caches which prefix can send a prompt where most of
it is cached. Each event comes before those that depend on it: a block is stored before it is
removed, and in one request a parent before its child. Enters `BlockPool.observers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.block_pool import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block's content can be hit from now on.

    The hash names the block's tokens and all before them. `parent_hash` is that of the block before
    it; of a first block it is empty, or made from the request's cache salt.
    """

    block_id: int
    group: int
    block_hash: bytes
    parent_hash: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A block's content is gone; another block may hold the same."""

    block_id: int
    group: int
    block_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
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
        prefix = block.prefix
        if event == "cleared":
            self._events.append(AllCleared())
        elif event == "stored":
            assert prefix is not None and prefix.parent is not None, block
            self._events.append(
                BlockStored(
                    block_id=block.block_id,
                    group=block.group,
                    block_hash=prefix.digest,
                    parent_hash=prefix.parent.digest,
                    token_ids=tuple(prefix.token_ids),
                )
            )
        elif event == "removed":
            assert prefix is not None, block
            self._events.append(
                BlockRemoved(block_id=block.block_id, group=block.group, block_hash=prefix.digest)
            )

    def drain(self) -> list[KVEvent]:
        """All events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
