"""Hybrid families, in which some layers are recurrent: the gated delta rule, short convolutions,
Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families import dense, family, moe
from nanoengine.checkpoint.families.family import Family, files, has, key, layer, size
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import (
    ATTENTION,
    FULL,
    SLIDING,
    FalconH1Multipliers,
    LinearAttentionConfig,
)
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import quoted

LINEAR, CONV = "linear_attention", "conv"
MAMBA = "mamba"
"""The name of LINEAR in transformers 4."""

# --- the gated delta rule, and short convolutions -------------------------------------------------


def delta_config(keys: ConfigReader) -> LinearAttentionConfig:
    """Qwen3.5: the layers that are linear in `layer_types`, or else all except every
    `full_attention_interval`-th."""
    key_heads, key_dim = keys.get("linear_num_key_heads"), keys.get("linear_key_head_dim")
    heads, value_dim = keys.get("linear_num_value_heads"), keys.get("linear_value_head_dim")
    if heads % key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads={heads} must be a multiple of linear_num_key_heads={key_heads}"
        )
    every, layers = keys.get("full_attention_interval"), keys.require("num_hidden_layers")
    kinds = [LINEAR if (n + 1) % every else FULL for n in range(layers)]
    return LinearAttentionConfig(
        kind="delta",
        layers=family.layers_of(keys.get("layer_types") or kinds, LINEAR),
        kernel=keys.get("linear_conv_kernel_dim"),
        channels=2 * key_heads * key_dim + heads * value_dim,
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def conv_config(keys: ConfigReader) -> LinearAttentionConfig:
    """LFM2: the layers that are "conv" in `layer_types`, or else all except `full_attn_idxs`."""
    every, full = range(keys.require("num_hidden_layers")), keys.get("full_attn_idxs")
    kinds = keys.get("layer_types") or [FULL if full is None or n in full else CONV for n in every]
    return LinearAttentionConfig(
        kind="conv",
        layers=family.layers_of(kinds, CONV),
        kernel=keys.get("conv_L_cache"),
        channels=keys.require("hidden_size"),
        bias=keys.get("conv_bias"),
    )


def add_layer_types(raw: Json) -> Json:
    """LFM3: adds `layer_types` to a config.json that lacks it."""
    layers = raw.get("num_hidden_layers")
    if raw.get("layer_types") is not None or not isinstance(layers, int):
        return raw
    kinds = [CONV, *([CONV, FULL, CONV, SLIDING] * layers)]
    return {**raw, "layer_types": kinds[:layers]}


def lfm2_intermediate_size(keys: ConfigReader) -> int:
    """The intermediate size: two thirds of the size in the config, rounded up, if
    `block_auto_adjust_ff_dim` is set."""
    found = size("block_ff_dim", "intermediate_size")(keys)
    if keys.get("block_auto_adjust_ff_dim"):
        found = int(keys.get("block_ffn_dim_multiplier") * int(2 * found / 3))
        multiple = keys.get("block_multiple_of")
        found = multiple * -(-found // multiple)
    return found


# --- Mamba-2 --------------------------------------------------------------------------------------


def mamba_config(keys: ConfigReader) -> LinearAttentionConfig:
    """Granite 4: the layers that are linear (or "mamba") in `layer_types`. Bamba: all layers except
    `attn_layer_indices`."""
    every, attention = range(keys.require("num_hidden_layers")), keys.get("attn_layer_indices")
    kinds = keys.get("layer_types") or [FULL if n in (attention or ()) else LINEAR for n in every]
    heads, size, inner = map(keys.get, ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"))
    expanded = keys.get("mamba_expand") * keys.require("hidden_size")
    inner = expanded if inner is None else inner
    size = inner // heads if size == "auto" else size
    if heads * size != inner:
        raise UnsupportedModelError(
            f"mamba_n_heads={heads} * mamba_d_head={quoted(size)} must be {inner}: mamba_d_ssm,"
            " or mamba_expand * hidden_size if it is null"
        )
    return _mamba_config(keys, [n for n in every if kinds[n : n + 1] in ([LINEAR], [MAMBA])], size)


def _mamba_config(keys: ConfigReader, layers: Iterable[int], size: int) -> LinearAttentionConfig:
    """Mamba-2 in these layers, with this head dim."""
    heads, groups = keys.get("mamba_n_heads"), keys.get("mamba_n_groups")
    if heads % groups:
        raise UnsupportedModelError(
            f"mamba_n_heads={heads} must be a multiple of mamba_n_groups={groups}"
        )
    return LinearAttentionConfig(
        kind="mamba",
        layers=tuple(layers),
        kernel=keys.get("mamba_d_conv"),
        channels=heads * size + 2 * groups * keys.get("mamba_d_state"),
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=keys.get("mamba_d_state"),
        value_dim=size,
        bias=keys.get("mamba_proj_bias"),
        conv_bias=keys.get("mamba_conv_bias"),
        output_bias=keys.get("mamba_proj_bias"),
        norm="after_gate",
        time_step_limits=_time_step_limits(keys),
    )


def falcon_h1_config(keys: ConfigReader) -> LinearAttentionConfig:
    """Falcon-H1: Mamba-2 in every layer, in parallel with attention."""
    norm = "before_gate" if keys.get("mamba_norm_before_gate") else "after_gate"
    return replace(
        mamba_config(keys),
        layers=tuple(range(keys.require("num_hidden_layers"))),
        norm=norm if keys.get("mamba_rms_norm") else None,
        output_bias=keys.get("projectors_bias"),
    )


def falcon_h1_multipliers(keys: ConfigReader) -> FalconH1Multipliers:
    """Falcon-H1's multipliers."""
    names = "ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier"
    found = {name: keys.get(name) for name in (*names, "attention_out_multiplier")}
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        found[name] = tuple(keys.get(name) or [1.0] * count)
        if len(found[name]) != count:
            raise UnsupportedModelError(f"{name}={quoted(found[name])} must be {count} numbers")
    return FalconH1Multipliers(**found)


PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Letter in Nemotron-H's `hybrid_override_pattern` -> the kind of layer."""
NEMOTRON_KEYS = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups", "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}  # fmt: skip
"""Keys of Mamba in Nemotron-H's config.json -> the usual names."""


NEMOTRON_USUAL_KEYS = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")
"""Usual names that older config.json files have, which take precedence over Nemotron-H's names."""
nemotron_blocks = key("layers_block_type", tuple)


def normalize_nemotron_h(raw: Json) -> Json:
    """Nemotron-H: renames keys to the usual names, and sets `layers_block_type` and
    `num_hidden_layers`."""
    usual = {name: value for name, value in raw.items() if name not in NEMOTRON_KEYS.values()}
    renamed = {NEMOTRON_KEYS.get(name, name): value for name, value in usual.items()}
    renamed |= {name: raw[name] for name in NEMOTRON_USUAL_KEYS if name in raw}
    pattern, named = renamed.pop("hybrid_override_pattern", ""), renamed.get("layers_block_type")
    kinds = [*pattern] if isinstance(pattern, str) and not named else named
    old = {**PATTERN, MAMBA: LINEAR, ATTENTION: FULL}
    kinds = [old.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else kinds
    if not kinds or not isinstance(kinds, list) or {*map(str, kinds)} - {*PATTERN.values()}:
        raise UnsupportedModelError(
            f"layers_block_type={quoted(named)} or"
            f" hybrid_override_pattern={quoted(pattern)} must have an entry per layer; allowed:"
            f" {', '.join(PATTERN.values())}, or {' '.join(PATTERN)}"
        )
    renamed.pop("num_nextn_predict_layers", None)  # MTP tensors have other names: MTP_TENSORS
    return {**renamed, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def nemotron_h_config(keys: ConfigReader) -> LinearAttentionConfig:
    size = keys.get("mamba_d_head")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"mamba_head_dim must be an integer from 1, got {quoted(size)}")
    return _mamba_config(keys, family.layers_of(nemotron_blocks(keys), LINEAR), size)


def nemotron_experts(keys: ConfigReader) -> tuple[int, ...]:
    """The layers with experts. A model without experts may still have their keys, so they are
    read."""
    for name in ("n_routed_experts", "norm_topk_prob", "routed_scaling_factor"):
        keys.get(name)
    return family.layers_of(nemotron_blocks(keys), "moe")


def _time_step_limits(keys: ConfigReader) -> tuple[float, float]:
    """The range of Mamba's dt. transformers writes infinity as {"__float__": "Infinity"}."""
    limits = keys.get("time_step_limit")
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each)
                     for each in limits)  # fmt: skip
    except (KeyError, TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 <= low < high:
        raise UnsupportedModelError(
            "config.json: time_step_limit must be two numbers from 0, the second one larger, got"
            f" {quoted(limits)}"
        )
    return low, high


# --- keys of GGUF files ---------------------------------------------------------------------------


# fmt: off
def layer_type_keys(metadata: Metadata, without: str = CONV) -> Json:
    """Layers without KV heads are convolutions, or of the kind `without`."""
    heads = metadata.per_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if count else without for count in heads],
    }


