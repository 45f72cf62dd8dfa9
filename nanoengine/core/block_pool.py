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

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import Protocol

from nanoengine.core.prefixes import Prefix, pack

NULL_BLOCK = 0


class Block:
    """One block: who refers to it and, once full, what it holds.

    `prefix` is None while the block has no indexed content. `group` is the KV group whose layers
    filled it. `before` and `after` are its neighbours in the queue of free blocks.
    """

    __slots__ = ("after", "before", "block_id", "group", "prefix", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.group = 0
        self.prefix: Prefix | None = None
        self.before: Block = self
        self.after: Block = self

    def __repr__(self) -> str:
        name = self.prefix.digest.hex()[:8] if self.prefix else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, digest={name})"


class BlockObserver(Protocol):
    """Watches blocks; it may not change anything."""

    def on_block(self, event: str, block: Block) -> None:
        """Told, in causal order, of content that is

        "stored" (may be hit), "freed" (nobody uses it), "reused" (a hit has revived it), "removed"
        (called while the block still has it), and of all of it "cleared" (with the null block).
        """


class BlockPool:
    """A fixed number of blocks with reference counts, a content index and an LRU queue.

    Every operation is O(1) a block, and takes the blocks of a table in one call. The free blocks
    are linked in a ring that starts and ends at the null block: empty ones, then the cached ones,
    oldest first. Source: vLLM v1's block pool (null block, linked queue, cached free blocks).

    >>> pool, prefix = BlockPool(num_blocks=4), Prefix(b"a", None, pack([5, 6]))
    >>> pool.allocate(2)
    [1, 2]
    >>> pool.register([1], 0, [prefix])
    [Block(1, refs=1, digest=61)]
    >>> pool.free([2, 1]); pool.counts()
    {'empty': 2, 'cached': 1, 'active': 0}
    >>> pool.lookup(0, prefix)
    1
    >>> pool.touch([1]); pool.blocks[1]
    Block(1, refs=1, digest=61)

    Attributes:
        num_free: blocks that `allocate` can hand out now, empty and cached.
        num_evicted: cached blocks whose content went because `allocate` needed them.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.observers: list[BlockObserver] = []
        self._make_blocks()

    def _make_blocks(self) -> None:
        self.blocks = [Block(i) for i in range(self.num_blocks)]
        for before, after in pairwise([*self.blocks, self.blocks[NULL_BLOCK]]):
            before.after, after.before = after, before
        self.num_free = self._num_empty = self.num_blocks - 1
        self.num_evicted = 0
        self._index: list[dict[Prefix, int]] = [{} for _ in range(self.num_groups)]
        # Why: two blocks may hold one content, since tables are append-only. Those after the first.
        self._duplicates: dict[tuple[int, Prefix], list[int]] = {}
        # Digests evicted lately: as many as there are blocks, then those of as many before them.
        self._evicted: set[bytes] = set()
        self._evicted_before: set[bytes] = set()

    # --- counts -------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    def counts(self) -> dict[str, int]:
        """Empty, cached and active blocks; together `num_usable`."""
        return {
            "empty": self._num_empty,
            "cached": self.num_free - self._num_empty,
            "active": self.num_usable - self.num_free,
        }

    # --- life of a block ----------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each: empty ones, then the oldest cached.

        The caller checks `num_free` first; running out is a bug, not a condition.
        """
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free"
        null = self.blocks[NULL_BLOCK]
        block = null.after
        block_ids: list[int] = []
        num_evicted = 0
        for _ in range(count):
            if block.prefix is not None:
                self._drop_content(block)
                num_evicted += 1
            block_ids.append(block.block_id)
            block.ref_count = 1
            block = block.after
        null.after, block.before = block, null
        self.num_free -= count
        self._num_empty -= count - num_evicted
        self.num_evicted += num_evicted
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each active block; null entries are passed over."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                block = self.blocks[block_id]
                assert block.ref_count > 0, f"{block} is not active"
                block.ref_count += 1

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block that a lookup named; a cached one is active again.

        Null entries are passed over.
        """
        blocks = self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count == 0:
                if block_id == NULL_BLOCK:
                    continue
                assert block.prefix is not None, f"{block} holds nothing"
                before, after = block.before, block.after
                before.after, after.before = after, before
                self.num_free -= 1
                if self.observers:
                    self._tell("reused", block)
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops a reference of each block, in the given order; null entries are passed over.

        Callers pass a table tail first: of equally old blocks, the one with the longest prefix
        before it is then evicted first. Raises ValueError for a block that is free already.
        """
        blocks, observers = self.blocks, self.observers
        null = blocks[NULL_BLOCK]
        last, num_cached, empty = null.before, 0, []
        try:
            for block in map(blocks.__getitem__, block_ids):
                count = block.ref_count
                if count == 1:
                    block.ref_count = 0
                    if block.prefix is None:
                        empty.append(block)
                        continue
                    block.before, last.after = last, block
                    last = block
                    num_cached += 1
                    if observers:
                        self._tell("freed", block)
                elif count:
                    block.ref_count = count - 1
                elif block is not null:
                    raise ValueError(f"{block} is freed twice")
        finally:
            last.after, null.before = null, last
            self.num_free += num_cached + len(empty)
            for block in empty:
                self._push_empty(block)

    def _push_empty(self, block: Block) -> None:
        """To the head: a block without content has no age."""
        null = self.blocks[NULL_BLOCK]
        first = null.after
        block.before, block.after = null, first
        null.after = first.before = block
        self._num_empty += 1

    # --- content index ------------------------------------------------------------------------

    def register(
        self, block_ids: Sequence[int], group: int, prefixes: Sequence[Prefix]
    ) -> list[Block]:
        """Indexes the contents of full, active blocks; returns those that had none before.

        What is indexed already, and null entries, are passed over.
        """
        blocks, index, observers = self.blocks, self._index[group], self.observers
        fresh: list[Block] = []
        for block_id, prefix in zip(block_ids, prefixes, strict=True):
            block = blocks[block_id]
            if block.prefix is not None or block_id == NULL_BLOCK:
                assert block.prefix is prefix or block_id == NULL_BLOCK, (block, prefix)
                continue
            assert block.ref_count > 0, f"{block} is not active"
            block.group = group
            block.prefix = prefix
            if index.setdefault(prefix, block_id) != block_id:
                self._duplicates.setdefault((group, prefix), []).append(block_id)
            fresh.append(block)
            if observers:
                self._tell("stored", block)
        return fresh

    def lookup(self, group: int, prefix: Prefix) -> int | None:
        """A block with this content, active or cached, or None. Changes nothing."""
        return self._index[group].get(prefix)

    def lookup_all(self, group: int, prefixes: Iterable[Prefix]) -> list[int]:
        """A block for each of these contents, the null block where there is none."""
        return list(map(self._index[group].get, prefixes, repeat(NULL_BLOCK)))

    def num_cached(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks, each named by a lookup or null, nobody uses."""
        blocks = self.blocks
        return [blocks[i].ref_count for i in block_ids if i != NULL_BLOCK].count(0)

    def next_evicted(self, count: int) -> list[int]:
        """The cached blocks that the next `count` allocations would evict, in that order."""
        block, block_ids = self.blocks[NULL_BLOCK], []
        for _ in range(min(count, self.num_free)):
            block = block.after
            if block.prefix is not None:
                block_ids.append(block.block_id)
        return block_ids

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of those given blocks that are cached; returns how many were."""
        evicted = 0
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0 and block.prefix is not None:
                self._drop_content(block)
                before, after = block.before, block.after
                before.after, after.before = after, before
                self._push_empty(block)
                evicted += 1
        return evicted

    def reset(self) -> bool:
        """Drops all indexed content; refuses (False) while any block is active."""
        if self.num_free != self.num_usable:
            return False
        # Why set aside: one event says it all.
        observers, self.observers = self.observers, []
        self.evict(self.next_evicted(self.num_free))
        self._evicted, self._evicted_before = set(), set()
        self.observers = observers
        self._tell("cleared", self.blocks[NULL_BLOCK])
        return True

    def clear(self) -> None:
        """Starts anew, whatever is in use: for when counts and content can't be trusted."""
        self._make_blocks()
        self._tell("cleared", self.blocks[NULL_BLOCK])

    def was_evicted(self, digest: bytes) -> bool:
        """True if content of this digest was here not long ago: a larger pool would have it."""
        return digest in self._evicted or digest in self._evicted_before

    def _tell(self, event: str, block: Block) -> None:
        for observer in self.observers:
            observer.on_block(event, block)

    def _drop_content(self, block: Block) -> None:
        """Drops the content of a block that nobody uses, and remembers that it was here."""
        prefix, group, duplicates = block.prefix, block.group, self._duplicates
        assert prefix is not None, block
        if self.observers:
            self._tell("removed", block)
        if duplicates and (group, prefix) in duplicates:
            same = [self._index[group][prefix], *duplicates.pop((group, prefix))]
            same.remove(block.block_id)
            self._index[group][prefix] = same[0]
            if same[1:]:
                duplicates[group, prefix] = same[1:]
        else:
            del self._index[group][prefix]
        block.prefix = None
        self._evicted.add(prefix.digest)
        if len(self._evicted) >= self.num_blocks:
            self._evicted, self._evicted_before = set(), self._evicted

    # --- invariants ---------------------------------------------------------------------------

    def check(self, tables: Iterable[Iterable[int]] | None = None) -> None:
        """Walks everything and raises AssertionError on a broken invariant.

        With `tables`, all live block tables, reference counts are compared against them.
        """
        null = self.blocks[NULL_BLOCK]
        free: list[Block] = []
        block = null.after
        # Invariant I1: free + used + null = total, each block in one place.
        while block is not null and len(free) <= self.num_free:
            assert block.before.after is block and block.after.before is block, block
            free.append(block)
            block = block.after
        assert len(free) == self.num_free == len(set(free)), "the queue and its length differ"
        # Invariant I6: the null block is never allocated, hashed or freed.
        assert null.ref_count == 0 and null.prefix is None, null
        # Invariant I3: free if and only if the count is 0; empty ones come first.
        assert all(block.ref_count == 0 for block in free), free
        assert sum(block.ref_count == 0 for block in self.blocks[1:]) == len(free), "lost blocks"
        is_cached = [block.prefix is not None for block in free]
        assert is_cached == sorted(is_cached), "an empty block behind a cached one"
        assert is_cached.count(False) == self._num_empty, self._num_empty
        # Invariant I4: index entries and hashed blocks match one to one.
        indexed: list[int] = []
        assert all(self._duplicates.values()), self._duplicates
        assert all(prefix in self._index[group] for group, prefix in self._duplicates)
        for group, index in enumerate(self._index):
            for prefix, first in index.items():
                same = [first, *self._duplicates.get((group, prefix), ())]
                assert all(self.blocks[i].prefix is prefix for i in same), prefix
                assert all(self.blocks[i].group == group for i in same), group
                indexed += same
        hashed = [block.block_id for block in self.blocks if block.prefix is not None]
        assert sorted(indexed) == hashed, "the index and the blocks differ"
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
    first = Prefix(bytes([1]), None, pack([0]))
    second = Prefix(bytes([2]), first, pack([1]))
    pool.register(table[:3], 0, [first, second, Prefix(bytes([3]), second, pack([2]))])
    pool.share(table)
    print(f"{pool}  a fork shares them")
    pool.free(reversed(table))
    pool.free(reversed(table))
    print(f"{pool}  both end: three full blocks stay cached, the partial one is empty")
    hit = pool.lookup(0, first)
    assert hit is not None
    pool.touch([hit])
    print(f"{pool}  a new prompt hits block {hit}")
    pool.allocate(9)
    print(f"{pool}  nine more: the empty ones first, then block 3, the tail, is evicted")
    pool.check()


if __name__ == "__main__":
    _demo()
