"""DiskBlocks: which blocks are on disk, and which copies between host memory and files run.

    host pool ── write, a few at a time ──► disk pool ── remove, when evicted
              ◄── read, for a sequence that waits ──

A copy takes time, and its blocks must not be allocated again before it has finished. So it holds a
reference to its host block and to its disk block, and the index entry is added at its end. No block
is held on behalf of a sequence, so a sequence that ends while it waits leaves nothing to clean up.

Used by the TieredPrefixCache; a `DiskStorage` moves the bytes in the background.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.groups.cache import Load
from nanoengine.core.prefix_tree import PrefixTree
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.cost import Rate
from nanoengine.core.tiers.lookup import Content, Level, content_of
from nanoengine.core.tiers.stats import TierStats

MAX_WRITES = 8
"""Maximum number of concurrent writes: copies run in order, so a read may wait for all of them."""


class DiskCopy(NamedTuple):
    """One job of a DiskStorage: "write" (host to disk), "read" (disk to host) or "remove"."""

    kind: str
    content: Content
    host_id: int = NULL_BLOCK
    disk_id: int = NULL_BLOCK


class FinishedCopy(NamedTuple):
    """A copy that has ended: whether all bytes were copied, and the seconds it took."""

    copy: DiskCopy
    ok: bool
    seconds: float


class DiskStorage(Protocol):
    """Moves blocks between host memory and files, in the background and in the given order.

    No method raises because of the disk: a copy that fails has `ok=False`. `can_write` becomes
    False permanently in the first `collect` after the disk has rejected a block. So a trace that
    has the results of `collect` has all changes. The default methods are for engines without a disk
    tier.
    """

    can_write: bool = False

    def scan(self, prefixes: PrefixTree) -> list[Content]:
        """The content of the directory, least recently used first.

        Only blocks whose whole prefix is on disk: the ancestors of others can't be compared.
        """
        return []

    def submit(self, copy: DiskCopy) -> None:
        """Queues a copy; its host block must not be used until the copy has finished."""
        raise AssertionError(f"there is no disk tier for {copy}")

    def collect(self, wait_s: float) -> list[FinishedCopy]:
        """Copies that have finished since the last call; waits up to `wait_s` for one."""
        return []

    def close(self) -> None:
        """Finishes the running copies and allows other processes to write to the directory."""
        return


class NoDisk(DiskStorage):
    """The DiskStorage when host memory is the last tier."""


class DiskBlocks:
    """The blocks on disk: a pool whose blocks are files, and the running copies.

    Args:
        storage: moves the bytes.
        num_blocks: size of the disk's pool, including its null block.
        host: the pool of the tier above.
        stats: counts the moved blocks.
        rate: measures the read bandwidth.
        prefixes: creates the keys for the content of the directory.

    Attributes:
        storage: as given.
        copies: running reads and writes.
        readers: the sequences that wait for each read.
        to_write: content in host memory that is still to be written to disk.
    """

    def __init__(
        self,
        storage: DiskStorage,
        *,
        num_blocks: int,
        host: BlockPool,
        stats: TierStats,
        rate: Rate,
        prefixes: PrefixTree,
    ) -> None:
        self.pool = BlockPool(num_blocks, host.num_groups)
        self.storage = storage
        self._host = host
        self._stats = stats
        self._rate = rate
        self.copies: dict[Content, DiskCopy] = {}
        self.readers: dict[Content, list[Sequence]] = {}
        # Why bounded: the host holds no more blocks, so older content has been evicted from it.
        self.to_write: deque[Content] = deque(maxlen=host.num_usable)
        contents = [found for found in storage.scan(prefixes) if found.group < host.num_groups]
        surplus = max(0, len(contents) - self.pool.num_usable)
        for content in contents[:surplus]:
            storage.submit(DiskCopy("remove", content))
        for content in contents[surplus:]:
            [disk_id] = self.pool.allocate(1)
            self.pool.register([disk_id], content.group, [content.prefix])
            self.pool.free([disk_id])

    def start_reads(self, seq: Sequence, loads: Iterable[Load]) -> None:
        """Starts reading a waiting sequence's blocks from disk into host memory.

        Skips blocks that are already in host memory; stops when no host block is free.
        `seq.num_pending_reads` counts the running reads.
        """
        num_reads = 0
        for block_id in [load.block_id for load in loads if load.level is Level.DISK]:
            content = content_of(self.pool.blocks[block_id])
            if content not in self.readers:
                if content in self.copies or not self._host.num_free:
                    break
                [host_id] = self._host.allocate(1)
                self.pool.touch([block_id])
                self._submit(DiskCopy("read", content, host_id, block_id))
                self.readers[content] = []
                self._stats.hit_blocks += 1
            self.readers[content].append(seq)
            num_reads += 1
        seq.num_pending_reads = num_reads

    def start_writes(self) -> None:
        """Starts to write queued content to disk, a few blocks at a time."""
        if not self.storage.can_write:
            self.to_write.clear()
        while self.to_write and len(self.copies) - len(self.readers) < MAX_WRITES:
            content = self.to_write.popleft()
            host_id = self._host.lookup(*content)
            if (
                host_id is None  # evicted while it was queued
                or content in self.copies
                or self.pool.lookup(*content) is not None
                or not self.pool.num_free
            ):
                continue
            for victim in self.pool.next_evicted(1):
                self.storage.submit(DiskCopy("remove", content_of(self.pool.blocks[victim])))
            [disk_id] = self.pool.allocate(1)
            self._host.touch([host_id])
            self._submit(DiskCopy("write", content, host_id, disk_id))

    def _submit(self, copy: DiskCopy) -> None:
        self.copies[copy.content] = copy
        self.storage.submit(copy)

    def collect(self, wait_s: float) -> None:
        """Handles the copies that have finished; waits up to `wait_s` for one."""
        for (kind, content, host_id, disk_id), ok, seconds in self.storage.collect(wait_s):
            if kind == "remove":
                continue
            del self.copies[content]
            if not ok:
                self._stats.failed_copies += 1
            elif kind == "read":
                self._host.register([host_id], content.group, [content.prefix])
                self._stats.loaded_blocks += 1
                self._rate.add(self._stats.block_bytes, seconds)
            else:
                self.pool.register([disk_id], content.group, [content.prefix])
                self._stats.stored_blocks += 1
            self._host.free([host_id])
            self.pool.free([disk_id])
            if kind == "read":
                if not ok:
                    self.pool.evict([disk_id])
                for seq in self.readers.pop(content):
                    assert seq.num_pending_reads, seq
                    seq.num_pending_reads -= 1

    def evict(self, content: Content) -> None:
        """Drops content and removes its file; no copy of it may be running."""
        disk_id = self.pool.lookup(*content)
        if disk_id is not None:
            self.pool.evict([disk_id])
            self.storage.submit(DiskCopy("remove", content))

    def drain(self, *, and_write: bool) -> None:
        """Waits for all copies; `and_write` also writes the queue, else the queue is emptied."""
        if not and_write:
            self.to_write.clear()
        self.start_writes()
        while self.copies:
            self.collect(math.inf)
            self.start_writes()

    def reset(self) -> bool:
        """Drops all content and removes its files; no copy may be running."""
        for block in self.pool.blocks:
            if block.prefix is not None:
                self.storage.submit(DiskCopy("remove", content_of(block)))
        return self.pool.reset()

    def copied_host_ids(self) -> list[int]:
        """The host blocks that running copies refer to, one entry per reference."""
        return [copy.host_id for copy in self.copies.values()]
