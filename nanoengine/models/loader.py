"""load_model: builds a model from a config and a directory, ready to run. Called by the runner."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.files import TensorInfo, stored_tensors
from nanoengine.checkpoint.layer_config import LayerConfig
from nanoengine.checkpoint.slots import OwnsWeights, TensorNames, WeightSlot
from nanoengine.checkpoint.weights import check_sizes, drop_tied_head, dummy_weights, load_weights
from nanoengine.errors import ConfigError
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.layer import ModelContext, pin_attributes
from nanoengine.models.decoder import CausalLM

log = logging.getLogger(__name__)

DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
"""safetensors' names of the dtypes in which weights are kept."""
FLOATS = {"BF16", "F16", "F32", "F64"}
"""Stored dtypes that are floats; the others are integers."""

CLASSES = "score.weight"
"""A classification head; only pooling for classes reads it."""

LONGEST_DEFAULT = 2**20
"""Longest context [tokens] that is accepted without an explicit max_model_len. Why: the tables of
RoPE and of token ids have an entry per position."""


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
        ConfigError: the ranks don't divide the model, or `max_positions` exceeds its context; or it
            is not given, and the context is longer than `LONGEST_DEFAULT`.
        WeightLoadError: see `stored_tensors`, `drop_tied_head`, `check_sizes` and `load_weights`.
    """
    context_len = config.max_position_embeddings
    if context.max_positions is None and context_len > LONGEST_DEFAULT:
        raise ConfigError(
            f"the model's context is {context_len} tokens (max_position_embeddings): say how many"
            f" are needed with max_model_len=..., which is taken from the model up to"
            f" {LONGEST_DEFAULT} only"
        )
    stored: dict[str, TensorInfo] = {}
    if load_format == "auto":
        stored = tensors_to_run(config, stored_tensors(Path(directory)))
    names = TensorNames(config.tensor_names, stored)
    if load_format == "auto":
        if config.tie_word_embeddings:
            drop_tied_head(stored, names("lm_head.weight"), names("model.embed_tokens.weight"))
        check_sizes(config, stored, names)
        kinds = {
            tensor.dtype
            for name, tensor in stored.items()
            if len(tensor.shape) > 1 and "scale" not in name.rpartition(".")[2]
        }
        wider = (kinds & FLOATS) - {DTYPES.get(context.stored_dtype)}
        if context.keeps_weights and wider:
            context = replace(context, weight_dtype=None)
    check_ranks(config, context.shard.world_size)
    model = model_class(config)(config, context).eval()
    if config.headless:
        from nanoengine.models.headless import strip_lm_head

        model = strip_lm_head(model)
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
            named = _taking_blocks(named, stored)
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


def _taking_blocks(
    slots: Mapping[str, WeightSlot], stored: Mapping[str, TensorInfo]
) -> dict[str, WeightSlot]:
    """Returns the slots; slots of floats accept blocks if the GGUF file stores these."""
    from nanoengine.layers.quantized_formats import as_floats

    found: dict[str, WeightSlot] = {}
    for name, slot in slots.items():
        kind = stored[name].dtype if name in stored else "F32"
        if kind not in FLOATS and not slot.dtypes and not slot.pieces_only:
            slot = as_floats(slot, kind)
        found[name] = replace(slot, pieces=_taking_blocks(slot.pieces, stored))
    return found


def model_class(config: ModelConfig) -> type[CausalLM]:
    """`CausalLM` for everything that Llama and Qwen3 compute, with or without biases, for any
    family; else the class of the variant."""
    named = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    plans = LayerConfig(**named), LayerConfig(**named, qk_norm="per_head")
    (rope, *others) = set(config.ropes)
    alike = not others and rope is not None and not rope.llama_4_scaling_beta
    dense = config.moe is None and config.states is None
    if dense and alike and replace(config.plan, **named) in plans:
        return CausalLM
    if config.plan.gemma4 is not None:
        from nanoengine.models.gemma4 import Gemma4LM

        return Gemma4LM
    if config.plan.falcon_h1 is not None or config.plan.layers_block_type is not None:
        from nanoengine.models import mamba_layers

        return (
            mamba_layers.NemotronHLM if config.plan.falcon_h1 is None else mamba_layers.FalconH1LM
        )
    from nanoengine.models.generic import GenericLM

    return GenericLM


def check_ranks(config: ModelConfig, ranks: int) -> None:
    """Raises ConfigError unless every rank gets an equal part of everything that is split. There
    may be fewer KV heads than ranks; then ranks share them."""
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


def tensors_to_run(config: ModelConfig, stored: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Returns the tensors that are run, without those for images or drafts."""
    if config.headless:
        stored = {name: tensor for name, tensor in stored.items() if name != CLASSES}
    if not config.ignored_tensors:
        return stored
    ignored_tensors = {name: re.match(config.ignored_tensors, name) for name in stored}
    parts = sorted({match[0] for match in ignored_tensors.values() if match})
    if not parts:
        return stored
    kept = {name: tensor for name, tensor in stored.items() if not ignored_tensors[name]}
    log.warning(
        "not all of this checkpoint is run: %d of its %d tensors are left out (%s)",
        len(stored) - len(kept), len(stored), ", ".join(parts),
    )  # fmt: skip
    return kept


def weight_slots(model: CausalLM) -> dict[str, WeightSlot]:
    """All slots of a model by their names in this program."""
    slots: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, OwnsWeights):
            own = module.weight_slots(path)
            assert not slots.keys() & own.keys(), f"{path} offers slots of another layer"
            slots.update(own)
    plan = model.config.plan
    if plan.transposed_matrices or plan.norm.startswith("no_weight"):
        from nanoengine.layers.layouts import as_stored

        slots = as_stored(slots, plan)
    return slots


def model_size(model: torch.nn.Module) -> tuple[int, int]:
    """Returns (number of weights, their size here [bytes]); a quantized weight counts as one."""
    parameters = list(model.parameters())
    methods = [module for module in model.modules() if isinstance(module, LinearMethod)]
    return (
        sum(p.numel() for p in parameters) + sum(method.num_weights for method in methods),
        sum(p.nbytes for p in parameters) + sum(b.nbytes for m in methods for b in m.buffers()),
    )
