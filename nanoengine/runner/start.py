"""RunnerSetup: the start of a ModelRunner: load, measure, allocate, bind.

    load weights ─► profile the largest steps (GPU) ─► plan the memory ─► allocate the KV cache
    ─► bind each layer's slice of it ─► InputBatch ─► capture CUDA graphs (GPU)

`ModelRunner` adds the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.core.interfaces import TierStorage
from nanoengine.core.layout import KVLayout
from nanoengine.layers.collectives import Collectives
from nanoengine.models.loader import load_model, model_size
from nanoengine.runner import kv_cache
from nanoengine.runner.input_batch import InputBatch
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.memory import free_gpu_bytes, kv_groups, plan_memory, require_memory
from nanoengine.runner.options import RunnerOptions, make_context, use_isa
from nanoengine.runner.sampling.greedy import check_vocabulary
from nanoengine.runner.step import Mark
from nanoengine.runner.transfers import Download

if TYPE_CHECKING:
    from nanoengine.runner.graphs import GraphedDecode
    from nanoengine.runner.sampling.sampler import Sampler
    from nanoengine.runner.sampling.step_sampler import StepSampler

SAMPLER_BYTES = 64
"""Minimum memory of the Sampler per row [bytes]."""


def current_device(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns a function that makes a context manager in which a GPU is the current device.

    Why: Triton launches and CUDA graphs capture on the current device, wherever the tensors are.
    """
    if device.type == "cuda":
        return functools.partial(torch.cuda.device, device)
    return contextlib.nullcontext


