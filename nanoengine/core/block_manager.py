"""BlockManager: gives sequences their blocks: `allocate`, `may_append`, `fork`, `deallocate`.

    admission   can_allocate -> OK / LATER / NEVER, with the longest cached prefix
                allocate     -> the tables begin with the cached prefix, fresh blocks follow
    each step   catch_up     -> blocks that another sequence has filled meanwhile are taken over
                may_append   -> room for the step's tokens; copy-on-write where a block is shared
    the end     deallocate   -> tail first, so that long prefixes stay longest

A block table lists the blocks of a sequence in order, one table for each KV group. The PrefixCache
says what is cached and where; this file keeps the tables. It writes every change of a table to
`updates` and every copy of a block to `copies`, and the Scheduler moves both into the StepPlan.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.kv_groups import cdiv, num_dropped_blocks, num_needed_blocks
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
    """The answer of `can_allocate`: a verdict, and what `allocate` needs to carry it out.

    `num_needed_blocks` are taken from the free ones: fresh blocks, and those of the cached prefix
    that nobody uses. They suffice for chunks of up to `max_chunk` tokens. `reason` is for people;
    where the verdict is LATER, `lacks` says for what it waits: "blocks", or a "read" of a tier.
    """

    verdict: Verdict
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    num_cached_tokens: int = 0
    num_needed_blocks: int = 0
    max_chunk: int = 0
    reason: str = ""
    lacks: str = "blocks"


class BlockManager:
    """The block tables of all sequences over one pool.

    Args:
        layout: the KV cache that the executor has allocated.
        prefix_cache: finds cached blocks; None makes one without tiers below the device.
        watermark_frac: share of the blocks that admission leaves free while sequences run.
        max_chunk: most tokens that a sequence computes in one step. Bounds a window group's blocks.
        chunked: whether a prompt may be computed in smaller chunks, so that its windows fit.

    Attributes:
        pool: the device's blocks; the prefix cache has the same object.
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
        self._has_windows = any(group.sliding_window for group in layout.groups)
        kv_groups = layout.groups[: self.prefix_cache.num_kv_groups]
        self._drops_each_step = any(group.sliding_window for group in kv_groups)
        self._num_kv_groups = self.prefix_cache.num_kv_groups
        self._has_states = self._num_kv_groups < len(layout.groups)

    # --- admission ----------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int, chunk: int | None = None) -> int:
        """Most blocks that a sequence of this length holds at once, over all KV groups.

        `chunk` is the most tokens that one step computes of it; None: the smallest that is allowed.
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
        """False if even an idle pool is too small for a new sequence of this length."""
        return self._chunk_for(num_tokens, self.num_watermark_blocks) > 0

    def _chunk_for(self, num_tokens: int, num_kept: int) -> int:
        """The largest chunk with which a sequence of this length fits all but `num_kept` blocks.

        A window group holds the window and one chunk at once, so a smaller chunk needs fewer
        blocks. Returns 0 if no chunk fits.
        """
        chunk, spare = self.max_chunk, self.pool.num_usable - num_kept
        while chunk and self.num_blocks_for(num_tokens, chunk) > spare:
            chunk = chunk // 2 if self.chunked and self._has_windows else 0
        return chunk

    def can_allocate(self, seq: Sequence, *, keep_watermark: bool = True) -> Admission:
        """Finds the longest cached prefix and says whether the rest fits. Takes no block.

        NEVER: the whole pool less the watermark is too small. OK: after this sequence the free
        blocks still cover the watermark, or 0 blocks where `keep_watermark` is False. LATER: they
        don't, or a tier is reading blocks for the sequence; this call may have started the reads.

        A sequence back from preemption may use the watermark as well, because it had grown into it.
        """
        num_kept = 0 if seq.num_preempted_tokens else self.num_watermark_blocks
        chunk = self._chunk_for(seq.num_tokens, num_kept)
        if chunk == 0:
            return Admission(verdict=Verdict.NEVER)
        prefix = self.prefix_cache.find(seq)
        if not prefix.is_ready:
            return Admission(verdict=Verdict.LATER, reason=prefix.reason, lacks="read")
        needed = prefix.num_needed_blocks
        for index, group in enumerate(self.layout.groups):
            fresh = cdiv(seq.num_tokens, self.block_size) - prefix.num_blocks
            if group.sliding_window is not None:
                most = num_needed_blocks(group, seq.num_tokens, chunk, self.block_size)
                fresh = min(fresh, max(most - prefix.num_held(index), 0))
            needed += fresh
        spare = self.pool.num_free - needed
        fits = spare >= (self.num_watermark_blocks if keep_watermark else 0)
        if self._has_states:
            # Why one more: the step that reads a snapshot writes its own state elsewhere.
            fits = fits and prefix.num_needed_states < self.pool.num_free_states
        return Admission(
            verdict=Verdict.OK if fits else Verdict.LATER,
            prefix=prefix,
            num_cached_tokens=prefix.num_blocks * self.block_size,
            num_needed_blocks=needed,
            max_chunk=chunk,
            reason=prefix.reason,
        )

    def allocate(self, seq: Sequence, admission: Admission) -> None:
        """Gives an admitted sequence its cached prefix, and fresh blocks for its other tokens.

        A window group gets fresh blocks from `may_append`, chunk by chunk, because it never holds
        the blocks of all tokens at once.
        """
        assert admission.verdict is Verdict.OK, seq
        assert not seq.block_tables, seq
        num_blocks, num_cached = cdiv(seq.num_tokens, self.block_size), admission.num_cached_tokens
        # Why the cached prefix first: a fresh block must not evict one of its blocks.
        tables = self.prefix_cache.take(seq, admission.prefix)
        for index, (group, table) in enumerate(zip(self.layout.groups, tables, strict=True)):
            if group.sliding_window is None:
                table += self.pool.allocate(num_blocks - len(table))
            seq.block_tables.append(table)
            seq.num_dropped_blocks.append(num_dropped_blocks(group, num_cached, self.block_size))
            self.updates.append(TableUpdate(seq.row, index, 0, tuple(table)))
        seq.num_registered_blocks = admission.prefix.num_blocks
        seq.num_computed_tokens = seq.num_cached_tokens = num_cached
        seq.max_chunk = admission.max_chunk
        self.prefix_cache.count_admission(seq, num_cached)

    # --- growth -------------------------------------------------------------------------------

    def catch_up(self, seq: Sequence) -> None:
        """Replaces a sequence's next blocks by equal ones that another sequence has filled.

        Equal prompts that are prefilled side by side in chunks would each compute every block.
        Instead, before its next chunk a sequence takes over the blocks that the other has filled,
        those of the step being planned included, and frees its own unwritten ones. The prompts thus
        take turns, and each block is computed once.
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
        self.prefix_cache.stats.count_late(num_found, again=seq.num_preempted_tokens > 0)
        seq.num_cached_tokens += num_found
        seq.num_computed_tokens += num_found
        seq.num_registered_blocks = end

    def may_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Makes room for the next tokens of a running sequence; False if blocks are lacking.

        Most steps allocate nothing: a new block is due only when the tokens pass a block boundary.
        A block that is shared with a fork is replaced by a copy before it is written
        (copy-on-write).
        """
        if self._has_windows:
            self._drop_outside_windows(seq)
        start, blocks, needed = seq.num_computed_tokens, self.pool.blocks, 0
        num_blocks = -(-(start + num_new_tokens) // self.block_size)
        partial, offset = start // self.block_size, start % self.block_size
        tables = seq.block_tables
        if self._has_states:
            tables = tables[: self._num_kv_groups]
        for table in tables:
            if num_blocks > len(table):
                needed += num_blocks - len(table)
            if offset and blocks[table[partial]].ref_count > 1:
                needed += 1
        if needed > self.pool.num_free:
            return False
        if self._has_states and not self._move_state(seq, num_blocks):
            return False
        if needed == 0:
            return True
        for index, table in enumerate(tables):
            if offset and blocks[table[partial]].ref_count > 1:
                self._copy_on_write(seq, index, partial)
            if num_blocks > len(table):
                new = self.pool.allocate(num_blocks - len(table))
                self.updates.append(TableUpdate(seq.row, index, len(table), tuple(new)))
                table += new
        return True

    def _move_state(self, seq: Sequence, num_blocks: int) -> bool:
        """Makes room in the state group's table for a step that ends in its `num_blocks`-th block;
        False if a state is lacking.

        The step reads the first entry that is not null, from the block of the token before it on,
        and writes all of its own blocks that are not. So a state that nobody else may want moves
        on with its sequence, to the next entry that is written, and nothing is copied. Snapshots
        on the way are worth free states, but no preemption: the last ones come first.
        """
        table, pool = seq.block_tables[-1], self.pool
        first, offset = divmod(seq.num_computed_tokens, self.block_size)
        spare = pool.num_free_states
        if offset and pool.blocks[table[-1]].ref_count > 1:
            if not spare:
                return False
            self._copy_on_write(seq, self._num_kv_groups, first)
            spare -= 1
        if num_blocks <= len(table):
            return True
        held = pool.blocks[table[-1] if table else NULL_BLOCK]
        moves = held.ref_count == 1 and (offset > 0 or held.prefix is None)
        if held.ref_count == 1 and not moves and not spare:
            # Why this is the same state, and not a snapshot any more: no other one is free.
            pool.free([held.block_id])
            moves = pool.allocate(1, states=True) == [held.block_id]
        if not moves and not spare:
            return False
        keeps = self.prefix_cache.keeps_state
        kept = [index for index in range(first, num_blocks - 1) if keeps(seq, index)]
        # Why half of them: other sequences of this step want some too.
        kept = kept[max(0, len(kept) - spare // 2) :]
        start = len(table)
        if moves:
            start, table[-1] = start - 1, NULL_BLOCK
        table += [NULL_BLOCK] * (num_blocks - len(table))
        written = [*kept, num_blocks - 1]
        states = pool.allocate(len(written) - moves, states=True)
        for index, block_id in zip(written, [held.block_id] * moves + states, strict=True):
            table[index] = block_id
        self.updates.append(TableUpdate(seq.row, self._num_kv_groups, start, tuple(table[start:])))
        return True

    def slots_ready_until(self, seq: Sequence) -> int:
        """Decodes that start before this position have nothing to ask of `may_append`, `register`.

        Right after `may_append`: the block under way is then this sequence's alone. Its last slot
        is left out, because it makes the block full, also where refused drafts have left empty
        blocks behind it. Where steps overlap, a block that is full waits a step for its last token,
        and is indexed then. A window drops blocks as it moves, so it asks; a state that was left
        behind is dropped once.
        """
        if self._drops_each_step:
            return 0
        num_full = seq.num_computed_tokens // self.block_size
        if num_full > seq.num_registered_blocks and self.prefix_cache.enabled:
            return 0
        if self._has_states:
            group, computed = self.layout.groups[-1], seq.num_computed_tokens
            dropped = num_dropped_blocks(group, computed, self.block_size)
            if dropped > seq.num_dropped_blocks[-1]:
                return 0
        num_blocks = num_full + 1
        for table in seq.block_tables:  # Perf: 0.1 us less than `min(num_blocks, *map(len, ...))`.
            if len(table) < num_blocks:
                num_blocks = len(table)
        return num_blocks * self.block_size - 1

    def _drop_outside_windows(self, seq: Sequence) -> None:
        """Frees the blocks that no later query can see; null entries take their places."""
        for index, group in enumerate(self.layout.groups):
            table, before = seq.block_tables[index], seq.num_dropped_blocks[index]
            dropped = num_dropped_blocks(group, seq.num_computed_tokens, self.block_size)
            if dropped > before:
                self.pool.free(reversed(table[before:dropped]))
                nulls = [NULL_BLOCK] * (dropped - before)
                table[before:dropped] = nulls
                self.updates.append(TableUpdate(seq.row, index, before, tuple(nulls)))
                seq.num_dropped_blocks[index] = dropped

    def _copy_on_write(self, seq: Sequence, index: int, position: int) -> None:
        """Gives a sequence a copy of the block at `position` of its table, in place of it."""
        table = seq.block_tables[index]
        shared = table[position]
        states = index == self._num_kv_groups
        [table[position]] = self.pool.allocate(1, states=states)
        self.pool.free([shared])
        self.copies.append(BlockCopy(shared, table[position]))
        self.updates.append(TableUpdate(seq.row, index, position, (table[position],)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives a child the parent's blocks; both share them, and nothing is copied.

        Blocks without a computed token are not shared, because both would fill them.
        """
        num_blocks = cdiv(parent.num_computed_tokens, self.block_size)
        for index, whole in enumerate(parent.block_tables):
            table = whole[:num_blocks]
            self.pool.share(table)
            child.block_tables.append(table)
            self.updates.append(TableUpdate(child.row, index, 0, tuple(table)))
        parent.slots_ready_until = child.slots_ready_until = 0  # the last block is shared now
        child.max_chunk = parent.max_chunk
        child.num_dropped_blocks = list(parent.num_dropped_blocks)
        child.prefixes = list(parent.prefixes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens

    def deallocate(self, seq: Sequence) -> None:
        """Frees a sequence's blocks, tail first; full ones stay cached until they are evicted."""
        tables = seq.block_tables
        if len(tables) == 1:
            self.pool.free(reversed(tables[0]))
        else:
            # Why side by side: a hit needs its blocks in every group, so they are evicted together.
            rows = [*zip_longest(*tables, fillvalue=NULL_BLOCK)]
            self.pool.free(chain.from_iterable(reversed(rows)))
        if self.updates:  # Why: a sequence that is preempted after it has grown has no row now.
            row = seq.row
            self.updates = [update for update in self.updates if update.row != row]
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """Empties a sequence's tables without freeing the blocks, whose counts can't be trusted."""
        seq.block_tables = []
        seq.num_dropped_blocks = []
        seq.num_registered_blocks = 0
        seq.slots_ready_until = 0

    def discard_all(self) -> None:
        """Starts from an empty pool, because after a failed step no count can be trusted."""
        self.updates, self.copies = [], []
        self.prefix_cache.discard_all()

    # --- invariants ---------------------------------------------------------------------------

    def check(self, sequences: list[Sequence]) -> None:
        """Raises AssertionError if these sequences' tables and the pool contradict each other."""
        self.pool.check(table for seq in sequences for table in seq.block_tables)
        for seq in sequences:
            for index, table in enumerate(seq.block_tables):
                is_state = index == self._num_kv_groups  # only its last entry must be there
                dropped = -1 if is_state else seq.num_dropped_blocks[index]
                assert NULL_BLOCK not in table[dropped:], seq
                assert len(table) * self.block_size >= seq.num_computed_tokens, seq
                # Invariant I4: a table's indexed blocks hold the sequence's own prefixes.
                for block_id, prefix in zip(table, seq.prefixes, strict=False):
                    assert self.pool.blocks[block_id].prefix in (None, prefix), seq
        self.prefix_cache.check()


if __name__ == "__main__":
    __import__("runpy").run_module("nanoengine.core.demos.block_manager")["main"]()
