"""TieredPrefixCache: a prefix cache that also keeps blocks in host memory and on disk. Ints only.

    device pool ── store, after the forward of a plan ──► host pool ── write ──► disk pool
                ◄── load, before the forward of a plan ──           ◄── read ──
                    (the executor's TierStorage)            (DiskStorage, in the background)

The device's pool evicts content when it needs the block for something else. Content that was stored
in a tier before can then be loaded, which is often quicker than computing it again.

- A tier is one more BlockPool with the same keys. There is no swapping: a preempted sequence frees
  its blocks, and those of them that were stored come back as hits.
- The device loads from host memory alone, which can't fail. A file is first read into a host block,
  and its checksum is verified; a sequence waits for that once, and recomputes what did not arrive.
- An index entry appears when its copy has finished. Until then the copy holds a reference to its
  host block and its disk block. A device block needs none: plans run in order, so a step has read
  what it stores before a later step can write there.
- No block is held on behalf of a sequence, so one that ends while it waits leaves nothing behind.
- A step's transfers have finished when that step, or a later one, is committed.

Made in `features/kv_tiers.py`; called as every PrefixCache is.
Source: the connector and offloading of vLLM v1 (tiers as caches below the device pool); reading
through host memory and the cost model are ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.groups.cache import GroupedPrefix, GroupedPrefixCache
from nanoengine.core.groups.pool import StatePool
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan, StepResult, Transfer
from nanoengine.core.prefix_cache import CachedPrefix
from nanoengine.core.prefixes import Prefix
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.cost import CostModel
from nanoengine.core.tiers.disk import DiskBlocks, DiskStorage, NoDisk
from nanoengine.core.tiers.found import Content, Found, Level, Load, TierBlock, content_of
from nanoengine.core.tiers.stats import TierStats

LAZY_BLOCKS = 64
"""A lazy cache stores the device's cached blocks when they are among this many next evicted."""
WAIT_S = 0.05
"""Longest wait for the disk [s] when no step can be planned."""


@dataclass(slots=True, kw_only=True)
class TieredPrefix(GroupedPrefix):
    """A cached prefix of which some blocks must be loaded; in `tables` these are null."""

    loads: list[Load] = field(default_factory=list)

    def num_held(self, group: int) -> int:
        """How many blocks of the prefix a KV group holds, once all are loaded."""
        # Why not super(): in a dataclass with slots it looks at a class that was replaced.
        return GroupedPrefix.num_held(self, group) + sum(load.group == group for load in self.loads)


