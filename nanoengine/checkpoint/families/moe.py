"""Families with a mixture of experts, and attention in every layer."""

from __future__ import annotations

from typing import Any

from nanoengine.checkpoint.config_reader import KEYS, ConfigReader, Json
from nanoengine.checkpoint.families import dense, family
from nanoengine.checkpoint.families.family import (
    Family,
    Reader,
    files,
    has,
    key,
    made,
    plan,
    size,
)
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import repr_short


def experts(
    *,
    count: str = "num_experts",
    taken: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    score: str = "softmax",
    **fields: Any,
) -> Reader[MoEConfig]:
    """Returns a reader of a mixture of experts. `count`, `taken` and `inner` are the keys for the
    number of experts, the experts per token, and their inner size."""

    def read(keys: ConfigReader) -> MoEConfig:
        if score == "sigmoid":
            keys.allow("scoring_func", score)
        usual = {
            # Why a second: some writers of Qwen3-MoE use this key.
            "num_experts": size(count, "num_local_experts"),
            "num_experts_per_tok": size(taken, "num_experts_per_tok"),
            "intermediate_size": size(inner),
            "layers": tuple(range(keys.require("num_hidden_layers"))),
        }
        moe = made(MoEConfig, {**usual, "score": score, **fields}, keys)
        if moe.num_experts_per_tok > moe.num_experts:
            raise UnsupportedModelError(
                f"{taken}={moe.num_experts_per_tok} must be at most {count}={moe.num_experts}"
            )
        if moe.score == "sparsemixer" and moe.num_experts_per_tok != 2:
            raise UnsupportedModelError(
                f"{taken}={moe.num_experts_per_tok} is not implemented; supported: 2"
            )
        groups, kept = moe.num_groups, moe.groups_per_token
        small = groups > 1 and moe.num_experts < moe.best_of_group * groups
        if not 1 <= kept <= groups or moe.num_experts % groups or small:
            raise UnsupportedModelError(
                f"n_group={groups} and topk_group={kept} must make equal groups of two and more of"
                f" {count}={moe.num_experts}"
            )
        return moe

    return read


def where_any(some: Reader[Any], moe: Reader[MoEConfig]) -> Reader[MoEConfig | None]:
    """A mixture of experts if `some` finds any."""
    return lambda keys: moe(keys) if some(keys) else None


def layers_from(name: str) -> Reader[tuple[int, ...]]:
    """The first layers are dense; this key has their number."""
    return lambda keys: tuple(range(keys.get(name), keys.require("num_hidden_layers")))


