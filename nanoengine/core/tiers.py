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

import math
from collections import Counter, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

from nanoengine.core.block_pool import NULL_BLOCK, Block, BlockPool
from nanoengine.core.kv_groups import longest_common_hit, num_dropped_blocks
from nanoengine.core.plan import StepPlan, StepResult, Transfer
from nanoengine.core.protocols import KVLayout
from nanoengine.core.sequence import Sequence
from nanoengine.core.tier_cost import CostModel

MAX_WRITES = 8
"""Blocks being written to disk at once: a read behind them waits for no more than these."""
LAZY_BLOCKS = 64
"""A lazy tier stores blocks that are among this many next to be evicted."""
WAIT_S = 0.05
"""Longest wait for the disk in a step that has nothing else to do."""


class Level(IntEnum):
    """Where a block's content is, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NOWHERE = 3


class Place(NamedTuple):
    """A block id of one level's pool."""

    level: Level
    block_id: int


NOWHERE = Place(Level.NOWHERE, NULL_BLOCK)


class Content(NamedTuple):
    """What a full block holds: the key of every pool's index. The group is part of it, and so, by
    the first parent, is the cache salt."""

    group: int
    digest: bytes
    parent: bytes | None
    token_ids: SequenceOf[int]

    @property
    def key(self) -> tuple[int, bytes]:
        """Names the content among copies under way."""
        return self.group, self.digest


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

    def scan(self) -> list[Content]:
        """What the directory holds, least recently used first."""

    def submit(self, copy: DiskCopy) -> None:
        """Takes a copy on; its host block is left alone until it has finished."""

    def collect(self, wait_s: float) -> list[Finished]:
        """Copies finished since the last call; waits up to `wait_s` for one under way."""

    def close(self) -> None:
        """Ends what is under way and gives the directory free."""


