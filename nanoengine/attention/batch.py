"""Batch: all tensors of one step, passed through the model to attention.

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
    """The query tokens of one sequence, `start` to `end` in [T], for a recurrent layer.

    The first token is at `position` of its sequence, and the layer starts from the state in slot
    `read`. For each (count, slot) of `writes`, the state after the first `count` tokens is written
    to the slot; the last count covers all tokens.
    """

    start: int
    end: int
    position: int
    read: int
    writes: tuple[tuple[int, int], ...]


class SegmentChunks(NamedTuple):
    """The segments of a wave as chunks, for GPU kernels: cut where a state is written and at
    positions that are multiples of 64.

    `cuts` [C, 5] int64 has one row per chunk: its start and end in [T], the start of its segment,
    the slot of the segment's initial state, and the slot for the state after the chunk (0: it is
    not written). `firsts` [N + 1] int64: segment n has the chunks `firsts[n]` to `firsts[n + 1]`.
    """

    cuts: torch.Tensor
    firsts: torch.Tensor


@dataclass(slots=True, kw_only=True)
class ScanStep:
    """One wave of a step: sequences whose recurrent states can advance in parallel.

    A sequence that starts from a state that another one writes in the same step is in a later wave.
    Slot 0 contains zeros, the state before a sequence's first token; it is never written.

    Attributes:
        tokens: where the tokens of the wave's decodes are in [T]: a slice, or [D] int64.
        reads, writes: [D] int64, the slots of each decode's old and new state.
        spans: the segments of sequences with several query tokens.
        pieces: the same segments as chunks, on a GPU.
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
        num_decodes: the number of sequences with one query token; they are the first.
        max_query_len, max_seq_len: maxima over the sequences, as Python ints, for grid sizes.
        state_waves: the waves in which recurrent layers process the step, in order.
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
