"""Gemma: sandwich norms with a factor of 1 + weight; Gemma 4 has layers of two shapes."""

from __future__ import annotations

import math
from dataclasses import replace

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families import dense, family, moe
from nanoengine.checkpoint.families.family import Family, files, from_keys, key, layer
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import FULL, SLIDING, Gemma4Config
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import quoted


def gemma4_config(keys: ConfigReader) -> Gemma4Config:
    """Reads the two shapes of layers, and which layers have no KV cache."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("layer_types")
    kinds = kinds or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    if kinds[-1] != FULL:
        raise UnsupportedModelError(f"layer_types ends with {quoted(kinds[-1])}, not with {FULL!r}")
    window = keys.require("head_dim"), keys.require("num_key_value_heads")
    keys_are_values, shared = keys.get("attention_k_eq_v"), keys.get("num_kv_shared_layers")
    kv_heads = keys.get("num_global_key_value_heads") if keys_are_values else None
    full = keys.get("global_head_dim"), kv_heads or window[1]
    by_layer = keys.get("per_layer_config")
    if "per_layer_config" in keys and not by_layer:  # as in transformers
        full = window
    if by_layer:
        full_layers = [n for n, kind in enumerate(kinds) if kind == FULL]
        indices = sorted(int(name) if name.isdigit() else -1 for name in by_layer)
        first, *rest = by_layer.values()
        is_shape = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
        if indices != full_layers or rest != [first] * len(rest) or not is_shape:
            raise UnsupportedModelError(
                f"per_layer_config={quoted(by_layer)} is not implemented; supported: the same"
                f" head_dim and num_key_value_heads for all layers of {FULL!r}"
            )
        full = first.get("head_dim", window[0]), first.get("num_key_value_heads", window[1])
    found = Gemma4Config(
        shapes=(window, full),
        keys_are_values=keys_are_values,
        num_kv_shared=shared,
        shared_mlp_factor=2 if keys.get("use_double_wide_mlp") else 1,
        input_size=keys.get("hidden_size_per_layer_input"),
    )
    (small, large), cached = sorted(map(math.prod, found.shapes)), kinds[: layers - shared]
    if large % small or not {*kinds} <= {*cached}:
        raise UnsupportedModelError(
            f"(head_dim, KV heads) of {window} with a window and {full} without, and"
            f" num_kv_shared_layers={shared} of {layers} layers, are not implemented; supported:"
            " one KV cache size is a multiple of the other, and each kind has an unshared layer"
        )
    if found.input_size and keys.get("vocab_size_per_layer_input") != keys.require("vocab_size"):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={keys.get('vocab_size_per_layer_input')} is not"
            f" implemented; supported: vocab_size={keys.require('vocab_size')}"
        )
    return found


# fmt: off
def query_scale_keys(metadata: Metadata) -> Json:
    """The scale of queries: the head dim, or in the largest models the hidden size per head. The
    largest models are recognized by their number of layers."""
    heads = metadata.uniform("attention.head_count", int, 1)
    width, is_largest = metadata.get("embedding_length", int, 0), metadata.num_layers in (46, 62)
    return {"query_pre_attn_scalar": width // max(1, heads) if is_largest else metadata.head_dim}


def gemma4_keys(metadata: Metadata) -> Json:
    """The shapes of layers, and keys of the MLP and the experts."""
    kinds = metadata.window_keys(6, metadata.num_layers)["layer_types"]
    heads = metadata.per_layer("attention.head_count_kv")
    by_kind = dict(zip(kinds, heads, strict=False))
    inner = metadata.per_layer("feed_forward_length")
    window = metadata.get("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.get(name, int, window) != window:
            metadata.reject(name, f"{window}, the head dim of keys")
    shape = {"head_dim": metadata.head_dim, "num_key_value_heads": by_kind.get(FULL, 0)}
    full = [n for n, kind in enumerate(kinds) if kind == FULL]
    return {
        "head_dim": window, "num_key_value_heads": by_kind.get(SLIDING, heads[0]),
        "per_layer_config": {str(n): shape for n in full},
        "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] > inner[0],
        "attention_k_eq_v": f"blk.{min(full, default=0)}.attn_v.weight" not in metadata.tensors,
        "enable_moe_block": bool(metadata.get("expert_count", int)),
        "top_k_experts": metadata.get("expert_used_count", int), "num_experts_per_tok": None,
    }


GEMMA_1 = {
    "norm": "one_plus_weight", "hidden_act": dense.GELU,
    "embedding_multiplier": key("hidden_size", lambda n: n**0.5), **dense.ATTENTION_BIAS,
}
GEMMA = {
    "only": {"hidden_act": (dense.GELU, None), "hidden_activation": (dense.GELU,)},
    "norms": "sandwich", **GEMMA_1,
    "attention_multiplier": key("query_pre_attn_scalar", lambda n: n**-0.5),
}
GEMMA_2 = {
    **from_keys("attn_logit_softcapping", "final_logit_softcapping"), **GEMMA,
}
# Why not in defaults.json: only configs of Gemma 2 and 3 may lack these sizes.
GEMMA_2_DEFAULTS = {"max_position_embeddings": 8192}
GEMMA_3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}

GEMMA_4 = Family(
    "gemma4_text",
    layers=layer(
        only={
            "hidden_activation": (dense.GELU,),
            "use_bidirectional_attention": ("vision", False, None),
        },
        norms="sandwich", norm="fp32_weight", qk_norm="per_head", hidden_act=dense.GELU,
        attention_multiplier=1.0, gemma4=gemma4_config,
        embedding_multiplier=key("hidden_size", lambda n: n**0.5),
        **from_keys("final_logit_softcapping"), **dense.ATTENTION_BIAS,
    ),
    windows=family.all_but_every(6), rope_theta_keys=("rope_theta", "rope_local_base_freq"),
    moe=moe.if_any(key("enable_moe_block"), moe.experts(top_k_key="top_k_experts")),
    # Why a base: `rope_parameters` of a config may lack it.
    defaults={**GEMMA_3_DEFAULTS, "vocab_size": 262_144, "rope_theta": 1e6},
    names={
        **dense.POST_NORM_NAMES, "post_mlp_norm": "post_feedforward_layernorm_1",
        "post_experts_norm": "post_feedforward_layernorm_2",
        "pre_experts_norm": "pre_feedforward_layernorm_2",
    },
)

GEMMA_4_GGUF_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_mlp_norm", "post_ffw_norm_2": "post_experts_norm",
    "pre_ffw_norm_2": "pre_experts_norm", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    **{f"ffn_{x}_exps": f"experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_up_exps": "experts.{}.{}_proj",
}

FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        # Why "gelu" too: published checkpoints use this name for the tanh approximation.
        "gemma", gguf=files("gemma"), layers=layer(
            only={"hidden_act": (dense.GELU, "gelu"), "hidden_activation": (dense.GELU, None)},
            **GEMMA_1,
        ),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", layers=layer(**GEMMA_2), windows=family.all_but_every(2),
        defaults=GEMMA_2_DEFAULTS, names=dense.POST_NORM_NAMES,
        gguf=files("gemma2", read=query_scale_keys, full_every=2),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", layers=layer(qk_norm="per_head", **GEMMA), windows=family.all_but_every(),
        rope_theta_keys=("rope_theta", "rope_local_base_freq"),
        defaults={**GEMMA_3_DEFAULTS, "sliding_window_pattern": 6}, names=dense.POST_NORM_NAMES,
        gguf=files("gemma3", read=query_scale_keys, full_every=6),
    ),
    "Gemma4ForCausalLM": replace(GEMMA_4, gguf=files(
        "gemma4", read=gemma4_keys, names=GEMMA_4_GGUF_NAMES, full_every=6,
        ignored_keys=("expert_feed_forward_length",),
    )),
    "Gemma4UnifiedForCausalLM": replace(
        GEMMA_4, model_type="gemma4_unified_text",
        defaults={**GEMMA_4.defaults, "max_position_embeddings": 262_144},
    ),
}
# fmt: on
"""Architecture -> its family."""
