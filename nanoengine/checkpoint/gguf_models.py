"""Converts the metadata of a GGUF file to a config.json, and adapts the ModelConfig to the file.

A key that changes the computation and is not implemented raises an error with its name and value.
Called by `config.py` if the model is a GGUF file; `gguf_keys.py` reads keys, `gguf_tensors.py`
names tensors, and `Family.gguf` has the differences between GGUF files and checkpoints per family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader, Json
from nanoengine.checkpoint.families import every_family, gguf_families
from nanoengine.checkpoint.gguf import FLOATS, TYPES, read_rows
from nanoengine.checkpoint.gguf_keys import SCORING_FUNCS, GGUFConfigReader, Metadata
from nanoengine.checkpoint.gguf_tensors import ROPE_FACTORS, Entry, GGUFModel
from nanoengine.checkpoint.layer_config import FULL, SLIDING
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.rope import ORIGINAL
from nanoengine.errors import UnsupportedModelError

# fmt: off
YARN_KEYS = "attention_factor", "beta_fast", "beta_slow"
POSITION_SCALE_KEYS = "mscale_all_dim", "llama_4_scaling_beta"
"""Keys of `rope_parameters` for models that scale queries by their position."""
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of `general.sampling` -> keys of generation_config.json."""
BIASES = {
    "qkv_bias": (".q_proj.bias", ".qkv_proj.bias"), "output_bias": (".o_proj.bias",),
    "mlp_bias": (".mlp.down_proj.bias",),
}
"""Field of `LayerConfig` -> suffixes of tensor names that show that it is set. Why not a key: no
file has one."""
BIAS_KEYS = {
    **dict.fromkeys(("attention_bias", "use_qkv_bias", "use_bias"), ".q_proj.bias"),
    "mlp_bias": ".mlp.down_proj.bias", "lm_head_bias": "lm_head.bias",
}
"""The same for keys of transformers' configs."""
END_TOKENS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
)
"""Control tokens that always end an output. Why: files have keys for only one or two of the EOS
tokens in a generation_config.json. Source: `llama_vocab::impl::load` of llama.cpp."""
CONTROL_TYPE = 3
"""The id of the token type "control"."""
# fmt: on


