"""DecodeStep: a step of one token for every sequence, done on the device from end to end.

    batch_rows ─► gather ─► forward ─► LM head ─► sample ─► advance

`held` is what the device keeps of each row (`device_rows.py`); a step's inputs are gathered from
it.

`load` uploads what the device can't know: new rows, new blocks, and which rows run, if these have
changed. From one decode to the next that is a block now and then, and mostly nothing. `__call__`
reads only what is on the device, so the same function runs eagerly and is captured by a CUDA graph.

The ModelRunner calls it. It knows rows and plans, but not which model it runs.

Source: rows that stay on the GPU, from which kernels build a step's inputs, are the idea of vLLM's
second model runner.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from nanoengine.attention.batch import Batch
from nanoengine.core.plan import StepPlan
from nanoengine.runner.device_rows import DeviceRows
from nanoengine.runner.device_sampling import (
    SamplingKind,
    device_params,
    mixed_seeds,
    sample_on_device,
)
from nanoengine.runner.graphs import Outputs
from nanoengine.runner.row_buffers import Ints, RowBuffers, SamplingLines
from nanoengine.runner.sampler import Sampler
from nanoengine.runner.transfers import ship


class DecodeStep:
    """The device's side of all rows, and the step that advances them.

    Args:
        forward: batch -> hidden states [T, hidden_size], of all tokens.
        logits: hidden states -> logits [T, V].
        prepare: the attention backend's.
        rows: the host's side of all rows.
        sampler: has their sampling parameters.
        max_model_len: [tokens]; launches are sized for it.
        dtype: of the logits.
    """

    def __init__(
        self,
        *,
        forward: Callable[[Batch], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        prepare: Callable[[Batch], object],
        rows: RowBuffers,
        sampler: Sampler,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self._forward, self._logits, self._prepare = forward, logits, prepare
        self._rows, self._sampler = rows, sampler
        self._max_model_len = max_model_len
        self._device = device = rows.pool.device
        num_groups, self.num_rows, num_blocks = rows.block_tables.shape
        with_padding = self.num_rows + 1
        shape = {"num_groups": num_groups, "num_blocks": num_blocks}
        self.held = _rows_class(device)(rows.pool, **shape, block_size=rows.block_size)
        self.batch_rows = torch.full((self.num_rows,), self.num_rows, device=device)
        self._query_start_loc = torch.arange(with_padding, dtype=torch.int32, device=device)
        shape = (self.num_rows, sampler.vocab_size)
        self._logits_out = torch.zeros(shape, dtype=dtype, device=device)
        # What the device holds: the host compares plans with it, to see what the device lacks.
        self._held_lengths = np.zeros(with_padding, np.int64)
        self._held_rows = np.full(self.num_rows, self.num_rows)
        self._stale: dict[tuple[int, int], tuple[int, int]] = {}  # (group, row) -> table entries

    def fits(self, plan: StepPlan) -> bool:
        """True if each row of a plan computes one token, and samples after it."""
        one = {1}
        return set(plan.num_scheduled_tokens) == one and set(plan.num_logits) == one

    def update(self, plan: StepPlan) -> None:
        """Notes which entries of block tables have changed; `load` uploads them when needed."""
        self._held_lengths[plan.released] = -1  # Why: a step that failed may not have advanced them
        for row, group, start, block_ids in plan.table_updates:
            first, last = self._stale.get((group, row), (start, start))
            self._stale[group, row] = (min(first, start), max(last, start + len(block_ids)))

    def load(self, plan: StepPlan, size: int) -> SamplingLines:
        """Brings the device up to date for a plan of decodes, padded to `size` rows."""
        rows, starts = np.array(plan.rows, np.int64), np.array(plan.starts, np.int64)
        padded = np.full(size, self.num_rows)
        padded[: len(rows)] = rows
        moved = np.flatnonzero(self._held_lengths[rows] != starts)
        unknown = np.flatnonzero(self._rows.pool_positions[rows] != starts)
        changed = np.array(sorted(self._sampler.changed), np.int64)
        entries, block_ids = self._stale_entries()
        if not np.array_equal(self._held_rows[:size], padded):
            changes = 1
        else:
            changes = len(moved) + len(unknown) + len(changed) + len(entries)
        if changes:
            self._held_rows[:size] = -1  # Why: until all of it is sent, nothing is known
            self._upload(
                padded,
                (rows[moved], starts[moved]),
                (rows[unknown], self._rows.token_ids[rows[unknown], starts[unknown]]),
                changed,
                (entries, block_ids),
            )
        self._held_rows[:size] = padded
        self._held_lengths[rows] = starts + 1
        self._rows.pool_positions[rows] = starts + 1
        self._sampler.changed.clear()
        self._stale.clear()
        return SamplingLines(
            entries=np.arange(len(rows)),
            rows=rows,
            seq_ids=self._rows.seq_ids[rows],
            positions=starts + 1,
            rows_on_device=self.batch_rows[: len(rows)],
        )

    def _stale_entries(self) -> tuple[Ints, Ints]:
        """Changed entries of block tables, by their place in `tables`, and what they hold now."""
        places, block_ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for (group, row), (first, last) in self._stale.items():
            table = group * (self.num_rows + 1) + row
            places.append(np.arange(first, last) + table * self.held.tables.shape[2])
            block_ids.append(self._rows.block_tables[group, row, first:last])
        return np.concatenate(places), np.concatenate(block_ids)

    def _upload(
        self,
        padded: Ints,
        lengths: tuple[Ints, Ints],
        tokens: tuple[Ints, Ints],
        changed: Ints,
        entries: tuple[Ints, Ints],
    ) -> None:
        """One transfer, and a scatter for each kind of change that there is."""
        sampler = self._sampler
        sent = ship(
            self._device,
            padded,
            *lengths,
            tokens[0],
            tokens[1].astype(np.int64),
            *entries,
            changed,
            sampler.columns(changed),
            mixed_seeds(sampler.seed[changed]),
        )
        self.batch_rows[: len(padded)].copy_(sent[0])
        for target, at, values in (
            (self.held.lengths, sent[1], sent[2]),
            (self.held.pool, sent[3], sent[4]),
            (self.held.tables.view(-1), sent[5], sent[6]),
            (self.held.columns, sent[7], sent[8]),
            (self.held.seeds, sent[7], sent[9]),
        ):
            if len(at):
                target.index_copy_(-1, at, values)

    def __call__(self, size: int, kind: SamplingKind | None) -> Outputs:
        """The step for the first `size` of `batch_rows`: token ids [S] int64 and whether they are
        valid [S] bool. Without a kind it stops at the logits, [S, V]."""
        logits = self.forward(size)
        return logits if kind is None else self.sample(size, kind)

    def forward(self, size: int) -> tuple[torch.Tensor]:
        """The logits [size, V], in a buffer that all sizes share."""
        inputs = self.held.gather(self.batch_rows[:size])
        batch = Batch(
            **inputs._asdict(),
            query_start_loc=self._query_start_loc[: size + 1],
            logits_indices=None,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        batch.attention = self._prepare(batch)
        # Why one buffer: graphs keep what they return, and logits of every size are gigabytes.
        return (self._logits_out[:size].copy_(self._logits(self._forward(batch))),)

    def sample(self, size: int, kind: SamplingKind) -> Outputs:
        """Tokens from the logits of `forward`; the rows advance by them."""
        params = device_params(self.held.draw_params[:, :size])
        token_ids, valid = sample_on_device(self._logits_out[:size], params, kind)
        self.held.advance(self.batch_rows[:size], token_ids)
        return token_ids, valid


def _rows_class(device: torch.device) -> type[DeviceRows]:
    if device.type != "cuda":
        return DeviceRows
    from nanoengine.runner.triton_rows import TritonRows

    return TritonRows
