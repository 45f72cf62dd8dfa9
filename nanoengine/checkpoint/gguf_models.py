"""Converts a GGUF file's metadata to a config.json, and handles their differences.

A key that changes the computation and is not implemented is rejected, with its name and value.
Called by `config.py` if a model is a GGUF file; `gguf_keys.py` reads keys, `gguf_tensors.py` names
tensors, `Family.gguf` has the differences of a family's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nanoengine.checkpoint.config_reader import KEYS, ConfigReader, Json
from nanoengine.checkpoint.families import every_family
from nanoengine.checkpoint.gguf import FLOATS, TYPES, read_rows
from nanoengine.checkpoint.gguf_keys import SCORES, GGUFKeys, Metadata
from nanoengine.checkpoint.gguf_tensors import ROTATIONS, Entry, GGUFModel
from nanoengine.checkpoint.layer_config import FULL, SLIDING
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.rope import ORIGINAL
from nanoengine.errors import UnsupportedModelError

# fmt: off
YARN = "attention_factor", "beta_fast", "beta_slow"
GROWING = "mscale_all_dim", "llama_4_scaling_beta"
"""Keys of `rope_parameters` for models that scale queries by their position."""
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of `general.sampling` -> keys of generation_config.json."""
BIASES = {
    "qkv_bias": (".q_proj.bias", ".qkv_proj.bias"), "output_bias": (".o_proj.bias",),
    "mlp_bias": (".mlp.down_proj.bias",), "lm_head_bias": ("lm_head.bias",),
}
"""Field of `LayerConfig` -> endings of tensor names that indicate it. Why not a key: no file has
one."""
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
)
"""Control tokens that always end an output: files have only one or two of the EOS tokens in a
generation_config.json. Source: `llama_vocab::impl::load` of llama.cpp."""
CONTROL = 3
"""The type of a control token."""
# fmt: on


def read_config(path: Path, parse: Callable[..., Any]) -> Any:
    """The ModelConfig of a GGUF file.

    Args:
        parse: makes it from a config.json, like `config.parse_model_config`.

    Raises:
        UnsupportedModelError: as `parse` does, with the file's own keys.
    """
    model = GGUFModel(path)
    try:
        return as_in_file(model, parse(*config_json(model), partial(GGUFKeys, model.given)))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(in_its_words(model, str(error))) from error


