"""RunnerParts: how the parts of a ModelRunner come to be: load, measure, allocate, bind.

    load weights ─► profile the largest steps (GPU) ─► plan the memory ─► allocate the KV cache
    ─► bind each layer's slice of it ─► rows ─► capture CUDA graphs (GPU)

`ModelRunner` adds what happens at each step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.core.doors import TierStorage
from nanoengine.core.layout import KVLayout
from nanoengine.errors import ConfigError
from nanoengine.layers.collectives import Collectives
from nanoengine.models.loader import load_model, model_size
from nanoengine.runner import kv_cache
from nanoengine.runner.greedy import check_vocabulary
from nanoengine.runner.kv_cache import KVCache
from nanoengine.runner.memory import free_gpu_bytes, plan_memory, require_memory
from nanoengine.runner.numerics import make_context, use_isa
from nanoengine.runner.row_buffers import RowBuffers
from nanoengine.runner.step import LaunchedStep, Mark
from nanoengine.runner.transfers import Download
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.runner.graphs import GraphedDecode
    from nanoengine.runner.largest_steps import LargestSteps
    from nanoengine.runner.logits import LogitsProcessor
    from nanoengine.runner.sampler import Sampler
    from nanoengine.runner.special_rows import SpecialRows

SAMPLER_BYTES = 64
"""What the Sampler keeps of a row at least: eight numbers."""


def current_device(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """What makes a GPU the current one for a while.

    Why: Triton launches and CUDA graphs capture on the current device, wherever the tensors are.
    """
    if device.type == "cuda":
        return functools.partial(torch.cuda.device, device)
    return contextlib.nullcontext


class RunnerParts:
    """The parts of a ModelRunner: model, memory plan, KV cache, rows, backend.

    Args:
        config: the user's settings.
        model_config: of the checkpoint in `directory`.
        device, dtype, backend: as resolved from "auto".
        quantization: of linear layers; None: floats of `dtype`.
        processors: makes those of logits that run after those of SamplingParams.
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
        processors: Callable[[], Sequence[LogitsProcessor]] = tuple,
        ranks: Collectives | None = None,
    ) -> None:
        use_isa(config)
        self.ranks = ranks or Collectives()
        self._processors = processors
        self.config = config
        self.model_config = model_config
        self.device = device
        self.as_current = current_device(device)
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

    def start(self) -> KVLayout:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: `max_model_len` passes the model's context or the memory there is.
            WeightLoadError: see `models.loader.load_model`.
        """
        with torch.inference_mode(), self.as_current():
            return self._start()

    def _start(self) -> KVLayout:
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
        check_vocabulary(self.model_config.vocab_size, self.model_config.eos_token_ids)
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
        self.special: SpecialRows | None = None
        if self._uses_graphs or self.config.logits_processors:
            self.need_special(all_rows=True)
        self.graphed: GraphedDecode | None = None
        if self._uses_graphs:
            free = free_gpu_bytes(self.device)
            self.graphed = self._make_graphed(self.rows, self.need_special().sampler)
            self.graphed.capture(self.graphed.sizes)
            taken = max(0, free - free_gpu_bytes(self.device))
            self.memory = dataclasses.replace(self.memory, graph_bytes=taken)
        self.now: Callable[[], Mark] = time.perf_counter
        self.start_download: Callable[[list[torch.Tensor]], Download] | None = None
        if self.device.type == "cuda":
            from nanoengine.runner.gpu_clock import event_now

            side_stream = torch.cuda.Stream(self.device)
            self.start_download = functools.partial(Download, stream=side_stream)
            self.now = event_now
        self.latest: LaunchedStep | None = None
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

    def need_special(self, *, all_rows: bool = False) -> SpecialRows:
        """What rows ask for beyond the most likely token; made at the first call."""
        if self.special is None:
            from nanoengine.runner.special_rows import SpecialRows

            self.special = SpecialRows(self.rows, self.model, self._processors(), all_rows=all_rows)
        return self.special

    def _make_graphed(self, rows: RowBuffers, sampler: Sampler) -> GraphedDecode:
        """The decode step on the device, with no graph captured yet."""
        from nanoengine.runner.decode_step import DecodeStep
        from nanoengine.runner.graphs import CudaGraphs, GraphedDecode

        step = DecodeStep(self.model, self.backend, rows, sampler, self.dtype)
        return GraphedDecode(step, CudaGraphs())

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
            from nanoengine.runner.graphs import graph_bytes
            from nanoengine.runner.sampler import Sampler

            torch.cuda.empty_cache()
            longest = self.config.max_model_len or self.model_config.max_position_embeddings
            sampler = Sampler(self.model_config.vocab_size, self.config.max_num_seqs)
            taken = graph_bytes(
                lambda: self._make_graphed(self._make_rows(longest, 0), sampler),
                lambda: free_gpu_bytes(self.device),
            )
        gc.collect()
        torch.cuda.empty_cache()  # or the budget would count the profile's memory as used
        return activation_bytes, taken

    def _largest_steps(self) -> LargestSteps:
        from nanoengine.runner.largest_steps import LargestSteps

        return LargestSteps(
            model=self.model,
            prepare=self.backend.prepare,
            config=self.config,
            num_groups=len(self._kv_groups),
            block_size=self.block_size,
            device=self.device,
        )
