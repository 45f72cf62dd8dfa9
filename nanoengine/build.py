"""build_engine: the composition root, from an EngineConfig to a running LLMEngine.

The one file that knows both the core and everything that enters it by a door. What "auto" means is
decided here, and the answers are returned in EngineInfo; the config itself never changes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoengine.attention import resolve_backend
from nanoengine.checkpoint.config import ModelConfig, load_model_config
from nanoengine.checkpoint.files import checkpoint_files
from nanoengine.checkpoint.quantization import resolve_quantization
from nanoengine.core.block_manager import BlockManager
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.layout import KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.policies import make_policy
from nanoengine.core.prefix_cache import PrefixCache
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError, RequestError
from nanoengine.features.draft_model import DraftedRunner, DraftModel
from nanoengine.features.drafting import Drafter, Drafting
from nanoengine.features.forced import ForcedTokens, NoDrafter
from nanoengine.features.kv_tiers import make_tiers
from nanoengine.features.ngram import NgramDrafter
from nanoengine.features.processors import make_processors
from nanoengine.features.structured import Structured, make_structured
from nanoengine.observe.trace import trace_engine
from nanoengine.parallel.executor import RankedExecutor, require_sendable
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.numerics import use_isa
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.drafts import ModelDrafts, NgramDrafts, parse_speculative
from nanoengine.settings.params import SamplingParams
from nanoengine.settings.vllm_names import warn_idle

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> LLMEngine:
    """Starts an engine: finds the model, resolves device, dtype and backend, loads, sizes.

    Raises:
        ConfigError: a setting does not fit this machine or this model.
        ModelError: the checkpoint can't be run.
    """
    try:
        return _build_engine(config)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sizes = ("max_num_seqs", "max_model_len", "num_kv_blocks", "kv_cache_gib", "kv_tiers")
        given = ", ".join(f"{name}={getattr(config, name)!r}" for name in sizes)
        raise ConfigError(
            f"the memory of this machine is not enough: {error}; lower what asks for it: {given}"
        ) from error


def _build_engine(config: EngineConfig) -> LLMEngine:
    started = time.perf_counter()
    if config.trace is not None and not Path(config.trace).absolute().parent.is_dir():
        raise ConfigError(f"trace={config.trace!r}: its directory must be there; make it first")
    directory = resolve_model(config)
    model_config = load_model_config(directory)
    device = resolve_device(config.device)
    use_isa(config)
    config = share_of_memory(config, device)
    dtype = resolve_dtype(
        config.dtype,
        model_config.dtype,
        device,
        backend=config.attention_backend,
        quantized=bool(config.quantization or model_config.quantization),
    )
    backend = resolve_backend(config.attention_backend, device, dtype)
    quantization = resolve_quantization(
        config.quantization, model_config.quantization, device=device.type
    )
    run_on: dict[str, Any] = {"device": device, "dtype": dtype, "backend": backend}
    structured = make_structured(config, model_config, directory)
    executor = ModelRunner if config.tensor_parallel_size == 1 else RankedExecutor
    drafts = parse_speculative(config.speculative) if config.speculative else None
    if drafts is not None:
        _require_no_states(model_config, "be verified")
    if isinstance(drafts, ModelDrafts):
        draft = _make_draft_runner(drafts, config, run_on)
        executor = functools.partial(DraftedRunner, draft=draft)
    runner = executor(
        config,
        model_config,
        directory,
        **run_on,
        quantization=quantization,
        processors=(*make_processors(config.logits_processors), structured),
    )
    layout = runner.start()
    try:
        engine = _engine_on(runner, config, layout, backend, directory, structured, started)
    except BaseException:
        runner.shutdown()
        raise
    if config.trace is not None:
        try:
            trace_engine(engine, config.trace, steps=config.steps_traced(), config=config)
        except BaseException:
            engine.close()
            raise
    logger.info("%s: %s on %s, attention %s", config.model, dtype, device, backend)
    if quantization is not None:
        logger.info("quantization: %s", quantization)
    elif model_config.quantization is not None:
        logger.warning(
            "experts are stored in 4 bits and held as %s, since only a CPU multiplies 4 bits:"
            " %.1f GiB of weights", dtype, runner.weight_bytes / 2**30,
        )  # fmt: skip
    logger.info("%s", runner.memory)
    return engine


def _engine_on(
    runner: ModelRunner | RankedExecutor,
    config: EngineConfig,
    layout: KVLayout,
    backend: str,
    directory: Path,
    structured: Structured,
    started: float,
) -> LLMEngine:
    """The engine over an executor that has started."""
    device, memory = runner.device, runner.memory
    budget = config.step_budget(device.type)
    if not config.enable_chunked_prefill and budget < memory.max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt runs in one step: max_num_batched_tokens="
            f"{budget} must be at least max_model_len={memory.max_model_len}"
        )
    prefix_cache: PrefixCache | None = None
    if config.kv_tiers:
        assert isinstance(runner, ModelRunner), "refused with ranks"
        prefix_cache = _tiered_cache(runner, config, layout, backend, directory)
    try:
        manager = make_block_manager(
            layout,
            prefix_cache=prefix_cache,
            enable_prefix_caching=config.enable_prefix_caching,
            watermark_frac=config.watermark_frac,
            max_chunk=budget,
            chunked=config.enable_chunked_prefill,
        )
        scheduler = Scheduler(
            manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            chunked_prefill=config.enable_chunked_prefill,
            long_prefill_threshold=config.long_prefill_threshold,
            policy=make_policy(config.admission, config.preempt_above, config.admit_below),
        )
        overlap = device.type == "cuda" if config.overlap is None else config.overlap
        drafting = _make_drafting(config, runner, manager, overlap)
        info = _info(config, runner, layout, backend, time.perf_counter() - started)
        return LLMEngine(
            runner,
            scheduler,
            info,
            seed=config.seed,
            overlap=overlap,
            debug_checks=config.debug_checks,
            observers=() if drafting is None else (drafting,),
            proposer=drafting,
            check_params=_params_check(structured, config),
        )
    except BaseException:
        # Why: the error may live on, say in a notebook, and with it the disk's lock.
        if prefix_cache is not None and prefix_cache.tiers is not None:
            prefix_cache.tiers.close()
        raise


def _make_draft_runner(
    drafts: ModelDrafts, config: EngineConfig, run_on: dict[str, Any]
) -> ModelRunner:
    """The draft model's runner, not started: the settings of the engine, by its own checkpoint."""
    own = {"kv_cache_gib": None, "memory_fraction": None, "num_kv_blocks": None}
    # Why eager: its steps are no plain decodes.
    config = replace(
        config, model=drafts.model, speculative=None, max_model_len=None, enforce_eager=True, **own
    )
    try:
        directory = resolve_model(config)
    except ConfigError as error:
        raise ConfigError(f"speculative is neither 'ngram' nor a draft model: {error}") from error
    model_config = load_model_config(directory)
    _require_no_states(model_config, "be made")
    at_load = (config.quantization or "").startswith("int")
    quantization = resolve_quantization(
        config.quantization if at_load else None,
        model_config.quantization,
        device=run_on["device"].type,
    )
    return ModelRunner(config, model_config, directory, **run_on, quantization=quantization)


