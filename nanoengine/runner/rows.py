"""Rows: what the executor remembers of running sequences, and the Batch built from it each step.

    plan ──update──► token_ids     [R, max_model_len + 1]      one numpy row a running sequence,
                     block_tables  [G, R, M]                   changed in place
    plan ──make_batch──► Batch, SampleLines                gathered by index, no loop over sequences

Called by the ModelRunner. Legend: R rows, G KV groups, M blocks of the longest table, T tokens,
S sequences, L rows of logits, E entries of the plan's parallel lists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nanoengine.core.plan import StepPlan
from nanoengine.runner.batch import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLines:
    """What each row of logits is for. Parallel arrays [L] int64.

    Attributes:
        entries: index into `plan.rows`.
        rows: the row that samples.
        positions: where the sampled token goes in its sequence.
    """

    entries: Ints
    rows: Ints
    positions: Ints


class Rows:
    """Token ids and block tables of all rows, kept across steps.

    Args:
        max_num_seqs: R.
        max_model_len: [tokens]; one column more holds a token that is sampled but never computed.
        block_size: [tokens].
        num_groups: G.
        device: of the batches' tensors.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        # Why zeros, not empty: the system maps pages only when they are first written.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        max_blocks = -(-max_model_len // block_size) + 1
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), np.int32)
        self._staging = Staging(device)

    def update(self, plan: StepPlan) -> None:
        """Carries out the plan's changes of rows, in its order."""
        for new in plan.admitted:
            self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
        for fork in plan.forks:
            self.token_ids[fork.row] = self.token_ids[fork.parent_row]
        for row, position, token_id in plan.chosen_tokens:
            self.token_ids[row, position] = token_id
        for row, group, start, block_ids in plan.table_updates:
            self.block_tables[group, row, start : start + len(block_ids)] = block_ids
        if plan.draft_token_ids:
            ends = np.add(plan.starts, plan.num_scheduled_tokens)
            for entry, row in enumerate(plan.rows):
                drafts = plan.draft_token_ids.get(row, ())
                self.token_ids[row, ends[entry] - len(drafts) : ends[entry]] = drafts

    def write(self, rows: Ints, positions: Ints, token_ids: Ints) -> None:
        """Puts sampled tokens in their places, where the next step finds them."""
        self.token_ids[rows, positions] = token_ids

    def make_batch(self, plan: StepPlan) -> tuple[Batch, SampleLines]:
        """Builds the tensors of a step; sequences with one query token come first."""
        rows = np.array(plan.rows, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.num_scheduled_tokens, np.int64)
        num_logits = np.array(plan.num_logits, np.int64)

        # Sequences: the entries that compute something, decodes first.
        computing = np.flatnonzero(counts)
        order = computing[np.argsort(counts[computing] != 1, kind="stable")]
        seq_rows, seq_starts, seq_counts = rows[order], starts[order], counts[order]
        query_start_loc = np.zeros(len(order) + 1, np.int64)
        np.cumsum(seq_counts, out=query_start_loc[1:])
        seq_lens = seq_starts + seq_counts
        max_seq_len = int(seq_lens.max(initial=1))
        num_blocks = -(-max_seq_len // self.block_size)

        # Tokens: sequence after sequence.
        seq_of_token = np.repeat(np.arange(len(order)), seq_counts)
        num_tokens = len(seq_of_token)
        offset = np.arange(num_tokens) - query_start_loc[seq_of_token]
        positions = seq_starts[seq_of_token] + offset
        token_rows = seq_rows[seq_of_token]
        blocks = self.block_tables[:, token_rows, positions // self.block_size].astype(np.int64)

        lines, indices = self._sample_lines(
            plan, rows, starts + counts, num_logits, order, query_start_loc
        )
        tensors = self._staging.ship(
            self.token_ids[token_rows, positions].astype(np.int64),
            positions,
            blocks * self.block_size + positions % self.block_size,
            indices,
            query_start_loc.astype(np.int32),
            seq_lens.astype(np.int32),
            self.block_tables[:, seq_rows, :num_blocks],
        )
        batch = Batch(
            token_ids=tensors[0],
            positions=tensors[1],
            slot_mapping=tensors[2],
            logits_indices=tensors[3],
            query_start_loc=tensors[4],
            seq_lens=tensors[5],
            block_tables=tensors[6],
            num_decodes=int((seq_counts == 1).sum()),
            max_query_len=int(seq_counts.max(initial=1)),
            max_seq_len=max_seq_len,
        )
        return batch, lines

    def _sample_lines(
        self,
        plan: StepPlan,
        rows: Ints,
        ends: Ints,
        num_logits: Ints,
        order: Ints,
        query_start_loc: Ints,
    ) -> tuple[SampleLines, Ints]:
        """Which row of logits belongs to whom, and where in [T] it comes from."""
        end_in_batch = np.zeros(len(rows), np.int64)
        end_in_batch[order] = query_start_loc[1:]
        if plan.forks:  # a fork of this step samples from its parent's last position
            entry_of_row = {row: entry for entry, row in enumerate(plan.rows)}
            for fork in plan.forks:
                child = entry_of_row.get(fork.row)
                if child is not None and plan.num_scheduled_tokens[child] == 0:
                    end_in_batch[child] = end_in_batch[entry_of_row[fork.parent_row]]
        entries = np.repeat(np.arange(len(rows)), num_logits)
        before = np.cumsum(num_logits) - num_logits
        back = num_logits[entries] - (np.arange(len(entries)) - before[entries])  # L_e ... 1
        lines = SampleLines(entries=entries, rows=rows[entries], positions=ends[entries] - back + 1)
        return lines, end_in_batch[entries] - back


class Staging:
    """Moves the arrays of a step to the device: as they are on a CPU, in one transfer elsewhere.

    Why one buffer is enough: a step's tokens are fetched before the next step is built.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def ship(self, *arrays: NDArray[np.integer]) -> list[torch.Tensor]:
        """Tensors with the arrays' shapes and dtypes, on the device."""
        if self._device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        offsets, size = [], 0
        for array in arrays:
            offsets.append(size)
            size += -(-array.nbytes // 16) * 16  # Why 16: kernels load aligned
        if size > self._buffer.numel():
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        host = self._buffer.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        sent = self._buffer[:size].to(self._device, non_blocking=True)
        return [
            sent[offset : offset + array.nbytes]
            .view(getattr(torch, array.dtype.name))
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]
