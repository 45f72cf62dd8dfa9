"""TieredPrefixCache: a prefix cache that also keeps blocks in host memory and on disk. Ints only.

    device pool ── store, after the forward of a plan ──► host pool ── write ──► disk pool
                ◄── load, before the forward of a plan ──           ◄── read ──
                    (the executor's TierStorage)            (DiskStorage, in the background)

The device's pool evicts content when it needs the block for other content. Content that was stored
in a tier before can then be loaded, which is often faster than computing it again.

- A tier is another BlockPool with the same keys. There is no swapping: a preempted sequence frees
  its blocks, and the stored ones are found again as hits.
- The device only loads from host memory, which can't fail. A file is first read into a host block,
  and its checksum is verified. A sequence waits for reads once, and recomputes missing blocks.
- An index entry is added when its copy has finished. Until then the copy holds a reference to its
  host block and its disk block. A device block needs none: plans run in order, so a step has read
  what it stores before a later step can write there.
- No block is held on behalf of a sequence, so a sequence that ends while it waits leaves nothing.
- A step's transfers have finished when that step, or a later one, is committed.

Created in `features/kv_tiers.py`; has the interface of PrefixCache.
Source: the connector and offloading of vLLM v1 (tiers as caches below the device pool); reading
through host memory and the cost model are new.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.groups.cache import GroupedPrefix, GroupedPrefixCache, Load
from nanoengine.core.groups.pool import StatePool
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan, StepResult, Transfer
from nanoengine.core.prefix_cache import CachedPrefix
from nanoengine.core.prefix_tree import Prefix
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.cost import CostModel
from nanoengine.core.tiers.disk import DiskBlocks, DiskStorage, NoDisk
from nanoengine.core.tiers.lookup import Content, Level, TieredLookup, content_of
from nanoengine.core.tiers.stats import TierStats

WAIT_S = 0.05
"""Longest wait for the disk [s] when no step can be planned."""


class StepCopy(NamedTuple):
    """One block that a step copies: "load" (host to device) or "store" (device to host)."""

    kind: str
    content: Content
    device_id: int
    host_id: int


class TieredPrefixCache(GroupedPrefixCache):
    """A prefix cache with a host tier and an optional disk tier below it.

    Args:
        layout: the device's KV cache.
        num_host_blocks, num_disk_blocks: sizes of the tiers.
        num_host_states: number of snapshots in host memory; a disk holds none.
        cost: decides between loading and recomputing.
        disk: moves blocks to files and back; None: there is no disk tier.

    Attributes:
        host: the pool of host memory.
        disk: the blocks on disk.
        cost: as given.
        storage: moves blocks to files and back; a `NoDisk` without a disk tier.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_host_blocks: int,
        cost: CostModel,
        disk: DiskStorage | None = None,
        num_disk_blocks: int = 1,
        num_host_states: int = 0,
    ) -> None:
        super().__init__(layout)
        self.tiers = self
        self.cost = cost
        self.storage: DiskStorage = disk or NoDisk()
        self._last_level = Level.HOST if disk is None else Level.DISK
        self._sizes = (num_host_blocks + 1, num_disk_blocks + 1)
        self._num_host_states = num_host_states
        self._stats = [TierStats(name=n, block_bytes=layout.block_bytes) for n in ("host", "disk")]
        self._start_tiers()

    def _start_tiers(self) -> None:
        """Creates the tiers' pools: an empty one for the host, and the disk's from its files."""
        self.host = StatePool(self._sizes[0], len(self.layout.groups), self._num_host_states)
        self.disk = DiskBlocks(
            self.storage,
            num_blocks=self._sizes[1],
            host=self.host,
            stats=self._stats[1],
            rate=self.cost.disk.rate,
            prefixes=self.prefixes,
        )
        self._planned: list[StepCopy] = []
        self._in_flight: dict[int, list[StepCopy]] = {}
        self._storing: set[Content] = set()
        self._invalid: list[Content] = []

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix on the device, or a longer one if loading the rest is worth it.

        If some of it is on disk, this starts the reads, and the prefix is not ready until they have
        ended.
        """
        if seq.num_pending_reads:
            return _wait_for(seq)
        found = self._find_in_all_tiers(seq)
        # Why: a sequence waits for the disk once; missing blocks are recomputed.
        last = self._last_level if seq.num_pending_reads is None else Level.HOST
        level, reason = self._cheapest(found, last)
        if level is Level.DISK:
            self._read(seq, found)
            if seq.num_pending_reads:
                return _wait_for(seq)
            level, reason = self._cheapest(found, Level.HOST)
        length = found.prefix_length(level)
        return self._prefix(found.device, length, found.loads(length), reason)

    def _find_in_all_tiers(self, seq: Sequence) -> TieredLookup:
        """Where a sequence's full blocks are; full attention ends at the first that is missing."""
        end = self._num_usable_blocks(seq)
        prefixes = self._prefixes_of(seq, end)[:end]
        found = TieredLookup(self.layout)
        for index, group in enumerate(self.layout.groups):
            device, below = self.pool.lookup_all(index, prefixes), {}
            for i, block_id in enumerate(device):
                if block_id == NULL_BLOCK:
                    hit = self.lookup(Content(index, prefixes[i]))
                    if hit is not None:
                        below[i] = Load(index, i, *hit)
                    elif group.sliding_window is None:
                        del device[i:]
                        break
            found.device.append(device)
            found.below.append(below)
        return found

    def lookup(self, content: Content) -> tuple[Level, int] | None:
        """The nearest tier below the device that has this content, and its block there."""
        for level, pool in ((Level.HOST, self.host), (Level.DISK, self.disk.pool)):
            block_id = pool.lookup(*content)
            if block_id is not None:
                return level, block_id
        return None

    def _cheapest(self, found: TieredLookup, last: Level) -> tuple[Level, str]:
        """The lowest tier whose hits are worth loading, and the reason."""
        best, reasons = Level.DEVICE, []
        best_length = found.prefix_length(best)
        for level in (Level.HOST, Level.DISK)[:last]:
            length = found.prefix_length(level)
            if length <= best_length:
                continue
            counts = _count(found.loads(length))
            prefer, reason = self.cost.prefer_load(
                level.name.lower(),
                num_host=counts[Level.HOST] + counts[Level.DISK],
                num_disk=counts[Level.DISK],
                num_tokens=(length - best_length) * self.block_size,
                # These are loaded even if this tier is not used.
                num_host_before=_count(found.loads(best_length))[Level.HOST],
            )
            reasons.append(reason)
            if prefer:
                best, best_length = level, length
        return best, "; ".join(reasons)

    def _read(self, seq: Sequence, found: TieredLookup) -> None:
        """Starts reading the blocks of the longest prefix that are on disk."""
        loads = found.loads(found.prefix_length(Level.DISK))
        host_ids = [load.block_id for load in loads if load.level is Level.HOST]
        # Why: a read allocates a host block, which must not hold an earlier part of the prefix.
        self.host.touch(host_ids)
        self.disk.start_reads(seq, loads)
        self.host.free(reversed(host_ids))

    # --- load and store -----------------------------------------------------------------------

    def activate(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Makes the blocks of a found prefix active, and adds its loads to the planned step."""
        assert isinstance(prefix, GroupedPrefix), prefix
        tables = super().activate(seq, prefix)
        for group, position, _, host_id in prefix.loads:
            content = Content(group, seq.prefixes[position])
            [block_id] = self.pool.allocate(1, states=group >= self.num_kv_groups)
            # Why at once: a step's loads come before its forward pass.
            self.pool.register([block_id], group, [content.prefix])
            self.host.touch([host_id])
            self._planned.append(StepCopy("load", content, block_id, host_id))
            self._stats[0].hit_blocks += 1
            tables[group][position] = block_id
        seq.num_pending_reads = None
        return tables

    def _index(self, block_ids: list[int], group: int, prefixes: list[Prefix]) -> list[Block]:
        """Indexes device blocks, and stores the newly indexed ones."""
        fresh = super()._index(block_ids, group, prefixes)
        for block in fresh:
            self._store(block)
        return fresh

    def _store(self, block: Block) -> None:
        """Adds a store to the step being planned, unless the host already has the content."""
        content = content_of(block)
        if content in self._storing or self.host.lookup(*content) is not None:
            return
        is_state = block.group >= self.num_kv_groups
        num_free = self.host.num_free_states if is_state else self.host.num_free
        if num_free:  # Why: else all host blocks are being copied; this one is not stored.
            [host_id] = self.host.allocate(1, states=is_state)
            self._storing.add(content)
            self._planned.append(StepCopy("store", content, block.block_id, host_id))

    def take_transfers(self, plan: StepPlan) -> list[Transfer]:
        """The loads and stores of a planned step."""
        copies, self._planned = sorted(self._planned, key=attrgetter("kind")), []
        if copies:
            self._in_flight[plan.step] = copies
        transfers = []
        for kind, group in groupby(copies, key=attrgetter("kind")):
            pairs = [(copy.device_id, copy.host_id) for copy in group]
            transfers.append(Transfer(kind, "host", *zip(*pairs, strict=True)))
        return transfers

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Called when a step has run: its copies and all earlier copies have finished."""
        self.cost.observe(plan, result, self.layout.block_bytes)
        for step in [step for step in self._in_flight if step <= plan.step]:
            for kind, content, _, host_id in self._in_flight.pop(step):
                if kind == "load":
                    self._stats[0].loaded_blocks += 1
                else:
                    self._storing.discard(content)
                    self.host.register([host_id], content.group, [content.prefix])
                    self._stats[0].stored_blocks += 1
                    self.disk.to_write.append(content)
                self.host.free([host_id])
        self._collect(0.0)

    def wait(self) -> None:
        """Called when no step runs and none can be planned: waits for a read to end."""
        if self.disk.readers:
            self._collect(WAIT_S)

    def _collect(self, wait_s: float) -> None:
        """Handles the disk's finished copies, and starts the next ones."""
        self.disk.collect(wait_s)
        self._drop_invalid()
        self.disk.start_writes()

    # --- drop ---------------------------------------------------------------------------------

    def invalidate(self, block_ids: list[int]) -> None:
        """Drops content that may be wrong: on the device now, in tiers when copies have ended."""
        blocks = map(self.pool.blocks.__getitem__, block_ids)
        self._invalid += [content_of(block) for block in blocks if block.prefix is not None]
        super().invalidate(block_ids)

    def _drop_invalid(self) -> None:
        """Drops invalid content from the tiers, unless it is being copied."""
        waiting = []
        for content in self._invalid:
            host_id = self.host.lookup(*content)
            in_use = host_id is not None and self.host.blocks[host_id].ref_count
            if in_use or content in self._storing or content in self.disk.copies:
                waiting.append(content)
                continue
            if host_id is not None:
                self.host.evict([host_id])
            self.disk.evict(content)
        self._invalid = waiting

    def reset(self) -> bool:
        """Drops all content and files; returns False and keeps them while blocks are in use."""
        if self.pool.counts()["active"]:
            return False
        self.disk.drain(and_write=False)
        return self.host.reset() and self.disk.reset() and super().reset()

    def discard_all(self) -> None:
        """Starts again from the files on disk, which are verified when they are read."""
        super().discard_all()
        while self.storage.collect(math.inf):
            pass  # Why: results do not matter, because the disk's pool is created again.
        self._start_tiers()

    def close(self) -> None:
        """Writes the queued blocks to disk, and closes it."""
        self.disk.drain(and_write=True)
        self._drop_invalid()
        self.storage.close()

    # --- the rest -----------------------------------------------------------------------------

    def tier_stats(self) -> tuple[TierStats, ...]:
        """The block counts of each tier, and the moved blocks."""
        for tier, pool in zip(self._stats, (self.host, self.disk.pool), strict=True):
            for state, count in pool.counts().items():
                setattr(tier, f"{state}_blocks", count)
        return tuple(self._stats[: self._last_level])

    def check(self) -> None:
        """Raises AssertionError if a block's reference does not belong to a running copy."""
        from nanoengine.core.checks import check_pool

        copies, disk = [*chain(self._planned, *self._in_flight.values())], self.disk
        check_pool(self.host, [[copy.host_id for copy in copies], disk.copied_host_ids()])
        check_pool(disk.pool, [[copy.disk_id for copy in disk.copies.values()]])
        storing = {copy.content for copy in copies if copy.kind == "store"}
        assert storing == self._storing, (storing, self._storing)
        reading = {content for content, copy in disk.copies.items() if copy.kind == "read"}
        assert reading == set(disk.readers), (reading, set(disk.readers))


def _wait_for(seq: Sequence) -> CachedPrefix:
    """A prefix that is not ready, because the disk is reading blocks of it."""
    reason = f"{seq.num_pending_reads} blocks are read from disk for it"
    return CachedPrefix(is_ready=False, reason=reason)


def _count(loads: list[Load]) -> Counter[int]:
    """Number of blocks to load per tier."""
    return Counter(load.level for load in loads)
