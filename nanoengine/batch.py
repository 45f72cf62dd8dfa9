"""Batch: every tensor of one step, as one argument that goes down to attention.

Legend: T tokens, S sequences, L rows of logits, G KV groups, M blocks of the longest table.

    query_start_loc   0  1  2           7           12      sequences with 1, 1, 5, 5 query tokens
    token_ids         t  t  t t t t t   t t t t t           [T], sequence after sequence
    slot_mapping      where each token's key and value go   [G, T]
    block_tables      where the whole context lies          [G, S, M]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tensors of one step, all on the model's device.

    Sequences with one query token come first, because attention has a kernel of its own for them.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        slot_mapping: [G, T] int64, where each token's key and value go: block_id * block_size +
            offset.
        query_start_loc: [S + 1] int32, where each sequence's query tokens start in [T].
        seq_lens: [S] int32, context of each sequence including this step's tokens.
        block_tables: [G, S, M] int32, entries past a sequence's last block are 0 (the null block).
        logits_indices: [L] int64, positions in [T] whose logits are needed; None: all, in order.
        num_decodes: the first `num_decodes` sequences have exactly one query token.
        max_query_len, max_seq_len: over the sequences, as Python ints, for grid sizes.
        attention: what the backend's `prepare` returned; opaque to everyone else.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor | None
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    attention: object = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens computed in this step."""
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """S, the sequences that compute at least one token."""
        return self.seq_lens.shape[0]
