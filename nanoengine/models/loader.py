"""load_model: builds a model from a config and a directory, ready to run. Called by the runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.files import TensorInfo, stored_tensors
from nanoengine.checkpoint.layer_config import LayerConfig
from nanoengine.checkpoint.slots import OwnsWeights, TensorNames, WeightSlot
from nanoengine.checkpoint.weights import (
    check_sizes,
    drop_tied_head,
    dummy_weights,
    load_weights,
    tensors_to_run,
)
from nanoengine.errors import ConfigError
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.layer import ModelContext, pin_attributes
from nanoengine.models.decoder import CausalLM

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
"""The 16-bit dtypes in which weights may stay -> their names in safetensors."""
FLOATS = {"BF16", "F16", "F32", "F64"}
"""Stored dtypes that are floats; the others are integers."""

MAX_DEFAULT_CONTEXT = 2**20
"""Longest context [tokens] that is accepted without an explicit max_model_len. Why: the tables of
RoPE and of token ids have one entry per position."""


def load_model(
    config: ModelConfig,
    directory: str | Path,
    *,
    context: ModelContext,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
) -> CausalLM:
    """Builds the model of `config` on `context.device` and loads its weights.

    Args:
        directory: the checkpoint's directory, or its GGUF file.
        load_format: "auto" reads the checkpoint's files; "dummy" draws weights from `seed` and
            reads nothing.

    Raises:
        ConfigError: the model can't be split over ranks; `max_positions` exceeds its context; or
            `max_positions` is None, and the context is longer than `MAX_DEFAULT_CONTEXT`.
        WeightLoadError: see `stored_tensors`, `drop_tied_head`, `check_sizes` and `load_weights`.
    """
    context_len = config.context_len(context.max_positions)
    if context.max_positions is None and context_len > MAX_DEFAULT_CONTEXT:
        raise ConfigError(
            f"the model's context is {context_len} tokens (max_position_embeddings), longer than"
            f" the {MAX_DEFAULT_CONTEXT} that are allowed by default: set max_model_len"
        )
    if config.model_impl == "transformers":
        if context.shard.world_size > 1:
            what = f"{config.architecture}, which transformers' modules compute"
            raise ConfigError(f"tensor_parallel_size must be 1 for {what}")
        from nanoengine.models.transformers_backend import TransformersLM

        return TransformersLM(config, Path(directory), context, dummy=load_format == "dummy")
    stored: dict[str, TensorInfo] = {}
    if load_format == "auto":
        stored = tensors_to_run(config, stored_tensors(Path(directory)))
    names = TensorNames(config.tensor_names, stored)
    if load_format == "auto":
        if config.tie_word_embeddings:
            drop_tied_head(stored, names("lm_head.weight"), names("model.embed_tokens.weight"))
        check_sizes(config, stored, names)
        dtypes = {
            tensor.dtype
            for name, tensor in stored.items()
            if len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2]
        }
        wider = (dtypes & FLOATS) - {DTYPES.get(context.stored_dtype)}
        if context.keeps_weights and wider:
            context = replace(context, weight_dtype=None)
    check_ranks(config, context.shard.world_size)
    model = model_class(config)(config, context).eval()
    if config.headless:
        from nanoengine.models.headless import strip_lm_head

        model = strip_lm_head(model)
    if config.mtp is not None:
        from nanoengine.models.mtp import MTP

        model.mtp = MTP(model.model, config.mtp, context)
    context.kernels.place(model)
    slots = weight_slots(model)
    if any(name.endswith((".k_scale", ".v_scale")) for name in stored):
        from nanoengine.layers.kv_scales import scale_slots

        slots |= scale_slots(model)
    if load_format == "dummy":
        dummy_weights(names.of(slots), seed)
    else:
        named = names.of(slots)
        if config.quantization is not None and config.quantization.format == "gguf":
            from nanoengine.layers.quantized_formats import accept_blocks

            named = accept_blocks(named, stored)
        load_weights(named, stored)
    for module in model.modules():
        if isinstance(module, LinearMethod):
            module.finish()
    if context.int8_cache and config.plan.qkv_bias and config.plan.qk_norm is None:
        from nanoengine.models.key_factors import balance_keys

        balance_keys(model, context.dtype)
    context.kernels.fuse(model)
    pin_attributes(model)
    return model


def model_class(config: ModelConfig) -> type[CausalLM]:
    """Returns `CausalLM` for configs of any family that compute the same as Llama or Qwen3, with or
    without biases; otherwise the class that supports the config."""
    ignored = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    plans = LayerConfig(**ignored), LayerConfig(**ignored, qk_norm="per_head")
    (rope, *more_ropes) = set(config.ropes)
    plain_rope = not more_ropes and rope is not None and not rope.llama_4_scaling_beta
    dense = config.moe is None and config.states is None and config.plan.hidden_act != "relu2"
    if dense and plain_rope and replace(config.plan, **ignored) in plans:
        return CausalLM
    if config.plan.gemma4 is not None:
        from nanoengine.models.gemma4 import Gemma4LM

        return Gemma4LM
    if config.plan.falcon_h1 is not None or config.plan.layers_block_type is not None:
        from nanoengine.models.mamba_layers import MambaLM

        return MambaLM
    from nanoengine.models.generic import GenericLM

    return GenericLM


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raises ConfigError if a size that is split is not a multiple of the number of ranks. Ranks
    share KV heads if there are fewer KV heads than ranks."""
    is_mamba = config.states is not None and config.states.kind == "mamba"
    groups = "mamba_n_groups" if is_mamba else "linear_num_key_heads"
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "moe_intermediate_size": config.moe.intermediate_size if config.moe else 0,
        "shared_expert_intermediate_size": config.moe.shared_size if config.moe else 0,
        groups: config.states.num_key_heads if config.states else 0,
        "hidden_size": config.states.channels if config.states else 0,
    }
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(f"tensor_parallel_size={ranks} must divide {name}={size}")
    kv_heads = config.num_key_value_heads
    if kv_heads % ranks and ranks % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={ranks} must divide num_key_value_heads={kv_heads}, or be a"
            " multiple of it"
        )


def weight_slots(model: CausalLM) -> dict[str, WeightSlot]:
    """All slots of a model, by the names that this package gives to tensors."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, OwnsWeights):
            own = module.weight_slots(path)
            assert not slots.keys() & own.keys(), f"{path} repeats slots of another layer"
            slots.update(own)
    return slots


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """Returns (number of weights, their size in memory [bytes]); scales are not weights."""
    parameters = list(model.parameters())
    methods = [module for module in model.modules() if isinstance(module, LinearMethod)]
    return (
        sum(p.numel() for p in parameters) + sum(method.num_weights for method in methods),
        sum(p.nbytes for p in parameters) + sum(b.nbytes for m in methods for b in m.buffers()),
    )
