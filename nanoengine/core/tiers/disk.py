"""DiskBlocks: which blocks are on disk, and the copies between host memory and files under way.

    host pool ── write, a few at a time ──► disk pool ── remove, when evicted
              ◄── read, for a sequence that waits ──

Until a copy has finished, its host block and its disk block hold a reference; the index entry
appears then. Nothing is held on behalf of a sequence, so one that ends while it waits leaves
nothing behind. Used by Tiers; a `DiskStorage` moves the bytes, in the background.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.cache_stats import TierStats
from nanoengine.core.prefixes import Prefixes
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.cost import Rate
from nanoengine.core.tiers.found import Content, Level, TierBlock, content_of

MAX_WRITES = 8
"""Blocks being written to disk at once: a read behind them waits for no more than these."""


class DiskCopy(NamedTuple):
    """Work for a DiskStorage: "write" (host to disk), "read" (disk to host) or "remove"."""

    kind: str
    content: Content
    host_id: int = NULL_BLOCK
    disk_id: int = NULL_BLOCK


class Finished(NamedTuple):
    """A copy that has ended: whether the bytes arrived whole, and the seconds it took."""

    copy: DiskCopy
    ok: bool
    seconds: float


class DiskStorage(Protocol):
    """Moves blocks between host memory and files, in the background and in the order given.

    No method raises for what a disk can do: a copy that fails is `ok=False`. `can_write` turns
    False for good when the disk takes no more.
    """

    can_write: bool

    def scan(self, prefixes: Prefixes) -> list[Content]:
        """What the directory holds, least recently used first.

        A block whose prefix is not on disk as a whole is no use: its ancestors can't be compared.
        """

    def submit(self, copy: DiskCopy) -> None:
        """Takes a copy on; its host block is left alone until it has finished."""

    def collect(self, wait_s: float) -> list[Finished]:
        """Copies finished since the last call; waits up to `wait_s` for one under way."""

    def close(self) -> None:
        """Ends what is under way and gives the directory free."""


class DiskBlocks:
    """A pool of files below the host's pool.

    Args:
        storage: moves the bytes.
        num_blocks: of the tier, its null block included.
        host: the pool above, whose blocks copies read and write.
        stats: counts what is moved.
        rate: learns what reading takes.
        prefixes: name what the directory holds.
    """

    def __init__(
        self,
        storage: DiskStorage,
        *,
        num_blocks: int,
        num_groups: int,
        host: BlockPool,
        stats: TierStats,
        rate: Rate,
        prefixes: Prefixes,
    ) -> None:
        self.pool = BlockPool(num_blocks, num_groups)
        self._storage = storage
        self._host = host
        self._stats = stats
        self._rate = rate
        self._copies: dict[Content, DiskCopy] = {}
        self._readers: dict[Content, list[Sequence]] = {}  # who waits for each block
        # Why bounded: what came longest ago has left the host again, if it holds no more.
        self._to_write: deque[Content] = deque(maxlen=host.num_usable)
        contents = [content for content in storage.scan(prefixes) if content.group < num_groups]
        surplus = max(0, len(contents) - self.pool.num_usable)
        for content in contents[:surplus]:
            storage.submit(DiskCopy("remove", content))
        for content in contents[surplus:]:
            [disk_id] = self.pool.allocate(1)
            self.pool.register([disk_id], content.group, [content.prefix])
            self.pool.free([disk_id])

    @property
    def is_reading(self) -> bool:
        """True while a sequence waits for a block."""
        return bool(self._readers)

    def is_copying(self, content: Content) -> bool:
        """True while this content is read or written."""
        return content in self._copies

    # --- up -----------------------------------------------------------------------------------

    def read_for(self, seq: Sequence, blocks: Iterable[TierBlock]) -> None:
        """Has those of the blocks that are on disk read into host memory, for a waiting sequence.

        In order, and as many as the host has room for.
        """
        num_reads = 0
        for level, block_id in blocks:
            if level is not Level.DISK:
                continue
            content = content_of(self.pool.blocks[block_id])
            if content not in self._readers:
                if content in self._copies or not self._host.num_free:
                    break
                [host_id] = self._host.allocate(1)
                self.pool.touch([block_id])
                self._submit(DiskCopy("read", content, host_id, block_id))
                self._readers[content] = []
                self._stats.hit_blocks += 1
            self._readers[content].append(seq)
            num_reads += 1
        seq.num_pending_reads = num_reads

    def _end_read(self, copy: DiskCopy, ok: bool, seconds: float) -> None:
        self.pool.free([copy.disk_id])
        if ok:
            self._host.register([copy.host_id], copy.content.group, [copy.content.prefix])
            self._stats.loaded_blocks += 1
            self._rate.add(self._stats.block_bytes, seconds)
        else:
            self.pool.evict([copy.disk_id])
            self._stats.failed_copies += 1
        self._host.free([copy.host_id])
        for seq in self._readers.pop(copy.content):
            assert seq.num_pending_reads, seq
            seq.num_pending_reads -= 1

    # --- down ---------------------------------------------------------------------------------

    def write_later(self, content: Content) -> None:
        """Content has come to the host, and goes on from there."""
        self._to_write.append(content)

    def write(self) -> None:
        """Has blocks that came to the host written to disk, a few at a time."""
        if not self._storage.can_write:
            self._to_write.clear()
        while self._to_write and len(self._copies) - len(self._readers) < MAX_WRITES:
            content = self._to_write.popleft()
            host_id = self._host.lookup(*content)
            if (
                host_id is None  # evicted before its turn came
                or content in self._copies
                or self.pool.lookup(*content) is not None
                or not self.pool.num_free
            ):
                continue
            for victim in self.pool.next_evicted(1):
                self._storage.submit(DiskCopy("remove", content_of(self.pool.blocks[victim])))
            [disk_id] = self.pool.allocate(1)
            self._host.touch([host_id])
            self._submit(DiskCopy("write", content, host_id, disk_id))

    def _end_write(self, copy: DiskCopy, ok: bool) -> None:
        self._host.free([copy.host_id])
        if ok:
            self.pool.register([copy.disk_id], copy.content.group, [copy.content.prefix])
            self._stats.stored_blocks += 1
        else:
            self._stats.failed_copies += 1
        self.pool.free([copy.disk_id])

    # --- both ---------------------------------------------------------------------------------

    def _submit(self, copy: DiskCopy) -> None:
        self._copies[copy.content] = copy
        self._storage.submit(copy)

    def collect(self, wait_s: float) -> None:
        """Takes note of copies that have finished; waits up to `wait_s` for one."""
        for copy, ok, seconds in self._storage.collect(wait_s):
            if copy.kind == "remove":
                continue
            del self._copies[copy.content]
            if copy.kind == "write":
                self._end_write(copy, ok)
            else:
                self._end_read(copy, ok, seconds)

    def evict(self, content: Content) -> None:
        """Drops content and its file; no copy of it may be under way."""
        disk_id = self.pool.lookup(*content)
        if disk_id is not None:
            self.pool.evict([disk_id])
            self._storage.submit(DiskCopy("remove", content))

    def drain(self, *, and_write: bool) -> None:
        """Waits for all copies; those still to be written are written first, or forgotten."""
        if not and_write:
            self._to_write.clear()
        self.write()
        while self._copies:
            self.collect(math.inf)
            self.write()

    def abandon(self) -> None:
        """Waits until the storage is at rest; what its copies did is forgotten."""
        while self._storage.collect(math.inf):
            pass

    def reset(self) -> bool:
        """Drops all content, files too; nothing is under way."""
        for block in self.pool.blocks:
            if block.prefix is not None:
                self._storage.submit(DiskCopy("remove", content_of(block)))
        return self.pool.reset()

    def close(self) -> None:
        """Gives the directory free."""
        self._storage.close()

    def held_host_ids(self) -> list[int]:
        """Host blocks that copies under way hold."""
        return [copy.host_id for copy in self._copies.values()]

    def check(self) -> None:
        """Raises AssertionError if a reference is held that no copy under way explains."""
        self.pool.check([[copy.disk_id for copy in self._copies.values()]])
        reading = {content for content, copy in self._copies.items() if copy.kind == "read"}
        assert reading == set(self._readers), (reading, set(self._readers))


class NoDisk:
    """In place of a DiskStorage when host memory is the last tier."""

    can_write = False

    def scan(self, prefixes: Prefixes) -> list[Content]:
        """Nothing."""
        return []

    def submit(self, copy: DiskCopy) -> None:
        """Never called: nothing is found on disk, and nothing is written."""
        raise AssertionError(f"there is no disk tier for {copy}")

    def collect(self, wait_s: float) -> list[Finished]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing to close."""