def _require_no_states(model_config: ModelConfig, what: str) -> None:
    if model_config.states is not None:
        raise ConfigError(
            f"speculative: drafts can't {what} by {model_config.architecture}, whose layers keep"
            " states: a state can't step back from a wrong token"
        )


def _make_drafting(
    config: EngineConfig,
    runner: ModelRunner | RankedExecutor,
    manager: BlockManager,
    overlap: bool,
) -> Drafting | None:
    """Who drafts, and decides when."""
    drafts = parse_speculative(config.speculative) if config.speculative else None
    # Why not where steps overlap: to ask what a grammar forces, each would wait for the last one.
    if drafts is None and (overlap or runner.model_config.states is not None):
        return None
    drafter: Drafter = NoDrafter()
    if isinstance(drafts, NgramDrafts):
        drafter = NgramDrafter(drafts)
    elif isinstance(runner, DraftedRunner):
        assert isinstance(drafts, ModelDrafts)
        drafter = DraftModel(runner, manager, drafts.k)
    if isinstance(runner, ModelRunner):  # ranks keep what they know of grammars to themselves
        drafter = ForcedTokens(runner.sampler, drafter)
    return None if isinstance(drafter, NoDrafter) else Drafting(drafter=drafter, overlapped=overlap)


def _params_check(structured: Structured, config: EngineConfig) -> Callable[[SamplingParams], None]:
    """What raises RequestError for parameters that processors or ranks can't obey."""
    if config.tensor_parallel_size == 1:
        return structured.check

    def check(params: SamplingParams) -> None:
        structured.check(params)
        if params.logits_processors or params.extra_args:
            sent = (params.logits_processors, params.extra_args)
            require_sendable("logits_processors and extra_args", sent, RequestError)

    return check


