"""ModelRunner: the in-process Executor. Carries out a StepPlan in tensors.

    start()    load weights -> profile (GPU) -> size and allocate the KV cache -> bind it to layers
    execute()  rows.update -> loads from tiers -> block copies -> Batch -> model -> stores to tiers
               -> logits of sampling rows -> Sampler

Called by LLMEngine through the Executor door; decides nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanoengine.attention import backend_class, make_backend
from nanoengine.config import EngineConfig
from nanoengine.core.kv_groups import make_kv_groups
from nanoengine.core.plan import StepPlan, StepResult, StepTimes, TokenLogprob
from nanoengine.core.protocols import KVLayout, TierStorage
from nanoengine.errors import ConfigError
from nanoengine.layers.context import ModelContext
from nanoengine.layers.linear import LinearMethod
from nanoengine.layers.ops import make_ops
from nanoengine.layers.packed import linear_method_for
from nanoengine.models.config import ModelConfig
from nanoengine.models.loader import load_model
from nanoengine.models.quantization import Quantization
from nanoengine.models.weights import model_size
from nanoengine.runner import kv_cache
from nanoengine.runner.batch import Batch
from nanoengine.runner.cuda_graph import CudaGraphs, GraphedForward
from nanoengine.runner.kv_cache import GIB, KVCache
from nanoengine.runner.rows import Rows, SampleLines
from nanoengine.runner.sampler import Sampler, prompt_logprobs

LOGITS_CHUNK = 256
"""Prompt positions whose logits exist at once: 256 x 152k float32 are 0.16 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes; bytes. `max_model_len` is what the pool was found to allow."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    def __str__(self) -> str:
        tokens = (self.num_blocks - 1) * self.block_size
        return (
            f"memory: weights {self.weight_bytes / GIB:.2f} GiB, activations"
            f" {self.activation_bytes / GIB:.2f} GiB, KV cache {self.kv_bytes / GIB:.2f} GiB\n"
            f"KV cache: {self.num_blocks} blocks of {self.block_size} tokens = {tokens} tokens"
            f" = {tokens / self.max_model_len:.1f} sequences of {self.max_model_len}"
        )


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
        self.backend = make_backend(
            backend,
            device=device,
            dtype=dtype,
            head_dim=model_config.head_dim,
            block_size=self.block_size,
            fp8_cache=config.kv_cache_dtype == "fp8",
            deterministic=config.deterministic,
        )
        self.kv_dtype = kv_cache.stored_dtype(config.kv_cache_dtype, dtype)
        self.groups = make_kv_groups(model_config.sliding_windows)
        self.load_s = 0.0
        self.num_parameters = 0
        self.tier_storage: dict[str, TierStorage] = {}

    # --- start --------------------------------------------------------------------------------

    @torch.inference_mode()
    def start(self) -> KVLayout:
        """Loads the model, sizes and allocates the KV cache.

        Raises:
            ConfigError: `max_model_len` passes the model's context or the memory there is.
            WeightLoadError: see `models.weights`.
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
        self.memory = self._size(bytes_a_block, asked, context_len)
        self.kv_cache = self._allocate(self.memory.num_blocks)
        self.forward = self._capture() if self._uses_graphs else self.model
        self.rows = Rows(
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.memory.max_model_len,
            block_size=self.block_size,
            num_groups=len(self.groups),
            device=self.device,
        )
        self.sampler = Sampler(
            self.model_config.vocab_size,
            self.config.max_num_seqs,
            self.model_config.eos_token_ids,
        )
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}
        return KVLayout(
            num_blocks=self.memory.num_blocks,
            block_size=self.block_size,
            block_bytes=bytes_a_block,
            groups=self.groups,
        )

    def _linear_methods(self) -> Callable[[str], LinearMethod]:
        if not self.config.deterministic:
            return linear_method_for(self.device, self.dtype, self.quantization)
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
            dtype=self.dtype,
            device=self.device,
            attention_backend=self.backend,
            ops=make_ops(self.device, self.dtype),
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

    def _capture(self) -> GraphedForward:
        return GraphedForward(
            self.model,
            self.backend.prepare,
            num_groups=len(self.groups),
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.memory.max_model_len,
            block_size=self.block_size,
            device=self.device,
            graphs=CudaGraphs(),
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
        activation_bytes = 0
        if config.num_kv_blocks is not None:
            num_blocks = config.num_kv_blocks
        elif config.kv_cache_gib is not None:
            budget = int(config.kv_cache_gib * GIB)
            num_blocks = kv_cache.num_blocks_for_bytes(budget, bytes_a_block)
        else:
            if self.device.type == "cpu":
                free = kv_cache.free_cpu_bytes()
                budget = min(int(free * kv_cache.CPU_DEFAULT_FRAC), kv_cache.CPU_DEFAULT_MAX_BYTES)
                if config.memory_fraction is not None:
                    budget = int(free * config.memory_fraction)
            else:
                activation_bytes = self._profile()
                budget = self._gpu_budget(activation_bytes)
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
            kv_bytes=num_blocks * bytes_a_block,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=asked or min(context_len, tokens),
        )

    def _profile(self) -> int:
        """Peak bytes of activations, logits, sampling and graphs, measured at the largest step."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run_largest_step()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        if self._uses_graphs:
            # Why: their pool holds the activations of one batch of decodes beside all others.
            peak += peak * self.config.max_num_seqs // self.config.max_num_batched_tokens
        torch.cuda.empty_cache()  # or the budget would count the profile's memory as used
        return peak

    def _run_largest_step(self) -> None:
        """The largest forwards, all rows' logits, and sampling with every filter on."""
        self._allocate(2)  # every slot is in the null block
        longest = self.config.max_model_len or self.model_config.max_position_embeddings
        total, num_seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        # Why twice: prompts have the widest activations, decodes a scratch for split contexts.
        self.model(self._full_batch([1] * num_seqs, seq_len=longest))
        prompts = [min(longest, total - done) for done in range(0, total, longest)]
        batch = self._full_batch(prompts)
        hidden = self.model(batch)
        logits = self.model.logits(hidden[batch.logits_indices])
        sampler = Sampler(self.model_config.vocab_size, num_seqs)
        num_lines = logits.shape[0]
        sampler.temperature[:], sampler.greedy[:], sampler.top_p[:] = 1.0, False, 0.9
        sampler.sample(logits, range(num_lines), range(num_lines)).fetch()

    def _full_batch(self, counts: list[int], seq_len: int | None = None) -> Batch:
        """Sequences of `counts` query tokens, all in the null block; logits of max_num_seqs rows.

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
                logits_indices=ints(np.arange(min(self.config.max_num_seqs, total))),
                num_decodes=sum(n == 1 for n in counts),
                max_query_len=max(counts),
                max_seq_len=max(seq_lens),
            )
        )

    def _gpu_budget(self, activation_bytes: int) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        fraction = self.config.memory_fraction or kv_cache.GPU_DEFAULT_FRAC
        return int(total * fraction) - (total - free) - activation_bytes

    # --- execute ------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carries out one plan, in the order of its fields, and waits for the sampled tokens."""
        started = time.perf_counter()
        self._update_rows(plan)
        load_s = self._load_blocks(plan)
        if plan.block_copies:
            self.kv_cache.copy_blocks(plan.block_copies)
        result = StepResult(token_ids=[[] for _ in plan.rows])
        if plan.rows:
            self._compute(plan, result, started + load_s)
            result.times.load_s = load_s
        else:
            self._store_blocks(plan)
        for storage in self.tier_storage.values():
            storage.wait()
        return result

    def _compute(self, plan: StepPlan, result: StepResult, started: float) -> None:
        """Forward, stores and sampling of a step that has rows."""
        batch, lines = self.rows.make_batch(plan)
        self._prepared(batch)
        prepared = time.perf_counter()
        hidden = self.forward(batch)  # [T, hidden_size]
        logits = self.model.logits(hidden[batch.logits_indices])  # [L, V]
        self._store_blocks(plan)
        self._synchronize()
        forwarded = time.perf_counter()
        if len(lines.entries):
            self._sample(plan, lines, logits, result)
        if self._prompt_logprobs:
            self._score_prompts(plan, batch, hidden, result)
        result.times = StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sample_s=time.perf_counter() - forwarded,
        )

    def _load_blocks(self, plan: StepPlan) -> float:
        """Brings blocks up from the tiers; returns the seconds it took."""
        started = time.perf_counter()
        loads = [transfer for transfer in plan.transfers if transfer.kind == "load"]
        for load in loads:
            self.tier_storage[load.tier].load(load.tier_ids, load.device_ids)
        return time.perf_counter() - started if loads else 0.0

    def _store_blocks(self, plan: StepPlan) -> None:
        """Copies blocks that are full now to the tiers, beside the sampling."""
        for transfer in plan.transfers:
            if transfer.kind == "store":
                self.tier_storage[transfer.tier].store(transfer.device_ids, transfer.tier_ids)

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
        for row, position, _ in plan.chosen_tokens:
            self.sampler.rewrite(row, self.rows.token_ids[row, : position + 1])

    def _prepared(self, batch: Batch) -> Batch:
        batch.attention = self.backend.prepare(batch)
        return batch

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _sample(
        self, plan: StepPlan, lines: SampleLines, logits: torch.Tensor, result: StepResult
    ) -> None:
        """Samples a token a line, keeps accepted ones, and puts them where the next step reads."""
        sampled = self.sampler.sample(
            logits, lines.rows, lines.positions, plan.draft_token_ids
        ).fetch()
        self.rows.write(lines.rows, lines.positions, np.array(sampled.token_ids))
        for line, entry in enumerate(lines.entries.tolist()):
            tokens = result.token_ids[entry]
            drafts = plan.draft_token_ids.get(plan.rows[entry], ())
            if tokens and tokens[-1] != drafts[len(tokens) - 1]:
                continue  # the draft before this line was wrong
            tokens.append(sampled.token_ids[line])
            if line in sampled.errors:
                result.errors[entry] = sampled.errors[line]
            if line in sampled.logprobs:
                result.logprobs.setdefault(entry, []).append(sampled.logprobs[line])
        self.sampler.accept(plan.rows, result.token_ids)

    def _score_prompts(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of the prompt tokens that follow positions computed in this step."""
        starts = batch.query_start_loc.tolist()
        order = [e for e, n in enumerate(plan.num_scheduled_tokens) if n == 1]
        order += [e for e, n in enumerate(plan.num_scheduled_tokens) if n > 1]
        for seq, entry in enumerate(order):
            row, start = plan.rows[entry], plan.starts[entry]
            num_top, num_prompt = self._prompt_logprobs.get(row, (0, 0))
            end = min(start + plan.num_scheduled_tokens[entry], num_prompt - 1)
            found: list[list[TokenLogprob]] = []
            for low in range(start, end, LOGITS_CHUNK):
                high = min(low + LOGITS_CHUNK, end)
                at = starts[seq] - start
                logits = self.model.logits(hidden[at + low : at + high])
                following = self.rows.token_ids[row, low + 1 : high + 1].astype(np.int64)
                next_ids = torch.from_numpy(following).to(self.device)
                found += prompt_logprobs(logits, next_ids, num_top)
            if found:
                result.prompt_logprobs[entry] = found

    # --- end ----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drops weights and KV cache and returns a GPU's memory to the system."""
        self.tier_storage = {}
        for name in ("model", "forward", "kv_cache", "rows", "sampler"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
