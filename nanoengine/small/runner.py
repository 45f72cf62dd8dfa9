"""ModelRunner: runs plans on tensors. It makes no decisions.

    plan ──► update rows ──► Batch ──► model ──► logits ──► sample ──► StepResult

Each running sequence has a row here, with its tokens and its block table. Rows are kept between
steps, so a plan contains only the changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from nanoengine.core.layout import KVGroup, KVLayout
from nanoengine.core.plan import AdmittedSequence, StepPlan, StepResult
from nanoengine.small import sampler
from nanoengine.small.batch import Batch
from nanoengine.small.model import load_model


@dataclass(slots=True)
class Row:
    """The runner's data of one running sequence."""

    admitted: AdmittedSequence
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)


class Launched(NamedTuple):
    """A step that has run."""

    step_result: StepResult

    def result(self) -> StepResult:
        """The sampled tokens."""
        return self.step_result


@dataclass(eq=False)
class ModelRunner:
    """An executor in this process: weights, KV cache, and the rows of running sequences.

    Attributes:
        directory: the checkpoint.
        num_blocks: blocks of the KV cache, including the null block.
        block_size: tokens per block.
        device, dtype: of weights, KV cache and computation.
    """

    directory: Path
    num_blocks: int
    block_size: int
    device: torch.device
    dtype: torch.dtype
    rows: dict[int, Row] = field(default_factory=dict, init=False)

    def start(self) -> KVLayout:
        """Loads the model, allocates the KV cache, and binds each layer to its slice of it."""
        self.model = model = load_model(self.directory, self.device, self.dtype)
        num_layers = len(model.attentions)
        shape = (self.num_blocks, self.block_size, model.num_kv_heads, model.head_dim)
        # [layers, key or value, blocks, tokens per block, heads, head dimension]
        self.kv_cache = torch.zeros((num_layers, 2, *shape), dtype=self.dtype, device=self.device)
        for attention, (k_cache, v_cache) in zip(model.attentions, self.kv_cache, strict=True):
            attention.k_cache, attention.v_cache = k_cache, v_cache
        return KVLayout(
            num_blocks=self.num_blocks, block_size=self.block_size,
            block_bytes=self.kv_cache.nbytes // self.num_blocks,
            groups=(KVGroup(layers=tuple(range(num_layers))),),
        )  # fmt: skip

    def shutdown(self) -> None:
        """Frees the memory."""
        del self.model, self.kv_cache

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Runs a plan."""
        self._update_batch(plan)
        result = StepResult(token_ids=[[] for _ in plan.rows])
        sampling = [entry for entry, num_logits in enumerate(plan.num_logits) if num_logits]
        if plan.rows:
            logits = self.model.forward(self._make_batch(plan, sampling))  # [L, V]
            for entry, row_logits in zip(sampling, logits, strict=True):
                row = self.rows[plan.rows[entry]]
                admitted, position = row.admitted, len(row.token_ids)
                token_id = sampler.sample(row_logits, admitted.params, admitted.seed, position)
                row.token_ids.append(token_id)
                result.token_ids[entry].append(token_id)
        return Launched(result)

    def _update_batch(self, plan: StepPlan) -> None:
        """Applies the plan's changes to rows and block tables."""
        assert not (plan.forks or plan.block_copies or plan.transfers or plan.draft_token_ids)
        for row in plan.released:
            del self.rows[row]
        for admitted in plan.admitted:
            self.rows[admitted.row] = Row(admitted, list(admitted.token_ids))
        for row, _, start, block_ids in plan.table_updates:
            self.rows[row].block_table[start : start + len(block_ids)] = block_ids

    def _make_batch(self, plan: StepPlan, sampling: list[int]) -> Batch:
        """The tensors of a step whose entries `sampling` need the logits of their last token."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots, contexts = [], []
        counts = plan.num_scheduled_tokens
        for row_id, start, count in zip(plan.rows, plan.starts, counts, strict=True):
            row, end = self.rows[row_id], start + count
            token_ids += row.token_ids[start:end]
            positions += range(start, end)
            contexts.append(self._slots(row.block_table, end))
            slots.append(contexts[-1][start:])
        last = torch.tensor(counts).cumsum(0) - 1  # each sequence's last token in the batch
        return Batch(
            token_ids=torch.tensor(token_ids, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            slot_mapping=torch.cat(slots),
            num_scheduled_tokens=list(counts),
            context_slots=contexts,
            logits_indices=last[sampling].to(self.device),
        )

    def _slots(self, block_table: list[int], num_tokens: int) -> torch.Tensor:
        """The slots of a sequence's first tokens, [num_tokens]."""
        index = torch.arange(num_tokens)
        blocks = torch.tensor(block_table)[index // self.block_size]
        return (blocks * self.block_size + index % self.block_size).to(self.device)
