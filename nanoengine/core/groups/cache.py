"""GroupedPrefixCache: a hit needs its blocks in every KV group, and a state in a state group.

Full attention needs every block of a prefix, a window the last few, and a state group the snapshot
at its end. The longest prefix is the longest one that all groups can start from (rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from nanoengine.core.block_pool import NULL_BLOCK, Block
from nanoengine.core.groups.pool import StatePool
from nanoengine.core.groups.rules import longest_common_hit, num_dropped_blocks
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_cache import CachedPrefix, PrefixCache
from nanoengine.core.prefix_tree import Prefix
from nanoengine.core.sequence import Sequence


class Load(NamedTuple):
    """A block of a prefix that is below the device (tiers/): its KV group, its position in the
    group's table, its tier, and its id there."""

    group: int
    position: int
    level: int
    block_id: int


@dataclass(slots=True, kw_only=True)
class GroupedPrefix(CachedPrefix):
    """A cached prefix in several groups.

    Attributes:
        num_needed_states: number of free states that it uses.
        loads: blocks to load, which are null in `tables`.
        num_shared_blocks: for models with recurrent states, the number of blocks whose keys and
            values are cached; the prefix ends at a snapshot before that.
    """

    num_needed_states: int = 0
    num_shared_blocks: int = 0
    loads: SequenceOf[Load] = ()

    def num_held_blocks(self, group: int) -> int:
        """How many blocks of the prefix a KV group holds, after all loads."""
        table, loaded = self.tables[group], sum(load.group == group for load in self.loads)
        return len(table) - table.count(NULL_BLOCK) + loaded


class GroupedPrefixCache(PrefixCache):
    """The prefix cache of a model with several KV groups.

    Attributes:
        num_kv_groups: number of KV groups, without the state group.
    """

    pool: StatePool

    def __init__(self, layout: KVLayout, *, enabled: bool = True) -> None:
        super().__init__(layout, enabled=enabled)
        self.snapshot_every = layout.snapshot_every
        self.num_kv_groups = len(layout.groups) - (self.snapshot_every is not None)
        self.pool = StatePool(layout.num_blocks, len(layout.groups), layout.num_states)

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix that all KV groups have cached. Allocates nothing."""
        found = self._find_from(seq, 0)
        return self._prefix(found, longest_common_hit(self.layout.groups, found, self.block_size))

    def _prefix(
        self, found: list[list[int]], length: int, loads: SequenceOf[Load] = (), reason: str = ""
    ) -> GroupedPrefix:
        """The first `length` blocks that were found on the device, and the blocks to load."""
        tables, kv = [], slice(self.num_kv_groups)
        for group, hits in zip(self.layout.groups, found, strict=True):
            # Why null: the group's window does not reach these blocks.
            dropped = num_dropped_blocks(group, length * self.block_size, self.block_size)
            tables.append([NULL_BLOCK] * dropped + hits[dropped:length])
        num_needed = [*map(self.pool.num_cached, tables)]
        for load in loads:
            num_needed[load.group] += 1
        shared = 0
        if self.snapshot_every is not None:  # the length if every state were kept
            shared = longest_common_hit(self.layout.groups[kv], found[kv], self.block_size)
        return GroupedPrefix(
            num_blocks=length,
            tables=tables,
            loads=loads,
            num_needed_blocks=sum(num_needed[kv]),
            num_needed_states=sum(num_needed[self.num_kv_groups :]),
            num_shared_blocks=shared,
            reason=reason,
        )

    def _find_from(self, seq: Sequence, start: int) -> list[list[int]]:
        """Per KV group, the cached blocks from the `start`-th on, null where not cached.

        A list ends where no longer prefix is possible.
        """
        end = self._num_usable_blocks(seq)
        prefixes = self._prefixes_of(seq, end)[start:end]
        found = []
        for index, group in enumerate(self.layout.groups):
            hits = self.pool.lookup_all(index, prefixes)
            if group.sliding_window is None and NULL_BLOCK in hits:
                # Why: full attention needs every block, so blocks after a gap are useless.
                del hits[hits.index(NULL_BLOCK) :]
            found.append(hits)
        return found

    def activate(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Makes the blocks of a found prefix active; returns the start of the sequence's tables."""
        assert isinstance(prefix, GroupedPrefix), prefix
        seq.num_shared_blocks = prefix.num_shared_blocks
        return super().activate(seq, prefix)

    def find_filled(self, seq: Sequence) -> list[list[int]]:
        """Blocks with the content that a running sequence computes next, filled by other sequences.

        `[g][i]` is group g's block for the i-th table position, counted from the block of the
        sequence's next token; null where the group needs none.
        """
        found = self._find_from(seq, seq.num_computed_tokens // self.block_size)
        length = longest_common_hit(self.layout.groups, found, self.block_size)
        return [hits[:length] for hits in found]

    # --- register -----------------------------------------------------------------------------

    def _index_run(self, seq: Sequence, prefixes: list[Prefix], first: int, full: int) -> None:
        # Why in this order: a hit needs a block in all groups.
        for start in range(first, full):
            run = slice(start, start + 1)
            for group, table in enumerate(seq.block_tables):
                if group < self.num_kv_groups or self.keeps_state(seq, start):
                    self._index(table[run], group, prefixes[run])

    def _index(self, block_ids: list[int], group: int, prefixes: list[Prefix]) -> list[Block]:
        """Indexes blocks of one KV group; returns the blocks that were not indexed before."""
        return self.pool.register(block_ids, group, prefixes)

    def keeps_state(self, seq: Sequence, index: int) -> bool:
        """Whether the state after a sequence's `index`-th block is kept as a snapshot.

        A state needs the memory of many tokens' keys and values, so few are kept: at regular
        intervals, at the end of the prompt, and where other prompts branched off.
        Source: Marconi (arXiv 2411.19379) keeps states where prompts branch.
        """
        assert self.snapshot_every is not None
        length = index + 1
        last = (seq.num_prompt_tokens - 1) // self.block_size
        regular = length % self.snapshot_every == 0
        return self.enabled and (regular or length in (last, seq.num_shared_blocks))
