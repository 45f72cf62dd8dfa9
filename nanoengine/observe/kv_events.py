"""KVEvents: what enters and leaves the prefix cache, in order, for those who mirror it elsewhere.

Enters `BlockPool.observers`. A router, say, that knows which engine holds which prefix sends a
prompt where most of it is cached. Every event comes before any that depends on it: a block is
stored before it is removed, a parent before its child in the same request.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.core.block_pool import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A block's content can be hit from now on. `parent_hash` is None or a salt for a first one."""

    block_id: int
    group: int
    block_hash: bytes
    parent_hash: bytes | None
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
    >>> from nanoengine.core.prefixes import Prefix, pack
    >>> pool, events = BlockPool(num_blocks=3), KVEvents()
    >>> pool.observers.append(events)
    >>> _ = pool.register(pool.allocate(1), 0, [Prefix(b"a", None, pack([5, 6]))])
    >>> events.drain()[0].token_ids, events.drain()
    ((5, 6), [])
    """

    def __init__(self) -> None:
        self._events: list[KVEvent] = []

    def on_block(self, event: str, block: Block) -> None:
        """Keeps what concerns content; a block's references are its own affair."""
        if event == "cleared":
            self._events.append(AllCleared())
        elif event == "stored" and block.hash is not None:
            self._events.append(
                BlockStored(
                    block_id=block.block_id,
                    group=block.group,
                    block_hash=block.hash,
                    parent_hash=block.parent_hash,
                    token_ids=tuple(block.token_ids or ()),
                )
            )
        elif event == "removed" and block.hash is not None:
            self._events.append(
                BlockRemoved(block_id=block.block_id, group=block.group, block_hash=block.hash)
            )

    def drain(self) -> list[KVEvent]:
        """All events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
