"""Measures the GPU memory that the largest steps need, by running them.

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


def peak_bytes(model: CausalLM, backend: AttentionBackend, inputs: InputBatch, budget: int) -> int:
    """Peak bytes of activations, logits and sampling over the largest steps. Arguments as for
    `largest_batches`."""
    peaks = []
    for batch in largest_batches(inputs, budget):
        device = batch.token_ids.device
        batch.attention = backend.prepare(batch)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(model, batch, len(inputs.seq_ids))
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return max(peaks)


def largest_batches(inputs: InputBatch, budget: int) -> list[Batch]:
    """A batch of prompts, which has the widest activations, and a batch of decodes of the longest
    sequences, which need scratch memory for split contexts.

    Args:
        inputs: a new one for the maximum length; all its tokens are in the null block.
        budget: maximum number of tokens per step.
    """
    num_rows, columns = inputs.token_ids.shape
    longest = columns - 1
    prompts, decodes = StepPlan(step=0), StepPlan(step=0)
    for index, start in enumerate(range(0, budget, longest)):
        count = min(longest, budget - start)
        # Why all logits: if prompts are scored, the last layer computes all tokens. Why modulo: all
        # rows are equal, so any row will do.
        prompts.add(index % num_rows, 0, count, num_logits=count)
    for row in range(num_rows):
        decodes.add(row, longest - 1, 1, num_logits=1)
    if (state := inputs.first_state) is not None:  # all rows write it after their last token
        table, size = inputs.block_tables[-1], inputs.block_size
        table[:, (longest - 1) // size] = table[prompts.rows[-1], (count - 1) // size] = state
    return [inputs.make_batch(plan)[0] for plan in (prompts, decodes)]


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