def config_json(model: GGUFModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config.json and the generation_config.json of the same model, as far as `GGUFKeys` does
    not find the keys; None: no value.

    Raises:
        UnsupportedModelError: a key that changes the computation is not implemented, or has the
            wrong type; the message names file, key, value and what is allowed.
    """
    given, files, tensors = model.given, model.files, model.tensors
    family, more = every_family()[model.name], files.read(given)
    raw: dict[str, Any] = {"architectures": [model.name], "eos_token_id": [], **files.fixed}
    experts = () if family.moe is None else ("expert_count", "expert_used_count")
    for name in ("feed_forward_length", *experts, *files.unread):
        given.get(name, Any)
    raw["num_hidden_layers"] = given.main_layers
    if "num_key_value_heads" not in more:
        heads = given.one("attention.head_count", int)
        raw["num_key_value_heads"] = given.one("attention.head_count_kv", int, heads)
    head_dim = raw["head_dim"] = given.head_dim
    is_latent = "qk_rope_head_dim" in more
    if given.one("attention.value_length", int, head_dim) != head_dim and not is_latent:
        given.refuse("attention.value_length", f"{head_dim}, the size of keys")
    epsilons = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
    # Why both: a norm of either kind may have the key of the other one.
    names = epsilons if family.norm_eps != "rms_norm_eps" else epsilons[::-1]
    found = [value for name in names if (value := given.get(name, float)) is not None]
    raw[family.norm_eps] = found[0] if found else given.refuse(epsilons[1], "a number")
    if not given.get("attention.causal", bool, True):
        given.refuse("attention.causal", "True")
    rotary_dim = given.get("rope.dimension_count", int, head_dim)
    if family.partial:
        raw["rotary_dim"] = rotary_dim
    elif rotary_dim != head_dim and not is_latent:
        given.refuse("rope.dimension_count", f"{head_dim}, the size of a head")
    if score := given.get("expert_gating_func", int):
        raw["scoring_func"] = SCORES.get(score) or given.refuse("expert_gating_func", "1 and 2")
    if "use_qk_norm" in raw:
        raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if "token_embd.weight" in tensors:
        size = tensors["token_embd.weight"].shape[0]
        raw |= {"vocab_size": size, "vocab_size_per_layer_input": size}
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    raw |= given.windows(files.slides, raw["num_hidden_layers"]) | _rotation(model) | more
    found = {theirs: given.read(f"general.sampling.{n}", float) for n, theirs in SAMPLING.items()}
    return raw, {key: value for key, value in found.items() if value is not None}


def in_its_words(model: GGUFModel, message: str) -> str:
    """Rewrites a message about the result of `config_json` with the keys of the file."""
    if (path := str(model.given.path)) in message:
        return message
    own = f"{model.given.architecture}."
    names = {key: own + spec.gguf for key, spec in KEYS.items() if spec.gguf}
    names |= {ours: f"general.sampling.{key}" for key, ours in SAMPLING.items()}
    names |= {"vocab_size": "tokens", "eos_token_id": "tokenizer.ggml.eos_token_id"}
    message = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], message)
    return f"{path}: {re.sub(r'(generation_)?config.json:? ', '', message)}"


def as_in_file(model: GGUFModel, config: Any) -> Any:
    """Adapts a ModelConfig made from `config_json`: sets the fields that differ in a GGUF file."""
    plan, moe, states = config.plan, config.moe, config.states
    here = model.entries()
    biases = {part: any(name.endswith(ends) for name in here) for part, ends in BIASES.items()}
    # Why wide: writers add the 1 that such norms leave out.
    norm = {"centered": "wide", "centered layer": "layer"}.get(plan.norm, plan.norm)
    drafting = range(config.num_hidden_layers, model.given.layers)
    ignored_tensors = [config.ignored_tensors] if plan.gemma4 else []
    ignored_tensors += [rf"model\.layers\.({'|'.join(map(str, drafting))})\."] if drafting else []
    kinds = {entry.tensor.type for entry in here.values() if len(entry.shape) > 1}
    merged = plan.fused_gate_up and not any(name.endswith(".gate_proj.weight") for name in here)
    if moe is not None:
        moe = replace(moe, inputs_first=False, correction_bias=bool(moe.correction_bias))
    if states is not None:
        states = replace(states, merged=False, tiled=model.files.tiled)
    if states is not None and states.kind == "mamba":
        parts = {name.partition(".mamba.")[2] for name in here}
        norm_of = states.norm if "norm.weight" in parts else None
        states = replace(states, conv_bias="conv1d.bias" in parts, norm=norm_of)
    return replace(
        config,
        plan=replace(plan, norm=norm, fused_gate_up=merged, **biases),
        moe=moe,
        states=states,
        tensor_names={},
        ignored_tensors="|".join(filter(None, ignored_tensors)),
        dtype={"F16": "float16", "BF16": "bfloat16"}.get("".join(kinds), "float32"),
        quantization=_quantization(here),
        ends=tuple(_ends(model.given)),
    )


def _rotation(model: GGUFModel) -> Json:
    """The RoPE parameters. A tensor of factors divides the frequency of each pair of dimensions:
    llama3's rule as numbers, or longrope's two lists."""
    given, family = model.given, every_family()[model.name]
    base = given.get("rope.freq_base", float, 1e4)
    full, sliding = family.bases or ("rope_theta", "rope_theta")
    usual = base if sliding == full or given.architecture == "mellum" else 1e4
    other = given.get("rope.freq_base_swa", float, usual)
    if sliding == full and other != base:
        given.refuse("rope.freq_base_swa", f"{base}, as in layers without a window")
    found: dict[str, Any] = {full: base, sliding: other}
    kind = given.get("rope.scaling.type", str, "linear")
    factor = given.get("rope.scaling.factor", float) or given.get("rope.scale_linear", float) or 1
    magnitude = given.get("rope.scaling.attn_factor", float, 1.0)
    stored = [model.tensors[name] for name in ROTATIONS if name in model.tensors]
    factors = [read_rows(tensor).flatten().tolist() for tensor in stored]
    scaling: dict[str, Any] = {}
    usual_rope = ConfigReader({}, family.defaults, model_type=family.model_type).nonempty(
        "rope_parameters"
    )
    if FULL in usual_rope:
        return _proportional(given, factors, base, other)
    if factors:
        long, short = factors[0], factors[-1]
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["attention_factor"] = magnitude
        if len(factors) > 2 or kind == "yarn" or factor != 1:
            given.refuse("rope.scaling.type", f"none beside tensors such as {ROTATIONS[0]}")
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "truncate": usual_rope.get("truncate")}
        scaling |= {key: given.get(KEYS[key].gguf, float) for key in YARN}
        if "llama_4_scaling_beta" in usual_rope:
            scaling |= {key: given.get(KEYS[key].gguf, float) for key in GROWING}
            scaling["mscale"] = 1.0  # Why: no file has another value.
        elif given.architecture == "deepseek2":
            # Why times ten: writers multiply it by 0.1. No file has another value for `mscale`.
            log = 10 * given.get("rope.scaling.yarn_log_multiplier", float, 0.0)
            scaling |= {"mscale": log, "mscale_all_dim": log} if log else {}
        if given.get("rope.scaling.yarn_ext_factor", float, 1.0) != 1:
            given.refuse("rope.scaling.yarn_ext_factor", "1")
    elif kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        given.refuse("rope.scaling.type", "none, linear, yarn, longrope with its tensors")
    if "llama_4_scaling_beta" in usual_rope.keys() - scaling.keys():
        given.refuse("attention.temperature_scale", "0 without yarn")
    if magnitude != 1 and not factors:
        given.refuse("rope.scaling.attn_factor", "1 without longrope's tensors")
    original = given.get("rope.scaling.original_context_length", int)
    if scaling:
        found["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
        found[ORIGINAL] = original or given.get("context_length", int)
    return found


def _ends(given: Metadata) -> Iterator[tuple[str, int | None]]:
    """The sources of EOS tokens: keys, and names of control tokens."""
    words = "tokenizer.ggml"
    tokens = given.read(f"{words}.tokens", list[str], [])
    kinds = given.read(f"{words}.token_type", list[int], [])
    ends = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if text in ENDS and kind == CONTROL
    }
    if {"<|return|>", "<|call|>"} <= ends.keys():
        ends.pop("<|end|>", None)  # Why: there it ends a message, and an output has several.
    for key in (f"{words}.{name}_token_id" for name in ("eos", "eot", "eom")):
        yield key, given.read(key, int)
    yield from (("its known name", token_id) for token_id in ends.values())


def _quantization(here: Mapping[str, Entry]) -> StoredQuantization | None:
    """How matrices are stored; None: as floats."""
    stored = {name: entry.tensor.type for name, entry in here.items()}
    types = {name.removesuffix(".weight"): it for name, it in stored.items() if it not in FLOATS}
    if not types:
        return None
    blocks = [TYPES[it] for it in types.values()]
    bits = sum(8 * block.bytes / block.inputs for block in blocks) / len(blocks)
    return StoredQuantization(
        format="gguf",
        bits=8 if bits > 6.5 else 4,
        group_size=None,
        activations="int8",
        types=types,
    )


# fmt: off
def _proportional(given: Metadata, factors: list[list[float]], full: float, sliding: float) -> Json:
    """Gemma 4: in layers with full attention, pairs without RoPE have huge factors."""
    each = factors[0] if factors else [1.0]
    rotated = each.count(1.0)
    if len(factors) > 1 or min(each[rotated:], default=1e30) < 1e29:
        given.refuse("rope.scaling.type", f"1 and then 1e30 in {ROTATIONS[0]}")
    part = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(each)}
    return {"rope_parameters": {
        FULL: {**part, "rope_theta": full},
        SLIDING: {"rope_type": "default", "rope_theta": sliding},
    }}
# fmt: on
