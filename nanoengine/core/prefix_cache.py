"""PrefixCache: finds the blocks that hold the beginning of a prompt, so that it is not recomputed.

    prompt      a b c d | e f g h | i j k l | m        block_size 4; only full blocks are cached
    prefixes    P1 ◄───── P2 ◄───── P3                 each names all tokens up to its block's end
    the index   P1 → 7    P2 → 3    P3 → nothing       the cached prefix is blocks 7 and 3: 8 tokens

A request that computes a block registers it; a later one that begins with the same tokens finds it.
The BlockPool keeps content and blocks together: its index says which block holds a prefix, and its
queue says which content goes first when a block is needed. The PrefixCache says which prefixes a
sequence consists of and how many of them may be used, and it counts hits and misses.

Called by the Scheduler and the BlockManager. Tiers below the device extend it by a subclass
(`tiers/tiered_cache.py`), for which the methods at the end do nothing here.
Source: vLLM v1 (chained hashes, blocks kept after their request has ended).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoengine.core.block_pool import NULL_BLOCK, Block, BlockPool
from nanoengine.core.cache_stats import CacheStats, TierStats
from nanoengine.core.kv_groups import longest_common_hit, num_dropped_blocks
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan, StepResult, Transfer
from nanoengine.core.prefixes import Prefix, Prefixes, hash_block, pack, root_name
from nanoengine.core.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class CachedPrefix:
    """The longest cached prefix of a sequence, as the start of its block tables.

    `tables[g]` are the first `num_blocks` entries of group g's table, null where its window needs
    no block. `num_needed_blocks` of them come from the free blocks. While `is_ready` is False the
    sequence must wait; `reason` tells people what a tier was used for, or why it was not.
    """

    num_blocks: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_needed_blocks: int = 0
    is_ready: bool = True
    reason: str = ""

    def num_held(self, group: int) -> int:
        """Blocks that this prefix puts into a group's table."""
        table = self.tables[group]
        return len(table) - table.count(NULL_BLOCK)


