"""BlockPool: who owns each KV block, which content it holds, and which block goes next. Ints only.

    block 0        the null block: a placeholder, never allocated, hashed or freed
    active         reference count > 0
    cached         reference count 0, content indexed: evictable, oldest first, or revived by a hit
    empty          reference count 0, no content: handed out before any cached block

    allocate                touch (a hit)
    empty ───────► active ◄────────────── cached
      ▲               │ free: no hash        ▲ │
      └───────────────┘ free: has a hash ────┘ │
      ▲                                        │ evict (inline, when allocate finds no empty block)
      └────────────────────────────────────────┘

The same class keeps every tier (device, host, disk): only the mover of bytes differs. Called by the
BlockManager; knows nothing of sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from nanoengine.core.prefixes import Prefix

NULL_BLOCK = 0


class Block:
    """One block: who refers to it and, once full, what it holds.

    `prefix` is None while the block has no indexed content. `group` is the KV group whose layers
    filled it.
    """

    __slots__ = ("block_id", "group", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.group = 0
        self.prefix: Prefix | None = None

    @property
    def hash(self) -> bytes | None:
        """Digest of its whole prefix, None without content."""
        return None if self.prefix is None else self.prefix.digest

    @property
    def parent_hash(self) -> bytes | None:
        """Digest of the block before it, or of a root; None without content."""
        parent = None if self.prefix is None else self.prefix.parent
        return None if parent is None else parent.digest

    @property
    def token_ids(self) -> Sequence[int] | None:
        """Its own tokens, None without content."""
        return None if self.prefix is None else self.prefix.token_ids

    def __repr__(self) -> str:
        name = self.prefix.digest.hex()[:8] if self.prefix else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, hash={name})"


class BlockObserver(Protocol):
    """Watches blocks; it may not change anything."""

    def on_block(self, event: str, block: Block) -> None:
        """Told, in causal order, of content that is

        "stored" (may be hit), "freed" (nobody uses it), "reused" (a hit has revived it), "removed"
        (called while the block still has it), and of all of it "cleared" (with the null block).
        """


class BlockPool:
    """A fixed number of blocks with reference counts, a content index and an LRU queue.

    Every operation is O(1) a block. Source: vLLM v1's block pool (null block, cached free blocks);
    the OrderedDict as LRU queue with O(1) removal from the middle is ours.

    >>> pool, prefix = BlockPool(num_blocks=4), Prefix(b"a", None, (5, 6))
    >>> pool.allocate(2)
    [1, 2]
    >>> pool.register(1, 0, prefix)
    >>> pool.free([2, 1]); pool.counts()
    {'empty': 2, 'cached': 1, 'active': 0}
    >>> pool.lookup(0, prefix)
    1
    >>> pool.touch(1); pool.blocks[1]
    Block(1, refs=1, hash=61)
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        # Why: a stack, since a block without content has no age; popped from the end, lowest first.
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Why: lists, since two blocks may hold one content: tables are append-only.
        self._index: list[dict[Prefix, list[int]]] = [{} for _ in range(num_groups)]
        self.num_evicted = 0
        # Digests evicted lately, oldest first. Why ordered: the first key of a plain dict is found
        # by walking over all that were deleted before it.
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self.observers: list[BlockObserver] = []

    # --- counts -------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now: empty and cached."""
        return len(self._empty) + len(self._cached)

    def counts(self) -> dict[str, int]:
        """Empty, cached and active blocks; together `num_usable`."""
        empty, cached = len(self._empty), len(self._cached)
        return {"empty": empty, "cached": cached, "active": self.num_usable - empty - cached}

    # --- life of a block ----------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each: empty ones, then the oldest cached.

        The caller checks `num_free` first; running out is a bug, not a condition.
        """
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free"
        block_ids = []
        for _ in range(count):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._forget(self.blocks[block_id])
                self.num_evicted += 1
            self.blocks[block_id].ref_count = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each active block; null entries are passed over."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                block = self.blocks[block_id]
                assert block.ref_count > 0, f"{block} is not active"
                block.ref_count += 1

    def touch(self, block_id: int) -> None:
        """Adds a reference to a block that a lookup named; a cached one becomes active again."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            del self._cached[block_id]
            if self.observers:
                self._tell("reused", block)
        block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each block, in the given order; null entries are passed over.

        Callers pass a table tail first: of equally old blocks, the one with the longest prefix
        before it is then evicted first. Raises ValueError for a block that is free already.
        """
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            block = self.blocks[block_id]
            if block.ref_count == 0:
                raise ValueError(f"{block} is freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.prefix is None:
                    self._empty.append(block_id)
                else:
                    self._cached[block_id] = None
                    if self.observers:
                        self._tell("freed", block)

    # --- content index ------------------------------------------------------------------------

    def register(self, block_id: int, group: int, prefix: Prefix) -> None:
        """Indexes the content of a full, active block."""
        block = self.blocks[block_id]
        assert block_id != NULL_BLOCK and block.ref_count > 0 and block.prefix is None, block
        block.group = group
        block.prefix = prefix
        self._index[group].setdefault(prefix, []).append(block_id)
        if self.observers:
            self._tell("stored", block)

    def lookup(self, group: int, prefix: Prefix) -> int | None:
        """A block with this content, active or cached, or None. Changes nothing."""
        same = self._index[group].get(prefix)
        return same[0] if same else None

    def next_evicted(self, count: int) -> list[int]:
        """The cached blocks that the next `count` allocations would evict, in that order."""
        return list(islice(self._cached, max(0, count - len(self._empty))))

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of those given blocks that are cached; returns how many were."""
        evicted = 0
        for block_id in block_ids:
            if block_id in self._cached:
                del self._cached[block_id]
                self._forget(self.blocks[block_id])
                self._empty.append(block_id)
                evicted += 1
        return evicted

    def reset(self) -> bool:
        """Drops all indexed content; refuses (False) while any block is active."""
        if self.num_free != self.num_usable:
            return False
        # Why set aside: one event says it all.
        observers, self.observers = self.observers, []
        self.evict(list(self._cached))
        self._gone.clear()
        self.observers = observers
        self._tell("cleared", self.blocks[NULL_BLOCK])
        return True

    def was_evicted(self, digest: bytes) -> bool:
        """True if content of this digest was here not long ago: a larger pool would have it."""
        return digest in self._gone

    def _tell(self, event: str, block: Block) -> None:
        for observer in self.observers:
            observer.on_block(event, block)

    def _forget(self, block: Block) -> None:
        assert block.prefix is not None, block
        if self.observers:
            self._tell("removed", block)
        self._gone[block.prefix.digest] = None
        if len(self._gone) > self.num_blocks:
            self._gone.popitem(last=False)
        index = self._index[block.group]
        same = index[block.prefix]
        same.remove(block.block_id)
        if not same:
            del index[block.prefix]
        block.prefix = None

    # --- invariants ---------------------------------------------------------------------------

    def check(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Walks everything and raises AssertionError on a broken invariant.

        With `tables`, all live block tables, reference counts are compared against them.
        """
        empty, cached = set(self._empty), set(self._cached)
        free = empty | cached
        null = self.blocks[NULL_BLOCK]
        # Invariant I6: the null block is never allocated, hashed or freed.
        assert NULL_BLOCK not in free and null.ref_count == 0 and null.prefix is None, null
        # Invariant I1: free + used + null = total, each block in one place.
        assert len(empty) == len(self._empty) and not empty & cached, "a block is queued twice"
        for block in self.blocks[1:]:
            # Invariant I3: free if and only if the count is 0; cached if and only if hashed.
            assert (block.ref_count == 0) == (block.block_id in free), block
            if block.ref_count == 0:
                assert (block.prefix is not None) == (block.block_id in cached), block
        # Invariant I4: index entries and hashed blocks match one to one.
        indexed = {i for index in self._index for ids in index.values() for i in ids}
        assert indexed == {b.block_id for b in self.blocks if b.prefix is not None}
        for group, index in enumerate(self._index):
            for prefix, ids in index.items():
                assert all(self.blocks[i].prefix is prefix for i in ids), prefix
                assert all(self.blocks[i].group == group for i in ids), group
        if tables is not None:
            # Invariant I2: the reference count is the number of table entries.
            counts = [0] * self.num_blocks
            for table in tables:
                for block_id in table:
                    counts[block_id] += 1
            for block in self.blocks[1:]:
                assert block.ref_count == counts[block.block_id], (block, counts[block.block_id])

    def __str__(self) -> str:
        """One character a block: `0` null, `.` empty, `c` cached, then the reference count."""

        def mark(block: Block) -> str:
            if block.block_id == NULL_BLOCK:
                return "0"
            if block.ref_count:
                return str(min(block.ref_count, 9))
            return "c" if block.prefix else "."

        return "".join(mark(block) for block in self.blocks)


def _demo() -> None:
    pool = BlockPool(num_blocks=12)
    print(f"{pool}  a new pool: the null block and 11 empty ones")
    table = pool.allocate(4)
    print(f"{pool}  a prompt takes blocks {table}")
    first = prefix = Prefix(bytes([1]), None, (0,))
    for i, block_id in enumerate(table[:3]):
        prefix = Prefix(bytes([i + 1]), prefix, (i,)) if i else first
        pool.register(block_id, 0, prefix)
    pool.share(table)
    print(f"{pool}  a fork shares them")
    pool.free(reversed(table))
    pool.free(reversed(table))
    print(f"{pool}  both end: three full blocks stay cached, the partial one is empty")
    hit = pool.lookup(0, first)
    assert hit is not None
    pool.touch(hit)
    print(f"{pool}  a new prompt hits block {hit}")
    pool.allocate(9)
    print(f"{pool}  nine more: the empty ones first, then block 3, the tail, is evicted")
    pool.check()


if __name__ == "__main__":
    _demo()
