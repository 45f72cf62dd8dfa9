"""Gemma: sandwich norms with a factor of 1 + weight; Gemma 4 has layers of two shapes."""

from __future__ import annotations

import math
from dataclasses import replace

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families import dense, family, moe
from nanoengine.checkpoint.families.family import Family, files, key, plan, same
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import FULL, SLIDING, Gemma4Plan
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import repr_short


def gemma_4_plan(keys: ConfigReader) -> Gemma4Plan:
    """Gemma 4: layers without a window have other heads, and the last layers have no keys of their
    own."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("layer_types")
    kinds = kinds or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    if kinds[-1] != FULL:
        raise UnsupportedModelError(
            f"layer_types ends with {repr_short(kinds[-1])}, not with {FULL!r}"
        )
    window = keys.require("head_dim"), keys.require("num_key_value_heads")
    keys_are_values, shared = keys.get("attention_k_eq_v"), keys.get("num_kv_shared_layers")
    kv_heads = keys.get("num_global_key_value_heads") if keys_are_values else None
    full = keys.get("global_head_dim"), kv_heads or window[1]
    by_layer = keys.get("per_layer_config")
    if "per_layer_config" in keys and not by_layer:  # as transformers reads and writes it
        full = window
    if by_layer:
        wanted = [n for n, kind in enumerate(kinds) if kind == FULL]
        named = sorted(int(name) if name.isdigit() else -1 for name in by_layer)
        first, *others = by_layer.values()
        alike = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
        if named != wanted or others != [first] * len(others) or not alike:
            raise UnsupportedModelError(
                f"per_layer_config={repr_short(by_layer)} is not implemented; supported: head_dim"
                f" and num_key_value_heads, the same for each layer of {FULL!r}"
            )
        full = first.get("head_dim", window[0]), first.get("num_key_value_heads", window[1])
    found = Gemma4Plan(
        shapes=(window, full),
        keys_are_values=keys_are_values,
        num_shared=shared,
        shared_width=2 if keys.get("use_double_wide_mlp") else 1,
        input_size=keys.get("hidden_size_per_layer_input"),
    )
    (narrow, wide), own = sorted(map(math.prod, found.shapes)), kinds[: layers - shared]
    if wide % narrow or not {*kinds} <= {*own}:
        raise UnsupportedModelError(
            f"layers of {window[1]} KV heads of {window[0]} and of {full[1]} of {full[0]}, and"
            f" num_kv_shared_layers={shared} of {layers}, are not implemented; supported: one kind"
            " that keeps a multiple of the other, each with a layer that has its own keys"
        )
    if found.input_size and keys.get("vocab_size_per_layer_input") != keys.require("vocab_size"):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={keys.get('vocab_size_per_layer_input')} is not"
            f" implemented; supported: vocab_size={keys.require('vocab_size')}"
        )
    return found


# fmt: off
def score_scale(given: Metadata) -> Json:
    """The scale of scores: the head dim, or in the largest models, which are recognized by their
    number of layers, the hidden size per head."""
    heads, width = given.one("attention.head_count", int, 1), given.get("embedding_length", int, 0)
    wide = given.layers in (46, 62)
    return {"query_pre_attn_scalar": width // max(1, heads) if wide else given.head_dim}


def gemma_4(given: Metadata) -> Json:
    """The shape of layers with full attention, and the last layers that have no keys of their
    own."""
    kinds = given.windows(6, given.layers)["layer_types"]
    heads, inner = given.each("attention.head_count_kv"), given.each("feed_forward_length")
    by_kind = dict(zip(kinds, heads, strict=False))
    window = given.get("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if given.get(name, int, window) != window:
            given.refuse(name, f"{window}, the size of keys")
    other = {"head_dim": given.head_dim, "num_key_value_heads": by_kind.get(FULL, 0)}
    full = [n for n, kind in enumerate(kinds) if kind == FULL]
    return {
        "head_dim": window, "num_key_value_heads": by_kind.get(SLIDING, heads[0]),
        "per_layer_config": {str(n): other for n in full},
        "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] > inner[0],
        "attention_k_eq_v": f"blk.{min(full, default=0)}.attn_v.weight" not in given.tensors,
        "enable_moe_block": bool(given.get("expert_count", int)),
        "top_k_experts": given.get("expert_used_count", int), "num_experts_per_tok": None,
    }


GEMMA_1 = {
    "norm": "centered", "hidden_act": dense.GELU,
    "embedding_multiplier": key("hidden_size", lambda n: n**0.5), **dense.ATTENTION_BIAS,
}
GEMMA = {
    "only": {"hidden_act": (dense.GELU, None), "hidden_activation": (dense.GELU,)},
    "norms": "sandwich", **GEMMA_1,
    "attention_multiplier": key("query_pre_attn_scalar", lambda n: n**-0.5),
}
GEMMA_2 = {
    **same("attn_logit_softcapping", "final_logit_softcapping"), **GEMMA,
}
# Why in code: configs of other families must have these sizes. Gemma 3's published ones lack them.
GEMMA_2_DEFAULTS = {"max_position_embeddings": 8192}
GEMMA_3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}

GEMMA_4 = Family(
    "gemma4_text",
    plan=plan(
        only={
            "hidden_activation": (dense.GELU,),
            "use_bidirectional_attention": ("vision", False, None),
        },
        norms="sandwich", norm="wide", qk_norm="per_head", hidden_act=dense.GELU,
        attention_multiplier=1.0, gemma4=gemma_4_plan,
        embedding_multiplier=key("hidden_size", lambda n: n**0.5),
        **same("final_logit_softcapping"), **dense.ATTENTION_BIAS,
    ),
    windows=family.all_but_every(6), bases=("rope_theta", "rope_local_base_freq"),
    moe=moe.where_any(key("enable_moe_block"), moe.experts(taken="top_k_experts")),
    # Why a base: for a config whose `rope_parameters` has none.
    defaults={**GEMMA_3_DEFAULTS, "vocab_size": 262_144, "rope_theta": 1e6},
    names={
        **dense.POST_NORM_NAMES, "post_mlp_norm": "post_feedforward_layernorm_1",
        "post_experts_norm": "post_feedforward_layernorm_2",
        "pre_experts_norm": "pre_feedforward_layernorm_2",
    },
)

GGUF_GEMMA_4 = {
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
        # Why gelu too: the published files use this name for the approximation.
        "gemma", gguf=files("gemma"), plan=plan(
            only={"hidden_act": (dense.GELU, "gelu"), "hidden_activation": (dense.GELU, None)},
            **GEMMA_1,
        ),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", plan=plan(**GEMMA_2), windows=family.all_but_every(2),
        defaults=GEMMA_2_DEFAULTS, names=dense.POST_NORM_NAMES,
        gguf=files("gemma2", read=score_scale, slides=2),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", plan=plan(qk_norm="per_head", **GEMMA), windows=family.all_but_every(),
        bases=("rope_theta", "rope_local_base_freq"),
        defaults={**GEMMA_3_DEFAULTS, "sliding_window_pattern": 6}, names=dense.POST_NORM_NAMES,
        gguf=files("gemma3", read=score_scale, slides=6),
    ),
    "Gemma4ForCausalLM": replace(GEMMA_4, gguf=files(
        "gemma4", read=gemma_4, names=GGUF_GEMMA_4, slides=6,
        unread=("expert_feed_forward_length",),
    )),
    "Gemma4UnifiedForCausalLM": replace(
        GEMMA_4, model_type="gemma4_unified_text",
        defaults={**GEMMA_4.defaults, "max_position_embeddings": 262_144},
    ),
    "VaultGemmaForCausalLM": Family(
        "vaultgemma",
        plan=plan(**{**GEMMA_2, "norms": "pre"}), windows=family.all_but_every(2),
        defaults=GEMMA_2_DEFAULTS, names={"post_attention_layernorm": "pre_feedforward_layernorm"},
    ),
}
# fmt: on
"""Architecture -> its family."""
