"""EngineConfig: every setting of the engine, with its unit and the reason for its default.

Frozen: values determined at start (number of blocks, dtype, EOS ids, backend) are returned in
`EngineInfo` and never written back here. The options of the command line derive from this class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import checked, quoted, require_positive
from nanoengine.settings.tiers import Tier, check_tiers


@runtime_checkable
class BatchLogitsProcessor(Protocol):
    """Edits the logits of all requests; see `runner/sampling/logits_processors.py`."""

    def admit(self, sequence: Any) -> Any:
        """Returns the state of a row."""

    def apply(self, logits: Any, lines: Any, states: Any) -> None:
        """Edits rows of logits in place."""


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    from nanoengine.settings.vllm_names import LLM_OPTIONS, translate

    return translate(options, LLM_OPTIONS, ConfigError)


@checked(ConfigError, _translate)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    The arguments of vLLM's `LLM` in `vllm_names.LLM_OPTIONS` are also accepted, with the meaning
    given there.

    Attributes:
        model: Directory of a Hugging Face checkpoint, a GGUF file, or a hub id. For a GGUF on the
            hub: the hub id and the quantization, "owner/name:Q4_K_M", or the file,
            "owner/name/file.gguf".
        tokenizer: Directory or hub id of the tokenizer; None: the model's own.
        chat_template: Jinja text of a chat template, or a file that contains it; None: the model's
            own.
        skip_tokenizer_init: Run without a tokenizer: prompts are token ids, outputs have no text.
        trust_remote_code: Let transformers run the tokenizer's own Python code from the checkpoint.
        revision: Branch, tag or commit of the hub repository; None: its main branch.
        load_format: dummy: seeded random weights, for benchmarks; the directory needs only
            config.json.
        model_impl: transformers: transformers' modules compute the model, with this engine's
            attention and linear layers; slower. auto: only models without a native implementation.
        dtype: auto: the checkpoint's on a GPU, and on a CPU with instructions for bfloat16 dot
            products; float32 on other CPUs. On a CPU, bfloat16 rounds the factors of products and
            accumulates in float32; float32 computes with 16-bit weights exactly.
        quantization: int8, int4: quantize linear layers at load. Activations are quantized at run
            time; with _weight_only, and on a GPU, they stay floats. None: as the checkpoint stores
            them. gptq, awq, fp8, compressed-tensors, mxfp4, gguf: the same, but an error if the
            checkpoint has another one. gguf_weight_only: a GGUF file's quantized layers with
            floating-point activations.
        device: auto: cuda if available, else cpu.
        tensor_parallel_size: Number of ranks that share each layer: processes on this machine,
            each with its own GPU, or with its share of the CPU's threads.
        seed: Seeds requests without a seed of their own, and dummy weights.
        max_model_len: Maximum tokens of prompt and output together. None: the model's context, or
            the capacity of the KV cache if that is less.
        max_num_seqs: Maximum number of running sequences; each holds a row of the persistent
            buffers.
        max_num_batched_tokens: Token budget per step, shared by prompts and decodes; bounds the
            activations' memory. None: 8192 on a GPU, 1024 on a CPU, where the activations of more
            tokens would not fit its caches.
        enable_chunked_prefill: False: a prompt runs in one step or waits, so the budget must hold
            the longest prompt.
        long_prefill_threshold: Maximum prompt tokens per sequence and step; 0: limited by the
            budget only.
        block_size: Tokens per KV block, a power of two of at least 8; None: the attention
            backend's measured default.
        num_kv_blocks: Blocks of the pool, including the null block; None: sized by `kv_cache_gib`
            or `memory_fraction`.
        kv_cache_gib: Memory of the KV cache in GiB; None: sized by `memory_fraction`.
        memory_fraction: Share of device memory for weights, activations and KV together; None: 0.9
            on a GPU. On a CPU it is the KV cache's share of free memory; None: 0.3, at most 4 GiB.
        gpu_memory_utilization: vLLM's name of `memory_fraction`, on a GPU. On a CPU it has no
            effect, and a warning says so: 0.9 is a usual share of a GPU's memory, but too much of
            the memory that all programs share.
        enable_prefix_caching: Reuse the KV of equal prompt prefixes.
        watermark_frac: Share of blocks that admission leaves free while sequences run, so that
            decodes do not preempt at once.
        admission: predictive: admit while the blocks of all running sequences fit at their
            predicted peak; watermark: admit every sequence that fits now.
        kv_tiers: Where evicted KV blocks are kept: a HostTier, or a HostTier and a DiskTier.
        kv_cache_dtype: auto: the model's dtype. bfloat16: for float32 models, half the memory and
            traffic, with 7 bits of mantissa (backends cpu and naive). int8: one scale per token
            and KV head; about half the memory and traffic of 16 bits (backends cpu and naive). fp8:
            e4m3 with one scale per layer, from the checkpoint or 1; half the memory and traffic of
            16 bits, with 3 bits of mantissa (backends triton and naive).
        speculative: Speculative decoding: "ngram" drafts from prompt and output themselves, with
            options as in "ngram:max=4,min=2,k=8"; "mtp" drafts with the checkpoint's own MTP layer,
            as in "mtp:k=2". The tokens are the same; drafts are made where measurements show a
            gain. None: no drafts.
        logits_processors: Edit the logits of every request, in this order: functions as in
            `SamplingParams`, or objects with `admit` and `apply` (docs/structured_output.md).
        debug_checks: Check all invariants of the block pool after each step; slow, for tests and
            debugging.
        trace: Write the run's inputs to this file, compressed if its name ends in .gz; see
            docs/trace.md. `nanoengine explain` shows what the steps did.
        deterministic: The same bits for the same tokens, independent of the batch, of chunked
            prefill and of cache hits; slower. On a GPU with the triton backend; an error elsewhere.
        attention_backend: naive (plain torch for the whole model), cpu, triton, flash_attn, or a
            name that was added to `attention.BACKENDS`; auto: cpu on a CPU, triton on a GPU,
            naive on a GPU with compute capability below 8.0.
        cpu_isa: Instruction set of the CPU kernels, as named by `nanoengine info`; one that this
            CPU supports, for tests and comparisons. None: the best one. All engines of a process
            share it.
        enforce_eager: Disable CUDA graphs; no effect on a CPU, nor with tensor_parallel_size above
            1, which uses none.
        overlap: Plan and launch a step while the previous one runs; None: on a GPU. A CPU gains
            nothing, because planning and computing share its cores. The tokens are the same.

    Raises:
        ConfigError: a name is unknown, a value has the wrong type or is out of range, or two
            settings contradict each other; raised before anything is loaded.
    """

    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    revision: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    model_impl: Literal["auto", "transformers"] = "auto"
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    quantization: (
        Literal[
            "int8", "int4", "int8_weight_only", "int4_weight_only",
            "gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "gguf", "gguf_weight_only",
        ]
        | None
    ) = None  # fmt: skip
    device: str = "auto"
    tensor_parallel_size: int = 1
    seed: int = 0

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_threshold: int = 0

    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_gib: float | None = None
    memory_fraction: float | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    watermark_frac: float = 0.01
    admission: Literal["predictive", "watermark"] = "predictive"
    kv_tiers: tuple[Tier, ...] = ()
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "int8"] = "auto"
    speculative: str | None = None
    logits_processors: tuple[Callable[..., Any] | BatchLogitsProcessor, ...] = ()
    debug_checks: bool = False
    trace: str | None = None

    deterministic: bool = False
    attention_backend: str = "auto"
    cpu_isa: str | None = None
    enforce_eager: bool = False
    overlap: bool | None = None

    def step_budget(self, device_type: str) -> int:
        """Maximum number of tokens per step on this type of device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        is_small = device_type == "cpu" and self.enable_chunked_prefill
        return max(1024 if is_small else 8192, self.max_num_seqs)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Creates a config; paths may be path objects."""
        return cls(**{k: fspath(v) if isinstance(v, PathLike) else v for k, v in kwargs.items()})

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.chat_template is not None and "{" not in self.chat_template:
            try:
                text = Path(self.chat_template).expanduser().read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                allowed = "a Jinja template or its file"
                got = f"{quoted(self.chat_template)}: {error}"
                raise ConfigError(f"chat_template must be {allowed}, got {got}") from error
            object.__setattr__(self, "chat_template", text)
        check_tiers(self.kv_tiers)
        if self.speculative is not None:
            from nanoengine.settings.speculative import MTPDrafts, parse_speculative

            is_mtp = isinstance(parse_speculative(self.speculative), MTPDrafts)
            if is_mtp and (self.kv_tiers or self.tensor_parallel_size > 1):
                others = "kv_tiers or tensor_parallel_size > 1"
                raise ConfigError(f"speculative='mtp' is not supported with {others}")
        if self.kv_tiers and not self.enable_prefix_caching:
            raise ConfigError("kv_tiers stores cached prefixes: set enable_prefix_caching=True")

    def _check_ranges(self) -> None:
        size, budget = self.block_size, self.max_num_batched_tokens
        fraction, share = self.memory_fraction, self.gpu_memory_utilization
        counts = "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"
        require_positive(self, ConfigError, *counts)
        sizings = [self.num_kv_blocks, self.kv_cache_gib, fraction, share]
        rules = (
            ("model", bool(self.model), "a directory or hub id"),
            ("seed", 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "at least 2"),
            ("long_prefill_threshold", self.long_prefill_threshold >= 0, "at least 0"),
            ("block_size", size is None or (size >= 8 and size & (size - 1) == 0),
             "a power of two of at least 8"),
            ("num_kv_blocks", self.num_kv_blocks is None or self.num_kv_blocks >= 2,
             "at least 2: one block is the null block"),
            ("kv_cache_gib", self.kv_cache_gib is None or self.kv_cache_gib > 0, "greater than 0"),
            ("memory_fraction", fraction is None or 0 < fraction <= 1, "in (0, 1]"),
            ("gpu_memory_utilization", share is None or 0 < share <= 1, "in (0, 1]"),
            ("watermark_frac", 0 <= self.watermark_frac < 1, "in [0, 1)"),
        )  # fmt: skip
        for name, holds, allowed in rules:
            if not holds:
                raise ConfigError(f"{name} must be {allowed}, got {quoted(getattr(self, name))}")
        if sum(value is not None for value in sizings) > 1:
            names = "num_kv_blocks, kv_cache_gib, memory_fraction and gpu_memory_utilization"
            got = ", ".join(map(str, sizings))
            raise ConfigError(f"{names} all size the KV cache: set one, got {got}")
        if budget is not None and budget < self.max_num_seqs:
            least = f"max_num_seqs={self.max_num_seqs}, a token per sequence and step"
            raise ConfigError(f"max_num_batched_tokens={budget} must be at least {least}")
        if not self.enable_chunked_prefill and self.long_prefill_threshold:
            raise ConfigError("long_prefill_threshold needs enable_chunked_prefill=True")