def read_config(
    path: Path, parse: Callable[..., Any], parse_by_transformers: Callable[..., Any]
) -> Any:
    """Reads the ModelConfig of a GGUF file.

    Args:
        parse, parse_by_transformers: functions of `config.py`, which would be circular imports.

    Raises:
        UnsupportedModelError: see `parse`; the message has the keys of the GGUF file.
    """
    model = GGUFModel(path)
    make_reader = partial(GGUFConfigReader, model.metadata)
    try:
        if model.architecture in every_family():
            return adapt_to_file(parse(*config_json(model), make_reader), model)
        return adapt_to_file(parse_by_transformers(path, *config_json(model)), model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(with_gguf_keys(model, str(error))) from error


def config_json(model: GGUFModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json and generation_config.json of the model, without the keys that
    `GGUFConfigReader` finds in the metadata. See there for values of None.

    Raises:
        UnsupportedModelError: a key that changes the computation is not implemented, or has the
            wrong type; the message has file, key, value and what is allowed.
    """
    metadata, differences, tensors = model.metadata, model.differences, model.tensors
    family, family_keys = gguf_families()[model.architecture], differences.read(metadata)
    raw: dict[str, Any] = {"architectures": [model.architecture], "eos_token_id": []}
    raw |= differences.constants
    experts = () if family.moe is None else ("expert_count", "expert_used_count")
    for name in ("feed_forward_length", *experts, *differences.ignored_keys):
        metadata.get(name, Any)
    raw["num_hidden_layers"] = metadata.num_main_layers
    if "num_key_value_heads" not in family_keys:
        heads = metadata.uniform("attention.head_count_kv", int)
        raw["num_key_value_heads"] = heads or metadata.uniform("attention.head_count", int)
    head_dim = raw["head_dim"] = metadata.head_dim
    is_mla = "qk_rope_head_dim" in family_keys
    if metadata.uniform("attention.value_length", int, head_dim) != head_dim and not is_mla:
        metadata.reject("attention.value_length", f"{head_dim}, the head dim of keys")
    epsilons = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
    # Why both: some files have the key of the other kind of norm.
    names = epsilons if family.norm_eps != "rms_norm_eps" else epsilons[::-1]
    found = [value for name in names if (value := metadata.get(name, float)) is not None]
    raw[family.norm_eps] = found[0] if found else metadata.reject(epsilons[1], "a number")
    if not metadata.get("attention.causal", bool, True):
        metadata.reject("attention.causal", "True")
    rotary_dim = metadata.get("rope.dimension_count", int, head_dim)
    if family.partial_rotary:
        raw["rotary_dim"] = rotary_dim
    elif rotary_dim != head_dim and not is_mla:
        metadata.reject("rope.dimension_count", f"{head_dim}, the head dim")
    if score := metadata.get("expert_gating_func", int):
        name = SCORING_FUNCS.get(score)
        raw["scoring_func"] = name or metadata.reject("expert_gating_func", "1 and 2")
    if "use_qk_norm" in raw:
        raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if "token_embd.weight" in tensors:
        size = tensors["token_embd.weight"].shape[0]
        raw |= {"vocab_size": size, "vocab_size_per_layer_input": size}
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    windows = metadata.window_keys(differences.full_every, raw["num_hidden_layers"])
    raw |= windows | _rope_keys(model) | family_keys
    sampling = {to: metadata.read(f"general.sampling.{key}", float) for key, to in SAMPLING.items()}
    return raw, {key: value for key, value in sampling.items() if value is not None}


def transformers_keys(model: GGUFModel) -> Json:
    """The arguments of transformers' config class for a model of `families/gguf_only.py`.

    Raises:
        UnsupportedModelError: see `config_json`.
    """
    from transformers import AutoConfig

    family, metadata = gguf_families()[model.architecture], model.metadata
    (raw, _), entries = config_json(model), model.entries()
    keys = GGUFConfigReader(metadata, raw, family.defaults, model_type=family.model_type)
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    names = AutoConfig.for_model(family.model_type, **tokens).to_dict()
    found = {name: raw[name] for name in names if raw.get(name) is not None}
    found |= {name: keys.get(name) for name in names if name in SCHEMA and name in keys}
    for name in names.keys() & BIAS_KEYS.keys():
        found[name] = any(entry.endswith(BIAS_KEYS[name]) for entry in entries)
    full, sliding = family.rope_theta_keys or ("rope_theta", "")
    rope: Json = {"rope_type": "default", "rope_theta": raw[full], **raw.get("rope_scaling", {})}
    rope |= {name: raw[name] for name in (ORIGINAL,) if name in raw}
    if family.partial_rotary:
        rope |= {"partial_rotary_factor": raw["rotary_dim"] / raw["head_dim"]}
    if sliding:
        size = metadata.get("rope.dimension_count_swa", int, raw["head_dim"])
        factors = {"rope_theta": raw[sliding], "partial_rotary_factor": size / raw["head_dim"]}
        rope = {FULL: rope, SLIDING: {"rope_type": "default", **factors}}
    model.differences.values(metadata)
    metadata.reject_unread()
    return {**found, **tokens, "model_type": family.model_type, "rope_parameters": rope}


def with_gguf_keys(model: GGUFModel, message: str) -> str:
    """Replaces names of config.json keys in an error message by keys of the GGUF file."""
    if (path := str(model.metadata.path)) in message:
        return message
    own = f"{model.metadata.architecture}."
    names = {key: own + spec.gguf for key, spec in SCHEMA.items() if spec.gguf}
    names |= {ours: f"general.sampling.{key}" for key, ours in SAMPLING.items()}
    names |= {"vocab_size": "tokens", "eos_token_id": "tokenizer.ggml.eos_token_id"}
    message = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], message)
    return f"{path}: {re.sub(r'(generation_)?config.json:? ', '', message)}"


def adapt_to_file(config: Any, model: GGUFModel) -> Any:
    """Returns the ModelConfig with the fields changed that differ in this GGUF file."""
    layer, moe, states, entries = config.plan, config.moe, config.states, model.entries()
    biases = {part: any(name.endswith(ends) for name in entries) for part, ends in BIASES.items()}
    # Why: writers store 1 + weight.
    norm = "fp32_weight" if layer.norm == "one_plus_weight" else layer.norm
    mtp_layers = range(config.num_hidden_layers, model.metadata.num_layers)
    ignored = [config.ignored_tensors] if layer.gemma4 else []
    ignored += [rf"model\.layers\.({'|'.join(map(str, mtp_layers))})\."] if mtp_layers else []
    types = {entry.tensor.type for entry in entries.values() if len(entry.shape) > 1}
    fused = layer.fused_gate_up and not any(name.endswith(".gate_proj.weight") for name in entries)
    if moe is not None:
        moe = replace(moe, inputs_first=False, correction_bias=bool(moe.correction_bias))
    if states is not None:
        states = replace(states, fused_qkvz=False, tiled=model.differences.tiled)
    if states is not None and states.kind == "mamba":
        parts = {name.partition(".mamba.")[2] for name in entries}
        gate_norm = states.norm if "norm.weight" in parts else None
        states = replace(states, conv_bias="conv1d.bias" in parts, norm=gate_norm)
    return replace(
        config,
        plan=replace(layer, norm=norm, fused_gate_up=fused, **biases),
        moe=moe,
        states=states,
        tensor_names={},
        ignored_tensors="|".join(filter(None, ignored)),
        dtype={"F16": "float16", "BF16": "bfloat16"}.get("".join(types), "float32"),
        quantization=_quantization(entries),
        eos_sources=tuple(_eos_sources(model.metadata)),
    )


def _rope_keys(model: GGUFModel) -> Json:
    """The RoPE parameters as keys of config.json. Files with llama3 or longrope store a tensor with
    a divisor per RoPE frequency instead of the parameters; longrope has two such tensors."""
    metadata, family = model.metadata, gguf_families()[model.architecture]
    base = metadata.get("rope.freq_base", float, 1e4)
    full, sliding = family.rope_theta_keys or ("rope_theta", "rope_theta")
    default = base if sliding == full else 1e4
    sliding_base = metadata.get("rope.freq_base_swa", float, default)
    if sliding == full and sliding_base != base:
        metadata.reject("rope.freq_base_swa", f"{base}, as in layers without a window")
    found: dict[str, Any] = {full: base, sliding: sliding_base}
    kind = metadata.get("rope.scaling.type", str, "linear")
    factor = metadata.get("rope.scaling.factor", float)
    factor = factor or metadata.get("rope.scale_linear", float) or 1
    magnitude = metadata.get("rope.scaling.attn_factor", float, 1.0)
    stored = [model.tensors[name] for name in ROPE_FACTORS if name in model.tensors]
    factors = [read_rows(tensor).flatten().tolist() for tensor in stored]
    scaling: dict[str, Any] = {}
    reader = ConfigReader({}, family.defaults, model_type=family.model_type)
    if FULL in (usual := reader.get_dict("rope_parameters")):
        return _proportional_rope_keys(metadata, factors, base, sliding_base)
    if factors:
        long, short = factors[0], factors[-1]
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["attention_factor"] = magnitude
        if len(factors) > 2 or kind == "yarn" or factor != 1:
            metadata.reject("rope.scaling.type", f"none, with a tensor such as {ROPE_FACTORS[0]}")
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "truncate": usual.get("truncate")}
        scaling |= {key: metadata.get(SCHEMA[key].gguf, float) for key in YARN_KEYS}
        if "llama_4_scaling_beta" in usual:
            scaling |= {key: metadata.get(SCHEMA[key].gguf, float) for key in POSITION_SCALE_KEYS}
            scaling["mscale"] = 1.0  # Why: no file has another value.
        elif metadata.architecture == "deepseek2":
            # Why times ten: writers multiply it by 0.1. `mscale` is not stored; it is the same.
            log = 10 * metadata.get("rope.scaling.yarn_log_multiplier", float, 0.0)
            scaling |= {"mscale": log, "mscale_all_dim": log} if log else {}
        if metadata.get("rope.scaling.yarn_ext_factor", float, 1.0) != 1:
            metadata.reject("rope.scaling.yarn_ext_factor", "1")
    elif kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        metadata.reject("rope.scaling.type", "none, linear, yarn, and longrope with its tensors")
    if "llama_4_scaling_beta" in usual.keys() - scaling.keys():
        metadata.reject("attention.temperature_scale", "0 without yarn")
    if magnitude != 1 and not factors:
        metadata.reject("rope.scaling.attn_factor", "1 without longrope's tensors")
    original = metadata.get("rope.scaling.original_context_length", int)
    if scaling:
        found["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
        found[ORIGINAL] = original or metadata.get("context_length", int)
    return found


def _eos_sources(metadata: Metadata) -> Iterator[tuple[str, int | None]]:
    """See `ModelConfig.eos_sources`: keys, and control tokens that are in `END_TOKENS`."""
    prefix = "tokenizer.ggml"
    tokens = metadata.read(f"{prefix}.tokens", list[str], [])
    types = metadata.read(f"{prefix}.token_type", list[int], [])
    found = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in END_TOKENS and kind == CONTROL_TYPE
    }
    if {"<|return|>", "<|call|>"} <= found.keys():
        found.pop("<|end|>", None)  # Why: in gpt-oss it ends a message, not the output.
    for key in (f"{prefix}.{name}_token_id" for name in ("eos", "eot", "eom")):
        yield key, metadata.read(key, int)
    yield from (("its known name", token_id) for token_id in found.values())


def _quantization(entries: Mapping[str, Entry]) -> StoredQuantization | None:
    """How matrices are stored; None: as floats."""
    stored = {name: entry.tensor.type for name, entry in entries.items()}
    types = {name.removesuffix(".weight"): t for name, t in stored.items() if t not in FLOATS}
    if not types:
        return None
    blocks = [TYPES[kind] for kind in types.values()]
    bits = sum(8 * block.bytes / block.inputs for block in blocks) / len(blocks)
    return StoredQuantization(
        format="gguf",
        bits=8 if bits > 6.5 else 4,
        group_size=None,
        activations="int8",
        types=types,
    )


# fmt: off
def _proportional_rope_keys(
    metadata: Metadata, factors: list[list[float]], full: float, sliding: float,
) -> Json:
    """Gemma 4: in layers with full attention, pairs of dimensions without RoPE have a huge divisor,
    so that they are hardly rotated."""
    divisors = factors[0] if factors else [1.0]
    rotated = divisors.count(1.0)
    if len(factors) > 1 or min(divisors[rotated:], default=1e30) < 1e29:
        metadata.reject("rope.scaling.type", f"{ROPE_FACTORS[0]} with 1, followed by 1e30")
    scaled = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(divisors)}
    return {"rope_parameters": {
        FULL: {**scaled, "rope_theta": full},
        SLIDING: {"rope_type": "default", "rope_theta": sliding},
    }}
# fmt: on
