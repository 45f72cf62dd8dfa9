"""ModelRunner: the in-process Executor. Carries out a StepPlan in tensors.

    start()    load weights -> profile (GPU) -> size and allocate the KV cache -> bind it to layers
    launch()   rows.update -> loads from tiers -> block copies -> Batch -> model -> logits
               -> stores to tiers -> Sampler -> download; see `LaunchedStep` for the rest

A step runs in one of two ways. `_run_batch`, the one to read, takes any plan. `_run_decodes`
replays a CUDA graph and takes plans of decodes alone (`DecodeStep`); `tests/runner/test_graphs.py`
compares the two.

LLMEngine calls the runner through the Executor door. The runner decides nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.core.doors import TierStorage
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan
from nanoengine.errors import ConfigError
from nanoengine.layers.collectives import Collectives
from nanoengine.models.loader import load_model, model_size
from nanoengine.runner import kv_cache
from nanoengine.runner.decode_step import DecodeStep
from nanoengine.runner.graphs import CudaGraphs, GraphedDecode, graph_bytes
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.launched_step import LaunchedStep
from nanoengine.runner.logits import LogitsProcessor
from nanoengine.runner.memory import LargestSteps, free_gpu_bytes, plan_memory, require_memory
from nanoengine.runner.numerics import make_context, use_isa
from nanoengine.runner.row_buffers import RowBuffers, SamplingLines
from nanoengine.runner.sampler import SampledTokens, Sampler, pack_tokens
from nanoengine.runner.scores import PromptScorer
from nanoengine.runner.transfers import Download, Stopwatch
from nanoengine.settings.config import EngineConfig

SAMPLER_BYTES = 64
"""What the Sampler keeps of a row at least: eight numbers."""


def on_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A runner's method in inference mode, the runner's GPU being the current one.

    Why: Triton launches and CUDA graphs capture on the current device, wherever the tensors are.
    """

    @functools.wraps(method)
    def wrapped(self: ModelRunner, *args: Any) -> Any:
        on_gpu = self.device.type == "cuda"
        with torch.inference_mode(), torch.cuda.device(self.device) if on_gpu else nullcontext():
            return method(self, *args)

    return wrapped


