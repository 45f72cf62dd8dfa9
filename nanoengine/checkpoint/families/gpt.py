"""Families with the layout of GPT-2 or GPT-NeoX: LayerNorm with biases, an ungated MLP."""

from __future__ import annotations

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.checkpoint.families import dense, family
from nanoengine.checkpoint.families.family import Family, biases, key, plan

BEFORE = {"gelu_fast": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
BEFORE |= {name: name for name in ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")}
"""`hidden_act` of a config -> `LayerConfig.hidden_act`."""


def activation(keys: ConfigReader) -> str:
    """The activation of an MLP without a gate."""
    keys.allow("hidden_act", *BEFORE)
    return BEFORE[keys.get("hidden_act")]


OLDER = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads", "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size", "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size", "activation": "hidden_act",
    "activation_function": "hidden_act", "rms_norm_eps": "layer_norm_epsilon",
    "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta",
    "num_kv_heads": "num_key_value_heads",
}  # fmt: skip


def older(raw: Json) -> Json:
    """Renames a config's keys to the usual names; if both are present, the usual ones take
    precedence."""
    return {OLDER[name]: raw[name] for name in OLDER if name in raw} | {
        name: value for name, value in raw.items() if name not in OLDER
    }


NEOX = {
    "qkv_proj": "query_key_value", "o_proj": "dense", "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}  # fmt: skip


def falcon(raw: Json) -> Json:
    """Falcon: one KV head, except in the newer form."""
    heads = raw.get("num_kv_heads") or raw.get("num_attention_heads")
    newer = raw.get("new_decoder_architecture")
    return {**older(raw), "num_key_value_heads": heads if newer else 1}


def falcon_norms(keys: ConfigReader) -> str:
    """Attention and MLP are parallel, after one norm, or in the newer form after two."""
    newer, count = keys.get("new_decoder_architecture"), "num_ln_in_parallel_attn"
    keys.allow("parallel_attn", True)
    keys.allow(count, None, 1, 2 if newer else 1)
    return "parallel each" if newer and keys.get(count) != 1 else "parallel"


def falcon_names(keys: ConfigReader) -> dict[str, str]:
    """The names of the norms depend on their number."""
    two = falcon_norms(keys) == "parallel each"
    norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if two else {}
    return {
        "model.embed_tokens": "model.word_embeddings", "model.layers": "model.h",
        "model.norm": "model.ln_f", "self_attn": "self_attention", **NEOX, **norms,
    }  # fmt: skip


def opt_positions(keys: ConfigReader) -> int:
    """OPT: two rows of the table precede the first position."""
    keys.allow("word_embed_proj_dim", keys.require("hidden_size"), None)
    return 2


# fmt: off
PLAIN = {
    "norm": "layer", "norm_bias": True, "gated_mlp": False, "hidden_act": activation,
}
GPT = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "learned_positions": 0, **PLAIN}
OLD: Json = {
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
        "exaone", older, plan=plan(**dense.LLAMA), norm_eps="layer_norm_epsilon",
        names={
            **GPT_NAMES, "self_attn": "attn.attention", "o_proj": "out_proj",
            "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
        },
    ),
    "FalconForCausalLM": Family(
        "falcon", falcon,
        plan=plan(norms=falcon_norms, fused_qkv="heads", **PLAIN, **biases("bias")),
        defaults={"max_position_embeddings": 2048}, names=falcon_names, **OLD,
    ),
    "GPT2LMHeadModel": Family(
        "gpt2", older, plan=plan(fused_qkv="parts", transposed_matrices=True, **GPT),
        rope_layers=family.nowhere, names=GPT_2_NAMES, **OLD,
    ),
    "GPTBigCodeForCausalLM": Family(
        "gpt_bigcode", older, plan=plan(fused_qkv="parts", **GPT),
        # Why: the class has `multi_query` instead.
        defaults={"num_key_value_heads": 1},
        rope_layers=family.nowhere, names=GPT_2_NAMES, **OLD,
    ),
    "GPTJForCausalLM": Family(
        "gptj", older,
        plan=plan(
            norms="parallel", rope_interleaved=True, mlp_bias=True, lm_head_bias=True, **PLAIN,
        ),
        partial=True,
        names={
            **GPT_NAMES, "self_attn": "attn", "o_proj": "out_proj", "up_proj": "fc_in",
            "down_proj": "fc_out",
        },
        **OLD,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", older,
        plan=plan(
            norms=key("use_parallel_residual", lambda on: "parallel each" if on else "pre"),
            fused_qkv="heads", mlp_bias=True, **PLAIN, **dense.ATTENTION_BIAS,
        ),
        partial=True,
        names={
            "model.embed_tokens": "model.embed_in", "model.norm": "model.final_layer_norm",
            "self_attn": "attention", **NEOX,
        },
        norm_eps="layer_norm_eps",
    ),
    "OPTForCausalLM": Family(
        "opt", older,
        plan=plan(learned_positions=opt_positions, **PLAIN, **biases("enable_bias")),
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