def _tiered_cache(
    runner: ModelRunner, config: EngineConfig, layout: KVLayout, backend: str, directory: Path
) -> PrefixCache:
    """The cache that `kv_tiers` asks for; the runner learns what moves its blocks."""
    files = [directory / "config.json"]
    if config.load_format == "auto":
        files += checkpoint_files(directory)
    cache, runner.tier_storage = make_tiers(
        config.kv_tiers,
        layout,
        runner.kv_cache.kv,
        files,
        states=runner.kv_cache.states,
        # Why: whatever changes the bytes of a block must be named here.
        facts={
            "weights": config.load_format,
            "seed": config.seed if config.load_format == "dummy" else None,
            "dtype": runner.dtype,
            "quantization": runner.quantization,
            "kv_dtype": runner.kv_dtype,
            "deterministic": config.deterministic,
            "attention_backend": backend,
            "layout": runner.backend.kv_layout,
            "block_size": layout.block_size,
            "groups": layout.groups,
        },
    )
    assert cache is not None
    return cache


def _info(
    config: EngineConfig,
    runner: ModelRunner | RankedExecutor,
    layout: KVLayout,
    backend: str,
    start_s: float,
) -> EngineInfo:
    """What was discovered at start."""
    model_config, quantization = runner.model_config, runner.quantization
    return EngineInfo(
        model_name=config.model,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=runner.memory.max_model_len,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        quantization=str(quantization) if quantization else None,
        weight_bits=quantization.bits if quantization else None,
        attention_backend=backend,
        num_parameters=runner.num_parameters,
        weight_bytes=runner.weight_bytes,
        num_kv_blocks=layout.num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        load_s=runner.load_s,
        start_s=start_s,
        memory_plan=str(runner.memory),
        kv_cache_dtype=str(runner.kv_dtype).removeprefix("torch."),
        generation_defaults=dict(model_config.generation_defaults),
    )


def resolve_model(config: EngineConfig) -> Path:
    """The directory of the checkpoint: a local one, or a hub id brought into the hub's cache.

    Raises:
        ConfigError: neither a directory, nor a repository that can be reached or is cached.
    """
    directory = Path(config.model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigError(f"model must be a directory, got the file {config.model!r}")
    if config.model.count("/") != 1 or config.model.startswith((".", "/", "~")):
        raise ConfigError(f"model directory {config.model!r} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            config.model,
            revision=config.revision,
            allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {config.model!r} is no local directory, and the hub did not give it: {error}"
        ) from error
    return Path(found)


def resolve_device(name: str) -> torch.device:
    """The device that `name` means here; "auto" takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} asked for, but torch finds no CUDA GPU: use 'cpu'")
    return device


def share_of_memory(config: EngineConfig, device: torch.device) -> EngineConfig:
    """What `gpu_memory_utilization` means on this device: `memory_fraction` on a GPU, else
    nothing."""
    share = config.gpu_memory_utilization
    if share is None:
        return config
    if device.type != "cuda":
        warn_idle(
            f"gpu_memory_utilization={share} (there is no GPU; kv_cache_gib or memory_fraction"
            " sizes the KV cache)"
        )
        return replace(config, gpu_memory_utilization=None)
    return replace(config, gpu_memory_utilization=None, memory_fraction=share)


def resolve_dtype(
    name: str, stored: str, device: torch.device, *, backend: str = "auto", quantized: bool = False
) -> torch.dtype:
    """The dtype to compute in. "auto" is the stored one, but on a CPU float32 in place of 16 bits.

    A CPU keeps bfloat16 where one of its instructions multiplies such numbers, the backend is "cpu"
    and linear layers are not quantized. Elsewhere bfloat16 would be no faster than float32.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu" or stored == "float64":
        return getattr(torch, stored)
    if stored == "bfloat16" and backend in ("auto", "cpu") and not quantized:
        from nanoengine.kernels.isa import CURRENT

        if CURRENT.bf16_dots != "generic":
            return torch.bfloat16
    return torch.float32
