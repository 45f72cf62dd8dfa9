"""Families with multi-head latent attention (MLA): DeepSeek-V2 and later."""

from __future__ import annotations

from typing import Any

from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader, Json
from nanoengine.checkpoint.families import dense, moe
from nanoengine.checkpoint.families.family import Family, Reader, files, key, layer
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import MLAConfig
from nanoengine.errors import UnsupportedModelError


def mla_config(keys: ConfigReader) -> MLAConfig:
    """Reads the sizes of MLA."""
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    sizes = {name: keys.require(name) for name in names}
    if sizes["qk_rope_head_dim"] % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim={sizes['qk_rope_head_dim']} must be even")
    return MLAConfig(q_lora_rank=keys.get("q_lora_rank"), **sizes)


def if_group_limited(name: str) -> Reader[int]:
    """DeepSeek-V2: returns a reader of this key for the large model, or of 1 for the other models,
    which have no expert groups."""
    return lambda keys: (
        keys.require(name) if keys.get("topk_method") == "group_limited_greedy" else 1
    )


# fmt: off
def has_sigmoid_experts(metadata: Metadata) -> bool:
    """Whether experts have sigmoid scores. Early files of GLM-4.7-Flash lack the key; they are
    recognized by the correction bias, which only sigmoid scores have."""
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in metadata.tensors)
    score = metadata.get("expert_gating_func", int, 2 if has_bias else 1)
    return score == 2


def mla_sizes(metadata: Metadata) -> Json:
    """The sizes of MLA. Older files store them in the keys of ordinary attention."""
    rope_dim = metadata.get("rope.dimension_count", int, 0)
    size = metadata.get("attention.key_length_mla", int) or metadata.head_dim
    # Why read but not used: depending on the writer it is 1 or the number of heads.
    metadata.get("attention.head_count_kv", Any)
    value = metadata.get("attention.value_length_mla", int)
    value = value or metadata.uniform("attention.value_length", int)
    return {
        "q_lora_rank": metadata.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": rope_dim, "qk_nope_head_dim": size - rope_dim, "v_head_dim": value,
        "num_key_value_heads": metadata.get("attention.head_count", int),
        "head_dim": max(2, rope_dim),
    }


GGUF_DEFAULTS = {
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "n_shared_experts": 0,
}
"""Key of config.json -> its value if the GGUF file lacks it. Source: llama.cpp."""


def deepseek_keys(metadata: Metadata) -> Json:
    found = {k: metadata.get(SCHEMA[k].gguf, Any) or value for k, value in GGUF_DEFAULTS.items()}
    return found | mla_sizes(metadata)


def deepseek_2_keys(metadata: Metadata) -> Json:
    """The same for DeepSeek-V2; only the large model has expert groups."""
    found = deepseek_keys(metadata)
    if found["n_group"] == 1:
        return found | {"n_group": None, "topk_group": None}
    return found | {"topk_method": "group_limited_greedy"}


DEEPSEEK_LAYERS = layer(
    only={"topk_method": ("noaux_tc",)}, mla=mla_config, **dense.ATTENTION_BIAS,
    rope_interleaved=key("rope_interleave"),
)
# Why: MLA does not use head_dim, and its default, which is computed from other keys, may be odd.
UNUSED_HEAD_DIM = {"head_dim": 64}

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        layers=layer(
            only={
                "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,),
            },
            mla=mla_config, rope_interleaved=True, **dense.LLAMA,
        ),
        moe=moe.experts(
            count_key="n_routed_experts", norm_topk_prob=False, shared_size=moe.shared_size(),
            scaling_factor=key("routed_scaling_factor"),
            layers=moe.layers_from("first_k_dense_replace"),
            num_groups=if_group_limited("n_group"), groups_per_token=if_group_limited("topk_group"),
            best_of_group=1,
        ),
        defaults=UNUSED_HEAD_DIM, gguf=files("deepseek2", read=deepseek_2_keys),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", layers=DEEPSEEK_LAYERS, moe=moe.DEEPSEEK,
        defaults=UNUSED_HEAD_DIM | moe.ONE_MTP_LAYER,
        gguf=files("deepseek2", when=has_sigmoid_experts, read=deepseek_keys),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", layers=DEEPSEEK_LAYERS,
        moe=moe.experts(**{**moe.DEEPSEEK_KEYS, "layers": moe.named_sparse_layers}),
        defaults={"first_k_dense_replace": 1, **moe.ONE_MTP_LAYER},
    ),
}
# fmt: on
"""Architecture -> its family."""
