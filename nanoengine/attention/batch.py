"""Batch: all tensors of one step, as one argument that is passed down to attention.

Legend: T tokens, S sequences, L rows of logits, G KV groups without the state group, M blocks of
the longest table, D sequences with one query token.

    query_start_loc   0  1  2           7           12      sequences with 1, 1, 5, 5 query tokens
    token_ids         t  t  t t t t t   t t t t t           [T], sequence after sequence
    slot_mapping      where each token's key and value go   [G, T]
    block_tables      where the whole context is            [G, S, M]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class SequenceSegment(NamedTuple):
    """One sequence's tokens of a step, `start` to `end` of [T], in a recurrent layer.

    The first token is at `position`, and the layer starts from the state in slot `read`. For each
    (count, slot) of `writes`, the state after the first `count` tokens is written to the slot; the
    last count covers all tokens.
    """

    start: int
    end: int
    position: int
    read: int
    writes: tuple[tuple[int, int], ...]


class SegmentChunks(NamedTuple):
    """The spans of a wave on a GPU, cut where a state is written and at positions that are
    multiples of 64.

    `cuts` [C, 5] int64 has one row per piece: its `start` and `end` in [T], the `start` of its
    span, the slot from which the span starts, and the slot for the state after the piece, or 0 if
    it is not written. `firsts` [N + 1] int64: span n has the pieces `firsts[n]` to `firsts[n + 1]`.
    """

    cuts: torch.Tensor
    firsts: torch.Tensor


@dataclass(slots=True, kw_only=True)
class ScanStep:
    """Sequences that advance their states in parallel. A sequence that starts from a state that
    another one writes in this step belongs to a later wave.

    Slot 0 holds zeros, the state before a sequence's first token; nothing is written there.

    Attributes:
        tokens: the tokens of sequences with one query token, in [T]: a slice, or [D] int64.
        reads, writes: [D] int64, the slot from which each starts, and the slot for its new state.
        spans: the sequences with several query tokens.
        pieces: the same, for kernels of a GPU.
    """

    tokens: torch.Tensor | slice
    reads: torch.Tensor
    writes: torch.Tensor
    spans: tuple[SequenceSegment, ...] = ()
    pieces: SegmentChunks | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """The tensors of one step, all on the model's device.

    Sequences with one query token come first, because attention has a separate kernel for them.

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
        state_waves: what recurrent layers advance, in order.
        attention: what the backend's `prepare` returned; opaque to all other code.
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
    state_waves: tuple[ScanStep, ...] = ()
    attention: object = None

    @property
    def num_tokens(self) -> int:
        """T, the tokens computed in this step."""
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """S, the sequences that compute at least one token."""
        return self.seq_lens.shape[0]
