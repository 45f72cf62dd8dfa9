"""BlockManager: allocates KV blocks to sequences: `allocate`, `may_append`, `deallocate`.

    admission   can_allocate -> OK / LATER / NEVER, with the longest cached prefix
                allocate     -> the table begins with the cached prefix, fresh blocks follow
    each step   reuse_filled_blocks -> replaces blocks by equal ones that another sequence filled
                may_append      -> allocates blocks for the step's tokens; copies shared blocks
    the end     deallocate -> frees blocks tail first, so that long prefixes stay cached longest

A block table lists the blocks of a sequence in order. The PrefixCache knows which blocks are
cached; this file keeps the tables. Each change of a table is added to `updates` and each copy of a
block to `copies`. The Scheduler moves both into the StepPlan.

See also groups/manager.py (windows, recurrent states: several tables per sequence) and forks.py
(shared tables).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from nanoengine.core.block_pool import BlockPool
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import BlockCopy, TableUpdate
from nanoengine.core.prefix_cache import CachedPrefix, PrefixCache
from nanoengine.core.sequence import Sequence


class Verdict(enum.Enum):
    """Whether a sequence can be admitted."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True, kw_only=True)
class Admission:
    """The result of `can_allocate`: a verdict and the arguments of `allocate`.

    `num_needed_blocks` counts the free blocks that admission uses: fresh blocks, and cached blocks
    with reference count 0. They suffice for chunks of up to `max_chunk` tokens.
    """

    verdict: Verdict
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    num_cached_tokens: int = 0
    num_needed_blocks: int = 0
    max_chunk: int = 0


