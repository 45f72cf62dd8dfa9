"""Families with the layout of GPT-2 or GPT-NeoX: LayerNorm with biases, an ungated MLP."""

from __future__ import annotations

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families import dense, family
from nanoengine.checkpoint.families.family import Family, biases, key, layer

ACTIVATIONS = {"gelu_fast": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
ACTIVATIONS |= {name: name for name in ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")}
"""`hidden_act` in config.json -> `LayerConfig.hidden_act`."""


def activation(keys: ConfigReader) -> str:
    """The activation of an MLP without a gate."""
    keys.require_one_of("hidden_act", *ACTIVATIONS)
    return ACTIVATIONS[keys.get("hidden_act")]


USUAL_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
    "activation_function": "hidden_act", "rms_norm_eps": "layer_norm_epsilon",
    "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip


def rename_keys(raw: Json) -> Json:
    """Renames the keys of a config.json to the usual names, which take precedence if both are
    present."""
    return {USUAL_KEYS[name]: raw[name] for name in USUAL_KEYS if name in raw} | {
        name: value for name, value in raw.items() if name not in USUAL_KEYS
    }


NEOX_NAMES = {
    "qkv_proj": "query_key_value", "o_proj": "dense", "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}  # fmt: skip


def normalize_falcon(raw: Json) -> Json:
    """Falcon: one KV head, except with `new_decoder_architecture`."""
    heads = raw.get("num_kv_heads") or raw.get("num_attention_heads")
    newer = raw.get("new_decoder_architecture")
    return {**rename_keys(raw), "num_key_value_heads": heads if newer else 1}


def falcon_norms(keys: ConfigReader) -> str:
    """Attention and MLP are parallel and share a norm; the newer architecture may have one each."""
    newer, count_key = keys.get("new_decoder_architecture"), "num_ln_in_parallel_attn"
    keys.require_one_of("parallel_attn", True)
    keys.require_one_of(count_key, None, 1, 2 if newer else 1)
    return "parallel each" if newer and keys.get(count_key) != 1 else "parallel"


def falcon_names(keys: ConfigReader) -> dict[str, str]:
    """The tensor names; names of norms depend on their number."""
    has_two = falcon_norms(keys) == "parallel each"
    norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if has_two else {}
    return {
        "model.embed_tokens": "model.word_embeddings", "model.layers": "model.h",
        "model.norm": "model.ln_f", "self_attn": "self_attention", **NEOX_NAMES, **norms,
    }  # fmt: skip


def opt_positions(keys: ConfigReader) -> int:
    """OPT: two rows of the table of position embeddings precede position 0."""
    keys.require_one_of("word_embed_proj_dim", keys.require("hidden_size"), None)
    return 2


# fmt: off
PLAIN_MLP = {
    "norm": "layer", "norm_bias": True, "gated_mlp": False, "hidden_act": activation,
}
GPT = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "learned_positions": 0, **PLAIN_MLP}
GPT_FIELDS: Json = {
    "intermediate_size":
        lambda keys: keys.get("intermediate_size") or 4 * keys.require("hidden_size"),
    "norm_eps": "layer_norm_epsilon",
}
GPT_NAMES = {
    "model.embed_tokens": "model.wte", "model.layers": "model.h", "model.norm": "model.ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
}
GPT_2_NAMES = GPT_NAMES | {
    "model.embed_positions": "model.wpe", "self_attn": "attn", "qkv_proj": "c_attn",
    "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
}

FAMILIES: dict[str, Family] = {
    "ExaoneForCausalLM": Family(
        "exaone", rename_keys, layers=layer(**dense.LLAMA), norm_eps="layer_norm_epsilon",
        names={
            **GPT_NAMES, "self_attn": "attn.attention", "o_proj": "out_proj",
            "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
        },
    ),
    "FalconForCausalLM": Family(
        "falcon", normalize_falcon,
        layers=layer(norms=falcon_norms, fused_qkv="heads", **PLAIN_MLP, **biases("bias")),
        defaults={"max_position_embeddings": 2048}, names=falcon_names, **GPT_FIELDS,
    ),
    "GPT2LMHeadModel": Family(
        "gpt2", rename_keys, layers=layer(fused_qkv="parts", transposed_matrices=True, **GPT),
        rope_layers=family.nowhere, names=GPT_2_NAMES, **GPT_FIELDS,
    ),
    "GPTBigCodeForCausalLM": Family(
        "gpt_bigcode", rename_keys, layers=layer(fused_qkv="parts", **GPT),
        # Why: the config has `multi_query` instead.
        defaults={"num_key_value_heads": 1},
        rope_layers=family.nowhere, names=GPT_2_NAMES, **GPT_FIELDS,
    ),
    "GPTJForCausalLM": Family(
        "gptj", rename_keys,
        layers=layer(
            norms="parallel", rope_interleaved=True, mlp_bias=True, lm_head_bias=True, **PLAIN_MLP,
        ),
        partial_rotary=True,
        names={
            **GPT_NAMES, "self_attn": "attn", "o_proj": "out_proj", "up_proj": "fc_in",
            "down_proj": "fc_out",
        },
        **GPT_FIELDS,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", rename_keys,
        layers=layer(
            norms=key("use_parallel_residual", lambda on: "parallel each" if on else "pre"),
            fused_qkv="heads", mlp_bias=True, **PLAIN_MLP, **dense.ATTENTION_BIAS,
        ),
        partial_rotary=True,
        names={
            "model.embed_tokens": "model.embed_in", "model.norm": "model.final_layer_norm",
            "self_attn": "attention", **NEOX_NAMES,
        },
        norm_eps="layer_norm_eps",
    ),
    "OPTForCausalLM": Family(
        "opt", rename_keys,
        layers=layer(learned_positions=opt_positions, **PLAIN_MLP, **biases("enable_bias")),
        rope_layers=family.nowhere,
        names={
            "model.norm": "model.final_layer_norm", "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm", "o_proj": "out_proj",
            "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
        },
        norm_eps="layer_norm_eps",
    ),
}
# fmt: on
"""Architecture -> its family."""
