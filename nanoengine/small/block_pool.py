"""BlockPool: the blocks of the KV cache: their users, their content, and the order of eviction.

    used      ref_counts[b] > 0: in that many block tables
    free      in a queue:  [ empty, empty, ... | cached, ..., cached ]
                             ▲ `allocate` takes here          `free` puts ▲ cached blocks here

So `allocate` returns empty blocks first, then the least recently used cached block. A freed block
keeps its content, and can be found until `allocate` returns it again. Block 0 is the null block,
which no sequence uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks.

    >>> pool = BlockPool(num_blocks=5)
    >>> a, b = pool.allocate(), pool.allocate()
    >>> pool.register(a, b"digest", (5, 6))
    >>> pool.free([b, a]); print(pool)  # b was empty, a stays cached
    0c...
    >>> pool.lookup(b"digest", (5, 6))
    1
    """

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * num_blocks
        # Block -> the digest of its content and the tokens themselves.
        self.contents: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        # Content -> the blocks that hold it; a lookup returns the first. Why several: two sequences
        # may compute the same tokens at the same time. Why the tokens, too: other tokens with an
        # equal digest are not a hit.
        self.index: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        self.free_queue = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return, empty and cached."""
        return len(self.free_queue)

    def allocate(self) -> int:
        """Returns the first free block with one reference; its content is dropped."""
        block_id, _ = self.free_queue.popitem(last=False)
        if block_id in self.contents:
            content = self.contents.pop(block_id)
            self.index[content].remove(block_id)
            if not self.index[content]:
                del self.index[content]
        self.ref_counts[block_id] = 1
        return block_id

    def touch(self, block_id: int) -> None:
        """Adds a reference; a cached block leaves the queue."""
        self.free_queue.pop(block_id, None)
        self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block. Blocks without content go to the head of the queue."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free_queue[block_id] = None
                if block_id not in self.contents:
                    self.free_queue.move_to_end(block_id, last=False)

    def register(self, block_id: int, digest: bytes, tokens: tuple[int, ...]) -> None:
        """Indexes the content of a full block."""
        self.contents[block_id] = digest, tokens
        self.index.setdefault((digest, tokens), []).append(block_id)

    def lookup(self, digest: bytes, tokens: tuple[int, ...]) -> int | None:
        """A block with this content, or None."""
        return next(iter(self.index.get((digest, tokens), ())), None)

    def __str__(self) -> str:
        """One character per block: `0` null, `.` empty, `c` cached, else the reference count."""
        marks = "".join(
            str(min(count, 9)) if count else "c" if block_id in self.contents else "."
            for block_id, count in enumerate(self.ref_counts)
        )
        return "0" + marks[1:]
