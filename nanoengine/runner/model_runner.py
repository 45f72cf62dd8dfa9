"""ModelRunner: the in-process Executor. Carries out a StepPlan in tensors.

    launch()   rows.update ─► Batch ─► model ─► the most likely token of each row ─► download
    result()   of the `LaunchedStep` that it returns: waits for the download

A plan may also copy blocks, load blocks from tiers before the forward, and store some after it.

Implements `Executor`. The runner makes no scheduling decisions.

Related files: start.py (load, measure, allocate), sampling/step_sampler.py (draws, edits, drafts),
graphs.py (decodes that replay a CUDA graph; `tests/runner/test_graphs.py` compares).
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
        step_sampler: samples rows that are not plain; None until there is such a row.
    """

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carries out one plan, in the order of its fields.

        On a GPU it waits only for loads from a tier, and for logits processors that need the tokens
        of the previous step.
        """
        started = time.perf_counter()
        step = LaunchedStep(plan=plan, rows=self.rows, now=self.now, started=started)
        with torch.inference_mode(), self.as_current():
            self._update_rows(plan)
            if plan.transfers or plan.block_copies:
                self._bring_blocks(plan, step)
            if plan.rows:
                step.tensors = self._run(step)
                if self.start_download is not None:
                    step.download = self.start_download(step.tensors)
            if plan.transfers:
                self._store_blocks(plan, step)
        if self.step_sampler is not None:
            self.step_sampler.latest = step
        return step

    def _update_rows(self, plan: StepPlan) -> None:
        """Updates the rows and the step sampler's copy of their parameters."""
        if plan.draft_token_ids or not all(map(is_plain, plan.admitted)):
            self.need_step_sampler()
        self.rows.update(plan)
        if self.step_sampler is not None:
            self.step_sampler.update(plan)
        if self.graphed is not None:
            self.graphed.step.update(plan)

    def _run(self, step: LaunchedStep) -> list[torch.Tensor]:
        """Computes the step; returns the tensors for the host."""
        plan, sampler = step.plan, self.step_sampler
        if self.graphed is not None and self.graphed.step.fits(plan):
            return self.graphed.run(step, sampler)
        asked = sampler if sampler is not None and sampler.samples(plan) else None
        scored = None if asked is None else asked.scored(plan)
        batch, step.lines = self.rows.make_batch(plan, scored)
        batch.attention = self.backend.prepare(batch)
        step.times.prepare_s = time.perf_counter() - step.started - step.times.load_s
        step.marks.append(self.now())
        hidden = self.model(batch)
        if asked is not None:
            return asked.run(step, hidden, scored)
        packed = most_likely_tokens(self.model, hidden) if len(step.lines.entries) else None
        step.marks.append(self.now())
        if packed is not None:
            self.rows.keep(step.lines, packed[0])
        step.marks.append(self.now())
        return [] if packed is None else [packed]

    # --- blocks between tiers, and copies -----------------------------------------------------

    def _bring_blocks(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Loads blocks from the tiers, then copies blocks that are about to be written."""
        step.times.load_s = sum(
            self.tier_storage[transfer.tier].load(transfer.tier_ids, transfer.device_ids)
            for transfer in plan.transfers
            if transfer.kind == "load"
        )
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)

    def _store_blocks(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Stores blocks that are now full in the tiers."""
        for transfer in plan.transfers:
            if transfer.kind == "store":
                storage = self.tier_storage[transfer.tier]
                step.stores.append(storage.store(transfer.device_ids, transfer.tier_ids))

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Frees the weights and the KV cache and returns a GPU's memory to the system."""
        self.tier_storage = {}
        # Why the backend too: it keeps views of the cache.
        parts = ("model", "graphed", "kv_cache", "rows", "step_sampler", "backend")
        for name in parts:
            vars(self).pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