class ModelRunner:
    """Runs one model on one device.

    Args:
        config: the user's settings.
        model_config: of the checkpoint in `directory`.
        device, dtype, backend: as resolved from "auto".
        quantization: of linear layers; None: floats of `dtype`.
        processors: of logits, run after those of SamplingParams.
        ranks: with whom this one shares each layer; None: with nobody.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        backend: str,
        quantization: Quantization | None = None,
        processors: Sequence[LogitsProcessor] = (),
        ranks: Collectives | None = None,
    ) -> None:
        use_isa(config)
        self.ranks = ranks or Collectives()
        self._processors = processors
        self.config = config
        self.model_config = model_config
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self.directory = directory
        default = backend_class(backend).default_block_size
        self.block_size = config.block_size or default
        self.kv_dtype = kv_cache.stored_dtype(config.kv_cache_dtype, dtype)
        self.backend = make_backend(
            backend,
            device=device,
            dtype=dtype,
            head_dim=model_config.head_dim,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            deterministic=config.deterministic,
        )
        self.groups = kv_cache.make_groups(
            model_config, block_size=self.block_size, dtype=dtype, kv_dtype=self.kv_dtype
        )
        self.load_s = 0.0
        self.num_parameters = 0
        self.extra_block_bytes = 0  # of a block, for what else is kept of its tokens
        self.tier_storage: dict[str, TierStorage] = {}

    # --- start --------------------------------------------------------------------------------

    @on_device
    def start(self) -> KVLayout:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: `max_model_len` passes the model's context or the memory there is.
            WeightLoadError: see `models.loader.load_model`.
        """
        context_len = self.model_config.max_position_embeddings
        asked = self.config.max_model_len
        if asked is not None and asked > context_len:
            raise ConfigError(
                f"max_model_len must be at most the model's context of {context_len}, got {asked}"
            )
        self.load()
        self._kv_groups = kv_cache.kv_groups(self.groups)
        block_bytes = kv_cache.block_bytes(
            block_size=self.block_size,
            num_kv_heads=self._num_kv_heads,
            head_dim=self.model_config.head_dim,
            num_layers=max(len(group.layers) for group in self._kv_groups),
            dtype=self.kv_dtype,
        )
        plans = (layer.plan for layer in self.model.state_layers)
        state_bytes = kv_cache.state_bytes(plans, self.dtype)
        block_bytes += self.extra_block_bytes
        self._require_rows(SAMPLER_BYTES)
        self.sampler = Sampler(
            self.model_config.vocab_size,
            self.config.max_num_seqs,
            self.model_config.eos_token_ids,
            self._processors,
        )
        self.memory = plan_memory(
            self.config,
            block_bytes=block_bytes,
            block_size=self.block_size,
            groups=self.groups,
            context_len=context_len,
            weight_bytes=self.weight_bytes,
            device=self.device,
            measure=self._measure,
            ranks=self.ranks,
            state_bytes=state_bytes,
        )
        self.kv_cache = self._allocate(self.memory.num_blocks, self.memory.num_states)
        self.rows = self._make_rows(self.memory.max_model_len, self.memory.num_blocks)
        self.prompt_scorer = PromptScorer(self.rows, self.model.logits)
        self._graphed: GraphedDecode | None = None
        if self._uses_graphs:
            free = free_gpu_bytes(self.device)
            self._graphed = self._make_graphed(self.rows, self.memory.max_model_len)
            self._graphed.capture(self._graphed.sizes)
            taken = max(0, free - free_gpu_bytes(self.device))
            self.memory = dataclasses.replace(self.memory, graph_bytes=taken)
        side_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.start_download = functools.partial(Download, stream=side_stream)
        self._latest: LaunchedStep | None = None
        return KVLayout(
            num_blocks=self.memory.num_blocks,
            block_size=self.block_size,
            block_bytes=block_bytes,
            groups=self.groups,
            num_states=self.memory.num_states,
            state_bytes=state_bytes,
        )

    def load(self) -> None:
        """Loads the model, once: `start` does, unless it is loaded ahead of that."""
        if self.num_parameters:
            return
        started = time.perf_counter()
        context = make_context(
            self.config,
            self.model_config,
            self.quantization,
            self.backend,
            device=self.device,
            dtype=self.dtype,
            ranks=self.ranks,
        )
        self.model = load_model(
            self.model_config,
            self.directory,
            context=context,
            load_format=self.config.load_format,
            seed=self.config.seed,
        )
        self.load_s = time.perf_counter() - started
        self.num_parameters, self.weight_bytes = model_size(self.model)

    @property
    def _num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.model.attention_layers[0].spec.num_kv_heads

    @property
    def _uses_graphs(self) -> bool:
        """On a GPU, unless eager is asked for or something decides on the host."""
        safe = self.backend.graph_safe and self.model.graph_safe
        return self.device.type == "cuda" and safe and not self.config.enforce_eager

    def _make_graphed(self, rows: RowBuffers, max_model_len: int) -> GraphedDecode:
        """The decode step on the device, with no graph captured yet."""
        step = DecodeStep(
            forward=self.model,
            logits=self.model.logits,
            prepare=self.backend.prepare,
            rows=rows,
            sampler=self.sampler,
            max_model_len=max_model_len,
            dtype=self.dtype,
        )
        return GraphedDecode(step, max_num_seqs=self.config.max_num_seqs, graphs=CudaGraphs())

    def _require_rows(self, bytes_a_row: int) -> None:
        """Raises ConfigError if `max_num_seqs` rows would need more memory than the host has."""
        rows = self.config.max_num_seqs
        cpu = torch.device("cpu")
        require_memory(f"max_num_seqs={rows}", rows * bytes_a_row, cpu)

    def _make_rows(self, max_model_len: int, num_blocks: int) -> RowBuffers:
        self._require_rows(max_model_len * np.dtype(np.int32).itemsize)
        return RowBuffers(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_groups=len(self.groups),
            device=self.device,
            first_state=num_blocks if self.model_config.states else None,
        )

    def _allocate(self, num_blocks: int, num_states: int) -> KVCache:
        cache = KVCache(
            groups=self.groups,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self._num_kv_heads,
            head_dim=self.model_config.head_dim,
            layout=self.backend.kv_layout,
            dtype=self.kv_dtype,
            device=self.device,
            num_states=num_states,
            state_dtype=kv_cache.state_dtype_for(self.dtype),
        )
        cache.bind(self.model.attention_layers, self.model.state_layers)
        return cache

    def _measure(self) -> tuple[int, int]:
        """Bytes that a GPU's largest steps take for activations, and bytes of all CUDA graphs."""
        # Every slot is in the null block, and every state in slot 0.
        self._allocate(2, 1 if self.model_config.states else 0)
        activation_bytes = self._largest_steps().peak_bytes()
        taken = 0
        if self._uses_graphs:
            torch.cuda.empty_cache()
            longest = self.config.max_model_len or self.model_config.max_position_embeddings
            taken = graph_bytes(
                lambda: self._make_graphed(self._make_rows(longest, 0), longest),
                lambda: free_gpu_bytes(self.device),
            )
        gc.collect()
        torch.cuda.empty_cache()  # or the budget would count the profile's memory as used
        return activation_bytes, taken

    def _largest_steps(self) -> LargestSteps:
        return LargestSteps(
            model=self.model,
            prepare=self.backend.prepare,
            config=self.config,
            num_groups=len(self._kv_groups),
            block_size=self.block_size,
            device=self.device,
        )

    # --- launch -------------------------------------------------------------------------------

    @on_device
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Carries out one plan, in the order of its fields.

        On a GPU it waits for nothing but loads from a tier, and processors that follow the tokens
        of the step before.
        """
        started = time.perf_counter()
        self._update_rows(plan)
        load_s = self._load_blocks(plan)
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)
        step = LaunchedStep(plan=plan, rows=self.rows)
        if plan.rows:
            run = self._run_decodes if self._is_decode(plan) else self._run_batch
            step.download = self.start_download(run(plan, step, started + load_s))
            step.times.load_s = load_s
        else:
            self._store_blocks(plan, step)
        self._latest = step
        return step

    def _is_decode(self, plan: StepPlan) -> bool:
        return self._graphed is not None and self._graphed.step.fits(plan)

    def _run_batch(self, plan: StepPlan, step: LaunchedStep, started: float) -> list[torch.Tensor]:
        """Any step, its batch built on the host; returns what the host wants to see of it."""
        scored = self.prompt_scorer.scored(plan)
        batch, lines = self.rows.make_batch(plan, scored)
        batch.attention = self.backend.prepare(batch)
        step.times.prepare_s = time.perf_counter() - started
        watch = step.stopwatch = Stopwatch(self.device)
        watch.mark()
        sampling, scoring = self.model(batch).tensor_split([len(lines.entries)])
        found = self._most_likely(plan, lines, sampling)
        logits = None if found else self.model.logits(sampling)  # [lines, V]
        self._store_blocks(plan, step)
        watch.mark()
        tensors: list[torch.Tensor] = []
        if len(lines.entries):
            sampled = found or self._sample(plan, lines, logits)
            # Why not with drafts: how many of them count is found on the host, in `result`.
            if not plan.draft_token_ids:
                self.rows.keep(lines, sampled.token_ids)
            tensors += self._await_tokens(plan, step, lines, sampled)
        if len(scoring):
            step.scored_entries, scores = self.prompt_scorer.score(plan, scored, scoring)
            tensors += scores
        watch.mark()
        return tensors

    def _run_decodes(
        self, plan: StepPlan, step: LaunchedStep, started: float
    ) -> list[torch.Tensor]:
        """A step of decodes by a graph, its inputs being on the device."""
        graphed = self._graphed
        assert graphed is not None
        decode: DecodeStep = graphed.step
        size = graphed.size_for(len(plan.rows))
        lines = decode.load(plan, size)
        by_host = self.sampler.looks_at_logits(lines.rows)  # the graph then stops at them
        step.times.prepare_s = time.perf_counter() - started
        watch = step.stopwatch = Stopwatch(self.device)
        watch.mark()
        outputs = graphed(size, None if by_host else self.sampler.kind(lines.rows))
        self._store_blocks(plan, step)
        watch.mark()
        ours = [output[: len(plan.rows)] for output in outputs]
        if by_host:
            sampled = self._sample(plan, lines, ours[0])
            decode.held.advance(lines.rows_on_device, sampled.token_ids)
        else:
            sampled = SampledTokens(packed=pack_tokens(*ours))
        tensors = self._await_tokens(plan, step, lines, sampled)
        watch.mark()
        return tensors

    def _load_blocks(self, plan: StepPlan) -> float:
        """Brings blocks up from the tiers; returns the seconds it took."""
        return sum(
            self.tier_storage[transfer.tier].load(transfer.tier_ids, transfer.device_ids)
            for transfer in plan.transfers
            if transfer.kind == "load"
        )

    def _store_blocks(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Copies blocks that are full now to the tiers, beside the sampling."""
        for transfer in plan.transfers:
            if transfer.kind == "store":
                storage = self.tier_storage[transfer.tier]
                step.stores.append(storage.store(transfer.device_ids, transfer.tier_ids))

    def _update_rows(self, plan: StepPlan) -> None:
        for row in plan.released:
            self.sampler.release(row)
            self.prompt_scorer.release(row)
        for new in plan.admitted:
            self.sampler.admit(new)
            self.prompt_scorer.admit(new)
        for fork in plan.forks:
            self.sampler.fork(fork)
        self.rows.update(plan)
        if self._graphed is not None:
            self._graphed.step.update(plan)
        for row, position, _ in plan.chosen_tokens:
            self.sampler.rewrite(row, self.rows.token_ids[row, : position + 1])

    def _most_likely(
        self, plan: StepPlan, lines: SamplingLines, hidden: torch.Tensor
    ) -> SampledTokens | None:
        """The tokens of all lines where they are greedy and the model needs no logits for it."""
        if self.sampler.only_greedy(lines.rows):
            found = self.model.most_likely(hidden)
        elif self.sampler.only_masked(lines.rows):

            def masks() -> np.ndarray | None:
                self._learn_tokens()
                return self.sampler.masks(lines.rows, plan.draft_token_ids)

            found = self.model.most_likely(hidden, masks)
        else:
            return None
        return None if found is None else SampledTokens.most_likely(*found)

    def _sample(self, plan: StepPlan, lines: SamplingLines, logits: torch.Tensor) -> SampledTokens:
        """Samples a token a line."""
        if self.sampler.edited[lines.rows].any():
            self._learn_tokens()
        return self.sampler.sample(logits, lines.rows, lines.positions, plan.draft_token_ids)

    def _learn_tokens(self) -> None:
        """Waits for the tokens of the step before, which processors must know.

        Why not before the forward: it runs while they learn.
        """
        if self._latest is not None:
            self._latest.result()

    def _await_tokens(
        self, plan: StepPlan, step: LaunchedStep, lines: SamplingLines, sampled: SampledTokens
    ) -> list[torch.Tensor]:
        """Notes who waits for the tokens; returns what the host wants to see of them."""
        step.lines, step.sampled = lines, sampled
        step.edits = self.sampler.edits_of(plan.rows)
        return sampled.tensors

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drops weights and KV cache and returns a GPU's memory to the system."""
        self.tier_storage, self._latest = {}, None
        # Why the backend too: it keeps views of the cache.
        parts = ("model", "_graphed", "kv_cache", "rows", "prompt_scorer", "sampler", "backend")
        for name in parts:
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
