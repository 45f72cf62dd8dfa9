"""BlockManager: gives sequences their blocks: `allocate`, `may_append`, `fork`, `deallocate`.

    admission   can_allocate -> OK / LATER / NEVER, with the longest cached prefix
                allocate     -> hit blocks are shared or revived, fresh ones follow
    each step   may_append   -> room for the step's tokens; copy-on-write where a block is shared
                register     -> blocks that this step fills enter the prefix-cache index
    the end     deallocate   -> tail first, so that long prefixes stay longest

Called by the Scheduler alone. Every change of a block table is also written to `updates`, and every
copy to `copies`; the Scheduler moves both into the StepPlan.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.cache_stats import CacheStats
from nanoengine.core.kv_groups import (
    cdiv,
    num_dropped_blocks,
    num_needed_blocks,
)
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import BlockCopy, TableUpdate
from nanoengine.core.prefixes import Prefix, Prefixes, hash_block, pack, root_name
from nanoengine.core.sequence import Sequence
from nanoengine.core.tiers.found import Content, Found, TierBlock
from nanoengine.core.tiers.tiered_cache import NoTiers, Tiers


class Verdict(enum.Enum):
    """Whether a sequence can be admitted."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True, kw_only=True)
class Admission:
    """The answer of `can_allocate`: a verdict, and what `allocate` needs to carry it out.

    `hits[g]` is the cached start of group g's table, null entries included; `loads` are those of
    its entries, as (group, index, place), that a tier holds. `num_needed_blocks` is taken from the
    free ones: fresh blocks and revived cached ones; chunks of `max_chunk` tokens keep it so.
    `reason` is for people: why tiers were used or not.
    """

    verdict: Verdict
    hits: list[list[int]] = field(default_factory=list)
    loads: list[tuple[int, int, TierBlock]] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_needed_blocks: int = 0
    max_chunk: int = 0
    reason: str = ""