@dataclass(slots=True)
class StepCopies:
    """One step's copies: loads as (device block, host block), stores with their content as well."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    stores: list[tuple[int, int, Content]] = field(default_factory=list)


class TieredPrefixCache(GroupedPrefixCache):
    """A prefix cache with a host tier, and a disk tier below it or none.

    Args:
        layout: of the device's KV cache.
        num_host_blocks, num_disk_blocks: sizes of the tiers.
        num_host_states: snapshots that host memory holds besides; a disk holds none.
        cost: decides between loading and recomputing.
        lazy: store blocks that are soon evicted; False stores them as soon as they are full.
        disk: moves blocks to files and back; None: there is no disk tier.

    Attributes:
        host: the pool of host memory.
        disk: the blocks on disk.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_host_blocks: int,
        cost: CostModel,
        lazy: bool = False,
        disk: DiskStorage | None = None,
        num_disk_blocks: int = 1,
        num_host_states: int = 0,
    ) -> None:
        super().__init__(layout)
        self.tiers = self
        self._cost = cost
        self._lazy = lazy
        self._storage: DiskStorage = disk or NoDisk()
        self._last = Level.HOST if disk is None else Level.DISK
        self._sizes = (num_host_blocks + 1, num_disk_blocks + 1)
        self._num_host_states = num_host_states
        self._stats = [TierStats(name=n, block_bytes=layout.block_bytes) for n in ("host", "disk")]
        self._start_tiers()

    def _start_tiers(self) -> None:
        """Makes the tiers' pools: an empty one for the host, and the disk's from its files."""
        num_groups = len(self.layout.groups)
        self.host = StatePool(self._sizes[0], num_groups, self._num_host_states)
        self.disk = DiskBlocks(
            self._storage,
            num_blocks=self._sizes[1],
            num_groups=num_groups,
            host=self.host,
            stats=self._stats[1],
            rate=self._cost.disk.rate,
            prefixes=self.prefixes,
        )
        self._planned = StepCopies()
        self._under_way: dict[int, StepCopies] = {}
        self._storing: set[Content] = set()
        self._invalid: list[Content] = []

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix on the device, or a longer one if it is worth its loads.

        If some of it is on disk, this starts the reads, and the prefix is not ready until they have
        ended.
        """
        if seq.num_pending_reads:
            return _wait_for(seq)
        found = self._find_in_all_tiers(seq)
        # Why: a sequence asks the disk once; what did not arrive is recomputed.
        last = self._last if seq.num_pending_reads is None else Level.HOST
        level, reason = self._cheapest(found, last)
        if level is Level.DISK:
            self._read(seq, found)
            if seq.num_pending_reads:
                return _wait_for(seq)
            level, reason = self._cheapest(found, Level.HOST)
        length = found.reach(level)
        tables, loads = self._table_starts(found.device, length), found.loads(length)
        num_needed = [*map(self.pool.num_cached, tables)]
        for load in loads:
            num_needed[load.group] += 1
        return TieredPrefix(
            num_blocks=length,
            tables=tables,
            loads=loads,
            num_needed_blocks=sum(num_needed[: self.num_kv_groups]),
            num_needed_states=sum(num_needed[self.num_kv_groups :]),
            num_shared_blocks=self._num_shared_blocks(found.device),
            reason=reason,
        )

    def _find_in_all_tiers(self, seq: Sequence) -> Found:
        """Where a sequence's full blocks are; full attention ends at the first that is nowhere."""
        at_most = self._num_usable_blocks(seq)
        prefixes = self._prefixes_of(seq, at_most)[:at_most]
        found = Found(self.layout)
        for index, group in enumerate(self.layout.groups):
            device, below = self.pool.lookup_all(index, prefixes), {}
            for i, block_id in enumerate(device):
                if block_id == NULL_BLOCK:
                    tier_block = self.lookup(Content(index, prefixes[i]))
                    if tier_block is not None:
                        below[i] = tier_block
                    elif group.sliding_window is None:
                        del device[i:]
                        break
            found.device.append(device)
            found.below.append(below)
        return found

    def lookup(self, content: Content) -> TierBlock | None:
        """A block below the device that holds this content, of the nearest tier that has one."""
        for level, pool in ((Level.HOST, self.host), (Level.DISK, self.disk.pool)):
            block_id = pool.lookup(*content)
            if block_id is not None:
                return TierBlock(level, block_id)
        return None

    def _cheapest(self, found: Found, last: Level) -> tuple[Level, str]:
        """The tier down to which hits are worth their loads, and why."""
        best, reasons = Level.DEVICE, []
        before = found.reach(best)
        for level in (Level.HOST, Level.DISK)[:last]:
            length = found.reach(level)
            if length <= before:
                continue
            counts = _count(found.loads(length))
            prefer, reason = self._cost.prefer_load(
                level.name.lower(),
                num_host=counts[Level.HOST] + counts[Level.DISK],
                num_disk=counts[Level.DISK],
                num_tokens=(length - before) * self.block_size,
                # These are loaded even if this tier is not used.
                num_host_before=_count(found.loads(before))[Level.HOST],
            )
            reasons.append(reason)
            if prefer:
                best, before = level, length
        return best, "; ".join(reasons)

    def _read(self, seq: Sequence, found: Found) -> None:
        """Starts to read those blocks of the longest prefix that are on disk."""
        blocks = [load.block for load in found.loads(found.reach(Level.DISK))]
        held = [block.block_id for block in blocks if block.level is Level.HOST]
        # Why: a read takes a host block, which must not be one that holds an earlier part.
        self.host.touch(held)
        self.disk.read_for(seq, blocks)
        self.host.free(reversed(held))

    # --- load and store -----------------------------------------------------------------------

    def take(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Makes the blocks of a found prefix active, and adds its loads to the planned step."""
        assert isinstance(prefix, TieredPrefix), prefix
        tables = super().take(seq, prefix)
        for group, position, block in prefix.loads:
            tables[group][position] = self._load(group, seq.prefixes[position], block)
        seq.num_pending_reads = None
        return tables

    def _load(self, group: int, prefix: Prefix, block: TierBlock) -> int:
        """Adds a load to the step being planned; returns the device block.

        The block is indexed at once, because a step's loads come before its forward.
        """
        [block_id] = self.pool.allocate(1, states=group >= self.num_kv_groups)
        self.pool.register([block_id], group, [prefix])
        self.host.touch([block.block_id])
        self._planned.loads.append((block_id, block.block_id))
        self._stats[0].hit_blocks += 1
        return block_id

    def _index(self, block_ids: list[int], group: int, prefixes: list[Prefix]) -> list[Block]:
        """Indexes device blocks, and stores those that were not indexed before, unless lazy."""
        fresh = super()._index(block_ids, group, prefixes)
        if not self._lazy:
            for block in fresh:
                self._store(block)
        return fresh

    def _store(self, block: Block) -> None:
        """Adds a store to the step being planned, unless the host has the content already."""
        content = content_of(block)
        if content in self._storing or self.host.lookup(*content) is not None:
            return
        is_state = block.group >= self.num_kv_groups
        num_free = self.host.num_free_states if is_state else self.host.num_free
        if num_free:  # Why: else all host blocks are being copied; this one is not kept.
            [host_id] = self.host.allocate(1, states=is_state)
            self._storing.add(content)
            self._planned.stores.append((block.block_id, host_id, content))

    def take_transfers(self, plan: StepPlan) -> list[Transfer]:
        """The loads and stores of a step that has been planned, lazy stores included."""
        if self._lazy:
            for block_id in self.pool.next_evicted(LAZY_BLOCKS):
                self._store(self.pool.blocks[block_id])
        copies, self._planned = self._planned, StepCopies()
        if copies.loads or copies.stores:
            self._under_way[plan.step] = copies
        transfers = []
        for kind, pairs in (("load", copies.loads), ("store", [s[:2] for s in copies.stores])):
            if pairs:
                device_ids, host_ids = zip(*pairs, strict=True)
                transfers.append(Transfer(kind, "host", device_ids, host_ids))
        return transfers

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Called when a step has run: its copies, and those of earlier steps, have finished."""
        self._cost.observe(plan, result, self.layout.block_bytes)
        for step in [step for step in self._under_way if step <= plan.step]:
            copies = self._under_way.pop(step)
            for _, host_id in copies.loads:
                self.host.free([host_id])
                self._stats[0].loaded_blocks += 1
            for _, host_id, content in copies.stores:
                self._storing.discard(content)
                self.host.register([host_id], content.group, [content.prefix])
                self.host.free([host_id])
                self._stats[0].stored_blocks += 1
                self.disk.write_later(content)
        self._collect(0.0)

    def wait(self) -> None:
        """Called when no step is under way and none can be planned: waits for a read to end."""
        if self.disk.is_reading:
            self._collect(WAIT_S)

    def _collect(self, wait_s: float) -> None:
        """Ends the disk's finished copies, and starts what waited for that."""
        self.disk.collect(wait_s)
        self._drop_invalid()
        self.disk.write()

    # --- drop ---------------------------------------------------------------------------------

    def invalidate(self, block_ids: list[int]) -> None:
        """Drops content that may be wrong: on the device now, in tiers when copies have ended."""
        blocks = map(self.pool.blocks.__getitem__, block_ids)
        self._invalid += [content_of(block) for block in blocks if block.prefix is not None]
        super().invalidate(block_ids)

    def _drop_invalid(self) -> None:
        """Drops invalid content from the tiers, except while a copy of it is under way."""
        waiting = []
        for content in self._invalid:
            host_id = self.host.lookup(*content)
            is_held = host_id is not None and self.host.blocks[host_id].ref_count
            if is_held or content in self._storing or self.disk.is_copying(content):
                waiting.append(content)
                continue
            if host_id is not None:
                self.host.evict([host_id])
            self.disk.evict(content)
        self._invalid = waiting

    def reset(self) -> bool:
        """Drops all content, files too; refuses (False) while blocks are used or copied."""
        if self.pool.counts()["active"]:
            return False
        self.disk.drain(and_write=False)
        return self.host.reset() and self.disk.reset() and super().reset()

    def discard_all(self) -> None:
        """Starts again from what is on disk, whose files are verified when they are read."""
        super().discard_all()
        self.disk.abandon()
        self._start_tiers()

    def close(self) -> None:
        """Writes what waits for the disk, and closes it."""
        self.disk.drain(and_write=True)
        self._drop_invalid()
        self.disk.close()

    # --- the rest -----------------------------------------------------------------------------

    def tier_stats(self) -> tuple[TierStats, ...]:
        """The blocks of each tier, and what was moved."""
        for tier, pool in zip(self._stats, (self.host, self.disk.pool), strict=True):
            counts = pool.counts()
            tier.empty_blocks, tier.cached_blocks = counts["empty"], counts["cached"]
            tier.active_blocks = counts["active"]
        return tuple(self._stats[: self._last])

    def check(self) -> None:
        """Raises AssertionError if a reference is held that no copy under way explains."""
        copies = [self._planned, *self._under_way.values()]
        host_ids = [host_id for step in copies for _, host_id in step.loads]
        host_ids += [host_id for step in copies for _, host_id, _ in step.stores]
        from nanoengine.core.checks import check_pool

        check_pool(self.host, [host_ids, self.disk.held_host_ids()])
        storing = {content for step in copies for _, _, content in step.stores}
        assert storing == self._storing, (storing, self._storing)
        self.disk.check()


def _wait_for(seq: Sequence) -> CachedPrefix:
    """A prefix that is not ready, because the disk reads blocks of it."""
    reason = f"{seq.num_pending_reads} blocks are read from disk for it"
    return CachedPrefix(is_ready=False, reason=reason)


def _count(loads: list[Load]) -> Counter[Level]:
    """How many blocks are loaded from each tier."""
    return Counter(load.block.level for load in loads)
