"""ModelRunner: the in-process Executor. Carries out a StepPlan in tensors.

    launch()   InputBatch.update ─► Batch ─► model ─► most likely token of each row ─► download
    result()   of the LaunchedStep that `launch` returns: waits for the download

A plan may also copy blocks, load blocks from tiers before the forward, and store blocks after it.
The runner makes no scheduling decisions.

Related files: start.py (load, measure, allocate), sampling/step_sampler.py (everything but
greedy tokens), graphs.py (decodes that replay a CUDA graph).
"""

from __future__ import annotations

import gc
import time

import torch

from nanoengine.core.plan import StepPlan
from nanoengine.runner.sampling.greedy import is_plain, most_likely_tokens
from nanoengine.runner.start import RunnerSetup
from nanoengine.runner.step import LaunchedStep


class ModelRunner(RunnerSetup):
    """Runs one model on one device; `RunnerSetup` documents its arguments.

    Attributes:
        step_sampler: samples rows that are not plain; None before the first such row.
    """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carries out one plan, in the order of its fields.

        On a GPU it waits only for loads from a tier, and for logits processors that need the tokens
        of the previous step.
        """
        started = time.perf_counter()
        step = LaunchedStep(plan=plan, input_batch=self.input_batch, now=self.now, started=started)
        with torch.inference_mode(), self.as_current():
            self._update_batch(plan)
            if plan.transfers or plan.block_copies:
                self._load_blocks(plan, step)
            if plan.rows:
                step.tensors = self._run(step)
                if self.start_download is not None:
                    step.download = self.start_download(step.tensors)
            if plan.transfers:
                self._store_blocks(plan, step)
        if self.step_sampler is not None:
            self.step_sampler.previous_step = step
        return step

    def _update_batch(self, plan: StepPlan) -> None:
        """Applies the plan's row changes to the InputBatch, the sampler and the decode step."""
        if plan.draft_token_ids or not all(map(is_plain, plan.admitted)):
            self.ensure_step_sampler()
        self.input_batch.update(plan)
        if self.step_sampler is not None:
            self.step_sampler.update(plan)
        if self.graphed is not None:
            self.graphed.step.update(plan)

    def _run(self, step: LaunchedStep) -> list[torch.Tensor]:
        """Computes the step; returns the tensors for the host."""
        plan, sampler = step.plan, self.step_sampler
        if self.graphed is not None and self.graphed.step.fits(plan):
            return self.graphed.run(step, sampler)
        if sampler is not None and not sampler.handles(plan):
            sampler = None
        scored = None if sampler is None else sampler.scored(plan)
        batch, step.lines = self.input_batch.make_batch(plan, scored)
        batch.attention = self.backend.prepare(batch)
        step.times.prepare_s = time.perf_counter() - step.started - step.times.load_s
        step.marks.append(self.now())
        hidden = self.model(batch)
        if sampler is not None:
            return sampler.run(step, hidden, scored)
        packed = most_likely_tokens(self.model, hidden) if len(step.lines.entries) else None
        step.marks.append(self.now())
        if packed is not None:
            self.input_batch.store_sampled(step.lines, packed[0])
        step.marks.append(self.now())
        return [] if packed is None else [packed]

    # --- blocks between tiers, and copies -----------------------------------------------------

    def _load_blocks(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Loads blocks from the tiers, then makes the plan's block copies (copy-on-write)."""
        step.times.load_s = sum(
            self.tier_storage[transfer.tier].load(transfer.tier_ids, transfer.device_ids)
            for transfer in plan.transfers
            if transfer.kind == "load"
        )
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)

    def _store_blocks(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Starts to store blocks that have become full in the tiers."""
        for transfer in plan.transfers:
            if transfer.kind == "store":
                storage = self.tier_storage[transfer.tier]
                step.stores.append(storage.store(transfer.device_ids, transfer.tier_ids))

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Frees the weights and the KV cache and returns a GPU's memory to the system."""
        self.tier_storage = {}
        # Why the backend too: it keeps views of the cache.
        for name in ("model", "graphed", "kv_cache", "input_batch", "step_sampler", "backend"):
            vars(self).pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
