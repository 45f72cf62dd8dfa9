"""MTPRunner, MTPDrafter: drafts by the checkpoint's own MTP layer (multi-token prediction).

    plan ─► launch ─► hidden states of all tokens of the step; their next tokens are known later
    the next launch, or draft ─► the MTP layer: keys and values at the same positions, and drafts

The layer's keys and values are one more layer of the KV cache, so prefix hits, copy-on-write and
preemptions apply to it and need no code here. The entry of a position depends on the next token,
which a block's prefix does not contain: the last entry of a block in the prefix cache may belong to
another continuation. Such an entry can make drafts wrong, never tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from nanoengine.attention.batch import Batch
from nanoengine.checkpoint.files import stored_tensors
from nanoengine.checkpoint.mtp import with_mtp_layer
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.plan import StepPlan
from nanoengine.core.sequence import Sequence
from nanoengine.features.speculative.drafting import Drafter, DraftProposal
from nanoengine.models.decoder import select_rows
from nanoengine.runner import kv_cache
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions
from nanoengine.runner.sampling.greedy import most_likely_tokens
from nanoengine.runner.step import LaunchedStep


class PendingStep(NamedTuple):
    """A step whose tokens the MTP layer has not computed.

    `hidden` [T, hidden_size] are the hidden states of all its tokens; `rows`, `starts`, `counts`
    and `offsets` describe its sequences, in the order of the batch.
    """

    batch: Batch
    hidden: torch.Tensor
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    offsets: np.ndarray


class MTPRunner(ModelRunner):
    """A ModelRunner that also runs the MTP layer.

    Why no CUDA graphs: they return the hidden states of the tokens with logits only.
    """

    _uses_graphs = False

    def __init__(self, options: RunnerOptions) -> None:
        model_config = with_mtp_layer(options.model_config, stored_tensors(options.directory))
        super().__init__(replace(options, model_config=model_config))
        self.groups = kv_cache.make_groups(
            model_config.mtp, block_size=self.block_size, dtype=self.dtype, kv_dtype=self.kv_dtype
        )
        self._plan: StepPlan | None = None
        self._pending: PendingStep | None = None

    def load(self) -> None:
        """As in the base class; the model's forward then keeps all hidden states."""
        super().load()
        self.model.forward = self._forward

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Runs the MTP layer on the previous step, whose blocks are still its own, and then a
        plan."""
        self.draft({})
        self._plan = plan
        return super().launch(plan)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """The model's forward: computes all tokens, and returns those with logits."""
        wanted, batch.logits_indices = batch.logits_indices, None
        hidden, plan = type(self.model).forward(self.model, batch), self._plan
        if plan is not None:
            counts = np.array(plan.num_scheduled_tokens)
            order = np.flatnonzero(counts)
            order = order[np.argsort(counts[order] != 1, kind="stable")]
            rows, starts = np.array(plan.rows)[order], np.array(plan.starts)[order]
            counts, offsets = counts[order], batch.query_start_loc.cpu().numpy()
            self._pending = PendingStep(batch, hidden, rows, starts, counts, offsets)
        return select_rows(hidden, wanted)

    def draft(self, requested: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
        """Runs the MTP layer on the last step, and drafts.

        Args:
            requested: row -> (number of known tokens, number of drafts). The blocks of all drafts
                but the last must be allocated.

        Returns:
            The drafts of the rows whose newest hidden state the last step has computed.
        """
        step, self._pending = self._pending, None
        if step is None:
            return {}
        batch, starts, drafts = step.batch, step.starts, dict[int, list[int]]()
        first = np.repeat(starts - step.offsets[:-1], step.counts)
        following = np.arange(len(first)) + first + 1
        tokens = self.input_batch.token_ids[np.repeat(step.rows, step.counts), following]
        indices = []
        for index, row in enumerate(step.rows.tolist()):
            known, count = requested.get(row, (0, 0))
            offset = known - 2 - int(starts[index])
            if count and 0 <= offset < step.counts[index]:
                drafts[row] = []
                indices.append(int(step.offsets[index]) + offset)
        with torch.inference_mode(), self.as_current():
            batch.token_ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
            # Why at least one: a layer needs tokens to continue with.
            batch.logits_indices = torch.tensor(indices or [0], device=self.device)
            hidden, rows, number = self.model.mtp(batch, step.hidden), list(drafts), 0
            while rows:
                found = self._sample(hidden, rows, [requested[row][0] + number for row in rows])
                for row, token_id in zip(rows, found.tolist(), strict=True):
                    drafts[row].append(token_id)
                more = [n for n, row in enumerate(rows) if requested[row][1] > number + 1]
                if not more:
                    break
                keep = torch.tensor(more, device=self.device)
                rows, plan = [rows[n] for n in more], StepPlan(step=0)
                for row in rows:
                    plan.add(row, requested[row][0] - 1 + number, 1, num_logits=1)
                batch, _ = self.input_batch.make_batch(plan)
                batch.attention = self.backend.prepare(batch)
                batch.token_ids = found[keep]
                hidden, number = self.model.mtp(batch, hidden[keep]), number + 1
        return drafts

    def _sample(self, hidden: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """Samples with each request's parameters and the random numbers of the positions, so that
        the model often samples the same token."""
        sampler = self.ensure_step_sampler().sampler
        if not sampler.drawers[rows].any():
            return most_likely_tokens(self.model, hidden)[0]
        return sampler.sample(self.model.logits(hidden), rows, positions).packed[0]


class MTPDrafter(Drafter):
    """The drafter over an MTPRunner.

    Args:
        runner: the runner, already started.
        manager: has the blocks of the sequences.
        k: maximum number of drafts per sequence and step.
    """

    priors = (0.7,)
    needs_every_step = True  # Why: the MTP layer must know the tokens of each step.
    eligible_rows = None

    def __init__(self, runner: MTPRunner, manager: BlockManager, k: int) -> None:
        self.runner, self.manager, self.k = runner, manager, k

    def find_candidates(self, sequences: SequenceOf[Sequence]) -> list[DraftProposal]:
        """One draft; more if the sequence's last block has slots for their keys and values."""
        return [DraftProposal(self._max_drafts(seq), 0) for seq in sequences]

    def _max_drafts(self, seq: Sequence) -> int:
        if self.runner.input_batch.seq_ids[seq.row] != seq.seq_id:
            return 0  # a fork that only the next plan contains
        table, size, start = seq.block_tables[0], self.manager.block_size, seq.num_computed_tokens
        num_slots = len(table) * size - start
        if num_slots > 0 and self.manager.pool.blocks[table[start // size]].ref_count > 1:
            num_slots = 0  # Why: a shared block is copied by the next plan
        return min(self.k, 1 + num_slots)

    def draft(
        self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]
    ) -> list[tuple[int, ...]]:
        """Drafts for the sequences whose newest token the last step has sampled."""
        requested = {
            seq.row: (seq.num_tokens, count) for seq, count in zip(sequences, counts, strict=True)
        }
        drafts = self.runner.draft(requested)
        return [tuple(drafts.get(seq.row, ())) for seq in sequences]
