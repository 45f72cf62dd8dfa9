"""DecodeStep: a step of one token per sequence, computed on the device from end to end.

    batch_rows ─► gather ─► forward ─► LM head ─► sample ─► advance

The inputs of a step are gathered from `device_batch`, the device's copy of all batch rows.

`load` uploads what has changed on the host: new rows, new blocks, and the set of running rows.
Between two decodes this is usually nothing, and sometimes one block. `forward` and `sample` read
only device memory, so the same functions run eagerly and are captured by a CUDA graph.

Called by `GraphedDecode`.

Source: vLLM's second model runner also keeps the batch on the GPU and builds the inputs there.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.batch import Batch
from nanoengine.core.plan import StepPlan
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.device_batch import DeviceBatch
from nanoengine.runner.input_batch import InputBatch, Ints, SamplingIndices
from nanoengine.runner.sampling.draw import DrawParams, SamplingKind, sample_on_device
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.runner.transfers import ship


class DecodeStep:
    """A step that decodes one token for each of its rows, on the device.

    Args:
        model, backend: the model and its attention backend.
        input_batch: the host's copy of all rows.
        sampler: has the sampling parameters of the rows.
        dtype: dtype of the logits.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        input_batch: InputBatch,
        sampler: Sampler,
        dtype: torch.dtype,
    ) -> None:
        self._model, self._backend, self._sampler = model, backend, sampler
        self._input_batch, pool = input_batch, input_batch.pool
        self._device = device = pool.device
        num_groups, self.num_rows, num_blocks = input_batch.block_tables.shape
        # Why the longest: launches are sized for it.
        self._max_model_len = input_batch.token_ids.shape[1] - 1
        with_padding = self.num_rows + 1
        self.device_batch = DeviceBatch(
            pool, num_groups=num_groups, num_blocks=num_blocks, block_size=input_batch.block_size
        )
        self.batch_rows = torch.full((self.num_rows,), self.num_rows, device=device)
        self._query_start_loc = torch.arange(with_padding, dtype=torch.int32, device=device)
        shape = (self.num_rows, sampler.vocab_size)
        self._logits_out = torch.zeros(shape, dtype=dtype, device=device)
        # The contents of the device. Plans are compared with them to find what must be uploaded.
        self._device_positions = np.zeros(with_padding, np.int64)
        self._device_rows = np.full(self.num_rows, self.num_rows)
        self._stale: dict[tuple[int, int], tuple[int, int]] = {}  # (group, row) -> table entries

    def fits(self, plan: StepPlan) -> bool:
        """Returns True if each row of the plan computes one token and samples after it. With
        recurrent states, no row may start from a state that another row of the step writes."""
        batch = self._input_batch
        if set(plan.num_scheduled_tokens) != {1} or set(plan.num_logits) != {1}:
            return False
        if batch.first_state is None:
            return True
        from nanoengine.runner.recurrent_states import are_independent

        arrays = np.array(plan.rows), np.array(plan.starts)
        return are_independent(batch.block_tables[-1], batch.first_state, batch.block_size, *arrays)

    def update(self, plan: StepPlan) -> None:
        """Notes which entries of block tables have changed; `load` uploads them when needed."""
        self._device_positions[plan.released] = -1  # A step that failed may not have advanced them.
        for row, group, start, block_ids in plan.table_updates:
            first, last = self._stale.get((group, row), (start, start))
            self._stale[group, row] = (min(first, start), max(last, start + len(block_ids)))

    def load(self, plan: StepPlan, size: int) -> SamplingIndices:
        """Uploads all changes that a plan of decodes needs, padded to `size` rows."""
        rows, starts = np.array(plan.rows, np.int64), np.array(plan.starts, np.int64)
        padded = np.full(size, self.num_rows)
        padded[: len(rows)] = rows
        moved = np.flatnonzero(self._device_positions[rows] != starts)
        unknown = np.flatnonzero(self._input_batch.pool_positions[rows] != starts)
        changed = np.array(sorted(self._sampler.changed), np.int64)
        same_rows = np.array_equal(self._device_rows[:size], padded)
        if self._stale or len(moved) + len(unknown) + len(changed) or not same_rows:
            self._device_rows[:size] = -1  # unknown until everything is sent
            batch, sampler = self.device_batch, self._sampler
            tokens = self._input_batch.token_ids[rows[unknown], starts[unknown]].astype(np.int64)
            self._upload(
                padded,
                (batch.next_positions, rows[moved], starts[moved]),
                (batch.pool, rows[unknown], tokens),
                (batch.tables.view(-1), *self._stale_entries()),
                (batch.params, changed, sampler.params[:, changed]),
                (batch.seeds, changed, sampler.seeds[changed]),
            )
        self._device_rows[:size] = padded
        self._device_positions[rows] = starts + 1
        self._input_batch.pool_positions[rows] = starts + 1
        self._sampler.changed.clear()
        self._stale.clear()
        return SamplingIndices(
            entries=np.arange(len(rows)),
            rows=rows,
            seq_ids=self._input_batch.seq_ids[rows],
            positions=starts + 1,
            rows_on_device=self.batch_rows[: len(rows)],
        )

    def _stale_entries(self) -> tuple[Ints, Ints]:
        """Indices in `tables` of the changed block table entries, and their current values."""
        indices, block_ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for (group, row), (first, last) in self._stale.items():
            table = group * (self.num_rows + 1) + row
            indices.append(np.arange(first, last) + table * self.device_batch.tables.shape[2])
            block_ids.append(self._input_batch.block_tables[group, row, first:last])
        return np.concatenate(indices), np.concatenate(block_ids)

    def _upload(self, padded: Ints, *changes: tuple[torch.Tensor, Ints, Ints]) -> None:
        """Uploads all changes in one transfer, followed by one scatter per non-empty change.

        Args:
            changes: for each: the tensor, indices of its last dimension, and the new values there.
        """
        arrays = [array for _, *pair in changes for array in pair]
        rows, *sent = ship(self._device, padded, *arrays)
        self.batch_rows[: len(padded)].copy_(rows)
        for (target, *_), index, values in zip(changes, sent[::2], sent[1::2], strict=True):
            if len(index):
                target.index_copy_(-1, index, values)

    def forward(self, size: int) -> tuple[torch.Tensor]:
        """The logits [size, V] of the first `size` of `batch_rows`, in a buffer shared by all
        sizes."""
        batch = Batch(
            **self.device_batch.gather(self.batch_rows[:size]),
            query_start_loc=self._query_start_loc[: size + 1],
            logits_indices=None,
            num_decodes=size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        if (host := self._input_batch).first_state is not None:
            from nanoengine.runner.recurrent_states import decode_scan_step

            args = batch.block_tables[-1], host.first_state, host.block_size
            batch.state_waves = (decode_scan_step(batch.positions, *args),)
        batch.attention = self._backend.prepare(batch)
        # Why one buffer: graphs keep their outputs, and logits of every size take gigabytes.
        out, model = self._logits_out[:size], self._model
        return (out.copy_(model.logits(model(batch))),)

    def sample(self, size: int, kind: SamplingKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples from the logits of `forward` and advances the rows. Returns token ids [size]
        int64, and whether each is valid, [size] bool."""
        params = DrawParams(self.device_batch.draw_params[:, :size])
        token_ids, valid = sample_on_device(self._logits_out[:size], params, kind)
        self.device_batch.advance(self.batch_rows[:size], token_ids)
        return token_ids, valid
