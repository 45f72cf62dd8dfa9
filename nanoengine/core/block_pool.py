"""BlockPool: reference counts, content and the order of eviction of all KV blocks. Ints only.

    block 0        the null block: a placeholder, never allocated, indexed or freed
    active         reference count > 0
    cached         reference count 0, content indexed: evicted, oldest first, or revived by a hit
    empty          reference count 0, no content: allocated before any cached block

    allocate                touch (a hit)
    empty ───────► active ◄────────────── cached
      ▲               │ free: no content     ▲ │
      └───────────────┘ free: has content ───┘ │
      ▲                                        │ evict (in allocate, when no block is empty)
      └────────────────────────────────────────┘

Device, host and disk each have a pool of this class; only the code that moves the bytes differs.
Called by the BlockManager and the PrefixCache; does not depend on sequences.
See also groups/pool.py (recurrent states, which have another size and their own queue).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from typing import Protocol

from nanoengine.core.prefix_tree import Prefix

NULL_BLOCK = 0


class Block:
    """One block: its reference count and, once it is full, its content.

    Attributes:
        ref_count: number of block tables, or copies in progress, that refer to it.
        prefix: its indexed content: its tokens and all tokens before them; None if not indexed.
        group: the KV group whose layers filled it.
        queue: the queue that holds it while it is free.
        before, after: its neighbours in the queue.
    """

    __slots__ = ("after", "before", "block_id", "group", "prefix", "queue", "ref_count")

    def __init__(self, block_id: int, queue: Queue) -> None:
        self.block_id = block_id
        self.queue = queue
        self.ref_count = 0
        self.group = 0
        self.prefix: Prefix | None = None
        self.before: Block = self
        self.after: Block = self

    def __repr__(self) -> str:
        name = self.prefix.digest.hex()[:8] if self.prefix else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, digest={name})"


class Queue:
    """The free blocks among `num_blocks` blocks of one size: a linked ring that starts and ends at
    `end`: first the empty blocks, then the cached ones, oldest first."""

    __slots__ = ("end", "num_blocks", "num_empty", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.end = Block(NULL_BLOCK, self)
        self.num_blocks = self.num_free = self.num_empty = num_blocks

    def counts(self) -> dict[str, int]:
        """Numbers of empty, cached and active blocks; they add up to `num_blocks`."""
        return {
            "empty": self.num_empty,
            "cached": self.num_free - self.num_empty,
            "active": self.num_blocks - self.num_free,
        }


class BlockObserver(Protocol):
    """Observes the content of blocks; it may not change anything."""

    def on_block(self, event: str, block: Block) -> None:
        """Called for each event, in causal order.

        stored    the block's content is indexed and may be hit
        freed     the reference count has become 0; the block keeps its content
        reused    a hit has revived the block
        removed   the block is about to lose its content; it still has the content during this call
        cleared   all blocks have lost their content; `block` is the null block
        """


class BlockPool:
    """A fixed number of blocks with reference counts, a content index and an LRU queue.

    A pool has up to a million blocks, so no operation may iterate over them: each takes O(1) time
    per block, and one call handles all blocks of a table.
    Source: vLLM v1's block pool (null block, linked queue, cached free blocks).

    >>> from nanoengine.core.prefix_tree import pack
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
        num_evicted: cached blocks that lost their content because `allocate` needed them.
        index: per group, content -> a block that holds it; `duplicates`: the other blocks.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.observers: list[BlockObserver] = []
        self._make_blocks()

    def _make_blocks(self) -> None:
        self._kv = Queue(self.num_usable)
        self.queues, self.blocks = list[Queue](), [self._kv.end]
        self._add(self._kv)
        self.num_evicted = 0
        self.index: list[dict[Prefix, int]] = [{} for _ in range(self.num_groups)]
        # Why: two sequences may compute the same content at the same time, and their tables are not
        # changed afterwards. Content -> all blocks that hold it, except the one in the index.
        self.duplicates: dict[tuple[int, Prefix], list[int]] = {}
        # Digests of content evicted recently: up to one per block, and as many before those.
        self._evicted: set[bytes] = set()
        self._evicted_earlier: set[bytes] = set()

    def _add(self, queue: Queue) -> None:
        """Appends the blocks of a queue, all of them empty, to the pool."""
        first = len(self.blocks)
        self.queues.append(queue)
        self.blocks += [Block(first + i, queue) for i in range(queue.num_blocks)]
        for before, after in pairwise([queue.end, *self.blocks[first:], queue.end]):
            before.after, after.before = after, before

    # --- counts -------------------------------------------------------------------------------

    @property
    def num_usable(self) -> int:
        """All KV blocks except the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """KV blocks that `allocate` can return now, empty and cached."""
        return self._kv.num_free

    @property
    def num_active(self) -> int:
        """Blocks with a reference count above 0."""
        return sum(queue.num_blocks - queue.num_free for queue in self.queues)

    def counts(self) -> dict[str, int]:
        """Numbers of empty, cached and active blocks; they add up to `num_usable`."""
        return self._kv.counts()

    # --- lifecycle of a block -----------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks with one reference each: empty ones, then the oldest cached.

        The caller checks `num_free` before; too few free blocks here are a bug.
        """
        return self._pop_free(self._kv, count)

    def _pop_free(self, queue: Queue, count: int) -> list[int]:
        assert count <= queue.num_free, f"{count} blocks requested, {queue.num_free} are free"
        null = queue.end
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
        queue.num_free -= count
        queue.num_empty -= count - num_evicted
        self.num_evicted += num_evicted
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block, cached or active; skips null entries."""
        blocks = self.blocks
        for block_id in block_ids:
            block = blocks[block_id]
            if block.ref_count == 0:
                if block_id == NULL_BLOCK:
                    continue
                assert block.prefix is not None, f"{block} has no content"
                before, after = block.before, block.after
                before.after, after.before = after, before
                block.queue.num_free -= 1
                if self.observers:
                    self._notify("reused", block)
            block.ref_count += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block, in the given order; skips null entries.

        Callers pass a table tail first, because blocks are evicted in the order they are freed. The
        start of a prompt, which other prompts are likely to share, is thus evicted last.

        Raises:
            ValueError: a block is free already.
        """
        blocks, observers = self.blocks, self.observers
        for block in map(blocks.__getitem__, block_ids):
            count = block.ref_count
            if count == 1:
                block.ref_count = 0
                queue = block.queue
                queue.num_free += 1
                if block.prefix is None:
                    self._push_empty(block)
                    continue
                end = queue.end
                last = end.before
                block.before, block.after = last, end
                last.after = end.before = block
                if observers:
                    self._notify("freed", block)
            elif count:
                block.ref_count = count - 1
            elif block.block_id != NULL_BLOCK:
                raise ValueError(f"{block} is freed twice")

    def _push_empty(self, block: Block) -> None:
        """Puts a block without content at the head of its queue."""
        end = block.queue.end
        first = end.after
        block.before, block.after = end, first
        end.after = first.before = block
        block.queue.num_empty += 1

    # --- content index ------------------------------------------------------------------------

    def register(
        self, block_ids: Sequence[int], group: int, prefixes: Sequence[Prefix]
    ) -> list[Block]:
        """Indexes the content of full, active blocks; returns the newly indexed blocks.

        Skips null entries.
        """
        blocks, index, observers = self.blocks, self.index[group], self.observers
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
                self.duplicates.setdefault((group, prefix), []).append(block_id)
            fresh.append(block)
            if observers:
                self._notify("stored", block)
        return fresh

    def lookup(self, group: int, prefix: Prefix) -> int | None:
        """A block with this content, active or cached; None if there is none."""
        return self.index[group].get(prefix)

    def lookup_all(self, group: int, prefixes: Iterable[Prefix]) -> list[int]:
        """Per content: a block that holds it, or the null block."""
        return list(map(self.index[group].get, prefixes, repeat(NULL_BLOCK)))

    def num_cached(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks, all found by a lookup or null, have reference count 0."""
        blocks = self.blocks
        return [blocks[i].ref_count for i in block_ids if i != NULL_BLOCK].count(0)

    def next_evicted(self, count: int) -> list[int]:
        """The cached blocks per queue that the next `count` allocations would evict, in order."""
        block_ids = []
        for queue in self.queues:
            block = queue.end
            for _ in range(min(count, queue.num_free)):
                block = block.after
                if block.prefix is not None:
                    block_ids.append(block.block_id)
        return block_ids

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of the cached blocks among these; returns how many were cached."""
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
        """Drops all indexed content; returns False and changes nothing while a block is active."""
        if self.num_active:
            return False
        # Why: observers are notified once, not once per block.
        observers, self.observers = self.observers, []
        self.evict(self.next_evicted(len(self.blocks)))
        self._evicted, self._evicted_earlier = set(), set()
        self.observers = observers
        self._notify("cleared", self.blocks[NULL_BLOCK])
        return True

    def clear(self) -> None:
        """Makes all blocks empty, also active ones, because reference counts may be wrong."""
        self._make_blocks()
        self._notify("cleared", self.blocks[NULL_BLOCK])

    def was_evicted(self, digest: bytes) -> bool:
        """True if content with this digest was evicted recently; a larger pool would keep it."""
        return digest in self._evicted or digest in self._evicted_earlier

    def _notify(self, event: str, block: Block) -> None:
        for observer in self.observers:
            observer.on_block(event, block)

    def _drop_content(self, block: Block) -> None:
        """Drops the content of a block with reference count 0, and records its eviction."""
        prefix, group, duplicates = block.prefix, block.group, self.duplicates
        assert prefix is not None, block
        if self.observers:
            self._notify("removed", block)
        if duplicates and (group, prefix) in duplicates:
            same_content = [self.index[group][prefix], *duplicates.pop((group, prefix))]
            same_content.remove(block.block_id)
            self.index[group][prefix] = same_content[0]
            if same_content[1:]:
                duplicates[group, prefix] = same_content[1:]
        else:
            del self.index[group][prefix]
        block.prefix = None
        self._evicted.add(prefix.digest)
        if len(self._evicted) >= self.num_blocks:
            self._evicted, self._evicted_earlier = set(), self._evicted

    def __str__(self) -> str:
        """One character per block: `0` null, `.` empty, `c` cached, else the reference count."""
        marks = [("c" if b.prefix else ".") if not b.ref_count else str(min(b.ref_count, 9))
                 for b in self.blocks[1:]]  # fmt: skip
        return "".join(["0", *marks])
