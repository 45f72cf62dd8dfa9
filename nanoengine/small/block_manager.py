"""BlockManager: allocates blocks to sequences, and finds cached prefixes of prompts.

    block_size 4      tokens   a b c d | e f g h | i j          a prompt of 10 tokens
                      table       3         7       1           its blocks, in any order
                      digests     ●────────►●                   of full blocks: a chain

The digest of a block is a hash of its tokens and of the previous digest, so it identifies all
tokens up to the end of the block. A prompt that begins with the same tokens has the same first
digests, and its table begins with the same blocks: these tokens are not computed again.
"""

from __future__ import annotations

import xxhash

from nanoengine.core.plan import TableUpdate
from nanoengine.small.block_pool import BlockPool
from nanoengine.small.sequence import Sequence


class BlockManager:
    """The block tables of all sequences over one pool.

    Attributes:
        updates: changes of block tables since the last plan.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.updates: list[TableUpdate] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The blocks of the longest cached prefix of the sequence.

        At least one token is excluded, because a sequence needs the logits of its last token.
        """
        hits: list[int] = []
        for index in range((seq.num_tokens - 1) // self.block_size):
            block_id = self.pool.lookup(self._digest(seq, index), self._tokens(seq, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def can_allocate(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether the pool has enough free blocks for `allocate`: fresh ones, and hits that no
        sequence uses."""
        fresh = self.num_blocks_for(seq.num_tokens) - len(hits)
        unused = sum(self.pool.ref_counts[hit] == 0 for hit in hits)
        return fresh + unused <= self.pool.num_free

    def allocate(self, seq: Sequence, hits: list[int]) -> None:
        """Assigns its cached prefix to a sequence, and fresh blocks for its other tokens."""
        for hit in hits:  # Why all first: a fresh block must not evict a later hit.
            self.pool.touch(hit)
        num_fresh = self.num_blocks_for(seq.num_tokens) - len(hits)
        seq.block_table = hits + [self.pool.allocate() for _ in range(num_fresh)]
        seq.num_computed_tokens = seq.num_cached_tokens = len(hits) * self.block_size
        self.updates.append(TableUpdate(seq.row, 0, 0, tuple(seq.block_table)))

    def may_append(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Allocates blocks for the tokens of this step; False if the pool has too few.

        Most steps need no block: one is needed only when the tokens cross a block boundary.
        """
        table, start = seq.block_table, len(seq.block_table)
        num_new = self.num_blocks_for(seq.num_computed_tokens + num_new_tokens) - start
        if num_new > self.pool.num_free:
            return False
        if num_new > 0:
            table += [self.pool.allocate() for _ in range(num_new)]
            self.updates.append(TableUpdate(seq.row, 0, start, tuple(table[start:])))
        return True

    def register(self, seq: Sequence, num_computed_before: int) -> None:
        """Indexes the blocks that the step being planned fills.

        Why before they are computed: an equal prompt that is admitted in the same step shares them.
        This works because each layer stores all keys and values of a step before it reads any.
        """
        first, end = num_computed_before // self.block_size, seq.num_computed_tokens
        for index in range(first, end // self.block_size):
            block_id = seq.block_table[index]
            self.pool.register(block_id, self._digest(seq, index), self._tokens(seq, index))

    def deallocate(self, seq: Sequence) -> None:
        """Frees the sequence's blocks, the last one first: other prompts are likely to share the
        first blocks, which are thus evicted last."""
        self.pool.free(reversed(seq.block_table))
        self.updates = [update for update in self.updates if update.row != seq.row]
        seq.block_table, seq.num_computed_tokens = [], 0

    def _tokens(self, seq: Sequence, index: int) -> tuple[int, ...]:
        """The token ids of a full block."""
        return tuple(seq.token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """The digest of a full block; each digest of a sequence is computed once."""
        while len(seq.digests) <= index:
            before = seq.digests[-1] if seq.digests else b""
            tokens = repr(self._tokens(seq, len(seq.digests))).encode()
            seq.digests.append(xxhash.xxh3_128_digest(before + tokens))
        return seq.digests[index]