@dataclass(slots=True)
class BlockManager:
    """Block tables of all sequences over one pool.

    Args:
        layout: what the executor has allocated.
        enable_prefix_caching: look up and register full blocks.
        watermark_frac: share of blocks that admission leaves free while something runs.
        max_chunk: most tokens a sequence computes in one step; bounds a window group's blocks.
        chunked: fewer tokens may be computed in a step, where a window in a small pool needs it.
        tiers: where blocks live on below the device.
    """

    layout: KVLayout
    enable_prefix_caching: bool = True
    watermark_frac: float = 0.01
    max_chunk: int = 8192
    chunked: bool = True
    tiers: Tiers | NoTiers = field(default_factory=NoTiers)
    pool: BlockPool = field(init=False)
    prefixes: Prefixes = field(init=False, default_factory=Prefixes)
    stats: CacheStats = field(init=False, default_factory=CacheStats)
    updates: list[TableUpdate] = field(init=False)
    copies: list[BlockCopy] = field(init=False)
    block_size: int = field(init=False)
    num_watermark_blocks: int = field(init=False)
    _has_windows: bool = field(init=False)
    # Unsalted digest of a first block -> the root that it was last indexed under.
    _roots: OrderedDict[bytes, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.layout.num_blocks, len(self.layout.groups))
        self.updates, self.copies = [], []
        self._roots = OrderedDict()
        self.block_size = self.layout.block_size
        self._has_windows = any(group.sliding_window for group in self.layout.groups)
        self.num_watermark_blocks = int(self.watermark_frac * self.pool.num_usable)
        self.tiers.start(self.prefixes)

    # --- admission ----------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int, chunk: int | None = None) -> int:
        """Most blocks that a sequence of this length holds at once, over all groups.

        `chunk` [tokens] is what a step computes of it at most; None: as little as may be.
        """
        if chunk is None:
            chunk = 1 if self.chunked else self.max_chunk
        if not self._has_windows:
            return len(self.layout.groups) * cdiv(num_tokens, self.block_size)
        return sum(
            num_needed_blocks(group, num_tokens, chunk, self.block_size)
            for group in self.layout.groups
        )

    def can_ever_allocate(self, num_tokens: int) -> bool:
        """False if a new sequence of this length can't be admitted even to an idle pool."""
        return self._chunk_for(num_tokens, self.num_watermark_blocks) > 0

    def _chunk_for(self, num_tokens: int, num_kept: int) -> int:
        """The chunk by which a sequence of this length fits alone in all but `num_kept` blocks.

        0: it never does. Only a window's need depends on the chunk, and it has no full need of it:
        a sequence that has grown token by token is computed again in chunks that fit.
        """
        chunk, spare = self.max_chunk, self.pool.num_usable - num_kept
        while chunk and self.num_blocks_for(num_tokens, chunk) > spare:
            chunk = chunk // 2 if self.chunked and self._has_windows else 0
        return chunk

    def can_allocate(self, seq: Sequence, *, keep_watermark: bool = True) -> Admission:
        """Looks up the longest cached prefix and says whether the rest fits.

        Changes nothing, but may have the disk tier read blocks; until they have come, it is LATER.

        NEVER if the whole pool less the watermark is too small; OK if the blocks needed from the
        free ones leave the watermark (or nothing, when nothing else runs); else LATER. A sequence
        back from preemption may need the watermark too: it had grown into it.
        """
        num_tokens, num_blocks = seq.num_tokens, cdiv(seq.num_tokens, self.block_size)
        num_kept = 0 if seq.num_preempted_tokens else self.num_watermark_blocks
        chunk = self._chunk_for(num_tokens, num_kept)
        if chunk == 0:
            return Admission(verdict=Verdict.NEVER)
        found = self._find_prefix(seq)
        choice = self.tiers.choose(seq, found)
        if not choice.is_ready:
            return Admission(verdict=Verdict.LATER, reason=choice.reason)
        num_hit_blocks = choice.num_blocks
        hits, loads = found.take(num_hit_blocks)
        needed = len(loads)
        for index, (group, hit) in enumerate(zip(self.layout.groups, hits, strict=True)):
            fresh = num_blocks - num_hit_blocks
            if group.sliding_window is not None:
                most = num_needed_blocks(group, num_tokens, chunk, self.block_size)
                held = len(hit) - hit.count(NULL_BLOCK) + [g for g, _, _ in loads].count(index)
                fresh = min(fresh, max(most - held, 0))
            needed += fresh + self.pool.num_cached(hit)
        spare = self.pool.num_free - needed
        fits = spare >= (self.num_watermark_blocks if keep_watermark else 0)
        return Admission(
            verdict=Verdict.OK if fits else Verdict.LATER,
            hits=hits,
            loads=loads,
            num_cached_tokens=num_hit_blocks * self.block_size,
            num_needed_blocks=needed,
            max_chunk=chunk,
            reason=choice.reason,
        )

    def allocate(self, seq: Sequence, admission: Admission) -> None:
        """Gives an admitted sequence its cached prefix, and the blocks of its known tokens.

        A window group gets the rest chunk by chunk from `may_append`, since it never holds all.
        """
        assert admission.verdict is Verdict.OK, seq
        assert not seq.block_tables, seq
        for hit in admission.hits:  # Why all first: a fresh block must not evict a later hit.
            self.pool.touch(hit)
        for g, i, place in admission.loads:
            admission.hits[g][i] = self._load(Content(g, seq.prefixes[i]), place)
        for index, (group, hit) in enumerate(zip(self.layout.groups, admission.hits, strict=True)):
            table = list(hit)
            if group.sliding_window is None:
                table += self.pool.allocate(cdiv(seq.num_tokens, self.block_size) - len(table))
            seq.block_tables.append(table)
            seq.num_windowed_blocks.append(num_nulls(hit))
            self.updates.append(TableUpdate(seq.row, index, 0, tuple(table)))
        seq.num_registered_blocks = len(admission.hits[0])
        seq.num_computed_tokens = seq.num_cached_tokens = admission.num_cached_tokens
        seq.max_chunk = admission.max_chunk
        seq.fetch = None
        self._count(seq, admission.num_cached_tokens)

    def _load(self, content: Content, place: TierBlock) -> int:
        """Gives a block that a tier holds its place on the device.

        Indexed at once, as in `register`: a step's loads come before its forward.
        """
        [block_id] = self.pool.allocate(1)
        self.pool.register([block_id], content.group, [content.prefix])
        self.tiers.load(place.block_id, block_id)
        return block_id

    def _count(self, seq: Sequence, num_cached: int) -> None:
        if not self._reads_cache(seq):
            return
        num_tokens = seq.num_tokens
        if seq.num_preempted_tokens:
            self.stats.readmit_queried_tokens += num_tokens
            self.stats.readmit_hit_tokens += num_cached
        else:
            miss = self._miss(seq, num_cached // self.block_size, num_tokens)
            self.stats.count(num_tokens, num_cached, miss=miss)

    def _miss(self, seq: Sequence, num_hits: int, num_tokens: int) -> str | None:
        """Why the prefix cache did not have all full blocks before the last token."""
        at_most = (num_tokens - 1) // self.block_size
        if at_most == 0:
            return "short"
        if num_hits == at_most:
            return None
        if self.pool.was_evicted(seq.prefixes[num_hits].digest):
            return "evicted"
        known_root = None if num_hits else self._roots.get(self._unsalted(seq))
        if known_root is None or known_root == root_name(seq.request.cache_salt):
            return "cold"
        return "salt"

    def _unsalted(self, seq: Sequence) -> bytes:
        """Digest of the first block as it is without a salt."""
        if seq.request.cache_salt is None:
            return seq.prefixes[0].digest
        return hash_block(root_name(None) + pack(seq.token_ids[: self.block_size]))

    # --- growth -------------------------------------------------------------------------------

    def catch_up(self, seq: Sequence) -> None:
        """Moves a prompt that is being computed on to where another with equal tokens has come.

        It takes over the other's full blocks, those of the step being planned included, in place of
        its own unwritten ones. Equal prompts that are prefilled side by side in chunks thus take
        turns, and each of their blocks is computed once.
        """
        size = self.block_size
        start = seq.num_computed_tokens // size
        at_most = (len(seq.token_ids) - 1) // size
        if start >= at_most or not self._reads_cache(seq):
            return
        taken: list[list[int]] = []
        for prefix in self._name_blocks(seq, at_most)[start:at_most]:
            hits = [self.pool.lookup(g, prefix) for g in range(len(seq.block_tables))]
            if None in hits:
                break
            taken.append([hit for hit in hits if hit is not None])
        if not taken:
            return
        for g, table in enumerate(seq.block_tables):
            new = [hits[g] for hits in taken]
            self.pool.touch(new)
            self.pool.free(reversed(table[start : start + len(new)]))
            table[start : start + len(new)] = new
            self.updates.append(TableUpdate(seq.row, g, start, tuple(new)))
        end = (start + len(taken)) * size
        self.stats.count_late(end - seq.num_computed_tokens, again=seq.num_preempted_tokens > 0)
        seq.num_cached_tokens += end - seq.num_computed_tokens
        seq.num_computed_tokens = end
        seq.num_registered_blocks = end // size

    def may_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Makes room for the next tokens of a running sequence; False if the pool has too little.

        Most steps allocate nothing: a new block is due only when the tokens pass a boundary. A
        block shared with a fork is replaced by a copy before it is written (copy-on-write).
        """
        if self._has_windows:
            self._drop_outside_windows(seq)
        start, blocks, needed = seq.num_computed_tokens, self.pool.blocks, 0
        num_blocks = -(-(start + num_new_tokens) // self.block_size)
        partial, offset = start // self.block_size, start % self.block_size
        for table in seq.block_tables:
            if num_blocks > len(table):
                needed += num_blocks - len(table)
            if offset and blocks[table[partial]].ref_count > 1:
                needed += 1
        if needed == 0:
            return True
        if needed > self.pool.num_free:
            return False
        for index, table in enumerate(seq.block_tables):
            if offset and blocks[table[partial]].ref_count > 1:
                self._copy_on_write(seq, index, partial)
            if num_blocks > len(table):
                new = self.pool.allocate(num_blocks - len(table))
                self.updates.append(TableUpdate(seq.row, index, len(table), tuple(new)))
                table += new
        return True

    def slots_ready_until(self, seq: Sequence) -> int:
        """Decodes that start before this position have nothing to ask of `may_append`, `register`.

        Right after `may_append`: the block under way is then this sequence's alone. The last slot
        is left out, since it makes the block full; a window drops blocks as it moves, so it asks.
        """
        if self._has_windows:
            return 0
        return min(map(len, seq.block_tables)) * self.block_size - 1

    def _drop_outside_windows(self, seq: Sequence) -> None:
        for index, group in enumerate(self.layout.groups):
            table, before = seq.block_tables[index], seq.num_windowed_blocks[index]
            dropped = num_dropped_blocks(group, seq.num_computed_tokens, self.block_size)
            if dropped > before:
                self.pool.free(reversed(table[before:dropped]))
                nulls = [NULL_BLOCK] * (dropped - before)
                table[before:dropped] = nulls
                self.updates.append(TableUpdate(seq.row, index, before, tuple(nulls)))
                seq.num_windowed_blocks[index] = dropped

    def _copy_on_write(self, seq: Sequence, index: int, position: int) -> None:
        table = seq.block_tables[index]
        shared = table[position]
        table[position] = self.pool.allocate(1)[0]
        self.pool.free([shared])
        self.copies.append(BlockCopy(shared, table[position]))
        self.updates.append(TableUpdate(seq.row, index, position, (table[position],)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's tables become the parent's, every block shared; nothing is copied.

        Blocks without a computed token are not shared: both would fill them.
        """
        num_blocks = cdiv(parent.num_computed_tokens, self.block_size)
        for index, whole in enumerate(parent.block_tables):
            table = whole[:num_blocks]
            self.pool.share(table)
            child.block_tables.append(table)
            self.updates.append(TableUpdate(child.row, index, 0, tuple(table)))
        parent.slots_ready_until = child.slots_ready_until = 0  # the last block is shared now
        child.max_chunk = parent.max_chunk
        child.num_windowed_blocks = list(parent.num_windowed_blocks)
        child.prefixes = list(parent.prefixes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens

    def deallocate(self, seq: Sequence) -> None:
        """Drops the sequence's blocks, tail first; full ones stay cached until they are needed."""
        tables = seq.block_tables
        if len(tables) == 1:
            self.pool.free(reversed(tables[0]))
        else:  # Why side by side: a hit needs its blocks in every group, so they go together.
            rows = [*zip_longest(*tables, fillvalue=NULL_BLOCK)]
            self.pool.free(chain.from_iterable(reversed(rows)))
        if self.updates:  # Why: a sequence preempted while it grows has a row no longer.
            row = seq.row
            self.updates = [update for update in self.updates if update.row != row]
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """The sequence holds no blocks from now on; their reference counts stay as they are."""
        seq.block_tables = []
        seq.num_windowed_blocks = []
        seq.num_registered_blocks = 0
        seq.slots_ready_until = 0

    # --- prefix cache -------------------------------------------------------------------------

    def register(self, seq: Sequence) -> None:
        """Indexes blocks that are full once the step under way has run.

        Why already now: an equal prompt admitted in the same step then shares them; all keys and
        values of a step are stored before any is read.
        """
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if not self.enable_prefix_caching or full <= seq.num_registered_blocks:
            return
        prefixes = self._name_blocks(seq, full)
        if seq.num_registered_blocks == 0:
            self._roots[self._unsalted(seq)] = root_name(seq.request.cache_salt)
            if len(self._roots) > self.layout.num_blocks:
                self._roots.popitem(last=False)
        first = seq.num_registered_blocks
        # Why: a block's contents in all groups become known before the next block's.
        step = full - first if len(seq.block_tables) == 1 else 1
        for start in range(first, full, step):
            run = slice(start, start + step)
            for group, table in enumerate(seq.block_tables):
                self.tiers.catch(self.pool.register(table[run], group, prefixes[run]))
        seq.num_registered_blocks = full

    def distrust(self, block_ids: list[int]) -> None:
        """Drops the content of blocks, which may be wrong, here and in the tiers."""
        for block_id in block_ids:
            if self.pool.blocks[block_id].prefix is not None:
                self.tiers.distrust(self.pool.blocks[block_id])
        self.pool.evict(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Drops all cached content; refuses (False) while blocks are in use."""
        return not self.pool.counts()["active"] and self.tiers.reset() and self.pool.reset()

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of those given blocks that nobody uses; returns how many were."""
        return self.pool.evict(block_ids)

    def discard_all(self) -> None:
        """Starts from a new pool: after a failed step neither counts nor content can be trusted."""
        observers = self.pool.observers
        self.pool = BlockPool(self.layout.num_blocks, len(self.layout.groups))
        self.pool.observers = observers
        self._roots.clear()
        for observer in observers:
            observer.on_block("cleared", self.pool.blocks[NULL_BLOCK])
        self.updates, self.copies = [], []
        self.tiers.discard_all()

    def _reads_cache(self, seq: Sequence) -> bool:
        # Why: prompt log-probabilities need every position computed.
        return self.enable_prefix_caching and seq.params.prompt_logprobs is None

    def _find_prefix(self, seq: Sequence) -> Found:
        """Where each full block of the prompt is found, as far as it may matter."""
        # Why - 1: at least one token is left to compute, or there would be no logits.
        at_most = (seq.num_tokens - 1) // self.block_size
        prefixes = self._name_blocks(seq, at_most)[:at_most] if self._reads_cache(seq) else []
        found = Found(self.layout)
        for group, kind in enumerate(self.layout.groups):
            device: list[int] = []
            below: dict[int, TierBlock] = {}
            for i, block_id in enumerate(self.pool.lookup_all(group, prefixes)):
                if block_id is None:
                    place = self.tiers.find(Content(group, prefixes[i]))
                    if place is not None:
                        below[i] = place
                    elif kind.sliding_window is None:
                        break  # Why: full attention needs every block before a hit.
                device.append(block_id or NULL_BLOCK)
            found.device.append(device)
            found.below.append(below)
        return found

    def _name_blocks(self, seq: Sequence, count: int) -> list[Prefix]:
        """At least the first `count` full blocks' prefixes, each hashed once in its life."""
        prefixes, size = seq.prefixes, self.block_size
        if len(prefixes) < count:
            parent = prefixes[-1] if prefixes else self.prefixes.root(seq.request.cache_salt)
            token_ids = seq.token_ids[len(prefixes) * size : count * size]
            prefixes += self.prefixes.follow(parent, token_ids, size)
        return prefixes

    # --- invariants ---------------------------------------------------------------------------

    def check(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError if a pool invariant is broken for these live sequences."""
        self.pool.check(table for seq in sequences for table in seq.block_tables)
        for seq in sequences:
            for table, windowed in zip(seq.block_tables, seq.num_windowed_blocks, strict=True):
                assert NULL_BLOCK not in table[windowed:], seq
                assert len(table) * self.block_size >= seq.num_computed_tokens, seq
                # Invariant I4: a table's indexed blocks hold the sequence's own prefixes.
                for block_id, prefix in zip(table, seq.prefixes, strict=False):
                    assert self.pool.blocks[block_id].prefix in (None, prefix), seq
        self.tiers.check()


def num_nulls(table: list[int]) -> int:
    """Null entries at the start of a table."""
    count = 0
    while count < len(table) and table[count] == NULL_BLOCK:
        count += 1
    return count
