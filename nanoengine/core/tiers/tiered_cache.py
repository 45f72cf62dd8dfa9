"""Tiers: KV blocks that live on below the device, in host memory and on disk. Ints only.

    device pool ── store, after the forward of a plan ──► host pool ── write ──► disk pool
                ◄── load, before the forward of a plan ──           ◄── read ──
                    (the executor's TierStorage)            (DiskStorage, in the background)

Decisions:
- A tier is one more BlockPool with the same content index. There is no swapping: a preempted
  sequence frees its blocks, and what a tier has caught of them comes back as a hit.
- The device loads from host memory alone, which can't fail. A file is first read into a host block,
  its checksum verified; a sequence waits for that once, and what did not arrive is recomputed.
- An index entry appears when its copy has finished. Until then the host block and the disk block
  of the copy hold a reference. A device block needs none: plans run in order, so a step has read
  what it stores before a later step can write there.
- Nothing is held on behalf of a sequence, so one that ends while it waits leaves nothing behind.
- A step's transfers have finished when that step, or a later one, is committed.

Called by the BlockManager and the Scheduler; `NoTiers` answers in its place when there are none.
Source: the connector and offloading of vLLM v1 (tiers as caches below the device pool); reading
through host memory and the cost model are ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoengine.core.block_pool import Block, BlockPool
from nanoengine.core.cache_stats import TierStats
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan, StepResult, Transfer
from nanoengine.core.prefixes import Prefixes
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.cost import CostModel
from nanoengine.core.tiers.disk import DiskBlocks, DiskStorage, Fetch, NoDisk
from nanoengine.core.tiers.found import Content, Found, Level, TierBlock, content_of

LAZY_BLOCKS = 64
"""A lazy tier stores blocks that are among this many next to be evicted."""
WAIT_S = 0.05
"""Longest wait for the disk in a step that has nothing else to do."""


class Choice(NamedTuple):
    """How much of a prompt to take from where it is found.

    `num_blocks` [blocks] start the sequence's tables; `is_ready` is False while the disk reads for
    it; `reason` says why it was loaded or not, "" if there was nothing to choose.
    """

    num_blocks: int
    is_ready: bool = True
    reason: str = ""


class NoTiers:
    """In place of Tiers when the device is all there is."""

    def start(self, prefixes: Prefixes) -> None:
        """Nothing to start."""

    def find(self, content: Content) -> TierBlock | None:
        """Nowhere."""
        return None

    def choose(self, seq: Sequence, found: Found) -> Choice:
        """The longest prefix on the device."""
        return Choice(num_blocks=found.reach(Level.DEVICE))

    def load(self, host_id: int, device_id: int) -> None:
        """Never called: nothing was found in a tier."""
        raise AssertionError("there is no tier to load from")

    def catch(self, blocks: list[Block]) -> None:
        """Lets full blocks be."""

    def distrust(self, block: Block) -> None:
        """It is nowhere else."""

    def take_transfers(self, plan: StepPlan, pool: BlockPool) -> list[Transfer]:
        """None."""
        return []

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing was under way."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def reset(self) -> bool:
        """Nothing to drop."""
        return True

    def discard_all(self) -> None:
        """Nothing to drop."""

    def close(self) -> None:
        """Nothing to close."""

    def stats(self) -> tuple[TierStats, ...]:
        """No tiers."""
        return ()

    def check(self) -> None:
        """Nothing to check."""


@dataclass(slots=True)
class Moves:
    """The transfers of one step: (device block, host block), and for stores what they hold."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    stores: list[tuple[int, int, Content]] = field(default_factory=list)


