"""Families that transformers' modules compute: how their GGUF files are read.

A checkpoint of such a family needs no description, because transformers reads its config.json. The
names of tensors are those of transformers' modules. `transformers_config.py` makes the config.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanoengine.checkpoint.config_reader import Json
from nanoengine.checkpoint.families import mla
from nanoengine.checkpoint.families.family import Family, files
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import FULL, SLIDING

# fmt: off
XIELU = ("alpha_n", "alpha_p", "beta", "eps")


def xielu_values(metadata: Metadata) -> dict[str, float]:
    """Apertus: the parameters of the activation function of each layer."""
    values = {name: metadata.read(f"xielu.{name}", list[float], []) for name in XIELU}
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": value
        for name in XIELU for layer, value in enumerate(values[name])
    }


def expert_keys(metadata: Metadata, score: int = 2) -> Json:
    """The layers with experts, which have a router; and checks that the router has this score, a
    key of `SCORING_FUNCS`, and normalized weights."""
    for name, value in (("expert_gating_func", score), ("expert_weights_norm", True)):
        if metadata.get(name, Any, value) != value:
            metadata.reject(name, str(value))
    routers = [f"blk.{n}.ffn_gate_inp.weight" for n in range(metadata.num_main_layers)]
    kinds = ["sparse" if router in metadata.tensors else "dense" for router in routers]
    return {
        "mlp_layer_types": kinds,
        **dict.fromkeys(("num_experts", "n_routed_experts"), metadata.get("expert_count", int)),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", int, 0),
    }


def afmoe_keys(metadata: Metadata) -> Json:
    return expert_keys(metadata) | {"route_scale": metadata.get("expert_weights_scale", float)}


def granite_swa_keys(metadata: Metadata) -> Json:
    """RoPE's base of each layer; 0: the layer has no RoPE."""
    every = [True] * metadata.num_layers
    base = metadata.get("rope.freq_base", float, 1e4)
    has_rope = metadata.get("attention.rope_pattern", list[bool], every)
    return {"layer_rope_theta": [base if rope else 0.0 for rope in has_rope]}


def laguna_keys(metadata: Metadata) -> Json:
    """Layers may have different numbers of heads; every fourth layer, starting with the first, has
    full attention."""
    heads, count = metadata.per_layer("attention.head_count"), metadata.num_layers
    gate = metadata.tensors.get("blk.0.attn_gate.weight")
    per_head = gate is not None and gate.shape[0] == heads[0]
    found = expert_keys(metadata) | {
        "num_attention_heads": max(heads), "num_attention_heads_per_layer": heads,
        "gating": "per-head" if per_head else "per-element",
        "moe_routed_scaling_factor": metadata.get("expert_weights_scale", float, 1.0),
    }
    if metadata.get("attention.sliding_window", int):
        found["layer_types"] = [SLIDING if n % 4 else FULL for n in range(count)]
    return found


def cohere_keys(metadata: Metadata) -> Json:
    return {"logit_scale": metadata.get("logit_scale", float)}


AFMOE_NAMES = {
    "attn_gate": "self_attn.gate_proj", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate", "exp_probs_b.bias": "mlp.expert_bias",
}

FAMILIES: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        "afmoe", gguf=files(
            "afmoe", full_every=4, constants={"mup_enabled": True}, read=afmoe_keys,
            names=AFMOE_NAMES,
        ),
    ),
    "ApertusForCausalLM": Family(
        "apertus", gguf=files(
            "apertus", values=xielu_values,
            names={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        ),
    ),
    "ArceeForCausalLM": Family("arcee", gguf=files("arcee", interleaved=True)),
    "CohereForCausalLM": Family(
        "cohere", norm_eps="layer_norm_eps",
        gguf=files("command-r", constants={"use_qk_norm": True}, read=cohere_keys),
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", norm_eps="layer_norm_eps",
        gguf=files("cohere2", full_every=4, read=cohere_keys),
    ),
    "Dots1ForCausalLM": Family("dots1", gguf=files("dots1", read=expert_keys)),
    "ExaoneMoeForCausalLM": Family(
        "exaone_moe", gguf=files(
            "exaone-moe", full_every=4, read=expert_keys,
            ignored_keys=("expert_shared_feed_forward_length",),
        ),
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa",
        gguf=files("granite_swa", interleaved=True, full_every=4, read=granite_swa_keys),
    ),
    "Jais2ForCausalLM": Family("jais2", norm_eps="layer_norm_eps", gguf=files("jais2")),
    "LagunaForCausalLM": Family(
        "laguna", partial_rotary=True, rope_theta_keys=("rope_theta", "rope_local_base_freq"),
        gguf=files("laguna", read=laguna_keys, names={"attn_gate": "self_attn.g_proj"}),
    ),
    "MellumForCausalLM": Family(
        "mellum", rope_theta_keys=("rope_theta", "rope_local_base_freq"),
        gguf=files(
            "mellum", constants={"norm_topk_prob": True}, full_every=4,
            read=partial(expert_keys, score=1),
        ),
    ),
    "MiniCPM3ForCausalLM": Family("minicpm3", gguf=files("minicpm3", read=mla.mla_sizes)),
    "NemotronForCausalLM": Family(
        "nemotron", partial_rotary=True, norm_eps="norm_eps",
        gguf=files("nemotron", one_plus_weight=True),
    ),
    "PhiForCausalLM": Family(
        "phi", partial_rotary=True, norm_eps="layer_norm_eps", gguf=files("phi2", names={
            "output_norm": "model.final_layernorm", "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
        }),
    ),
    "PhimoeForCausalLM": Family("phimoe", gguf=files("phimoe", names={
        "ffn_gate_inp": "mlp.router",
    })),
    "StableLmForCausalLM": Family(
        "stablelm", partial_rotary=True, norm_eps="layer_norm_eps", gguf=files("stablelm"),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2", norm_eps="norm_epsilon",
        gguf=files("starcoder2", names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    ),
}
# fmt: on
"""Architecture -> its family."""