class BlockManager:
    """The block tables of all sequences, one table per sequence, over one pool.

    Args:
        layout: the KV cache that the executor has allocated.
        prefix_cache: finds cached blocks; None creates one without tiers below the device.
        watermark_frac: share of the blocks that admission leaves free while sequences run.
        max_chunk: maximum number of tokens that a sequence computes in one step.
        chunked: whether a prompt may be computed in smaller chunks.

    Attributes:
        pool: the device's blocks; the same object as the prefix cache's `pool`.
        updates: changes of block tables since the last plan.
        copies: copies of blocks since the last plan.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        prefix_cache: PrefixCache | None = None,
        watermark_frac: float = 0.01,
        max_chunk: int = 8192,
        chunked: bool = True,
    ) -> None:
        self.layout = layout
        self.prefix_cache = prefix_cache or PrefixCache(layout)
        self.pool: BlockPool = self.prefix_cache.pool
        self.max_chunk = max_chunk
        self.chunked = chunked
        self.updates: list[TableUpdate] = []
        self.copies: list[BlockCopy] = []
        self.block_size = layout.block_size
        self.num_watermark_blocks = int(watermark_frac * self.pool.num_usable)

    # --- admission ----------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that a sequence of this length needs."""
        return -(-num_tokens // self.block_size)

    def can_ever_allocate(self, num_tokens: int) -> bool:
        """False if even an idle pool is too small for a new sequence of this length."""
        return self.max_chunk_for(num_tokens, self.num_watermark_blocks) > 0

    def max_chunk_for(self, num_tokens: int, num_reserved: int) -> int:
        """The largest chunk size at which a sequence of this length fits into the pool minus
        `num_reserved` blocks; 0 if there is none."""
        fits = self.num_blocks_for(num_tokens) <= self.pool.num_usable - num_reserved
        return self.max_chunk if fits else 0

    def can_allocate(self, seq: Sequence, *, keep_watermark: bool = True) -> Admission:
        """Finds the longest cached prefix and checks whether the rest fits. Allocates nothing.

        NEVER: the whole pool minus the watermark is too small. OK: the free blocks suffice, and the
        remaining free blocks cover the watermark, unless `keep_watermark` is False. LATER: they do
        not suffice yet, or a tier is reading blocks of the sequence. This call may start the reads.

        For a preempted sequence nothing is subtracted: it may have grown into the watermark.
        """
        num_reserved = 0 if seq.num_preempted_tokens else self.num_watermark_blocks
        chunk = self.max_chunk_for(seq.num_tokens, num_reserved)
        if chunk == 0:
            return Admission(verdict=Verdict.NEVER)
        prefix = self.prefix_cache.find(seq)
        if not prefix.is_ready:
            return Admission(verdict=Verdict.LATER, prefix=prefix)
        needed = prefix.num_needed_blocks + self.num_fresh_blocks(seq, prefix, chunk)
        spare = self.pool.num_free - needed
        fits = spare >= (self.num_watermark_blocks if keep_watermark else 0)
        return Admission(
            verdict=Verdict.OK if fits else Verdict.LATER,
            prefix=prefix,
            num_cached_tokens=prefix.num_blocks * self.block_size,
            num_needed_blocks=needed,
            max_chunk=chunk,
        )

    def num_fresh_blocks(self, seq: Sequence, prefix: CachedPrefix, chunk: int) -> int:
        """Number of blocks to allocate after the cached prefix, for chunks of this size."""
        return self.num_blocks_for(seq.num_tokens) - prefix.num_blocks

    def allocate(self, seq: Sequence, admission: Admission) -> None:
        """Gives an admitted sequence its cached prefix and fresh blocks."""
        assert admission.verdict is Verdict.OK, seq
        assert not seq.block_tables, seq
        # Why the cached prefix first: a fresh block must not evict one of its blocks.
        seq.block_tables = self.prefix_cache.activate(seq, admission.prefix)
        self.fill_tables(seq, admission)
        for index, table in enumerate(seq.block_tables):
            self.updates.append(TableUpdate(seq.row, index, 0, tuple(table)))
        seq.num_registered_blocks = admission.prefix.num_blocks
        seq.num_computed_tokens = seq.num_cached_tokens = admission.num_cached_tokens
        seq.max_chunk = admission.max_chunk
        self.prefix_cache.count_admission(seq, admission.num_cached_tokens)

    def fill_tables(self, seq: Sequence, admission: Admission) -> None:
        """Allocates the fresh blocks that an admitted sequence starts with."""
        [table] = seq.block_tables
        table += self.pool.allocate(self.num_blocks_for(seq.num_tokens) - len(table))

    # --- growth -------------------------------------------------------------------------------

    def reuse_filled_blocks(self, seq: Sequence) -> None:
        """Replaces a sequence's next blocks by equal ones that another sequence has filled.

        Equal prompts that are prefilled concurrently in chunks would each compute every block.
        Instead, before its next chunk, a sequence takes the blocks that the other one has filled
        (or fills in the step being planned), and frees its own unwritten blocks. So the prompts
        alternate, and each block is computed once.
        """
        filled = self.prefix_cache.find_filled(seq)
        if not filled[0]:
            return
        start = seq.num_computed_tokens // self.block_size
        end = start + len(filled[0])
        for index, (table, new) in enumerate(zip(seq.block_tables, filled, strict=True)):
            self.pool.touch(new)
            self.pool.free(reversed(table[start:end]))
            table[start:end] = new
            self.updates.append(TableUpdate(seq.row, index, start, tuple(new)))
        num_found = end * self.block_size - seq.num_computed_tokens
        self.prefix_cache.stats.count_late_hits(num_found, readmitted=seq.num_preempted_tokens > 0)
        seq.num_cached_tokens += num_found
        seq.num_computed_tokens += num_found
        seq.num_registered_blocks = end

    def may_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Allocates blocks for the next tokens of a running sequence; False if too few are free.

        Most steps allocate nothing: a new block is needed only when the tokens cross a block
        boundary. A block that is shared with a fork is copied before it is written (copy-on-write).
        """
        [table] = seq.block_tables
        partial, offset = divmod(seq.num_computed_tokens, self.block_size)
        num_new = self.num_blocks_for(seq.num_computed_tokens + num_new_tokens) - len(table)
        is_shared = offset > 0 and self.pool.blocks[table[partial]].ref_count > 1
        if max(num_new, 0) + is_shared > self.pool.num_free:
            return False
        if is_shared:
            self.copy_on_write(seq, 0, partial, self.pool.allocate(1)[0])
        if num_new > 0:
            new = self.pool.allocate(num_new)
            self.updates.append(TableUpdate(seq.row, 0, len(table), tuple(new)))
            table += new
        return True

    def copy_on_write(self, seq: Sequence, index: int, position: int, new: int) -> None:
        """Schedules a copy of a shared block to `new`, and replaces the block in one table."""
        table = seq.block_tables[index]
        shared, table[position] = table[position], new
        self.pool.free([shared])
        self.copies.append(BlockCopy(shared, new))
        self.updates.append(TableUpdate(seq.row, index, position, (new,)))

    def slots_ready_until(self, seq: Sequence) -> int:
        """Decodes that start before this position need neither `may_append` nor `register`.

        Called right after `may_append`, when no other sequence shares the last block. The
        block's last slot is excluded: the token there fills the block, which must then be
        registered. The table may end with empty blocks, from rejected drafts. Returns 0
        if a full block is not registered yet: with overlapping steps its last token arrives one
        step later.
        """
        num_full = seq.num_computed_tokens // self.block_size
        if num_full > seq.num_registered_blocks and self.prefix_cache.enabled:
            return 0
        num_blocks = num_full + 1
        for table in seq.block_tables:  # Perf: 0.1 us less than `min(num_blocks, *map(len, ...))`.
            if len(table) < num_blocks:
                num_blocks = len(table)
        return num_blocks * self.block_size - 1

    # --- ends ---------------------------------------------------------------------------------

    def deallocate(self, seq: Sequence) -> None:
        """Frees a sequence's blocks, tail first; full blocks stay cached until they are evicted."""
        self.pool.free(reversed(seq.block_tables[0]))
        self.clear_tables(seq)

    def clear_tables(self, seq: Sequence) -> None:
        """Empties a sequence's tables, and removes its updates from the next plan.

        Frees no block: after a failed step the reference counts may be wrong.
        """
        if self.updates:  # Why: a sequence may grow and then lose its row in one plan.
            self.updates = [update for update in self.updates if update.row != seq.row]
        seq.block_tables = []
        seq.num_dropped_blocks = []
        seq.num_registered_blocks = 0
        seq.slots_ready_until = 0

    def discard_all(self) -> None:
        """Starts with an empty pool, because after a failed step reference counts may be wrong."""
        self.updates, self.copies = [], []
        self.prefix_cache.discard_all()
