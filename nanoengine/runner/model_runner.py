"""ModelRunner: the in-process Executor. Carries out a StepPlan in tensors.

    start()    load weights -> profile (GPU) -> size and allocate the KV cache -> bind it to layers
    launch()   rows.update -> loads from tiers -> block copies -> Batch -> model -> logits
               -> stores to tiers -> Sampler -> downloads; see `LaunchedStep` for the rest

A step has two ways. `_run_batch`, the one to read, takes any plan. `_run_decodes` replays a CUDA
graph for plans of decodes alone (`DecodeStep`); `tests/runner/test_graphs.py` holds it to the
first.

Called by LLMEngine through the Executor door; decides nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.batch import Batch
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.config import EngineConfig
from nanoengine.core.doors import TierStorage
from nanoengine.core.kv_groups import make_kv_groups
from nanoengine.core.layout import KVLayout
from nanoengine.core.plan import StepPlan
from nanoengine.errors import ConfigError
from nanoengine.layers.choose import linear_method_for, make_ops
from nanoengine.layers.context import ModelContext
from nanoengine.layers.linear_method import LinearMethod
from nanoengine.models.loader import load_model, model_size
from nanoengine.runner import kv_cache
from nanoengine.runner.decode_step import DecodeStep
from nanoengine.runner.graphs import CudaGraphs, GraphedDecode
from nanoengine.runner.kv_cache import GIB, KVCache
from nanoengine.runner.launched_step import LaunchedStep, PromptScores
from nanoengine.runner.row_buffers import Ints, RowBuffers, SamplingLines
from nanoengine.runner.sampler import SampledTokens, Sampler, token_logprobs
from nanoengine.runner.transfers import Downloads, Stopwatch, ship, staging_size

SAMPLER_BYTES = 64
"""What the Sampler keeps of a row at least: eight numbers."""

LOGITS_CHUNK = 256
"""Prompt positions whose logits exist at once: 256 x 152k float32 are 0.16 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes; bytes. `max_model_len` is what the pool was found to allow.

    `graph_bytes` is what a GPU lost to the decode step, its graphs and the driver's copies of them;
    `staging_bytes` are buffers between the GPU and a host tier.
    """

    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    staging_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    def __str__(self) -> str:
        tokens = (self.num_blocks - 1) * self.block_size
        parts = [
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("host tier's staging", self.staging_bytes),
            ("KV cache", self.kv_bytes),
        ]
        named = ", ".join(
            f"{name} {size / GIB:.2f} GiB"
            for name, size in parts
            if size or name in ("weights", "activations", "KV cache")
        )
        return (
            f"memory: {named}\n"
            f"KV cache: {self.num_blocks} blocks of {self.block_size} tokens = {tokens} tokens"
            f" = {tokens / self.max_model_len:.1f} sequences of {self.max_model_len}"
        )


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
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self._directory = directory
        default = backend_class(backend).default_block_size
        self.block_size = config.block_size or default
        self.kv_dtype = kv_cache.stored_dtype(config.kv_cache_dtype, dtype)
        self._by_kernels = device.type == "cpu" and backend == "cpu"
        self.backend = make_backend(
            backend,
            device=device,
            dtype=dtype,
            head_dim=model_config.head_dim,
            block_size=self.block_size,
            kv_dtype=self.kv_dtype,
            deterministic=config.deterministic,
        )
        self.groups = make_kv_groups(model_config.sliding_windows)
        self.load_s = 0.0
        self.num_parameters = 0
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
        self._load()
        bytes_a_block = kv_cache.block_bytes(
            block_size=self.block_size,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            num_layers=max(len(group.layers) for group in self.groups),
            dtype=self.kv_dtype,
        )
        self._require_rows(SAMPLER_BYTES)
        self.sampler = Sampler(
            self.model_config.vocab_size,
            self.config.max_num_seqs,
            self.model_config.eos_token_ids,
        )
        self.memory = self._size(bytes_a_block, asked, context_len)
        self.kv_cache = self._allocate(self.memory.num_blocks)
        self.rows = self._make_rows(self.memory.max_model_len)
        self._decode: tuple[DecodeStep, GraphedDecode] | None = None
        if self._uses_graphs:
            free = self._free_bytes()
            decode = self._decode_step(self.rows, self.memory.max_model_len)
            decode[1].capture(decode[1].sizes)
            self._decode = decode
            taken = max(0, free - self._free_bytes())
            self.memory = dataclasses.replace(self.memory, graph_bytes=taken)
        self.downloads = Downloads(self.device)
        self._latest: LaunchedStep | None = None
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        return KVLayout(
            num_blocks=self.memory.num_blocks,
            block_size=self.block_size,
            block_bytes=bytes_a_block,
            groups=self.groups,
        )

    @property
    def _activation_dtype(self) -> torch.dtype:
        """float32 for bfloat16 by the CPU's kernels, which round what they multiply."""
        rounds = self._by_kernels and self.dtype == torch.bfloat16
        return torch.float32 if rounds else self.dtype

    @property
    def _weight_dtype(self) -> torch.dtype:
        """What weights are stored in: 16 bits where the CPU's kernels read them, as they are."""
        config, dtype = self.model_config, self.dtype
        if not self._by_kernels:
            return self._activation_dtype
        # Why even: weights of 16 bits are read in pairs of inputs.
        if config.hidden_size % 2 or config.intermediate_size % 2:
            if dtype == torch.bfloat16:
                raise ConfigError(
                    f"dtype='bfloat16' on a CPU needs layers of an even number of inputs, got"
                    f" hidden_size={config.hidden_size} and"
                    f" intermediate_size={config.intermediate_size}, which must be even: set"
                    " dtype='float32'"
                )
            return dtype
        stored = getattr(torch, config.dtype)
        return stored if dtype == torch.float32 and stored.itemsize == 2 else dtype

    def _linear_methods(self) -> Callable[[str], LinearMethod]:
        if not self.config.deterministic:
            return linear_method_for(
                self.device,
                self._activation_dtype,
                self.quantization,
                rounds_inputs=self._activation_dtype != self.dtype,
            )
        if self.quantization is not None or self.model_config.moe is not None:
            what = "quantized weights" if self.quantization else "mixtures of experts"
            raise ConfigError(
                f"deterministic=True does not cover {what}: their products depend on the number of"
                " tokens; leave it out"
            )
        from nanoengine.layers.triton_linear import TritonLinear

        return TritonLinear

    def _load(self) -> None:
        started = time.perf_counter()
        context = ModelContext(
            dtype=self._activation_dtype,
            weight_dtype=self._weight_dtype,
            keeps_weights=self._weight_dtype != self.dtype,
            device=self.device,
            attention_backend=self.backend,
            ops=make_ops(self.device, self._activation_dtype),
            linear_method_factory=self._linear_methods(),
            max_positions=self.config.max_model_len,
        )
        self.model = load_model(
            self.model_config,
            self._directory,
            context=context,
            load_format=self.config.load_format,
            seed=self.config.seed,
        )
        self.load_s = time.perf_counter() - started
        self.num_parameters, self.weight_bytes = model_size(self.model)

    @property
    def _uses_graphs(self) -> bool:
        """On a GPU, unless eager is asked for or something decides on the host."""
        safe = self.backend.graph_safe and self.model.graph_safe
        return self.device.type == "cuda" and safe and not self.config.enforce_eager

    def _decode_step(
        self, rows: RowBuffers, max_model_len: int
    ) -> tuple[DecodeStep, GraphedDecode]:
        """The decode step, and what captures and replays it."""
        step = DecodeStep(
            forward=self.model,
            logits=self.model.logits,
            prepare=self.backend.prepare,
            rows=rows,
            sampler=self.sampler,
            max_model_len=max_model_len,
            dtype=self.dtype,
        )
        num_seqs = self.config.max_num_seqs
        return step, GraphedDecode(step, max_num_seqs=num_seqs, graphs=CudaGraphs())

    def _require_rows(self, bytes_a_row: int) -> None:
        """Raises ConfigError if `max_num_seqs` rows would need more memory than the host has."""
        rows = self.config.max_num_seqs
        cpu = torch.device("cpu")
        kv_cache.require_memory(f"max_num_seqs={rows}", rows * bytes_a_row, cpu)

    def _make_rows(self, max_model_len: int) -> RowBuffers:
        self._require_rows(max_model_len * np.dtype(np.int32).itemsize)
        return RowBuffers(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.block_size,
            num_groups=len(self.groups),
            device=self.device,
        )

    def _allocate(self, num_blocks: int) -> KVCache:
        cache = KVCache(
            groups=self.groups,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            layout=self.backend.kv_layout,
            dtype=self.kv_dtype,
            device=self.device,
        )
        cache.bind(self.model.attention_layers)
        return cache

    def _size(self, bytes_a_block: int, asked: int | None, context_len: int) -> MemoryPlan:
        """Decides the number of blocks and the effective max_model_len."""
        config = self.config
        activation_bytes = graph_bytes = 0
        staging_bytes = staging_size(bytes_a_block) if self._stages else 0
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
            setting, asked_bytes = f"num_kv_blocks={num_blocks}", num_blocks * bytes_a_block
            kv_cache.require_memory(setting, asked_bytes, self.device)
        elif config.kv_cache_gib is not None:
            setting, asked_gib = f"kv_cache_gib={config.kv_cache_gib}", config.kv_cache_gib
            kv_cache.require_memory(setting, asked_gib * GIB, self.device)
            budget = int(config.kv_cache_gib * GIB)
            num_blocks = kv_cache.num_blocks_for_bytes(budget, bytes_a_block)
        else:
            if self.device.type == "cpu":
                free = kv_cache.free_cpu_bytes()
                budget = min(int(free * kv_cache.CPU_DEFAULT_FRAC), kv_cache.CPU_DEFAULT_MAX_BYTES)
                if config.memory_fraction is not None:
                    budget = int(free * config.memory_fraction)
            else:
                activation_bytes, graph_bytes = self._profile()
                budget = self._gpu_budget(activation_bytes + graph_bytes + staging_bytes)
            num_blocks = kv_cache.num_blocks_for_bytes(budget, bytes_a_block)
            longest = -(-(asked or context_len) // self.block_size) * len(self.groups)
            num_blocks = min(num_blocks, config.max_num_seqs * longest + 1)  # no use for more
        if all(group.sliding_window is None for group in self.groups):
            tokens = (num_blocks - 1) * self.block_size
        else:  # a window may hold far less than the length: the scheduler judges each request
            tokens = context_len if num_blocks > len(self.groups) else 0
        if (asked or 2) > tokens:
            raise kv_cache.too_small(asked or context_len, num_blocks, self.block_size, tokens)
        return MemoryPlan(
            weight_bytes=self.weight_bytes,
            activation_bytes=activation_bytes,
            graph_bytes=graph_bytes,
            staging_bytes=staging_bytes,
            kv_bytes=num_blocks * bytes_a_block,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=asked or min(context_len, tokens),
        )

    @property
    def _stages(self) -> bool:
        """A host tier beside a GPU copies by way of buffers there."""
        return self.device.type == "cuda" and bool(self.config.kv_tiers)

    def _profile(self) -> tuple[int, int]:
        """Peak bytes of activations, logits and sampling, measured at the largest steps; bytes that
        the decode step and its graphs will take."""
        self._allocate(2)  # every slot is in the null block
        peak = max(self._peak(batch) for batch in self._largest_batches())
        graph_bytes = self._trial_of_graphs() if self._uses_graphs else 0
        gc.collect()
        torch.cuda.empty_cache()  # or the budget would count the profile's memory as used
        return peak, graph_bytes

    def _trial_of_graphs(self) -> int:
        """What all graphs will take, by capturing the two largest sizes.

        The first fills the pool that all of them share. The second takes what every other one does:
        the driver's own memory, which torch doesn't count.
        """
        torch.cuda.empty_cache()
        longest = self.config.max_model_len or self.model_config.max_position_embeddings
        free = [self._free_bytes()]
        _, graphed = self._decode_step(self._make_rows(longest), longest)
        for size in (graphed.sizes[-1], graphed.sizes[-2:][0]):
            graphed.capture([size])
            free.append(self._free_bytes())
        first, each = free[0] - free[1], free[1] - free[2]
        return max(0, first) + max(0, each) * (len(graphed.sizes) - 1)

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.mem_get_info(self.device)[0]

    def _largest_batches(self) -> tuple[Batch, Batch]:
        """Prompts, which have the widest activations, and decodes of the longest sequences, which
        have a scratch for split contexts."""
        longest = self.config.max_model_len or self.model_config.max_position_embeddings
        num_seqs = self.config.max_num_seqs
        total = self.config.step_budget(self.device.type)
        prompts = [min(longest, total - done) for done in range(0, total, longest)]
        return self._full_batch(prompts), self._full_batch([1] * num_seqs, seq_len=longest)

    def _peak(self, batch: Batch) -> int:
        """Peak bytes of a step."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run_all_of(batch)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _run_all_of(self, batch: Batch) -> None:
        """A forward of all rows, with logits of max_num_seqs, sampled as filters want it."""
        logits = self.model.logits(self.model(batch)[: self.config.max_num_seqs])
        lines = np.arange(logits.shape[0])
        sampler = Sampler(self.model_config.vocab_size, len(lines))
        sampler.temperature[:], sampler.greedy[:], sampler.top_p[:] = 1.0, False, 0.9
        sampler.sample(logits, lines, lines).fetch()

    def _full_batch(self, counts: list[int], seq_len: int | None = None) -> Batch:
        """Sequences of `counts` query tokens, all in the null block.

        `seq_len` is the context of each; None: its query tokens alone.
        """
        counts = sorted(counts, key=lambda n: n != 1)
        seq_lens = [seq_len or count for count in counts]
        total = sum(counts)
        num_blocks = -(-max(seq_lens) // self.block_size)

        def ints(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype, device=self.device)

        groups = len(self.groups)
        return self._prepared(
            Batch(
                token_ids=ints(np.zeros(total)),
                positions=ints(np.concatenate([np.arange(n) for n in counts])),
                slot_mapping=ints(np.zeros((groups, total))),
                query_start_loc=ints(np.cumsum([0, *counts]), torch.int32),
                seq_lens=ints(seq_lens, torch.int32),
                block_tables=ints(np.zeros((groups, len(counts), num_blocks)), torch.int32),
                logits_indices=None,  # Why: where prompts are scored, all rows go on to the end
                num_decodes=sum(n == 1 for n in counts),
                max_query_len=max(counts),
                max_seq_len=max(seq_lens),
            )
        )

    def _gpu_budget(self, other_bytes: int) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = self.config.memory_fraction or kv_cache.GPU_DEFAULT_FRAC
        return int(total * fraction) - (total - free) - other_bytes

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
            step.download = self.downloads.start(run(plan, step, started + load_s))
            step.times.load_s = load_s
        else:
            self._store_blocks(plan, step)
        self._latest = step
        return step

    def _is_decode(self, plan: StepPlan) -> bool:
        return self._decode is not None and self._decode[0].fits(plan)

    def _run_batch(self, plan: StepPlan, step: LaunchedStep, started: float) -> list[torch.Tensor]:
        """Any step, its batch built on the host; returns what the host wants to see of it."""
        num_scored = self._num_scored(plan)
        batch, lines = self.rows.make_batch(plan, num_scored)
        self._prepared(batch)
        step.times.prepare_s = time.perf_counter() - started
        watch = step.stopwatch = Stopwatch(self.device)
        watch.mark()
        sampling, scoring = self.model(batch).tensor_split([len(lines.entries)])
        found = self._most_likely(lines, sampling)
        logits = None if found else self.model.logits(sampling)  # [lines, V]
        self._store_blocks(plan, step)
        watch.mark()
        tensors: list[torch.Tensor] = []
        if len(lines.entries):
            sampled = found or self._sample(plan, lines, logits)
            # Why not with drafts: how many of them count is found on the host, in `result`.
            if not plan.draft_token_ids:
                self.rows.keep(lines, sampled.token_ids)
            tensors += self._expect(plan, step, lines, sampled)
        tensors += self._score_prompts(plan, num_scored, scoring, step, len(tensors))
        watch.mark()
        return tensors

    def _run_decodes(
        self, plan: StepPlan, step: LaunchedStep, started: float
    ) -> list[torch.Tensor]:
        """A step of decodes by a graph, its inputs being on the device."""
        assert self._decode is not None
        decode, graphed = self._decode
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
            decode.held.advance(lines.device_rows, sampled.token_ids)
        else:
            sampled = SampledTokens(token_ids=ours[0], valid=ours[1])
        tensors = self._expect(plan, step, lines, sampled)
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
            self._prompt_logprobs.pop(row, None)
        for new in plan.admitted:
            self.sampler.admit(new)
            if new.params.prompt_logprobs is not None:
                self._prompt_logprobs[new.row] = (new.params.prompt_logprobs, new.num_prompt_tokens)
        for fork in plan.forks:
            self.sampler.fork(fork)
        self.rows.update(plan)
        if self._decode is not None:
            self._decode[0].update(plan)
        for row, position, _ in plan.chosen_tokens:
            self.sampler.rewrite(row, self.rows.token_ids[row, : position + 1])

    def _prepared(self, batch: Batch) -> Batch:
        batch.attention = self.backend.prepare(batch)
        return batch

    def _most_likely(self, lines: SamplingLines, hidden: torch.Tensor) -> SampledTokens | None:
        """The tokens of all lines where they are greedy and the model needs no logits for it."""
        if not self.sampler.only_greedy(lines.rows):
            return None
        found = self.model.most_likely(hidden)
        return None if found is None else SampledTokens.most_likely(*found)

    def _sample(self, plan: StepPlan, lines: SamplingLines, logits: torch.Tensor) -> SampledTokens:
        """Samples a token a line."""
        if self.sampler.edited[lines.rows].any() and self._latest is not None:
            # Why here: processors must know the tokens before; the forward runs while they learn.
            self._latest.result()
        return self.sampler.sample(logits, lines.rows, lines.positions, plan.draft_token_ids)

    def _expect(
        self, plan: StepPlan, step: LaunchedStep, lines: SamplingLines, sampled: SampledTokens
    ) -> list[torch.Tensor]:
        """Notes who waits for the tokens; returns copies of them that no later step overwrites."""
        step.lines, step.owners = lines, self.rows.seq_ids[lines.rows]
        step.sampled, step.followers = sampled, self.sampler.followers(plan.rows)
        return sampled.tensors

    def _num_scored(self, plan: StepPlan) -> Ints:
        """[E], how many positions of each entry are followed by a prompt token to be scored."""
        found = np.zeros(len(plan.rows), np.int64)
        if self._prompt_logprobs:
            for entry, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
                _, num_prompt = self._prompt_logprobs.get(row, (0, 0))
                end = min(start + plan.num_scheduled_tokens[entry], num_prompt - 1)
                found[entry] = max(end - start, 0)
        return found

    def _score_prompts(
        self, plan: StepPlan, counts: Ints, hidden: torch.Tensor, step: LaunchedStep, at: int
    ) -> list[torch.Tensor]:
        """Log-probabilities of the prompt tokens that follow the first `counts` positions of each
        entry, whose `hidden` lie one after the other; `at` is the place of the first tensor among
        the step's downloads."""
        tensors: list[torch.Tensor] = []
        for entry in np.flatnonzero(counts).tolist():
            row, start, count = plan.rows[entry], plan.starts[entry], int(counts[entry])
            num_top, _ = self._prompt_logprobs[row]
            following = self.rows.token_ids[row, start + 1 : start + count + 1].astype(np.int64)
            first = at + len(tensors)
            for low in range(0, count, LOGITS_CHUNK):
                targets = following[low : low + LOGITS_CHUNK]
                logits = self.model.logits(hidden[low : low + len(targets)])
                tensors.append(token_logprobs(logits, ship(self.device, targets)[0], num_top))
            hidden = hidden[count:]
            found = range(first, at + len(tensors))
            step.scores.append(PromptScores(entry=entry, num_top=num_top, downloads=found))
        return tensors

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drops weights and KV cache and returns a GPU's memory to the system."""
        self.tier_storage, self._latest = {}, None
        # The backend too: it keeps views of the cache.
        for name in ("model", "_decode", "kv_cache", "rows", "sampler", "backend"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
