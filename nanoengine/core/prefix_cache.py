"""PrefixCache: prompts that begin alike share blocks, so that their beginning is computed once.

    prompt      a b c d | e f g h | i j k l | m        block_size 4; only full blocks are cached
    prefixes    P1 ◄───── P2 ◄───── P3                 each stands for all tokens to its block's end
    the index   P1 → 7    P2 → 3    P3 → nothing       the cached prefix: blocks 7 and 3, 8 tokens

A sequence that fills a block registers it, and a later one that begins with the same tokens finds
it. The BlockPool owns the index, which says which block holds a prefix, and the queue, which says
what is evicted first. The PrefixCache says which prefixes a sequence consists of and how many of
them may come from the cache, and it counts hits and misses.

Called by the Scheduler and the BlockManager.
Special: groups/cache.py (windows, states: a hit in every group), tiers/ (host memory, disk).
Source: vLLM v1 (chained hashes; blocks are kept after their request has ended).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from nanoengine.core.block_pool import NULL_BLOCK, BlockPool
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefixes import Prefix, Prefixes, hash_block, pack, root_name
from nanoengine.core.sequence import Sequence
from nanoengine.core.stats import CacheStats


@dataclass(slots=True, kw_only=True)
class CachedPrefix:
    """The longest cached prefix of a sequence, as the start of its block tables.

    Attributes:
        num_blocks: how many full blocks the prefix has.
        tables: for each KV group that many entries; null where its window needs no block.
        num_needed_blocks: how many free blocks it takes: those that are cached become active.
        is_ready: False while a tier reads blocks of it; the sequence waits.
        reason: for people: why blocks are loaded from a tier, or computed although one has them.
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
        tiers: what tiers below the device do at each step; None: there are none.
        prefixes: makes the keys of the index, one object for each content.
        stats: how much was looked up and found.
    """

    def __init__(self, layout: KVLayout, *, enabled: bool = True) -> None:
        self.layout = layout
        self.enabled = enabled
        self.block_size = layout.block_size
        self.pool = BlockPool(layout.num_blocks, len(layout.groups))
        self.tiers: Any = None
        self.prefixes = Prefixes()
        self.stats = CacheStats()
        # Of first blocks registered lately: digest without the salt -> name of the salted root.
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    # --- find ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> CachedPrefix:
        """The longest prefix that is cached. Takes no block."""
        table = self._cached_blocks(seq, 0)
        return CachedPrefix(
            num_blocks=len(table),
            tables=[table],
            num_needed_blocks=self.pool.num_cached(table),
        )

    def _cached_blocks(self, seq: Sequence, start: int) -> list[int]:
        """The cached blocks of a sequence from its `start`-th on, up to the first that is not."""
        at_most = self._num_usable_blocks(seq)
        hits = self.pool.lookup_all(0, self._prefixes_of(seq, at_most)[start:at_most])
        return hits[: hits.index(NULL_BLOCK)] if NULL_BLOCK in hits else hits

    def take(self, seq: Sequence, prefix: CachedPrefix) -> list[list[int]]:
        """Makes the blocks of a found prefix active; returns the start of the sequence's tables."""
        for table in prefix.tables:
            self.pool.touch(table)
        return prefix.tables

    def find_filled(self, seq: Sequence) -> list[list[int]]:
        """Blocks that hold what a running sequence computes next, because another was faster.

        `[g][i]` is group g's block for the i-th position of the table, counted from the block that
        the sequence's next token lies in.
        """
        return [self._cached_blocks(seq, seq.num_computed_tokens // self.block_size)]

    def _num_usable_blocks(self, seq: Sequence) -> int:
        """How many of a sequence's blocks may come from the cache: full ones, and not all."""
        if not self.enabled:
            return 0
        # Why - 1: at least one token must be computed, or there would be no logits.
        num_tokens = len(seq.token_ids) - 1
        if seq.params.prompt_logprobs is not None:
            # Why: a position whose log-probabilities are wanted must be computed.
            num_tokens = min(num_tokens, seq.params.first_scored_position)
        return num_tokens // self.block_size

    def _prefixes_of(self, seq: Sequence, count: int) -> list[Prefix]:
        """The prefixes of at least the first `count` full blocks.

        A sequence keeps them, so each block is hashed once. The chain starts at a root that is made
        from the request's cache salt, so that tenants share nothing.
        """
        prefixes, size = seq.prefixes, self.block_size
        if len(prefixes) < count:
            parent = prefixes[-1] if prefixes else self.prefixes.root(seq.request.cache_salt)
            token_ids = seq.token_ids[len(prefixes) * size : count * size]
            prefixes += self.prefixes.follow(parent, token_ids, size)
        return prefixes

    # --- register -----------------------------------------------------------------------------

    def register(self, seq: Sequence) -> None:
        """Indexes a sequence's blocks that are full once the step being planned has run.

        Why not afterwards: an equal prompt that is admitted in the same step then shares them. It
        reads what is written, because each layer stores all keys and values of a step before it
        reads any.
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
        self._index_run(seq, prefixes, first, full)
        seq.num_registered_blocks = full

    def _index_run(self, seq: Sequence, prefixes: list[Prefix], first: int, full: int) -> None:
        self.pool.register(seq.block_tables[0][first:full], 0, prefixes[first:full])

    # --- drop ---------------------------------------------------------------------------------

    def evict(self, block_ids: Iterable[int]) -> int:
        """Drops the content of those of the blocks that nobody uses; returns how many."""
        return self.pool.evict(block_ids)

    def invalidate(self, block_ids: list[int]) -> None:
        """Drops content that may be wrong, because the sequence that held these blocks has failed.

        Blocks that another sequence uses keep theirs.
        """
        self.pool.evict(block_ids)

    def reset(self) -> bool:
        """Drops all cached content; refuses (False) while blocks are in use."""
        return self.pool.reset()

    def discard_all(self) -> None:
        """Empties all blocks: after a failed step neither counts nor content can be trusted."""
        self.pool.clear()
        self._roots.clear()

    # --- statistics ---------------------------------------------------------------------------

    def count_admission(self, seq: Sequence, num_cached_tokens: int) -> None:
        """Counts the tokens looked up for a sequence and found, and why not all were found."""
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
