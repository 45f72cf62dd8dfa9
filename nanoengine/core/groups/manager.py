"""GroupedBlockManager: block tables of models with windows or states, one table per KV group.

    window   blocks outside the window of all later queries are freed and replaced by null entries
    state    one table entry holds the state after the newest token; it moves to later entries as
             the sequence grows, and some states are kept as snapshots. In a step with drafts, one
             more entry per draft follows: the state after it, from which the next step starts if
             this draft is the last accepted one

The rules themselves are in rules.py.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import Any

from nanoengine.core.block_manager import Admission, BlockManager, Verdict
from nanoengine.core.block_pool import NULL_BLOCK
from nanoengine.core.groups.cache import GroupedPrefix, GroupedPrefixCache
from nanoengine.core.groups.pool import StatePool
from nanoengine.core.groups.rules import num_dropped_blocks, num_needed_blocks
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import TableUpdate
from nanoengine.core.prefix_cache import CachedPrefix
from nanoengine.core.sequence import Sequence


class GroupedBlockManager(BlockManager):
    """A BlockManager with one table per KV group.

    `max_chunk` bounds the blocks of a window group, which holds the window and one chunk at once.
    """

    pool: StatePool

    def __init__(
        self, layout: KVLayout, *, prefix_cache: GroupedPrefixCache, **options: Any
    ) -> None:
        super().__init__(layout, prefix_cache=prefix_cache, **options)
        self.cache, self.pool = prefix_cache, prefix_cache.pool
        self._num_kv_groups = prefix_cache.num_kv_groups
        kv_groups = layout.groups[: self._num_kv_groups]
        self._drops_each_step = any(group.sliding_window for group in kv_groups)
        self._has_windows = any(group.sliding_window for group in layout.groups)
        self._has_states = self._num_kv_groups < len(layout.groups)

    # --- admission ----------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int, chunk: int | None = None) -> int:
        """Maximum number of blocks that a sequence of this length holds, over all KV groups.

        `chunk` is the maximum number of its tokens per step; None: the smallest allowed chunk.
        """
        if chunk is None:
            chunk = 1 if self.chunked else self.max_chunk
        return sum(
            num_needed_blocks(group, num_tokens, chunk, self.block_size)
            for group in self.layout.groups
        )

    def max_chunk_for(self, num_tokens: int, num_reserved: int) -> int:
        """As in the base class; a window needs fewer blocks with a smaller chunk."""
        chunk, spare = self.max_chunk, self.pool.num_usable - num_reserved
        while chunk and self.num_blocks_for(num_tokens, chunk) > spare:
            chunk = chunk // 2 if self.chunked and self._has_windows else 0
        return chunk

    def can_allocate(self, seq: Sequence, *, keep_watermark: bool = True) -> Admission:
        """As in the base class; a sequence also needs states."""
        admission = super().can_allocate(seq, keep_watermark=keep_watermark)
        if self._has_states and admission.verdict is Verdict.OK:
            assert isinstance(admission.prefix, GroupedPrefix)
            # Why one more: the step that reads a snapshot writes its own state elsewhere.
            if admission.prefix.num_needed_states >= self.pool.num_free_states:
                admission.verdict = Verdict.LATER
        return admission

    def num_fresh_blocks(self, seq: Sequence, prefix: CachedPrefix, chunk: int) -> int:
        """Blocks after a cached prefix, over all groups; a window group holds only a few."""
        assert isinstance(prefix, GroupedPrefix)
        num_blocks = -(-seq.num_tokens // self.block_size)
        total = 0
        for index, group in enumerate(self.layout.groups):
            fresh = num_blocks - prefix.num_blocks
            if group.sliding_window is not None:
                needed = num_needed_blocks(group, seq.num_tokens, chunk, self.block_size)
                fresh = min(fresh, max(needed - prefix.num_held_blocks(index), 0))
            total += fresh
        return total

    def fill_tables(self, seq: Sequence, admission: Admission) -> None:
        """Allocates fresh blocks for the tables of full attention.

        A window group gets its blocks from `may_append`, chunk by chunk, because it never holds
        the blocks of all tokens at once.
        """
        num_blocks, num_cached = -(-seq.num_tokens // self.block_size), admission.num_cached_tokens
        for group, table in zip(self.layout.groups, seq.block_tables, strict=True):
            if group.sliding_window is None:
                table += self.pool.allocate(num_blocks - len(table))
            seq.num_dropped_blocks.append(num_dropped_blocks(group, num_cached, self.block_size))

    # --- growth -------------------------------------------------------------------------------

    def may_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """As in the base class, over all groups; allocates for all groups or for none."""
        if self._has_windows:
            self._drop_outside_windows(seq)
        start, blocks, needed = seq.num_computed_tokens, self.pool.blocks, 0
        end = start + num_new_tokens
        num_blocks = -(-end // self.block_size)
        partial, offset = start // self.block_size, start % self.block_size
        tables = seq.block_tables[: self._num_kv_groups]
        for table in tables:
            if num_blocks > len(table):
                needed += num_blocks - len(table)
            if offset and blocks[table[partial]].ref_count > 1:
                needed += 1
        if needed > self.pool.num_free:
            return False
        if self._has_states:
            num_drafts = max(0, end - seq.num_tokens)
            num_states = -(-(end - num_drafts) // self.block_size)
            if not self._move_state(seq, num_states):
                return False
            if not self._set_draft_states(seq, num_states, num_drafts):
                return False
        if needed == 0:
            return True
        for index, table in enumerate(tables):
            if offset and blocks[table[partial]].ref_count > 1:
                self.copy_on_write(seq, index, partial, self.pool.allocate(1)[0])
            if num_blocks > len(table):
                new = self.pool.allocate(num_blocks - len(table))
                self.updates.append(TableUpdate(seq.row, index, len(table), tuple(new)))
                table += new
        return True

    def _move_state(self, seq: Sequence, num_blocks: int) -> bool:
        """Prepares the state group's table for a step that ends in its `num_blocks`-th block; False
        if no state is free.

        The step starts from the newest stored state before its first token, and stores the state
        after each of its blocks whose table entry is not null. So a state that only this sequence
        can use moves to the next entry that is written, and nothing is copied. Snapshots within the
        chunk may use free states but cause no preemption; the last ones have priority.
        """
        table, pool = seq.block_tables[-1], self.pool
        first, offset = divmod(seq.num_computed_tokens, self.block_size)
        spare = pool.num_free_states
        if offset and pool.blocks[table[-1]].ref_count > 1:
            if not spare:
                return False
            [new] = pool.allocate(1, states=True)
            self.copy_on_write(seq, self._num_kv_groups, first, new)
            spare -= 1
        if num_blocks <= len(table):
            return True
        last, keeps = pool.blocks[table[-1] if table else NULL_BLOCK], self.cache.keeps_state
        # Why the second case: the token that fills a block may be known only after the step.
        is_snapshot = last.prefix is not None or (
            seq.num_registered_blocks < first and keeps(seq, first - 1)
        )
        moves = last.ref_count == 1 and (offset > 0 or not is_snapshot)
        if last.ref_count == 1 and not moves and not spare:
            # Why: no other state is free, so this one loses its content and is allocated again.
            pool.free([last.block_id])
            moves = pool.allocate(1, states=True) == [last.block_id]
        if not moves and not spare:
            return False
        kept = [index for index in range(first, num_blocks - 1) if keeps(seq, index)]
        # Why half: other sequences of this step need some, too.
        kept = kept[max(0, len(kept) - spare // 2) :]
        start = len(table)
        if moves:
            start, table[-1] = start - 1, NULL_BLOCK
        table += [NULL_BLOCK] * (num_blocks - len(table))
        written = [*kept, num_blocks - 1]
        states = pool.allocate(len(written) - moves, states=True)
        for index, block_id in zip(written, [last.block_id] * moves + states, strict=True):
            table[index] = block_id
        self.updates.append(TableUpdate(seq.row, self._num_kv_groups, start, tuple(table[start:])))
        return True

    def max_drafts(self, num_reserved: int) -> int:
        """How many drafts of one sequence a step may verify, if others need `num_reserved` states:
        each draft needs a state, in which it is stored."""
        return max(0, self.pool.num_free_states - num_reserved)

    def _set_draft_states(self, seq: Sequence, start: int, num_drafts: int) -> bool:
        """Makes `num_drafts` states the entries from `start` on; False if too few are free."""
        table = seq.block_tables[-1]
        num_new = start + num_drafts - len(table)
        if num_new > self.pool.num_free_states:
            return False
        if num_new > 0:
            new = self.pool.allocate(num_new, states=True)
            index = self._num_kv_groups
            self.updates.append(TableUpdate(seq.row, index, len(table), tuple(new)))
            table += new
        elif num_new:
            self.pool.free(table[num_new:])
            del table[num_new:]
        return True

    def accept_drafts(self, seq: Sequence, num_accepted: int) -> None:
        """After a step with drafts, makes the state after the last accepted one the newest state.
        `num_computed_tokens` includes the accepted drafts."""
        table, size, end = seq.block_tables[-1], self.block_size, seq.num_computed_tokens
        start = end - num_accepted - 1  # the step's first token, which precedes the drafts
        first, last = start // size, (end - 1) // size
        states, accepted = table[first:], [NULL_BLOCK] * (last - first + 1)
        accepted[-1] = states[num_accepted]
        for index in range(first, last):
            if self.cache.keeps_state(seq, index):
                accepted[index - first] = states[(index + 1) * size - start - 1]
        self.pool.free([state for state in states if state not in accepted])
        table[first:] = accepted
        self.updates.append(TableUpdate(seq.row, self._num_kv_groups, first, tuple(accepted)))

    def slots_ready_until(self, seq: Sequence) -> int:
        """As in the base class. A window drops blocks as it moves, so each step must check; a state
        that is not kept is dropped once."""
        if self._drops_each_step:
            return 0
        if self._has_states:
            group, computed = self.layout.groups[-1], seq.num_computed_tokens
            dropped = num_dropped_blocks(group, computed, self.block_size)
            if dropped > seq.num_dropped_blocks[-1]:
                return 0
        return super().slots_ready_until(seq)

    def _drop_outside_windows(self, seq: Sequence) -> None:
        """Frees the blocks outside the windows of all later queries; null entries replace them."""
        for index, group in enumerate(self.layout.groups):
            table, previous = seq.block_tables[index], seq.num_dropped_blocks[index]
            dropped = num_dropped_blocks(group, seq.num_computed_tokens, self.block_size)
            if group.snapshot_every is not None and self.cache.enabled:
                # Why: a snapshot between accepted drafts is registered in this step.
                dropped = min(dropped, seq.num_registered_blocks)
            if dropped > previous:
                self.pool.free(reversed(table[previous:dropped]))
                nulls = [NULL_BLOCK] * (dropped - previous)
                table[previous:dropped] = nulls
                self.updates.append(TableUpdate(seq.row, index, previous, tuple(nulls)))
                seq.num_dropped_blocks[index] = dropped

    def deallocate(self, seq: Sequence) -> None:
        """As in the base class, but all groups together: a hit needs a block in each."""
        positions = [*zip_longest(*seq.block_tables, fillvalue=NULL_BLOCK)]
        self.pool.free(chain.from_iterable(reversed(positions)))
        self.clear_tables(seq)