class Tiers:
    """A host tier, and a disk tier below it or none.

    Args:
        layout: of the device's KV cache.
        num_host_blocks, num_disk_blocks: sizes of the tiers.
        cost: decides between loading and recomputing.
        lazy: store blocks near eviction; False: as soon as they are full.
        disk: moves blocks to files and back; None without a disk tier.
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
    ) -> None:
        self._layout = layout
        self._cost = cost
        self._lazy = lazy
        self._storage: DiskStorage = disk or NoDisk()
        self._last = Level.HOST if disk is None else Level.DISK
        self._sizes = (num_host_blocks + 1, num_disk_blocks + 1)
        self._stats = [TierStats(name=n, block_bytes=layout.block_bytes) for n in ("host", "disk")]

    def start(self, prefixes: Prefixes) -> None:
        """Empty pools, but for what the disk holds; `prefixes` name what all pools hold."""
        self._prefixes = prefixes
        num_groups = len(self._layout.groups)
        self.host = BlockPool(self._sizes[0], num_groups)
        self.disk = DiskBlocks(
            self._storage,
            num_blocks=self._sizes[1],
            num_groups=num_groups,
            host=self.host,
            stats=self._stats[1],
            rate=self._cost.disk.rate,
            prefixes=prefixes,
        )
        self._moves = Moves()
        self._in_flight: dict[int, Moves] = {}
        self._storing: set[Content] = set()
        self._distrusted: list[Content] = []

    # --- hits ---------------------------------------------------------------------------------

    def find(self, content: Content) -> TierBlock | None:
        """The nearest tier that holds this content."""
        for level, pool in ((Level.HOST, self.host), (Level.DISK, self.disk.pool)):
            block_id = pool.lookup(*content)
            if block_id is not None:
                return TierBlock(level, block_id)
        return None

    def choose(self, seq: Sequence, found: Found) -> Choice:
        """How much of the found prefix to take: loading costs time, as computing does.

        Not ready while blocks are read from disk for this sequence, which is asked for here.
        """
        last = self._last
        if seq.fetch is not None:
            if seq.fetch.num_pending:
                return _not_ready(seq.fetch)
            last = Level.HOST  # Why: what the disk did not bring, it is not asked for again.
        best, reason = self._cheapest(found, last)
        if best is Level.DISK:
            seq.fetch = self._fetch(found, found.reach(best))
            if seq.fetch.num_pending:
                return _not_ready(seq.fetch)
            best, reason = self._cheapest(found, Level.HOST)
        return Choice(num_blocks=found.reach(best), reason=reason)

    def _cheapest(self, found: Found, last: Level) -> tuple[Level, str]:
        """The level down to which hits are worth their loads, and why."""
        best, reasons = Level.DEVICE, []
        before = found.reach(best)
        for level in (Level.HOST, Level.DISK)[:last]:
            length = found.reach(level)
            if length <= before:
                continue
            counts = _count(found, length)
            prefer, reason = self._cost.prefer_load(
                level.name.lower(),
                num_host=counts[Level.HOST] + counts[Level.DISK],
                num_disk=counts[Level.DISK],
                num_tokens=(length - before) * self._layout.block_size,
                # What of these blocks is loaded anyway.
                num_host_before=_count(found, before)[Level.HOST],
            )
            reasons.append(reason)
            if prefer:
                best, before = level, length
        return best, "; ".join(reasons)

    def _fetch(self, found: Found, length: int) -> Fetch:
        """Has the prefix's blocks read from disk into host memory."""
        places = [place for _, _, place in found.take(length)[1]]
        held = [place.block_id for place in places if place.level is Level.HOST]
        self.host.touch(held)  # Why: reading the end of a prefix must not evict its start.
        fetch = self.disk.fetch(places)
        self.host.free(reversed(held))
        return fetch

    def load(self, host_id: int, device_id: int) -> None:
        """Adds a load to the step being planned; the device block may be indexed at once."""
        self.host.touch([host_id])
        self._moves.loads.append((device_id, host_id))
        self._stats[0].hit_blocks += 1

    # --- stores -------------------------------------------------------------------------------

    def catch(self, blocks: list[Block]) -> None:
        """Device blocks are full once the step being planned has run: stores them, unless lazy."""
        if not self._lazy:
            for block in blocks:
                self._store(block)

    def _store(self, block: Block) -> None:
        content = content_of(block)
        if content in self._storing or self.host.lookup(*content) is not None:
            return
        if self.host.num_free:  # Why: else all of it is being copied; not storing costs a miss.
            [host_id] = self.host.allocate(1)
            self._storing.add(content)
            self._moves.stores.append((block.block_id, host_id, content))

    def take_transfers(self, plan: StepPlan, pool: BlockPool) -> list[Transfer]:
        """The loads and stores of a step that has been planned over the device's `pool`."""
        if self._lazy:
            for block_id in pool.next_evicted(LAZY_BLOCKS):
                self._store(pool.blocks[block_id])
        moves, self._moves = self._moves, Moves()
        if moves.loads or moves.stores:
            self._in_flight[plan.step] = moves
        transfers = []
        for kind, pairs in (("load", moves.loads), ("store", [m[:2] for m in moves.stores])):
            if pairs:
                device_ids, host_ids = zip(*pairs, strict=True)
                transfers.append(Transfer(kind, "host", device_ids, host_ids))
        return transfers

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run: its copies, and those of steps before it, have finished."""
        self._cost.observe(plan, result, self._layout.block_bytes)
        for step in [step for step in self._in_flight if step <= plan.step]:
            moves = self._in_flight.pop(step)
            for _, host_id in moves.loads:
                self.host.free([host_id])
                self._stats[0].loaded_blocks += 1
            for _, host_id, content in moves.stores:
                self._storing.discard(content)
                self.host.register([host_id], content.group, [content.prefix])
                self.host.free([host_id])
                self._stats[0].stored_blocks += 1
                self.disk.write_later(content)
        self._collect(0.0)

    def wait(self) -> None:
        """Called when a step has nothing to run: sleeps until the disk has read something."""
        if self.disk.is_reading:
            self._collect(WAIT_S)

    def _collect(self, wait_s: float) -> None:
        self.disk.collect(wait_s)
        self._drop_distrusted()
        self.disk.write()

    # --- content that may be wrong ------------------------------------------------------------

    def distrust(self, block: Block) -> None:
        """A device block's content may be wrong (its row failed): drops it in every tier."""
        self._distrusted.append(content_of(block))

    def _drop_distrusted(self) -> None:
        """Drops distrusted content, once no copy of it is under way."""
        waiting = []
        for content in self._distrusted:
            host_id = self.host.lookup(*content)
            is_held = host_id is not None and self.host.blocks[host_id].ref_count
            if is_held or content in self._storing or self.disk.is_copying(content):
                waiting.append(content)
                continue
            if host_id is not None:
                self.host.evict([host_id])
            self.disk.evict(content)
        self._distrusted = waiting

    # --- the rest -----------------------------------------------------------------------------

    def reset(self) -> bool:
        """Drops all content, files too; refuses (False) while a step's copies are under way."""
        self.disk.drain(and_write=False)
        return self.host.reset() and self.disk.reset()

    def discard_all(self) -> None:
        """After a failed step: starts anew from what is on disk, whose files are verified."""
        self.disk.abandon()
        self.start(self._prefixes)

    def close(self) -> None:
        """Writes out what the disk has not got yet, and closes it."""
        self.disk.drain(and_write=True)
        self._drop_distrusted()
        self.disk.close()

    def stats(self) -> tuple[TierStats, ...]:
        """Counts of each tier."""
        for tier, pool in zip(self._stats, (self.host, self.disk.pool), strict=True):
            counts = pool.counts()
            tier.empty_blocks, tier.cached_blocks = counts["empty"], counts["cached"]
            tier.active_blocks = counts["active"]
        return tuple(self._stats[: self._last])

    def check(self) -> None:
        """Raises AssertionError if a reference is held that no copy under way explains."""
        moves = [self._moves, *self._in_flight.values()]
        host_ids = [host_id for m in moves for _, host_id in m.loads]
        host_ids += [host_id for m in moves for _, host_id, _ in m.stores]
        self.host.check([host_ids, self.disk.held_host_ids()])
        storing = {content for m in moves for _, _, content in m.stores}
        assert storing == self._storing, (storing, self._storing)
        self.disk.check()


def _not_ready(fetch: Fetch) -> Choice:
    """The sequence waits for the disk."""
    reason = f"{fetch.num_pending} blocks are read from disk for it"
    return Choice(num_blocks=0, is_ready=False, reason=reason)


def _count(found: Found, length: int) -> Counter[Level]:
    """Blocks of a prefix that are loaded, by the tier they come from."""
    return Counter(place.level for _, _, place in found.take(length)[1])