def sparse_layers(keys: ConfigReader) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step, dense = keys.get("decoder_sparse_step"), keys.get("mlp_only_layers") or ()
    layers = range(keys.require("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def named_sparse_layers(keys: ConfigReader) -> tuple[int, ...]:
    """The layers in `mlp_layer_types`, else as `layers_from`."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("mlp_layer_types")
    if not kinds:
        return layers_from("first_k_dense_replace")(keys)
    keys.get("first_k_dense_replace")  # the older name of the same
    if len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"mlp_layer_types={repr_short(kinds)} must be 'dense' or 'sparse' for each of"
            f" num_hidden_layers={layers}"
        )
    return family.layers_of(kinds, "sparse")


def ernie_layers(keys: ConfigReader) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer in a range has experts; -1 means the last layer."""
    layers, every = keys.require("num_hidden_layers"), keys.get("moe_layer_interval")
    first, last = keys.get("moe_layer_start_index"), keys.get("moe_layer_end_index")
    end = layers if last == -1 else min(last + 1, layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % every == 0)


def shared_size(name: str = "n_shared_experts") -> Reader[int]:
    """DeepSeek-V3: this key has the number of shared experts, each of an expert's size."""

    def read(keys: ConfigReader) -> int:
        count = keys.get(name)
        count = keys.require(name) if count is None else count
        return count * keys.require("moe_intermediate_size")

    return read


def mup_scale(keys: ConfigReader) -> float:
    """AFMoE: embeddings are scaled by the root of the hidden size if `mup_enabled` is set."""
    return keys.require("hidden_size") ** 0.5 if keys.get("mup_enabled") else 1.0


# fmt: off
# fmt: off
def expert_size(given: Metadata) -> Json:
    """For families that store the size of experts as the MLP's size in config.json."""
    return {"intermediate_size": given.one("expert_feed_forward_length", int)}


def always_normed(given: Metadata) -> Json:
    """For families that always divide the weights of a token's experts by their sum."""
    if not given.get("expert_weights_norm", bool, True):
        given.refuse("expert_weights_norm", "True")
    return {}


def hunyuan_3(given: Metadata) -> Json:
    """The number of shared experts, from their size; layers without a router are dense."""
    size = given.get("expert_feed_forward_length", int) or 1
    routers = [f"blk.{n}.ffn_gate_inp.weight" in given.tensors for n in range(given.main_layers)]
    return always_normed(given) | {
        "num_shared_experts": given.get("expert_shared_feed_forward_length", int, 0) // size,
        "first_k_dense_replace": routers.index(True) if True in routers else len(routers),
    }


# Why: if all layers have experts, configs need no other MLP size.
EXPERT_SIZE = size("intermediate_size", "moe_intermediate_size")
NORM_TOPK = {"norm_topk_prob": key("norm_topk_prob")}
QWEN = {"layers": sparse_layers, **NORM_TOPK}
QWEN_SHARED = experts(
    shared_size=size("shared_expert_intermediate_size"), shared_gate=True, **QWEN,
)
SCALED = {
    "score": "sigmoid", "scaling_factor": key("routed_scaling_factor"), "norm_epsilon": 1e-20,
    **NORM_TOPK,
}
DEEPSEEK_KEYS = {
    "count": "n_routed_experts", "correction_bias": True, "num_groups": key("n_group"),
    "groups_per_token": key("topk_group"), "shared_size": shared_size(),
    "layers": layers_from("first_k_dense_replace"), **SCALED,
}
DEEPSEEK = experts(**DEEPSEEK_KEYS)
GGUF_KEYS = (
    *sorted({key.gguf for key in KEYS.values() if key.gguf.startswith("expert_")}),
    "leading_dense_block_count",
)
"""The names of expert keys in GGUF files."""
# Why no norm key: a softmax over the selected experts equals one over all, divided by their sum.
MIXTRAL = {"count": "num_local_experts", "inner": "intermediate_size"}
# Why another key: these families have another name for the shared experts.
SHARED = {"correction_bias": True, "shared_size": shared_size("num_shared_experts")}

DRAFTS = r"mtp\."
DRAFT_LAYER = {"num_nextn_predict_layers": 1}

NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MIXTRAL_NAMES = {"mlp": "block_sparse_moe", **NUMBERED}
SHARED_NAMES = {"shared_experts": "shared_expert"}
GRANITE_NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
GRANITE_SHARED_NAMES = GRANITE_NAMES | {
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}

FAMILIES: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        "afmoe",
        plan=plan(
            only={"attention_bias": (False,)}, norms="sandwich", norm="wide", qk_norm="per_head",
            output_gate="gate_proj", embedding_multiplier=mup_scale,
        ),
        windows=family.all_but_every("global_attn_every_n_layers"),
        rope_layers=family.only_with_window,
        moe=experts(
            score="sigmoid", scaling_factor=key("route_scale"), norm_epsilon=1e-20,
            layers=layers_from("num_dense_layers"), **SHARED,
        ),
        names={
            "attention_output_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "mlp.gate": "mlp.router.gate", "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
        gguf=files(
            "afmoe", slides=4, fixed={"mup_enabled": True}, read=always_normed,
            names={"attn_gate": "self_attn.gate_proj"},
        ),
    ),
    "Dots1ForCausalLM": Family(
        "dots1", plan=dense.QWEN3, moe=DEEPSEEK,
        windows=family.windows(family.from_max_window_layers),
        defaults={"n_shared_experts": None},  # Why: the class has None, which is not a number.
        gguf=files("dots1"),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        plan=plan(only={"use_bias": (False,), "moe_norm_min": (1e-12,)}, rope_interleaved=True),
        moe=experts(
            count="moe_num_experts", taken="moe_k", correction_bias="row", norm_least=1e-12,
            shared_size=shared_size("moe_num_shared_experts"),
            layers=ernie_layers,
        ),
        names={"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
        ignored_tensors=r"model\.mtp_",
        gguf=files("ernie4_5-moe", unread=("expert_shared_feed_forward_length",)),
    ),
    "ExaoneMoeForCausalLM": Family(
        "exaone_moe", plan=plan(qk_norm="per_head"), windows=family.all_but_every(),
        rope_layers=family.exaone_rope,
        moe=experts(**{**DEEPSEEK_KEYS, "count": "num_experts", **SHARED,
                       "layers": named_sparse_layers}),
        names={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"},
        ignored_tensors=DRAFTS, gguf=files(
            "exaone-moe", slides=4, unread=("expert_shared_feed_forward_length",),
        ),
    ),
    "FlexOlmoForCausalLM": Family(
        "flex_olmo", plan=dense.OLMO2, moe=experts(inner="intermediate_size", **NORM_TOPK),
        names=dense.POST_NORM_NAMES,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        plan=plan(
            qkv_bias=key("attention_bias"),
            qk_norm=key("use_qk_norm", lambda asked: "per_head" if asked else None),
        ),
        moe=DEEPSEEK, partial=True, defaults=DRAFT_LAYER,
        gguf=files(
            "glm4moe", fixed={"use_qk_norm": True}, unread=dense.IMAGES, names=dense.BEFORE_MLP,
        ),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        plan=plan(
            only={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
            norm="wide", qkv_bias=True, output_bias=True, hidden_act="clamped_swiglu",
            attention_sinks=True,
        ),
        windows=family.all_but_every(2),
        moe=experts(
            **MIXTRAL, router_bias=True, expert_bias=True, interleaved=True, inputs_first=True,
        ),
        # Why: the class includes a base too, which would take precedence over a config's own. And
        # the published files don't say which dtype they have.
        defaults={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "torch_dtype": "bfloat16",
        },
        names={"mlp.gate": "mlp.router"},
        gguf=files("gpt-oss", read=expert_size, names=dense.BEFORE_MLP, slides=2),
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", plan=dense.GRANITE, moe=experts(**MIXTRAL), names=GRANITE_NAMES,
        gguf=files("granitemoe", pairs=True),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared", plan=plan(**dense.GRANITE_KEYS, **dense.LLAMA, fused_gate_up=True),
        moe=experts(**MIXTRAL, shared_size=key("shared_intermediate_size")),
        names=GRANITE_SHARED_NAMES,
        gguf=files(
            "granitemoe", when=has("expert_shared_feed_forward_length"), pairs=True,
        ),
    ),
    "GraniteMoeSWAForCausalLM": Family(
        "granitemoe_swa",
        plan=plan(**dense.GRANITE_KEYS, **dense.ATTENTION_BIAS, fused_gate_up=True,
                  attention_sinks=True),
        windows=family.all_but_first_of_four, rope_layers=family.layer_bases,
        moe=experts(**MIXTRAL, shared_size=key("shared_intermediate_size")),
        names={
            "mlp": "block_sparse_moe", "mlp.gate": "block_sparse_moe.router",
            **{n: of for n, of in GRANITE_SHARED_NAMES.items() if ".shared_experts." in n},
        },
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe", plan=plan(qk_norm="post_rope", **dense.ATTENTION_BIAS),
        moe=experts(
            inner="intermediate_size", taken="moe_topk", shared_size=size("intermediate_size"),
        ),
        rope_extra=dense.HUNYUAN_ROPE,
        names={
            "mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp",
            **dense.HUNYUAN_NAMES,
        },
        gguf=files(
            "hunyuan-moe",
            unread=(
                "expert_feed_forward_length", "expert_shared_count",
                "expert_shared_feed_forward_length",
            ),
        ),
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3", plan=plan(qk_norm="per_head", **dense.LLAMA),
        moe=experts(
            score="sigmoid", scaling_factor=key("router_scaling_factor"), norm_epsilon=1e-20,
            layers=named_sparse_layers, **SHARED,
        ),
        defaults={"first_k_dense_replace": 1},
        names={
            "mlp.gate": "mlp.router.gate", "mlp.shared_experts": "mlp.shared_mlp",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
        gguf=files("hy_v3", read=hunyuan_3),
    ),
    "MellumForCausalLM": Family(
        "mellum", plan=dense.QWEN3, windows=family.windows(lambda keys, layer: False),
        bases=("rope_theta", "rope_local_base_freq"),
        moe=experts(layers=named_sparse_layers, **NORM_TOPK), ignored_tensors=DRAFTS,
        gguf=files("mellum", fixed={"norm_topk_prob": True}, slides=4),
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", plan=plan(only={"use_qk_norm": (True,)}, qk_norm="all_heads"),
        moe=experts(**MIXTRAL, score="sigmoid", correction_bias=True), partial=True,
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
        gguf=files("minimax-m2", read=expert_size),
    ),
    "MixtralForCausalLM": Family(
        "mixtral", windows=dense.WINDOW, moe=experts(**MIXTRAL), names=MIXTRAL_NAMES,
        gguf=files("llama", when=has("expert_count"), pairs=True),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", plan=plan(qk_norm="all_heads", **dense.ATTENTION_BIAS),
        moe=experts(inner="intermediate_size", **NORM_TOPK), gguf=files("olmoe"),
    ),
    "PhimoeForCausalLM": Family(
        "phimoe",
        plan=plan(
            norm="layer", norm_bias=True, **family.same("lm_head_bias"), **dense.ATTENTION_BIAS,
        ),
        windows=dense.WINDOW,
        moe=experts(**MIXTRAL, score="sparsemixer", jitter=key("router_jitter_noise")),
        rope_extra={"short_mscale": True, "long_mscale": True}, names=MIXTRAL_NAMES,
        gguf=files("phimoe"),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", plan=plan(**family.same("qkv_bias")), moe=QWEN_SHARED, names=SHARED_NAMES,
        windows=family.windows(
            lambda keys, n: n % 2 == 0 and n < keys.get("max_window_layers"), asked=True,
        ), gguf=files("qwen2moe"),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", plan=dense.QWEN3, moe=experts(**QWEN),
        windows=family.windows(asked=True, named=False),
        gguf=files("qwen3moe", fixed={"norm_topk_prob": True})
        | files("qwen3vlmoe", fixed={"norm_topk_prob": True}, unread=dense.IMAGES),
    ),
    "SolarOpenForCausalLM": Family(
        "solar_open", plan=plan(qkv_bias=key("attention_bias")),
        moe=experts(**{n: read for n, read in DEEPSEEK_KEYS.items() if n != "layers"}),
        partial=True, intermediate_size=EXPERT_SIZE,
    ),
}
# fmt: on
"""Architecture -> its family."""
