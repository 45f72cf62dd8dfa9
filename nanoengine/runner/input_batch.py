"""InputBatch: the tokens and block tables of running sequences, from which Batches are built.

    plan ──update──► token_ids     [R, max_model_len + 1]      one numpy row per running sequence,
                     block_tables  [G, R, M]                   updated in place
    plan ──make_batch──► Batch, SamplingIndices              gathered by index, no loop over rows
    sampled ──store_sampled──► pool    [R + 1]               on the device: each row's last token

A row is a slot of the batch: the index of a running sequence in all arrays. A sampled token is
written to the pool at once, and the next step reads it there. The host receives it when the device
has finished (`write_host`), on a CPU immediately. So a step can be launched before the host knows
the tokens of the previous one.

Called by the ModelRunner. Legend: R rows, G KV groups, M blocks of the longest table, T tokens, S
sequences, L rows of logits, E entries of the plan's parallel lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nanoengine.attention.batch import Batch, ScanStep
from nanoengine.core.plan import StepPlan
from nanoengine.runner.kv_cache import zeros
from nanoengine.runner.transfers import ship

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingIndices:
    """The rows of logits ("lines") from which tokens are sampled, as parallel int64 arrays.

    Attributes:
        entries: index into `plan.rows`.
        rows: the batch row that samples.
        seq_ids: the sequence that owned the batch row when the batch was built.
        positions: position of the sampled token in its sequence.
        rows_on_device: `rows` on the device.
    """

    entries: Ints
    rows: Ints
    seq_ids: Ints
    positions: Ints
    rows_on_device: torch.Tensor


class InputBatch:
    """Token ids and block tables of all rows, kept across steps.

    Args:
        max_num_seqs: R.
        max_model_len: [tokens]; one extra column holds a token that is sampled but never computed.
        block_size: [tokens].
        num_groups: G, including the state group.
        device: device of the batch tensors and of the pool.
        first_state: id of the first recurrent state; None: there is no state group.
        layers_per_slice: number of layers that share a cache slice, per group. A block of the pool
            then contains one block of each of them. None or []: one layer per slice.

    Attributes:
        pool: [R + 1] int64 on the device, the last sampled token per row; the last entry is
            padding.
        pool_positions: [R], position of that token in its sequence; -1: the pool holds none.
        seq_ids: [R], the sequence that owns the row; -1: the row is free.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        first_state: int | None = None,
        layers_per_slice: list[int] | None = None,
    ) -> None:
        self.block_size, self.first_state, self._device = block_size, first_state, device
        self.num_kv_groups = num_groups - (first_state is not None)
        self.layers_per_slice = layers_per_slice
        # Why not numpy: it backs a large array with 2 MiB pages, see `zeros`.
        host, tokens = torch.device("cpu"), (max_num_seqs, max_model_len + 1)
        self.token_ids = zeros(tokens, torch.int32, host).numpy()
        # Why 8, `MAX_DRAFTS`: the state after each draft has an entry.
        max_blocks = -(-max_model_len // block_size) + 1 + 8 * (first_state is not None)
        tables = num_groups, max_num_seqs, max_blocks
        self.block_tables = zeros(tables, torch.int32, host).numpy()
        self.pool = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.pool_positions, self.seq_ids = np.full((2, max_num_seqs), -1)

    def update(self, plan: StepPlan) -> None:
        """Applies the plan's row changes, in the plan's order."""
        if plan.released:
            self._forget(plan.released)
        for new in plan.admitted:
            self._forget(new.row)
            self.seq_ids[new.row] = new.seq_id
            self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
        for fork in plan.forks:
            self._forget(fork.row)
            self.seq_ids[fork.row] = fork.seq_id
            self.token_ids[fork.row] = self.token_ids[fork.parent_row]
        for row, position, token_id in plan.chosen_tokens:
            self.token_ids[row, position] = token_id
            self.pool_positions[row] = -1
        for row, group, start, block_ids in plan.table_updates:
            factors = self.layers_per_slice
            ids = np.multiply(block_ids, factors[group]) if factors else block_ids
            self.block_tables[group, row, start : start + len(block_ids)] = ids
        if plan.draft_token_ids:
            ends = np.add(plan.starts, plan.num_scheduled_tokens)
            for entry, row in enumerate(plan.rows):
                drafts = plan.draft_token_ids.get(row, ())
                self.token_ids[row, ends[entry] - len(drafts) : ends[entry]] = drafts

    def _forget(self, rows: int | list[int]) -> None:
        self.pool_positions[rows] = self.seq_ids[rows] = -1

    def store_sampled(self, lines: SamplingIndices, token_ids: torch.Tensor) -> None:
        """Writes sampled tokens [L] to the pool, one per row, for the next step. On a CPU, where
        they are available immediately, writes them to the host buffers instead."""
        if self._device.type == "cpu":
            self.write_host(lines, token_ids.numpy())
            return
        self.pool.index_copy_(0, lines.rows_on_device, token_ids)
        self.pool_positions[lines.rows] = lines.positions

    def write_host(self, lines: SamplingIndices, token_ids: Ints) -> None:
        """Writes sampled tokens [L] to the host buffers, for rows that still belong to the sequence
        that sampled them."""
        is_current = self.seq_ids[lines.rows] == lines.seq_ids
        self.token_ids[lines.rows[is_current], lines.positions[is_current]] = token_ids[is_current]

    def make_batch(
        self, plan: StepPlan, scored: tuple[Ints, Ints] | None = None
    ) -> tuple[Batch, SamplingIndices]:
        """Builds the tensors of a step; sequences with one query token come first.

        Logits are computed for the positions that are sampled, followed by the `scored` positions.
        `scored` has two arrays [E]: how many positions of an entry to skip, and how many to score.
        """
        rows = np.array(plan.rows, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.num_scheduled_tokens, np.int64)
        if plan.num_logits == plan.num_scheduled_tokens == [1] * len(rows) and scored is None:
            # Why: this fast path has the same result, and saves time per token with one stream.
            offsets = np.arange(len(rows) + 1)
            order = entries = logits_indices = offsets[:-1]
            seq_rows, seq_starts, seq_counts, from_end = rows, starts, counts, counts
        else:
            # The batch contains the entries that compute something, decodes first.
            computing = np.flatnonzero(counts)
            order = computing[np.argsort(counts[computing] != 1, kind="stable")]
            seq_rows, seq_starts, seq_counts = rows[order], starts[order], counts[order]
            offsets = np.zeros(len(order) + 1, np.int64)
            np.cumsum(seq_counts, out=offsets[1:])
            ends = np.zeros(len(rows), np.int64)
            ends[order] = offsets[1:]
            logits_indices, entries, from_end = _logits_indices(plan, ends, counts, scored)
        seq_lens, line_rows = seq_starts + seq_counts, rows[entries]
        max_seq_len = int(seq_lens.max(initial=1))
        num_blocks = -(-max_seq_len // self.block_size)
        tokens = self._gather_tokens(seq_rows, seq_starts, seq_counts)
        (
            token_ids, positions, slot_mapping, in_pool, pool_rows,
            query_start_loc, device_seq_lens, block_tables, device_logits_indices, rows_on_device
        ) = ship(
            self._device, *tokens, offsets.astype(np.int32), seq_lens.astype(np.int32),
            self.block_tables[: self.num_kv_groups, seq_rows, :num_blocks],
            logits_indices, line_rows,
        )  # fmt: skip
        if len(in_pool):
            token_ids.index_copy_(0, in_pool, self.pool.index_select(0, pool_rows))
        waves: tuple[ScanStep, ...] = ()
        if self.first_state is not None:
            from nanoengine.runner.recurrent_states import state_waves

            waves = state_waves(
                self._device, self.block_tables[-1], self.first_state, self.block_size,
                order, seq_rows, seq_starts, seq_counts, offsets, plan.draft_token_ids,
            )  # fmt: skip
        is_all = logits_indices is order or np.array_equal(logits_indices, np.arange(offsets[-1]))
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=device_seq_lens,
            block_tables=block_tables,
            logits_indices=None if is_all else device_logits_indices,
            num_decodes=int((seq_counts == 1).sum()),
            max_query_len=int(seq_counts.max(initial=1)),
            max_seq_len=max_seq_len,
            state_waves=waves,
        )
        lines = SamplingIndices(
            entries=entries,
            rows=line_rows,
            seq_ids=self.seq_ids[line_rows],
            positions=(starts + counts)[entries] - from_end + 1,
            rows_on_device=rows_on_device,
        )
        return batch, lines

    def _gather_tokens(self, rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, ...]:
        """The tokens that these sequences [S] compute, sequence by sequence.

        Returns:
            Token ids [T], positions [T] and slots [G, T]; then the indices of the ids that only the
            device pool holds, and their rows.
        """
        positions, seq_of_token = _ranges(starts, counts)
        token_rows = rows[seq_of_token]
        tables = self.block_tables[: self.num_kv_groups]
        blocks = tables[:, token_rows, positions // self.block_size].astype(np.int64)
        in_pool = np.flatnonzero(positions == self.pool_positions[token_rows])
        return (
            self.token_ids[token_rows, positions].astype(np.int64),
            positions,
            blocks * self.block_size + positions % self.block_size,
            in_pool,
            token_rows[in_pool],
        )


def _logits_indices(
    plan: StepPlan, ends: Ints, counts: Ints, scored: tuple[Ints, Ints] | None
) -> tuple[Ints, Ints, Ints]:
    """Indices of the step's tokens [T] that produce logits.

    Args:
        ends: [E], end of each entry's tokens in [T].
        counts: [E], tokens per entry.

    Returns:
        Indices of the sampled positions, followed by the scored ones; for each sampled position
        its entry, and its distance from the end of its entry (at least 1).
    """
    num_logits = np.array(plan.num_logits, np.int64)
    scoring = ends[:0]
    if scored is not None:
        scoring, _ = _ranges(ends - counts + scored[0], scored[1])
    if plan.forks:
        _use_parent_ends(plan, ends)
    sampling, entries = _ranges(ends - num_logits, num_logits)
    return np.concatenate((sampling, scoring)), entries, ends[entries] - sampling


def _use_parent_ends(plan: StepPlan, ends: Ints) -> None:
    """Makes a fork of this step, which computes nothing, sample from its parent's last position."""
    entry_of_row = {row: entry for entry, row in enumerate(plan.rows)}
    for fork in plan.forks:
        child = entry_of_row.get(fork.row)
        if child is not None and plan.num_scheduled_tokens[child] == 0:
            ends[child] = ends[entry_of_row[fork.parent_row]]


def _ranges(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The integers start, start + 1, ... of each range, concatenated; and the range that each
    integer belongs to. The first result may be `starts` itself."""
    if (lengths == 1).all():  # true in most steps
        return starts, np.arange(len(starts))
    ranges = np.repeat(np.arange(len(starts)), lengths)
    shifts = starts - (np.cumsum(lengths) - lengths)
    return np.arange(len(ranges)) + shifts[ranges], ranges
