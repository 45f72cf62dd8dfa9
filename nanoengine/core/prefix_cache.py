"""PrefixCache: prompts with equal beginnings share blocks, which are computed once.

    prompt      a b c d | e f g h | i j k l | m        block_size 4; only full blocks are cached
    prefixes    P1 ◄───── P2 ◄───── P3                 each covers all tokens to its block's end
    the index   P1 → 7    P2 → 3    P3 → nothing       the cached prefix: blocks 7 and 3, 8 tokens

A sequence registers each block that it fills, and later sequences with the same first tokens find
it. The BlockPool owns the index, which maps a prefix to a block, and the eviction queue. The
PrefixCache computes the prefixes of a sequence, limits how many may come from the cache, and counts
hits and misses.

Called by the Scheduler and the BlockManager.
See also groups/cache.py (windows, recurrent states: a hit in every group), tiers/ (host, disk).
Source: vLLM v1 (chained hashes; blocks are kept after their request has ended).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_tree import Prefix, PrefixTree, hash_block, pack, root_digest
from nanoengine.core.sequence import Sequence
from nanoengine.core.stats import CacheStats


@dataclass(slots=True, kw_only=True)
class CachedPrefix:
    """The longest cached prefix of a sequence, as the start of its block tables.

    Attributes:
        num_blocks: number of full blocks of the prefix.
        tables: per KV group, that many entries; null where its window needs no block.
        num_needed_blocks: number of free blocks that it uses: cached blocks that become active.
        is_ready: False while a tier reads some of its blocks; the sequence waits.
        reason: for users: why blocks are loaded from a tier, or computed although a tier has them.
    """

    num_blocks: int = 0
    tables: list[list[int]] = field(default_factory=list)
    num_needed_blocks: int = 0
    is_ready: bool = True
    reason: str = ""


class PrefixCache:
    """The prefix cache over the device's blocks.

    Args:
        layout: the KV cache that the executor has allocated.
        enabled: False registers nothing, so nothing is found.

    Attributes:
        pool: the device's blocks.
        tiers: the per-step work of the tiers below the device; None without tiers.
        prefixes: creates the keys of the index, one object per content.
        stats: numbers of tokens looked up and found.
    """

    def __init__(self, layout: KVLayout, *, enabled: bool = True) -> None:
        self.layout = layout
        self.enabled = enabled
        self.block_size = layout.block_size
        self.pool = BlockPool(layout.num_blocks, len(layout.groups))
        self.tiers: Any = None
        self.prefixes = PrefixTree()
        self.stats = CacheStats()
        # First blocks registered recently: digest without the salt -> name of the salted root.
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix that is cached. Allocates nothing."""
        table = self._cached_blocks(seq, 0)
        return CachedPrefix(
            num_blocks=len(table),
            tables=[table],
            num_needed_blocks=self.pool.num_cached(table),
        )

    def _cached_blocks(self, seq: Sequence, start: int) -> list[int]:
        """A sequence's cached blocks, from the `start`-th to the first that is not cached."""
        end = self._num_usable_blocks(seq)
        hits = self.pool.lookup_all(0, self._prefixes_of(seq, end)[start:end])
        return hits[: hits.index(NULL_BLOCK)] if NULL_BLOCK in hits else hits

    def activate(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Makes the blocks of a found prefix active; returns the start of the sequence's tables."""
        for table in prefix.tables:
            self.pool.touch(table)
        return prefix.tables

    def find_filled(self, seq: Sequence) -> list[list[int]]:
        """Blocks with the content that a running sequence computes next, filled by other sequences.

        `[g][i]` is group g's block for the i-th table position, counted from the block of the
        sequence's next token.
        """
        return [self._cached_blocks(seq, seq.num_computed_tokens // self.block_size)]

    def _num_usable_blocks(self, seq: Sequence) -> int:
        """How many of a sequence's blocks may come from the cache: full blocks, but not all."""
        if not self.enabled:
            return 0
        # Why - 1: at least one token must be computed, or there would be no logits.
        num_tokens = len(seq.token_ids) - 1
        if seq.params.prompt_logprobs is not None:
            # Why: a position whose log-probabilities are requested must be computed.
            num_tokens = min(num_tokens, seq.params.first_scored_position)
        return num_tokens // self.block_size

    def _prefixes_of(self, seq: Sequence, count: int) -> list[Prefix]:
        """The prefixes of at least the first `count` full blocks.

        A sequence keeps them, so each block is hashed once. The chain starts at a root that is
        derived from the request's cache salt, so that tenants share nothing.
        """
        prefixes, size = seq.prefixes, self.block_size
        if len(prefixes) < count:
            parent = prefixes[-1] if prefixes else self.prefixes.root(seq.request.cache_salt)
            token_ids = seq.token_ids[len(prefixes) * size : count * size]
            prefixes += self.prefixes.extend_blocks(parent, token_ids, size)
        return prefixes

    # --- register -----------------------------------------------------------------------------

    def register(self, seq: Sequence) -> None:
        """Indexes a sequence's blocks that are full once the step being planned has run.

        Why not afterwards: an equal prompt that is admitted in the same step then shares them. It
        reads the written values, because each layer stores all keys and values of a step before it
        reads any.
        """
        full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        first = seq.num_registered_blocks
        if not self.enabled or full <= first:
            return
        prefixes = self._prefixes_of(seq, full)
        if first == 0:
            self._roots[self._unsalted_digest(seq)] = root_digest(seq.request.cache_salt)
            if len(self._roots) > self.layout.num_blocks:
                self._roots.popitem(last=False)
        self._index_run(seq, prefixes, first, full)
        seq.num_registered_blocks = full

    def _index_run(self, seq: Sequence, prefixes: list[Prefix], first: int, full: int) -> None:
        self.pool.register(seq.block_tables[0][first:full], 0, prefixes[first:full])

    # --- drop ---------------------------------------------------------------------------------

    def invalidate(self, block_ids: list[int]) -> None:
        """Drops content that may be wrong, because the sequence that held these blocks has failed.

        Blocks that another sequence uses keep their content.
        """
        self.pool.evict(block_ids)

    def reset(self) -> bool:
        """Drops all cached content; returns False and changes nothing while a block is in use."""
        return self.pool.reset()

    def discard_all(self) -> None:
        """Empties all blocks, because after a failed step counts and content may be wrong."""
        self.pool.clear()
        self._roots.clear()

    # --- statistics ---------------------------------------------------------------------------

    def count_admission(self, seq: Sequence, num_cached_tokens: int) -> None:
        """Counts the tokens looked up and found for a sequence, and the reason of a miss."""
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
        """Why the block after the hits was not found; None if all were. See `CacheStats`."""
        num_usable = self._num_usable_blocks(seq)
        if num_usable == 0:
            return "short"
        if num_hits == num_usable:
            return None
        if self.pool.was_evicted(seq.prefixes[num_hits].digest):
            return "evicted"
        known_root = None if num_hits else self._roots.get(self._unsalted_digest(seq))
        if known_root is None or known_root == root_digest(seq.request.cache_salt):
            return "cold"
        return "salt"

    def _unsalted_digest(self, seq: Sequence) -> bytes:
        """The digest that the first block would have without a salt."""
        if seq.request.cache_salt is None:
            return seq.prefixes[0].digest
        return hash_block(root_digest(None) + pack(seq.token_ids[: self.block_size]))
