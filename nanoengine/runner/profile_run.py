"""GPU memory that the largest steps need, measured by running them.

Called at the start of a ModelRunner on a GPU, before KV blocks are allocated. The cache bound to
the layers needs only the null block, and one state.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.attention.batch import Batch
from nanoengine.core.plan import AdmittedSequence, StepPlan
from nanoengine.models.decoder import CausalLM
from nanoengine.runner.input_batch import InputBatch
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.settings.params import SamplingParams


def peak_bytes(model: CausalLM, backend: AttentionBackend, rows: InputBatch, budget: int) -> int:
    """Peak bytes of activations, logits and sampling over the largest steps. Arguments as for
    `largest_batches`."""
    peaks = []
    for batch in largest_batches(rows, budget):
        device = batch.token_ids.device
        batch.attention = backend.prepare(batch)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(model, batch, len(rows.seq_ids))
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return max(peaks)


def largest_batches(rows: InputBatch, budget: int) -> list[Batch]:
    """A batch of prompts, which has the widest activations, and a batch of decodes of the longest
    sequences, which need scratch memory for split contexts.

    Args:
        rows: fresh ones for the maximum length; all their tokens are in the null block.
        budget: maximum number of tokens per step.
    """
    num_rows, columns = rows.token_ids.shape
    longest = columns - 1
    prompts, decodes = StepPlan(step=0), StepPlan(step=0)
    for number, done in enumerate(range(0, budget, longest)):
        count = min(longest, budget - done)
        # Why all logits: if prompts are scored, the last layer computes all tokens. Why modulo: all
        # rows are alike, so any row serves.
        prompts.add(number % num_rows, 0, count, num_logits=count)
    for row in range(num_rows):
        decodes.add(row, longest - 1, 1, num_logits=1)
    if rows.first_state is not None:  # each writes the one state, after its last token
        rows.block_tables[-1, :, (longest - 1) // rows.block_size] = rows.first_state
        rows.block_tables[-1, prompts.rows[-1], (count - 1) // rows.block_size] = rows.first_state
    return [rows.make_batch(plan)[0] for plan in (prompts, decodes)]


def run(model: CausalLM, batch: Batch, num_logits: int) -> None:
    """Runs a forward pass of all rows with this many logits, and samples with filters."""
    hidden = model(batch)[:num_logits]
    if model.config.headless:
        return
    logits = model.logits(hidden)
    lines, params = np.arange(logits.shape[0]), SamplingParams(top_p=0.9)
    sampler = Sampler(model.config.vocab_size, len(lines))
    for row in lines.tolist():
        sampler.admit(AdmittedSequence(row, row, [0], 1, 0, params, seed=row))
    sampler.sample(logits, lines, lines).fetch()
