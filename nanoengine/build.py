"""build_engine: the composition root, from an EngineConfig to a running LLMEngine.

Only this file knows both the core and the implementations of its interfaces. It resolves the value
"auto" of settings and returns the results in EngineInfo; the config itself never changes.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from nanoengine.attention import resolve_backend
from nanoengine.checkpoint import find
from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.find import resolve_device, resolve_dtype, resolve_memory, resolve_model
from nanoengine.checkpoint.quantization import resolve_quantization
from nanoengine.core.engine_stats import EngineInfo
from nanoengine.core.layout import KVLayout
from nanoengine.core.make import make_block_manager
from nanoengine.core.policies import make_policy
from nanoengine.core.prefix_cache import PrefixCache
from nanoengine.core.scheduler import Scheduler
from nanoengine.engine import LLMEngine
from nanoengine.errors import ConfigError
from nanoengine.features.logits_processors import LogitsProcessors
from nanoengine.runner.model_runner import ModelRunner
from nanoengine.runner.options import RunnerOptions, use_allowed_cores, use_isa
from nanoengine.settings.config import EngineConfig
from nanoengine.text.load_tokenizer import with_tokenizer_eos
from nanoengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, tokenizer: Tokenizer | None = None) -> LLMEngine:
    """Starts an engine: finds the model, resolves device, dtype and backend, and loads the weights.

    Args:
        tokenizer: the model's tokenizer, whose EOS also ends answers; None: it is not loaded.

    Raises:
        ConfigError: a setting is impossible on this machine or for this model.
        ModelError: the checkpoint can't be run.
    """
    try:
        return _build_engine(config, tokenizer)
    except (MemoryError, torch.OutOfMemoryError) as error:
        sizes = ("max_num_seqs", "max_model_len", "num_kv_blocks", "kv_cache_gib", "kv_tiers")
        current = ", ".join(f"{name}={getattr(config, name)!r}" for name in sizes)
        raise ConfigError(
            f"this machine has too little memory: {error}; lower one of these settings: {current}"
        ) from error


def _build_engine(config: EngineConfig, tokenizer: Tokenizer | None) -> LLMEngine:
    started = time.perf_counter()
    if config.trace is not None and not Path(config.trace).absolute().parent.is_dir():
        raise ConfigError(f"trace={config.trace!r}: its directory does not exist; create it first")
    directory = resolve_model(config)
    model_config = with_tokenizer_eos(
        load_model_config(directory, model_impl=config.model_impl), tokenizer
    )
    if not model_config.eos_token_ids and not model_config.headless:
        message = "%s defines no EOS token: set max_tokens, stop or stop_token_ids to end outputs"
        logger.warning(message, config.model)
    device = resolve_device(config.device)
    if device.type == "cpu":
        use_allowed_cores()
    use_isa(config)
    config = resolve_memory(config, device)
    dtype = resolve_dtype(
        config.dtype,
        model_config.dtype,
        device,
        backend=config.attention_backend,
        quantized=bool(config.quantization or model_config.quantization),
    )
    find.check_dtype_range(model_config.architecture, dtype)
    backend = resolve_backend(config.attention_backend, device, dtype)
    quantization = resolve_quantization(
        config.quantization, model_config.quantization, device=device.type
    )
    processors = LogitsProcessors(config, model_config)
    options = RunnerOptions(
        config=config,
        model_config=model_config,
        directory=directory,
        device=device,
        dtype=dtype,
        backend=backend,
        quantization=quantization,
        processors=processors,
    )
    executor: Any = ModelRunner
    if config.tensor_parallel_size > 1:
        from nanoengine.ranks.executor import RankedExecutor as executor
    if config.speculative:
        from nanoengine.features.speculative.factory import speculative_executor

        executor = speculative_executor(options, executor)
    runner = executor(options)
    layout = runner.start()
    try:
        engine = _make_engine(runner, layout, started)
    except BaseException:
        runner.shutdown()
        raise
    if config.trace is not None:
        from nanoengine.observe.trace import trace_engine

        try:
            trace_engine(engine, config.trace, config=config)
        except BaseException:
            engine.close()
            raise
    logger.info("%s: %s on %s, attention %s", config.model, dtype, device, backend)
    if quantization is not None:
        logger.info("quantization: %s", quantization)
    elif model_config.quantization is not None and not runner.products:
        logger.warning(
            "weights stored in %s are dequantized to %s where this device has no kernel for the"
            " stored format: %.1f GiB of weights",
            model_config.quantization.kind, dtype, runner.weight_bytes / 2**30,
        )  # fmt: skip
    logger.info("%s", "\n".join((*runner.products, str(runner.memory))))
    return engine


def _make_engine(runner: ModelRunner, layout: KVLayout, started: float) -> LLMEngine:
    """The engine over a started executor."""
    device, memory, config = runner.device, runner.memory, runner.options.config
    budget = config.step_budget(device.type)
    if not config.enable_chunked_prefill and budget < memory.max_model_len:
        raise ConfigError(
            f"without chunked prefill a prompt runs in one step: max_num_batched_tokens="
            f"{budget} must be at least max_model_len={memory.max_model_len}"
        )
    prefix_cache: PrefixCache | None = None
    if config.kv_tiers:
        from nanoengine.features.kv_tiers import tiered_cache

        prefix_cache = tiered_cache(runner, layout)
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
            policy=make_policy(config.admission),
        )
        overlap = device.type == "cuda" if config.overlap is None else config.overlap

        def make_proposer() -> Any:
            from nanoengine.features.speculative.factory import make_drafting

            return make_drafting(config, runner, manager, overlap)

        info = _info(runner, layout, time.perf_counter() - started)
        engine = LLMEngine(
            runner,
            scheduler,
            info,
            seed=config.seed,
            overlap=overlap,
            debug_checks=config.debug_checks,
            make_proposer=make_proposer,
            processors=runner.options.processors,
        )
        if runner.model_config.headless:
            from nanoengine.features.pooling import HeadlessChecker

            engine.checker = HeadlessChecker(info, manager)
        if config.speculative or config.logits_processors:
            engine.enable_drafts()  # Why processors: one may force tokens, which are drafted.
        return engine
    except BaseException:
        # Why: the error may live on, for example in a notebook, and keep the disk's lock.
        if prefix_cache is not None and prefix_cache.tiers is not None:
            prefix_cache.tiers.close()
        raise


def _info(runner: ModelRunner, layout: KVLayout, start_s: float) -> EngineInfo:
    """What was determined at start."""
    model_config, quantization = runner.model_config, runner.options.quantization
    return EngineInfo(
        model_name=runner.options.config.model,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        max_model_len=runner.memory.max_model_len,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        quantization=str(quantization) if quantization else None,
        weight_bits=quantization.bits if quantization else None,
        attention_backend=runner.options.backend,
        num_parameters=runner.num_parameters,
        weight_bytes=runner.weight_bytes,
        products=runner.products,
        num_kv_blocks=layout.num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        load_s=runner.load_s,
        start_s=start_s,
        memory_plan=str(runner.memory),
        kv_cache_dtype=str(runner.kv_dtype).removeprefix("torch."),
        generation_defaults=dict(model_config.generation_defaults),
    )
