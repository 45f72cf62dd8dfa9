"""What a model computes and stores in, and by which layers: what the config means on a device.

Called by the ModelRunner before it loads a model. Nothing is allocated here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.errors import ConfigError
from nanoengine.layers.choose import linear_method_for, make_ops
from nanoengine.layers.collectives import Collectives
from nanoengine.layers.context import ModelContext, one_rank
from nanoengine.layers.linear_method import LinearMethod
from nanoengine.layers.shard import Shard
from nanoengine.settings.config import EngineConfig


def make_context(
    config: EngineConfig,
    model_config: ModelConfig,
    quantization: Quantization | None,
    backend: AttentionBackend,
    *,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Collectives,
) -> ModelContext:
    """What the layers of a model of `dtype` need.

    Raises:
        ConfigError: the layers' sizes are odd, or `deterministic` can't be had.
    """
    by_kernels = device.type == "cpu" and backend.name == "cpu"
    # The CPU's kernels round to bfloat16 only what they multiply: between two products is float32.
    rounds = by_kernels and dtype == torch.bfloat16
    activation_dtype = torch.float32 if rounds else dtype
    weight_dtype = activation_dtype
    if by_kernels:
        weight_dtype = _weight_dtype(model_config, dtype, ranks.shard)
    if config.deterministic:
        linear_methods = _deterministic_methods(model_config, quantization)
    else:
        linear_methods = linear_method_for(
            device, activation_dtype, quantization, rounds_inputs=rounds
        )
    return ModelContext(
        dtype=activation_dtype,
        weight_dtype=weight_dtype,
        keeps_weights=weight_dtype != dtype,
        device=device,
        attention_backend=backend,
        ops=make_ops(device, activation_dtype),
        linear_method_factory=linear_methods,
        max_positions=config.max_model_len,
        shard=ranks.shard,
        all_reduce=ranks.all_reduce if ranks.group else one_rank,
        all_gather=ranks.all_gather if ranks.group else one_rank,
    )


def _weight_dtype(config: ModelConfig, dtype: torch.dtype, shard: Shard) -> torch.dtype:
    """What weights on a CPU are stored in: 16 bits where they come so, since kernels read those."""
    # Why even: weights of 16 bits are read in pairs of inputs.
    sizes = {
        key: size if key == "hidden_size" else shard.split(size)
        for key, size in config.linear_inputs.items()
    }
    if any(size % 2 for size in sizes.values()):
        if dtype == torch.bfloat16:
            given = " and ".join(f"{key}={size}" for key, size in sizes.items())
            raise ConfigError(
                f"dtype='bfloat16' on a CPU needs layers of an even number of inputs, got"
                f" {given}, which must be even on each rank: set dtype='float32'"
            )
        return dtype
    stored = getattr(torch, config.dtype)
    return stored if dtype == torch.float32 and stored.itemsize == 2 else dtype


def _deterministic_methods(
    config: ModelConfig, quantization: Quantization | None
) -> Callable[[str], LinearMethod]:
    """One matrix multiplication with a fixed tile for all linear layers."""
    if quantization is not None or config.moe is not None:
        what = "quantized weights" if quantization else "mixtures of experts"
        raise ConfigError(
            f"deterministic=True does not cover {what}: their products depend on the number of"
            " tokens; leave it out"
        )
    from nanoengine.layers.triton_linear import TritonLinear

    return TritonLinear


def use_isa(config: EngineConfig) -> None:
    """Obeys `cpu_isa`, before the first kernel is imported.

    Raises:
        ConfigError: a set that the CPU lacks, or not the one that this process uses already.
    """
    if config.cpu_isa is not None:
        from nanoengine.kernels import isa

        isa.use(config.cpu_isa)
