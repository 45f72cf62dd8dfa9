"""LargestSteps: what the largest steps take of a GPU, measured by running them.

Called at the start of a ModelRunner on a GPU, before KV blocks are allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanoengine.attention.batch import Batch, Span, StateWave
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.sampler import Sampler
from nanoengine.settings.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """The largest steps that a config allows, run to see what memory of a GPU they take.

    Attributes:
        prepare: the attention backend's. The cache that layers are bound to needs no block but the
            null block.
        num_groups: KV groups.
    """

    model: CausalLM
    prepare: Callable[[Batch], object]
    config: EngineConfig
    num_groups: int
    block_size: int
    device: torch.device

    def peak_bytes(self) -> int:
        """Activations, logits and sampling, at the step that takes most."""
        return max(self._peak_bytes(batch) for batch in self.batches())

    def _peak_bytes(self, batch: Batch) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.run(batch)
        return torch.cuda.max_memory_allocated(self.device) - before

    def batches(self) -> tuple[Batch, Batch]:
        """Prompts, which have the widest activations, and decodes of the longest sequences, which
        have a scratch for split contexts."""
        longest = self.config.max_model_len or self.model.config.max_position_embeddings
        total = self.config.step_budget(self.device.type)
        prompts = [min(longest, total - done) for done in range(0, total, longest)]
        return self._batch(prompts), self._batch([1] * self.config.max_num_seqs, seq_len=longest)

    def run(self, batch: Batch) -> None:
        """A forward of all rows, with logits of max_num_seqs, sampled as filters want it."""
        logits = self.model.logits(self.model(batch)[: self.config.max_num_seqs])
        lines = np.arange(logits.shape[0])
        sampler = Sampler(self.model.config.vocab_size, len(lines))
        sampler.temperature[:], sampler.top_p[:] = 1.0, 0.9
        sampler.sample(logits, lines, lines).fetch()

    def _wave(self, counts: list[int]) -> StateWave:
        """Sequences of `counts` query tokens, those of one first, their states all in slot 0."""
        ends = np.cumsum(counts).tolist()
        several = [(end, n) for end, n in zip(ends, counts, strict=True) if n > 1]
        ones = torch.arange(len(counts) - len(several), device=self.device)
        return StateWave(
            tokens=ones,
            reads=torch.zeros_like(ones),
            writes=torch.zeros_like(ones),
            spans=tuple(Span(end - n, end, 0, 0, ((n, 0),)) for end, n in several),
        )

    def _batch(self, counts: list[int], seq_len: int | None = None) -> Batch:
        """Sequences of `counts` query tokens, all in the null block.

        `seq_len` is the context of each; None: its query tokens alone.
        """
        counts = sorted(counts, key=lambda n: n != 1)
        seq_lens = [seq_len or count for count in counts]
        total, num_blocks = sum(counts), -(-max(seq_lens) // self.block_size)

        def ints(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype, device=self.device)

        batch = Batch(
            token_ids=ints(np.zeros(total)),
            positions=ints(np.concatenate([np.arange(n) for n in counts])),
            slot_mapping=ints(np.zeros((self.num_groups, total))),
            query_start_loc=ints(np.cumsum([0, *counts]), torch.int32),
            seq_lens=ints(seq_lens, torch.int32),
            block_tables=ints(np.zeros((self.num_groups, len(counts), num_blocks)), torch.int32),
            logits_indices=None,  # Why: where prompts are scored, all rows go on to the end
            num_decodes=sum(n == 1 for n in counts),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            state_waves=(self._wave(counts),) if self.model.config.states else (),
        )
        batch.attention = self.prepare(batch)
        return batch