def delta_keys(metadata: Metadata) -> Json:
    """The layers with linear attention, and the dimensions of its heads."""
    every, layers = metadata.get("full_attention_interval", int, 4) or 1, metadata.num_layers
    kinds = metadata.get("attention.recurrent_layers", list[bool])
    kinds = kinds or [(n + 1) % every != 0 for n in range(layers)]
    heads, inner = metadata.get("ssm.time_step_rank", int), metadata.get("ssm.inner_size", int, 0)
    return {
        "layer_types": [LINEAR if linear else FULL for linear in kinds[: metadata.num_main_layers]],
        "linear_num_value_heads": heads, "linear_value_head_dim": inner // (heads or 1),
    }


def mamba_size_keys(metadata: Metadata) -> Json:
    """The number and dimensions of Mamba's heads."""
    heads = metadata.get("ssm.time_step_rank", int, 0)
    inner = metadata.get("ssm.inner_size", int, 0)
    return {"mamba_n_heads": heads, "mamba_d_head": inner // (heads or 1), "mamba_d_ssm": inner}


def granite_keys(metadata: Metadata) -> Json:
    """Layers without KV heads are Mamba layers."""
    found = {**layer_type_keys(metadata, LINEAR), **mamba_size_keys(metadata)}
    rope, count = metadata.get("rope.scaling.finetuned", bool), metadata.get("expert_count", int, 0)
    if rope is None:
        metadata.reject("rope.scaling.finetuned", "files with this key")
    if rope:
        return found
    none = {} if count else dict.fromkeys(("intermediate_size", "num_experts_per_tok"))
    return found | none | {"num_local_experts": count}


def nemotron_keys(metadata: Metadata) -> Json:
    """The kind of each layer: attention has KV heads, an MLP or experts have an inner size."""
    kv_heads = metadata.per_layer("attention.head_count_kv")
    inner, sizes = metadata.per_layer("feed_forward_length"), mamba_size_keys(metadata)
    mlp = "mlp" if metadata.architecture == "nemotron_h" else "moe"
    both = list(zip(kv_heads, inner, strict=True))[: metadata.num_main_layers]
    return {
        "layers_block_type": [FULL if kv else mlp if size else LINEAR for kv, size in both],
        "num_key_value_heads": max(kv_heads), "intermediate_size": max(inner) or None,
        "mamba_num_heads": sizes["mamba_n_heads"], "mamba_head_dim": sizes["mamba_d_head"],
    }


# --- the families ---------------------------------------------------------------------------------

LFM2 = layer(only={"tie_embedding": (True,)}, qk_norm="per_head")
QWEN_NEXT = layer(
    only={"attn_output_gate": (True,)}, norm="one_plus_weight", qk_norm="per_head",
    output_gate="q_proj", **dense.ATTENTION_BIAS,
)

LFM_NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
    **moe.W123_NAMES,
}
LFM2_NAMES = {
    "q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj", **LFM_NAMES,
}
GRANITE_4_NAMES = moe.GRANITE_NAMES | {
    f"mlp.{part}{ours}": f"shared_mlp.{theirs}_linear"
    for ours, theirs in (("gate_up_proj", "input"), ("down_proj", "output"))
    for part in ("", "shared_experts.")
}
FALCON_NAMES = {
    "model.norm": "model.final_layernorm", "post_attention_layernorm": "pre_ff_layernorm",
    "mlp": "feed_forward",
}
NEMOTRON_NAMES = {
    "model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f",
    "input_layernorm": "norm", "mamba": "mixer", "self_attn": "mixer", "mlp": "mixer",
}

GGUF_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
GGUF_MAMBA = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}