@dataclass(slots=True)
class Fetch:
    """A waiting sequence's one trip to the disk: blocks that have not arrived yet."""

    num_pending: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How much of a prompt to take from where it is found.

    `num_blocks` [blocks] start the sequence's tables; `is_ready` is False while the disk reads for
    it; `reason` says why it was loaded or not, "" if there was nothing to choose.
    """

    num_blocks: int
    is_ready: bool = True
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class TierStats:
    """One tier's block counts now, and what has moved since the start.

    `hit_blocks` were found here and asked for, `loaded_blocks` of them reached the level above;
    `stored_blocks` arrived from it; `failed_copies` were lost to a disk error or a damaged file.
    """

    name: str
    block_bytes: int
    empty_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    hit_blocks: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    failed_copies: int = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes moved up."""
        return self.loaded_blocks * self.block_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes moved down."""
        return self.stored_blocks * self.block_bytes


class NoTiers:
    """In place of Tiers when the device is all there is."""

    def find(self, content: Content) -> Place:
        """Nowhere."""
        return NOWHERE

    def choose(
        self, seq: Sequence, found: SequenceOf[SequenceOf[Place]], layout: KVLayout
    ) -> Choice:
        """The longest prefix on the device."""
        return Choice(num_blocks=reach(found, Level.DEVICE, layout))

    def load(self, host_id: int, device_id: int) -> None:
        """Never called: nothing was found in a tier."""
        raise AssertionError("there is no tier to load from")

    def catch(self, block: Block) -> None:
        """Lets a full block be."""

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
        self._disk: DiskStorage = disk or NoDisk()
        self._last = Level.HOST if disk is None else Level.DISK
        self._sizes = (num_host_blocks + 1, num_disk_blocks + 1)
        names = ("host", "disk")[: self._last]
        self._stats = [TierStats(name=n, block_bytes=layout.block_bytes) for n in names]
        self._start()

    def _start(self) -> None:
        """Empty pools, but for what the disk holds."""
        num_groups = len(self._layout.groups)
        self.host, self.disk = (BlockPool(size, num_groups) for size in self._sizes)
        self._moves = Moves()
        self._in_flight: dict[int, Moves] = {}
        self._storing: set[tuple[int, bytes]] = set()
        self._copies: dict[tuple[int, bytes], DiskCopy] = {}
        self._fetches: dict[tuple[int, bytes], list[Fetch]] = {}
        self._distrusted: list[Content] = []
        # Why bounded: what came longest ago has left the host again, if it holds no more.
        self._to_write: deque[Content] = deque(maxlen=self.host.num_usable)
        contents = self._disk.scan()
        surplus = max(0, len(contents) - self.disk.num_usable)
        for content in contents[:surplus]:
            self._disk.submit(DiskCopy("remove", content))
        for content in contents[surplus:]:
            [disk_id] = self.disk.allocate(1)
            self.disk.register(disk_id, **content._asdict())
            self.disk.free([disk_id])

    # --- hits ---------------------------------------------------------------------------------

    def find(self, content: Content) -> Place:
        """The nearest tier that holds this content."""
        for level, pool in ((Level.HOST, self.host), (Level.DISK, self.disk)):
            block_id = pool.lookup(*content)
            if block_id is not None:
                return Place(level, block_id)
        return NOWHERE

    def choose(
        self, seq: Sequence, found: SequenceOf[SequenceOf[Place]], layout: KVLayout
    ) -> Choice:
        """How much of the found prefix to take: loading costs time, as computing does.

        Not ready while blocks are read from disk for this sequence, which is asked for here.
        """
        best, reason = self._cheapest(found, self._last)
        if best is Level.DISK and seq.fetch is None:
            seq.fetch = self._fetch(found, reach(found, best, layout))
        if seq.fetch is not None and seq.fetch.num_pending:
            return Choice(
                num_blocks=0,
                is_ready=False,
                reason=f"{seq.fetch.num_pending} blocks are read from disk for it",
            )
        if best is Level.DISK:  # Why: what the disk did not bring, it is not asked for again.
            best, reason = self._cheapest(found, Level.HOST)
        return Choice(num_blocks=reach(found, best, layout), reason=reason)

    def _cheapest(self, found: SequenceOf[SequenceOf[Place]], last: Level) -> tuple[Level, str]:
        """The level down to which hits are worth their loads, and why."""
        layout, best, reasons = self._layout, Level.DEVICE, []
        before = reach(found, best, layout)
        for level in (Level.HOST, Level.DISK)[:last]:
            length = reach(found, level, layout)
            if length <= before:
                continue
            counts = self._count(found, length)
            prefer, reason = self._cost.prefer_load(
                level.name.lower(),
                num_host=counts[Level.HOST] + counts[Level.DISK],
                num_disk=counts[Level.DISK],
                num_tokens=(length - before) * layout.block_size,
                # What of these blocks is loaded anyway.
                num_host_before=self._count(found, before)[Level.HOST] if before else 0,
            )
            reasons.append(reason)
            if prefer:
                best, before = level, length
        return best, "; ".join(reasons)

    def _count(self, found: SequenceOf[SequenceOf[Place]], length: int) -> Counter[Level]:
        """Blocks of a prefix's tables by level."""
        return Counter(place.level for _, _, place in used(found, length, self._layout))

    def load(self, host_id: int, device_id: int) -> None:
        """Adds a load to the step being planned; the device block may be indexed at once."""
        self.host.touch(host_id)
        self._moves.loads.append((device_id, host_id))
        self._stats[0].hit_blocks += 1

    def _fetch(self, found: SequenceOf[SequenceOf[Place]], length: int) -> Fetch:
        """Has the prefix's blocks read from disk into host memory, as many as it has room for."""
        fetch = Fetch()
        places = [place for _, _, place in used(found, length, self._layout)]
        held = [place.block_id for place in places if place.level is Level.HOST]
        for host_id in held:  # Why: reading the end of a prefix must not evict its start.
            self.host.touch(host_id)
        for place in places:
            if place.level is not Level.DISK:
                continue
            content = content_of(self.disk.blocks[place.block_id])
            if content.key not in self._fetches:
                if content.key in self._copies or not self.host.num_free:
                    break
                [host_id] = self.host.allocate(1)
                self.disk.touch(place.block_id)
                self._submit(DiskCopy("read", content, host_id, place.block_id))
                self._fetches[content.key] = []
                self._stats[1].hit_blocks += 1
            self._fetches[content.key].append(fetch)
            fetch.num_pending += 1
        self.host.free(reversed(held))
        return fetch

    # --- stores -------------------------------------------------------------------------------

    def catch(self, block: Block) -> None:
        """A device block is full once the step being planned has run: stores it, unless lazy."""
        if not self._lazy:
            self._store(block)

    def _store(self, block: Block) -> None:
        content = content_of(block)
        if content.key in self._storing or self.host.lookup(*content) is not None:
            return
        if self.host.num_free:  # Why: else all of it is being copied; not storing costs a miss.
            [host_id] = self.host.allocate(1)
            self._storing.add(content.key)
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
                self._storing.discard(content.key)
                self._arrive(host_id, content)
                self._stats[0].stored_blocks += 1
                self._to_write.append(content)
        self._collect(0.0)

    def _arrive(self, host_id: int, content: Content) -> None:
        self.host.register(host_id, **content._asdict())
        self.host.free([host_id])

    # --- disk ---------------------------------------------------------------------------------

    def wait(self) -> None:
        """Called when a step has nothing to run: sleeps until the disk has read something."""
        if self._fetches:
            self._collect(WAIT_S)

    def _submit(self, copy: DiskCopy) -> None:
        self._copies[copy.content.key] = copy
        self._disk.submit(copy)

    def _collect(self, wait_s: float) -> None:
        """Takes note of copies that have finished, and starts writes in their place."""
        for copy, ok, seconds in self._disk.collect(wait_s):
            if copy.kind == "remove":
                continue
            del self._copies[copy.content.key]
            if copy.kind == "write":
                self._end_write(copy, ok)
            else:
                self._end_read(copy, ok)
                if ok:
                    self._cost.disk.rate.add(self._layout.block_bytes, seconds)
        self._drop_distrusted()
        self._write()

    def _end_write(self, copy: DiskCopy, ok: bool) -> None:
        self.host.free([copy.host_id])
        if ok:
            self.disk.register(copy.disk_id, **copy.content._asdict())
            self._stats[1].stored_blocks += 1
        else:
            self._stats[1].failed_copies += 1
        self.disk.free([copy.disk_id])

    def _end_read(self, copy: DiskCopy, ok: bool) -> None:
        self.disk.free([copy.disk_id])
        if ok:
            self._arrive(copy.host_id, copy.content)
            self._stats[1].loaded_blocks += 1
        else:
            self.host.free([copy.host_id])
            self.disk.evict([copy.disk_id])
            self._stats[1].failed_copies += 1
        for fetch in self._fetches.pop(copy.content.key):
            fetch.num_pending -= 1

    def _write(self) -> None:
        """Has blocks that came to the host written to disk, a few at a time."""
        if not self._disk.can_write:
            self._to_write.clear()
        while self._to_write and len(self._copies) - len(self._fetches) < MAX_WRITES:
            content = self._to_write.popleft()
            host_id = self.host.lookup(*content)
            if (
                host_id is None  # evicted before its turn came
                or content.key in self._copies
                or self.disk.lookup(*content) is not None
                or not self.disk.num_free
            ):
                continue
            for victim in self.disk.next_evicted(1):
                self._disk.submit(DiskCopy("remove", content_of(self.disk.blocks[victim])))
            [disk_id] = self.disk.allocate(1)
            self.host.touch(host_id)
            self._submit(DiskCopy("write", content, host_id, disk_id))

    # --- content that may be wrong ------------------------------------------------------------

    def distrust(self, block: Block) -> None:
        """A device block's content may be wrong (its row failed): drops it in every tier."""
        self._distrusted.append(content_of(block))

    def _drop_distrusted(self) -> None:
        """Drops distrusted content, once no copy of it is under way."""
        waiting = []
        for content in self._distrusted:
            host_id, disk_id = self.host.lookup(*content), self.disk.lookup(*content)
            is_held = host_id is not None and self.host.blocks[host_id].ref_count
            if is_held or content.key in self._storing or content.key in self._copies:
                waiting.append(content)
                continue
            if host_id is not None:
                self.host.evict([host_id])
            if disk_id is not None:
                self.disk.evict([disk_id])
                self._disk.submit(DiskCopy("remove", content))
        self._distrusted = waiting

    # --- the rest -----------------------------------------------------------------------------

    def _drain(self) -> None:
        self._write()
        while self._copies:
            self._collect(math.inf)

    def reset(self) -> bool:
        """Drops all content, files too; refuses (False) while a step's copies are under way."""
        self._to_write.clear()
        self._drain()
        if not self.host.reset():
            return False
        for block in self.disk.blocks:
            if block.hash is not None:
                self._disk.submit(DiskCopy("remove", content_of(block)))
        return self.disk.reset()

    def discard_all(self) -> None:
        """After a failed step: starts anew from what is on disk, whose files are verified."""
        while self._disk.collect(math.inf):
            pass
        self._start()

    def close(self) -> None:
        """Writes out what the disk has not got yet, and closes it."""
        self._drain()
        self._disk.close()

    def stats(self) -> tuple[TierStats, ...]:
        """Counts of each tier."""
        for tier, pool in zip(self._stats, (self.host, self.disk), strict=False):
            counts = pool.counts()
            tier.empty_blocks, tier.cached_blocks = counts["empty"], counts["cached"]
            tier.active_blocks = counts["active"]
        return tuple(self._stats)

    def check(self) -> None:
        """Raises AssertionError if a reference is held that no copy under way explains."""
        moves = [self._moves, *self._in_flight.values()]
        host_ids = [host_id for m in moves for _, host_id in m.loads]
        host_ids += [host_id for m in moves for _, host_id, _ in m.stores]
        host_ids += [copy.host_id for copy in self._copies.values()]
        self.host.check([host_ids])
        self.disk.check([[copy.disk_id for copy in self._copies.values()]])
        storing = {content.key for m in moves for _, _, content in m.stores}
        assert storing == self._storing, (storing, self._storing)
        reading = {key for key, copy in self._copies.items() if copy.kind == "read"}
        assert reading == set(self._fetches), (reading, set(self._fetches))


class NoDisk:
    """In place of a DiskStorage when host memory is the last tier."""

    can_write = False

    def scan(self) -> list[Content]:
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


def content_of(block: Block) -> Content:
    """What an indexed block holds."""
    assert block.hash is not None and block.token_ids is not None, block
    return Content(block.group, block.hash, block.parent_hash, block.token_ids)


def reach(found: SequenceOf[SequenceOf[Place]], level: Level, layout: KVLayout) -> int:
    """The longest prefix, in blocks, that every group can start from, with hits down to `level`."""
    return longest_common_hit(
        layout.groups,
        lambda g, n: [place.level <= level for place in found[g][:n]],
        min(map(len, found)),
        layout.block_size,
    )


def used(
    found: SequenceOf[SequenceOf[Place]], length: int, layout: KVLayout
) -> list[tuple[int, int, Place]]:
    """(group, index, place) of the blocks that a prefix of `length` blocks needs, in order."""
    needed = []
    for g, group in enumerate(layout.groups):
        dropped = num_dropped_blocks(group, length * layout.block_size, layout.block_size)
        needed += [(g, i, found[g][i]) for i in range(dropped, length)]
    return needed