class PrefixCache:
    """The prefix cache over the device's blocks.

    Args:
        layout: what the executor has allocated.
        enabled: False finds and registers nothing.

    Attributes:
        pool: the device's blocks, with the index from content to block.
        prefixes: one object for each content, which all pools use as its key.
        stats: what was looked up and found.
    """

    def __init__(self, layout: KVLayout, *, enabled: bool = True) -> None:
        self.layout = layout
        self.enabled = enabled
        self.block_size = layout.block_size
        self.pool = BlockPool(layout.num_blocks, len(layout.groups))
        self.prefixes = Prefixes()
        self.stats = CacheStats()
        # First blocks registered lately: digest without the salt -> name of the root, with it.
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix that every KV group has cached. Takes no block."""
        at_most = self._num_usable_blocks(seq)
        prefixes = self._prefixes_of(seq, at_most)[:at_most]
        found = []
        for index, group in enumerate(self.layout.groups):
            hits = self.pool.lookup_all(index, prefixes)
            if group.sliding_window is None and NULL_BLOCK in hits:
                del hits[hits.index(NULL_BLOCK) :]  # Why: full attention needs every block before.
            found.append(hits)
        length = longest_common_hit(self.layout.groups, found, self.block_size)
        tables = self._table_starts(found, length)
        num_needed = sum(map(self.pool.num_cached, tables))
        return CachedPrefix(num_blocks=length, tables=tables, num_needed_blocks=num_needed)

    def _table_starts(self, found: list[list[int]], length: int) -> list[list[int]]:
        """The tables that begin with `length` found blocks, null before what a window can see."""
        tables = []
        for group, hits in zip(self.layout.groups, found, strict=True):
            dropped = num_dropped_blocks(group, length * self.block_size, self.block_size)
            tables.append([NULL_BLOCK] * dropped + hits[dropped:length])
        return tables

    def take(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Gives a sequence the blocks that `find` has found for it; returns them as its tables."""
        for table in prefix.tables:
            self.pool.touch(table)
        return prefix.tables

    def find_filled(self, seq: Sequence) -> list[list[int]]:
        """Blocks that others have filled with what a running sequence is about to compute.

        The i-th list has, for each KV group, the block that may take the place of the sequence's
        own, counted from the one that its next token lies in.
        """
        start, at_most = seq.num_computed_tokens // self.block_size, self._num_usable_blocks(seq)
        filled: list[list[int]] = []
        if start >= at_most:
            return filled
        for prefix in self._prefixes_of(seq, at_most)[start:at_most]:
            hits = [self.pool.lookup(group, prefix) for group in range(len(seq.block_tables))]
            if None in hits:
                break
            filled.append([hit for hit in hits if hit is not None])
        return filled

    def _num_usable_blocks(self, seq: Sequence) -> int:
        """How many of a sequence's blocks may come from the cache."""
        if not self.enabled:
            return 0
        # Why - 1: at least one token is left to compute, or there would be no logits.
        num_tokens = len(seq.token_ids) - 1
        if seq.params.prompt_logprobs is not None:
            # Why: a position whose log-probabilities are wanted must be computed.
            num_tokens = min(num_tokens, seq.params.first_scored_position)
        return num_tokens // self.block_size

    def _prefixes_of(self, seq: Sequence, count: int) -> list[Prefix]:
        """The prefixes of at least the first `count` full blocks; each is hashed once in its life.

        A cache salt is the root of the first one's, so that tenants share nothing.
        """
        prefixes, size = seq.prefixes, self.block_size
        if len(prefixes) < count:
            parent = prefixes[-1] if prefixes else self.prefixes.root(seq.request.cache_salt)
            token_ids = seq.token_ids[len(prefixes) * size : count * size]
            prefixes += self.prefixes.follow(parent, token_ids, size)
        return prefixes

    # --- register -----------------------------------------------------------------------------

    def register(self, seq: Sequence) -> None:
        """Indexes the blocks that are full once the step being planned has run.

        Why before it has run: an equal prompt admitted in the same step then shares them. This is
        safe, because each layer stores all keys and values of a step before it reads any.
        """
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        first = seq.num_registered_blocks
        if not self.enabled or full <= first:
            return
        prefixes = self._prefixes_of(seq, full)
        if first == 0:
            self._roots[self._unsalted(seq)] = root_name(seq.request.cache_salt)
            if len(self._roots) > self.layout.num_blocks:
                self._roots.popitem(last=False)
        # Why: a block's contents in all groups become known before the next block's.
        step = full - first if len(seq.block_tables) == 1 else 1
        for start in range(first, full, step):
            run = slice(start, start + step)
            for group, table in enumerate(seq.block_tables):
                self._index(table[run], group, prefixes[run])
        seq.num_registered_blocks = full

    def _index(self, block_ids: list[int], group: int, prefixes: list[Prefix]) -> list[Block]:
        """Indexes blocks of one group; returns those that were not indexed before."""
        return self.pool.register(block_ids, group, prefixes)

    # --- drop ---------------------------------------------------------------------------------

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of those given blocks that nobody uses; returns how many were."""
        return self.pool.evict(block_ids)

    def invalidate(self, block_ids: list[int]) -> None:
        """Drops content that may be wrong, because the sequence that computed it has failed.

        Blocks that another sequence uses keep theirs.
        """
        self.pool.evict(block_ids)

    def reset(self) -> bool:
        """Drops all cached content; refuses (False) while blocks are in use."""
        return self.pool.reset()

    def discard_all(self) -> None:
        """After a failed step: neither reference counts nor content can be trusted any more."""
        self.pool.clear()
        self._roots.clear()

    # --- statistics ---------------------------------------------------------------------------

    def count_admission(self, seq: Sequence, num_cached_tokens: int) -> None:
        """Counts what was looked up for a sequence and found, and why the rest was not."""
        is_scored_whole = seq.params.prompt_logprobs is not None and (
            seq.params.first_scored_position == 0
        )
        if not self.enabled or is_scored_whole:
            return
        if seq.num_preempted_tokens:
            self.stats.readmit_queried_tokens += seq.num_tokens
            self.stats.readmit_hit_tokens += num_cached_tokens
        else:
            miss = self._reason_of_miss(seq, num_cached_tokens // self.block_size)
            self.stats.count(seq.num_tokens, num_cached_tokens, miss=miss)

    def _reason_of_miss(self, seq: Sequence, num_hits: int) -> str | None:
        """Why the first block behind the hits was not found; None if no more were asked for."""
        at_most = self._num_usable_blocks(seq)
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
        """The digest that the first block would have without a salt."""
        if seq.request.cache_salt is None:
            return seq.prefixes[0].digest
        return hash_block(root_name(None) + pack(seq.token_ids[: self.block_size]))

    # --- for tiers below the device; there are none here --------------------------------------

    def take_transfers(self, plan: StepPlan) -> list[Transfer]:
        """Copies between the device and other tiers that a planned step makes."""
        return []

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run, and its transfers with it."""

    def wait(self) -> None:
        """Called when no step runs and none can be planned: waits for what a tier is reading."""

    def close(self) -> None:
        """Gives back what tiers hold outside the process."""

    def tier_stats(self) -> tuple[TierStats, ...]:
        """Counts of each tier below the device."""
        return ()

    def check(self) -> None:
        """Raises AssertionError if a tier's invariant is broken."""