class RunnerSetup:
    """Loads and allocates the model, memory plan, KV cache, InputBatch and backend of a runner.

    `ranks` are the ranks that share each layer; None: there is only this one.
    """

    def __init__(self, options: RunnerOptions, ranks: Collectives | None = None) -> None:
        self.options, self.config, self.model_config = options, options.config, options.model_config
        use_isa(self.config)
        self.device, self.dtype = options.device, options.dtype
        self.ranks, self.as_current = ranks or Collectives(), current_device(self.device)
        default = backend_class(options.backend).default_block_size
        self.block_size = self.config.block_size or default
        self.kv_dtype = kv_cache.stored_dtype(self.config.kv_cache_dtype, self.dtype)
        self.backend = make_backend(
            options.backend,
            device=self.device,
            dtype=self.dtype,
            head_dim=self.model_config.largest_head,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            deterministic=self.config.deterministic,
            is_mla=self.model_config.plan.mla is not None,
        )
        self.groups = kv_cache.make_groups(
            self.model_config, block_size=self.block_size, dtype=self.dtype, kv_dtype=self.kv_dtype
        )
        self.num_parameters = 0
        self.tier_storage: dict[str, TierStorage] = {}

    # --- start --------------------------------------------------------------------------------

    def start(self) -> KVLayout:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: `max_model_len` exceeds the available memory.
            ConfigError, WeightLoadError: see `models.loader.load_model`.
        """
        with torch.inference_mode(), self.as_current():
            return self._start()

    def _start(self) -> KVLayout:
        if self.device.type == "cuda" and self.dtype != torch.float64:
            from nanoengine.kernels.launch import require_compiler

            require_compiler()
        self.load()
        block_bytes = kv_cache.block_bytes(
            block_size=self.block_size,
            num_layers=max(len(group.layers) for group in kv_groups(self.groups)),
            **self.kv_sizes,
        )
        plans = (layer.plan for layer in self.model.recurrent_layers)
        layout = KVLayout(
            num_blocks=0,
            block_size=self.block_size,
            block_bytes=block_bytes,
            groups=self.groups,
            state_bytes=kv_cache.state_bytes(plans, self.dtype),
        )
        self._require_row_memory(SAMPLER_BYTES)
        check_vocabulary(self.model_config.vocab_size)
        self.memory = plan_memory(
            self.config,
            layout,
            context_len=self.model_config.max_position_embeddings,
            weight_bytes=self.weight_bytes,
            device=self.device,
            measure=functools.partial(self._measure, layout),
            ranks=self.ranks,
        )
        layout = self.memory.layout
        self.kv_cache = self._allocate(layout)
        self.input_batch = self._make_input_batch(self.memory.max_model_len, layout.num_blocks)
        self.step_sampler: StepSampler | None = None
        if self._uses_graphs or self.config.logits_processors:
            self.ensure_step_sampler(all_rows=True)
        self.graphed: GraphedDecode | None = None
        if self._uses_graphs:
            free = free_gpu_bytes(self.device)
            self.graphed = self._make_graphed(self.input_batch, self.ensure_step_sampler().sampler)
            self.graphed.capture(self.graphed.sizes)
            used = max(0, free - free_gpu_bytes(self.device))
            self.memory = dataclasses.replace(self.memory, graph_bytes=used)
        self.now: Callable[[], Mark] = time.perf_counter
        self.start_download: Callable[[list[torch.Tensor]], Download] | None = None
        if self.device.type == "cuda":
            from nanoengine.runner.gpu_clock import event_now

            side_stream = torch.cuda.Stream(self.device)
            self.start_download = functools.partial(Download, stream=side_stream)
            self.now = event_now
        return layout

    def load(self) -> None:
        """Loads the model; called by `start`."""
        started = time.perf_counter()
        context = make_context(self.options, self.backend, self.ranks)
        self.model = load_model(
            self.model_config,
            self.options.directory,
            context=context,
            load_format=self.config.load_format,
            seed=self.config.seed,
        )
        self.load_s = time.perf_counter() - started
        self.num_parameters, self.weight_bytes = model_size(self.model)
        self.products = context.kernels.products

    @property
    def kv_sizes(self) -> dict[str, Any]:
        """Arguments for the sizes of a token's keys and values in the cache, on this rank."""
        spec = self.model.attention_layers[0].spec
        parts = {"parts": 2 if spec.value_dim is None else 1, "dtype": self.kv_dtype}
        return parts | {"num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}

    @property
    def _uses_graphs(self) -> bool:
        """True on a GPU, unless `enforce_eager` is set, the backend or model needs decisions on the
        host, or ranks share the layers: graphs that contain NCCL reductions are untested."""
        safe = self.backend.graph_safe and self.model.graph_safe and not self.model_config.headless
        eager = self.config.enforce_eager or self.config.tensor_parallel_size > 1
        return self.device.type == "cuda" and safe and not eager

    def ensure_step_sampler(self, *, all_rows: bool = False) -> StepSampler:
        """Returns the StepSampler, which is made at the first call."""
        if self.step_sampler is None:
            from nanoengine.runner.sampling.step_sampler import StepSampler

            batch, processors = self.input_batch, self.options.processors()
            self.step_sampler = StepSampler(batch, self.model, processors, all_rows=all_rows)
        return self.step_sampler

    def _make_graphed(self, input_batch: InputBatch, sampler: Sampler) -> GraphedDecode:
        """A GraphedDecode with no graph captured yet."""
        from nanoengine.runner.decode_step import DecodeStep
        from nanoengine.runner.graphs import CudaGraphs, GraphedDecode

        step = DecodeStep(self.model, self.backend, input_batch, sampler, self.dtype)
        return GraphedDecode(step, CudaGraphs())

    def _require_row_memory(self, bytes_per_row: int) -> None:
        """Raises ConfigError if `max_num_seqs` rows would need more memory than the host has."""
        rows = self.config.max_num_seqs
        require_memory(f"max_num_seqs={rows}", rows * bytes_per_row, torch.device("cpu"))

    def _make_input_batch(self, max_model_len: int, num_blocks: int) -> InputBatch:
        self._require_row_memory(max_model_len * np.dtype(np.int32).itemsize)
        return InputBatch(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_groups=len(self.groups),
            device=self.device,
            first_state=num_blocks if self.model_config.states else None,
            layers_per_slice=kv_cache.layers_per_slice(self.model_config, self.groups),
        )

    def _allocate(self, layout: KVLayout) -> KVCache:
        cache = KVCache(
            layout,
            order=self.backend.kv_layout,
            device=self.device,
            state_dtype=kv_cache.state_dtype_for(self.dtype),
            **self.kv_sizes,
        )
        cache.bind(self.model.attention_layers, self.model.recurrent_layers)
        return cache

    def _measure(self, layout: KVLayout) -> tuple[int, int]:
        """Bytes of activations in a GPU's largest steps, and bytes of all CUDA graphs."""
        from nanoengine.runner.profile_run import peak_bytes

        # All rows use the null block, and share one recurrent state.
        num_states = 1 if layout.state_bytes else 0
        self._allocate(dataclasses.replace(layout, num_blocks=2, num_states=num_states))
        budget, num_graph_bytes = self.config.step_budget(self.device.type), 0
        activation_bytes = peak_bytes(self.model, self.backend, self._longest_batch(), budget)
        if self._uses_graphs:
            from nanoengine.runner.graphs import graph_bytes
            from nanoengine.runner.sampling.sampler import Sampler

            torch.cuda.empty_cache()
            sampler = Sampler(self.model_config.vocab_size, self.config.max_num_seqs)
            num_graph_bytes = graph_bytes(
                lambda: self._make_graphed(self._longest_batch(), sampler),
                lambda: free_gpu_bytes(self.device),
            )
        gc.collect()
        torch.cuda.empty_cache()  # otherwise the budget would count this memory as used
        return activation_bytes, num_graph_bytes

    def _longest_batch(self) -> InputBatch:
        """A new InputBatch for the longest sequences that the memory plan may allow."""
        longest = self.model_config.context_len(self.config.max_model_len)
        return self._make_input_batch(longest, 2)
