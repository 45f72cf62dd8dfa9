"""Falcon 7B to 180B: attention and MLP in parallel, LayerNorm, q, k and v in one tensor."""

from __future__ import annotations

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families.family import Family, biases, layer

USUAL_KEYS = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip


def normalize(raw: Json) -> Json:
    """Renames keys to the usual names, which take precedence if both are present. There is one KV
    head, except with `new_decoder_architecture`."""
    renamed = {USUAL_KEYS[name]: raw[name] for name in USUAL_KEYS if name in raw}
    renamed |= {name: value for name, value in raw.items() if name not in USUAL_KEYS}
    heads = raw.get("num_kv_heads") or raw.get("num_attention_heads")
    return {**renamed, "num_key_value_heads": heads if raw.get("new_decoder_architecture") else 1}


def norms(keys: ConfigReader) -> str:
    """Attention and MLP are parallel and share a norm; in the newer architecture, each may have
    its own."""
    newer, count_key = keys.get("new_decoder_architecture"), "num_ln_in_parallel_attn"
    keys.require_one_of("parallel_attn", True)
    keys.require_one_of(count_key, None, 1, 2 if newer else 1)
    return "parallel each" if newer and keys.get(count_key) != 1 else "parallel"


def names(keys: ConfigReader) -> dict[str, str]:
    """The tensor names; names of norms depend on their number."""
    has_two = norms(keys) == "parallel each"
    each = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if has_two else {}
    return {
        "model.embed_tokens": "model.word_embeddings", "model.layers": "model.h",
        "model.norm": "model.ln_f", "self_attn": "self_attention", "qkv_proj": "query_key_value",
        "o_proj": "dense", "up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h", **each,
    }  # fmt: skip


# fmt: off
FAMILIES: dict[str, Family] = {
    "FalconForCausalLM": Family(
        "falcon", normalize,
        layers=layer(
            only={"hidden_act": ("gelu",)}, norms=norms, norm="layer", norm_bias=True,
            gated_mlp=False, hidden_act="gelu", fused_qkv="heads", **biases("bias"),
        ),
        defaults={"max_position_embeddings": 2048}, names=names, norm_eps="layer_norm_epsilon",
        intermediate_size=
            lambda keys: keys.get("intermediate_size") or 4 * keys.require("hidden_size"),
    ),
}
# fmt: on
"""Architecture -> its family."""
