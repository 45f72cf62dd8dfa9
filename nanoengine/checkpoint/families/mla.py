"""Families with multi-head latent attention (MLA): DeepSeek-V2 and later."""

from __future__ import annotations

from typing import Any

from nanoengine.checkpoint.config_reader import KEYS, ConfigReader, Json
from nanoengine.checkpoint.families import dense, moe
from nanoengine.checkpoint.families.family import Family, Reader, files, key, plan
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import MLAConfig
from nanoengine.errors import UnsupportedModelError


def latent(keys: ConfigReader, value_dim: int | None = None) -> MLAConfig:
    """DeepSeek-V2's sizes of attention."""
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"
    sizes = {name: keys.require(name) for name in names}
    if sizes["qk_rope_head_dim"] % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim={sizes['qk_rope_head_dim']} must be even")
    value_dim = value_dim or keys.require("v_head_dim")
    return MLAConfig(q_lora_rank=keys.get("q_lora_rank"), v_head_dim=value_dim, **sizes)


def minicpm_latent(keys: ConfigReader) -> MLAConfig:
    """The same, with a default for the size of values: the head dim of ordinary attention."""
    plain = keys.require("hidden_size") // keys.require("num_attention_heads")
    return latent(keys, keys.get("v_head_dim") or plain)


def depth_scale(keys: ConfigReader) -> float:
    """MiniCPM's factor on what a layer adds."""
    layers: int = keys.require("num_hidden_layers")
    depth: float | None = keys.get("scale_depth")
    return 1.0 if depth is None else depth / layers**0.5


def limited(name: str) -> Reader[int]:
    """DeepSeek-V2: the value of this key in the large model; the others have no groups of
    experts."""
    return lambda keys: (
        keys.require(name) if keys.get("topk_method") == "group_limited_greedy" else 1
    )


# fmt: off
def has_no_experts(given: Metadata) -> bool:
    return not given.get("expert_count", int)


def has_sigmoid_experts(given: Metadata) -> bool:
    """Why not only by the key: early files of GLM-4.7-Flash lack it, and only sigmoid scores have
    such a bias."""
    biased = any(name.endswith(".exp_probs_b.bias") for name in given.tensors)
    score = given.get("expert_gating_func", int, 2 if biased else 1)
    return score == 2 and not has_no_experts(given)


def mla_sizes(given: Metadata) -> Json:
    """The sizes of MLA. Older files store them under the keys of ordinary heads."""
    rope_dim = given.get("rope.dimension_count", int, 0)
    size = given.get("attention.key_length_mla", int) or given.head_dim
    # Why read: depending on the writer it is 1, or the number of heads.
    given.get("attention.head_count_kv", Any)
    value = given.get("attention.value_length_mla", int)
    value = value or given.one("attention.value_length", int)
    return {
        "q_lora_rank": given.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": rope_dim, "qk_nope_head_dim": size - rope_dim, "v_head_dim": value,
        "num_key_value_heads": given.get("attention.head_count", int),
        "head_dim": max(2, rope_dim),
    }


ABSENT = {
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0, "n_shared_experts": 0,
}
"""Keys -> their meaning if a GGUF file lacks them. Source: llama.cpp."""


def deepseek(given: Metadata) -> Json:
    found = {key: given.get(KEYS[key].gguf, Any) or value for key, value in ABSENT.items()}
    return found | mla_sizes(given)


def deepseek_2(given: Metadata) -> Json:
    """The same; only the large model limits groups of experts."""
    found = deepseek(given)
    if found["n_group"] == 1:
        return found | {"n_group": None, "topk_group": None}
    return found | {"topk_method": "group_limited_greedy"}


DEEPSEEK_PLAN = plan(
    only={"topk_method": ("noaux_tc",)}, latent=latent, **dense.ATTENTION_BIAS,
    rope_interleaved=key("rope_interleave"),
)
# Why in code: a key of `COMMON`. Published checkpoints have one layer for drafts.
UNUSED_HEAD = {"head_dim": 64}  # Why: MLA has other sizes, and one computed from others may be odd

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        plan=plan(
            only={
                "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,),
            },
            latent=latent, rope_interleaved=True, **dense.LLAMA,
        ),
        moe=moe.experts(
            count="n_routed_experts", norm_topk_prob=False, shared_size=moe.shared_size(),
            scaling_factor=key("routed_scaling_factor"),
            layers=moe.layers_from("first_k_dense_replace"),
            num_groups=limited("n_group"), groups_per_token=limited("topk_group"),
            best_of_group=1,
        ),
        defaults=UNUSED_HEAD, gguf=files("deepseek2", read=deepseek_2),
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", plan=DEEPSEEK_PLAN, moe=moe.DEEPSEEK, defaults=UNUSED_HEAD | moe.DRAFT_LAYER,
        gguf=files("deepseek2", when=has_sigmoid_experts, read=deepseek),
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", plan=DEEPSEEK_PLAN,
        moe=moe.experts(**{**moe.DEEPSEEK_KEYS, "layers": moe.named_sparse_layers}),
        defaults={"first_k_dense_replace": 1, **moe.DRAFT_LAYER},
    ),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        plan=plan(
            latent=minicpm_latent, embedding_multiplier=key("scale_emb"),
            residual_multiplier=depth_scale, **dense.LLAMA,
            logit_scale=lambda keys: keys.require("dim_model_base") / keys.require("hidden_size"),
        ),
        # Why in code: other families with MLA must have these sizes.
        defaults={
            "head_dim": 32, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        },
        gguf=files("minicpm3", read=mla_sizes),
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        plan=plan(latent=latent, rope_interleaved=key("rope_interleave"), **dense.ATTENTION_BIAS),
        defaults={
            "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        gguf=files(
            # Why: such files have some sizes of experts nevertheless.
            "deepseek2", when=has_no_experts, read=mla_sizes, unread=moe.GGUF_KEYS,
        ),
    ),
}
# fmt: on
"""Architecture -> its family."""