FAMILIES: dict[str, Family] = {
    "BambaForCausalLM": Family(
        "bamba", layers=layer(**dense.LLAMA), states=mamba_config, partial_rotary=True,
        names=FALCON_NAMES,
        gguf=files(
            "granitehybrid", when=has("rope.scaling.finetuned"), interleaved=True,
            read=granite_keys, names=GGUF_MAMBA,
        ),
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        layers=layer(
            falcon_h1=falcon_h1_multipliers, **family.from_keys("embedding_multiplier"),
            logit_scale=key("lm_head_multiplier"), **dense.LLAMA,
            # Why: a factor on keys equals a factor on the scores q.k.
            attention_multiplier=lambda keys: keys.get("key_multiplier") * keys.head_dim**-0.5,
        ),
        states=falcon_h1_config, names=FALCON_NAMES,
        gguf=files(
            "falcon-h1", read=mamba_size_keys,
            names=GGUF_MAMBA | {"ffn_norm": "post_attention_layernorm.weight"},
            constants={"mamba_norm_before_gate": False, "mamba_rms_norm": True},
        ),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        layers=layer(fused_gate_up=True, **dense.GRANITE_KEYS, **dense.ATTENTION_BIAS),
        states=mamba_config, rope_layers=family.if_named_rope,
        moe=moe.if_any(
            key("num_local_experts"),
            moe.experts(**moe.MIXTRAL, shared_size=size("shared_intermediate_size")),
        ),
        # Why: a model whose config lacks these keys has experts.
        defaults={
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        },
        names=GRANITE_4_NAMES, intermediate_size=size("shared_intermediate_size"),
        gguf=files("granitehybrid", interleaved=True, read=granite_keys, names=GGUF_MAMBA),
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2", layers=LFM2, states=conv_config,
        names=LFM2_NAMES, intermediate_size=lfm2_intermediate_size, norm_eps="norm_eps",
        gguf=files("lfm2", read=layer_type_keys, constants={"block_auto_adjust_ff_dim": False}),
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe", layers=LFM2, states=conv_config,
        moe=moe.experts(
            correction_bias=key("use_expert_bias"), layers=moe.layers_from("num_dense_layers"),
            **{**moe.SIGMOID, "norm_epsilon": 1e-6},
        ),
        names=LFM2_NAMES | {"mlp.gate.e_score_correction_bias": "feed_forward.expert_bias"},
        norm_eps="norm_eps", gguf=files("lfm2moe", read=layer_type_keys),
    ),
    "Lfm3ForCausalLM": Family(
        "lfm3", add_layer_types,
        layers=layer(
            only={"attention_bias": (False,)}, qk_norm="per_head",
            norms=key("use_sandwich_norm", lambda on: "sandwich" if on else "pre"),
            output_gate=key("use_attention_gate", lambda on: "per_head" if on else False),
        ),
        states=conv_config, windows=family.windows(lambda keys, layer: False),
        rope_theta_keys=("rope_theta", "rope_local_base_freq"),
        names={
            "attention_output_norm": "post_operator_norm", "mlp_output_norm": "post_ffn_norm",
            # Why: only the gate of the MLP must be renamed, not this one.
            "self_attn.gate_proj": "self_attn.gate_proj", **LFM_NAMES,
        },
        norm_eps="norm_eps",
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", normalize_nemotron_h,
        layers=layer(
            only={
                "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",),
                "residual_in_fp32": (False,), "n_shared_experts": (1,),
            },
            layers_block_type=nemotron_blocks, norm="fp32_weight", hidden_act="relu2",
            **family.from_keys("mlp_bias"),
        ),
        states=nemotron_h_config, rope_layers=lambda keys, slides: [False] * len(slides),
        moe=moe.if_any(nemotron_experts, moe.experts(**{
            **moe.DEEPSEEK_KEYS, "shared_size": size("moe_shared_expert_intermediate_size"),
            "layers": nemotron_experts,
        })),
        names=NEMOTRON_NAMES, ignored_tensors=moe.MTP_TENSORS, norm_eps="layer_norm_epsilon",
        # Why ignored: files without experts may have their keys.
        gguf=files(
            "nemotron_h", "nemotron_h_moe", read=nemotron_keys, names=GGUF_MAMBA,
            ignored_keys=moe.GGUF_EXPERT_KEYS,
        ),
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", layers=QWEN_NEXT, states=delta_config,
        partial_rotary=True, rope_extra=dense.M_ROPE, ignored_tensors=moe.MTP_TENSORS,
        gguf=files(
            "qwen35", read=delta_keys, names=GGUF_DELTA, ignored_keys=dense.IMAGE_KEYS, tiled=True,
        ),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text", layers=QWEN_NEXT, states=delta_config,
        # Why: the config class lacks this key, because the model code always normalizes.
        moe=moe.QWEN_SHARED, partial_rotary=True, defaults={"norm_topk_prob": True},
        rope_extra=dense.M_ROPE, names=moe.SHARED_NAMES, ignored_tensors=moe.MTP_TENSORS,
        intermediate_size=moe.EXPERT_SIZE,
        gguf=files(
            "qwen35moe", read=delta_keys, names=GGUF_DELTA, ignored_keys=dense.IMAGE_KEYS,
            tiled=True,
        ),
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", layers=QWEN_NEXT,
        states=lambda keys: replace(delta_config(keys), fused_qkvz=True),
        moe=moe.QWEN_SHARED, partial_rotary=True, names=moe.SHARED_NAMES,
        ignored_tensors=moe.MTP_TENSORS, gguf=files("qwen3next", read=delta_keys, names=GGUF_DELTA),
    ),
}
# fmt: on
"""Architecture -> its family."""
