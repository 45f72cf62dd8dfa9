"""RunnerOptions: the model to run, its device, dtype and kernels.

Called by the ModelRunner before it loads a model. Nothing is allocated here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.errors import ConfigError
from nanoengine.layers.collectives import Collectives
from nanoengine.layers.kernels import Kernels
from nanoengine.layers.layer import ModelContext, identity
from nanoengine.settings import cores
from nanoengine.settings.config import EngineConfig

if TYPE_CHECKING:
    from nanoengine.runner.sampling.logits_processors import LogitsProcessor

DEVICE_INDEPENDENT = ("naive", "triton")
"""Attention backends that determine the kernel set, whatever the device."""

THREAD_VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Environment variables with which a user sets the number of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What an executor runs; all ranks get the same options.

    Attributes:
        config: the user's settings.
        model_config: config of the checkpoint in `directory`.
        device, dtype, backend: resolved, never "auto".
        quantization: quantization of linear layers; None: floats of `dtype`, however they are
            stored.
        processors: makes the logits processors that run after those for SamplingParams.
    """

    config: EngineConfig
    model_config: ModelConfig
    directory: Path
    device: torch.device
    dtype: torch.dtype
    backend: str
    quantization: Quantization | None = None
    processors: Callable[[], Sequence[LogitsProcessor]] = tuple


def make_context(
    options: RunnerOptions, backend: AttentionBackend, ranks: Collectives
) -> ModelContext:
    """Makes the context that the layers of the model need.

    Raises:
        ConfigError: the kernels don't support the layers' sizes, or `deterministic`.
    """
    config, model_config, quantization = options.config, options.model_config, options.quantization
    device, dtype = options.device, options.dtype
    if config.deterministic and (quantization is not None or model_config.moe is not None):
        what = "quantized weights" if quantization else "mixtures of experts"
        raise ConfigError(
            f"deterministic=True is not supported for {what}: their products depend on the number"
            " of tokens; remove it"
        )
    kernels = make_kernels(backend, device=device, dtype=dtype, quantization=quantization)
    if quantization is None and model_config.quantization is not None:
        from nanoengine.layers.quantized import dequantize_all, quantized_linears

        stored = model_config.quantization
        as_stored = Quantization(bits=stored.bits, activations="float", stored=stored)
        kind = kernels.quantized_linear_factory() or dequantize_all
        kernels.linear = quantized_linears(as_stored, kernels.linear, kind)
    if quantization is not None and quantization.holds_embedding:
        kernels.embedding = kernels.linear
    activation_dtype, weight_dtype = kernels.dtypes(model_config, dtype, ranks.shard)
    return ModelContext(
        dtype=activation_dtype,
        weight_dtype=weight_dtype,
        keeps_weights=weight_dtype != dtype,
        device=device,
        kernels=kernels,
        max_positions=config.max_model_len,
        int8_cache=config.kv_cache_dtype == "int8",
        shard=ranks.shard,
        all_reduce=ranks.all_reduce if ranks.group else identity,
        all_gather=ranks.all_gather if ranks.group else identity,
    )


def make_kernels(
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> Kernels:
    """The kernel set of a device. It is plain torch for the naive backend, and for dtypes without
    kernels.

    Why imported here: an engine on a GPU then starts without numba, one on a CPU without Triton,
    and a naive one without either.
    """
    name, kind = backend.name, "" if backend.name in DEVICE_INDEPENDENT else device.type
    kernels = Kernels(backend)
    if name == "cpu" or (kind == "cpu" and dtype in (torch.float32, torch.float64)):
        from nanoengine.models.cpu import CPUKernels

        kernels = CPUKernels(backend, dtype=dtype)
    elif name == "triton" or (kind == "cuda" and dtype != torch.float64):
        from nanoengine.models.triton import TritonKernels

        kernels = TritonKernels(backend, dtype=dtype)
    if quantization is not None:
        from nanoengine.layers.quantized import quantized_linears

        has_kernels = name != "triton" or device.type == "cuda"  # Triton's interpreter has none
        make = kernels.quantized_linear_factory(quantization) if has_kernels else None
        kernels.linear = quantized_linears(quantization, kernels.linear, make)
    return kernels


def use_isa(config: EngineConfig) -> None:
    """Applies `cpu_isa`, before the first kernel is imported.

    Raises:
        ConfigError: the CPU lacks this instruction set, or the process already uses another one.
    """
    if config.cpu_isa is not None:
        from nanoengine.kernels import isa

        isa.use(config.cpu_isa)


def use_allowed_cores() -> None:
    """Limits the threads of torch, and so of the kernels, to the cores that the process may use.

    A number that the user has set is kept: by a variable of `THREAD_VARIABLES`, or by
    `torch.set_num_threads`, which torch would not choose by itself.
    """
    threads, allowed = torch.get_num_threads(), cores.allowed_cores()
    is_default = threads in cores.usual_threads() and not THREAD_VARIABLES & os.environ.keys()
    if threads > allowed and is_default:
        torch.set_num_threads(allowed)
