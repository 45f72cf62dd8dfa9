"""Families with a mixture of experts, and attention in every layer."""

from __future__ import annotations

from typing import Any

from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader, Json
from nanoengine.checkpoint.families import dense, family
from nanoengine.checkpoint.families.family import Family, Reader, files, has, key, layer, make, size
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import quoted


def experts(
    *,
    count_key: str = "num_experts",
    top_k_key: str = "num_experts_per_tok",
    size_key: str = "moe_intermediate_size",
    score: str = "softmax",
    **fields: Any,
) -> Reader[MoEConfig]:
    """Returns a reader of a MoEConfig with these further fields.

    Args:
        count_key, top_k_key, size_key: the keys of the number of experts, the number of experts per
            token, and the intermediate size of an expert.
    """

    def read(keys: ConfigReader) -> MoEConfig:
        if score == "sigmoid":
            keys.require_one_of("scoring_func", score)
        usual = {
            # Why a second key: some writers of Qwen3-MoE use it.
            "num_experts": size(count_key, "num_local_experts"),
            "num_experts_per_tok": size(top_k_key, "num_experts_per_tok"),
            "intermediate_size": size(size_key),
            "layers": tuple(range(keys.require("num_hidden_layers"))),
        }
        moe = make(MoEConfig, {**usual, "score": score, **fields}, keys)
        if moe.num_experts_per_tok > moe.num_experts:
            raise UnsupportedModelError(
                f"{top_k_key}={moe.num_experts_per_tok} exceeds {count_key}={moe.num_experts}"
            )
        groups, selected = moe.num_groups, moe.groups_per_token
        too_small = groups > 1 and moe.num_experts < moe.best_of_group * groups
        if not 1 <= selected <= groups or moe.num_experts % groups or too_small:
            raise UnsupportedModelError(
                f"n_group={groups}, topk_group={selected}: topk_group must be from 1 to n_group;"
                f" groups of {count_key}={moe.num_experts} must have equal sizes of at least 2"
            )
        return moe

    return read


def if_any(condition: Reader[Any], moe: Reader[MoEConfig]) -> Reader[MoEConfig | None]:
    """Returns a reader of a MoEConfig; None if `condition` returns a false value."""
    return lambda keys: moe(keys) if condition(keys) else None


def layers_from(name: str) -> Reader[tuple[int, ...]]:
    """Returns a reader of the layers with experts: the first layers are dense, and this key has
    their number."""
    return lambda keys: tuple(range(keys.get(name), keys.require("num_hidden_layers")))


def sparse_layers(keys: ConfigReader) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step, dense = keys.get("decoder_sparse_step"), keys.get("mlp_only_layers") or ()
    layers = range(keys.require("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def named_sparse_layers(keys: ConfigReader) -> tuple[int, ...]:
    """The layers with experts are in `mlp_layer_types`, or else all after the first dense ones."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("mlp_layer_types")
    if not kinds:
        return layers_from("first_k_dense_replace")(keys)
    keys.get("first_k_dense_replace")  # an older key with the same meaning
    if len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"mlp_layer_types={quoted(kinds)} must have num_hidden_layers={layers} entries,"
            " each 'dense' or 'sparse'"
        )
    return family.layers_of(kinds, "sparse")


def ernie_layers(keys: ConfigReader) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer in a range has experts; -1 means the last layer."""
    layers, every = keys.require("num_hidden_layers"), keys.get("moe_layer_interval")
    first, last = keys.get("moe_layer_start_index"), keys.get("moe_layer_end_index")
    end = layers if last == -1 else min(last + 1, layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % every == 0)


def shared_size(name: str = "n_shared_experts") -> Reader[int]:
    """Returns a reader of the size of the shared expert. This key has the number of shared experts,
    which have the size of the other experts."""

    def read(keys: ConfigReader) -> int:
        count = keys.get(name)
        count = keys.require(name) if count is None else count
        return count * keys.require("moe_intermediate_size")

    return read


# fmt: off
def expert_size_keys(metadata: Metadata) -> Json:
    """For families whose config.json has the size of experts in `intermediate_size`."""
    return {"intermediate_size": metadata.uniform("expert_feed_forward_length", int)}


def hunyuan_3_keys(metadata: Metadata) -> Json:
    """The number of shared experts, computed from their size; and the number of dense layers at the
    start, which have no router."""
    size, layers = metadata.get("expert_feed_forward_length", int) or 1, metadata.num_main_layers
    routers = [f"blk.{n}.ffn_gate_inp.weight" in metadata.tensors for n in range(layers)]
    if not metadata.get("expert_weights_norm", bool, True):
        metadata.reject("expert_weights_norm", "True")
    return {
        "num_shared_experts": metadata.get("expert_shared_feed_forward_length", int, 0) // size,
        "first_k_dense_replace": routers.index(True) if True in routers else len(routers),
    }


# Why two keys: if all layers have experts, configs need not have intermediate_size.
EXPERT_SIZE = size("intermediate_size", "moe_intermediate_size")
NORM_TOPK = {"norm_topk_prob": key("norm_topk_prob")}
QWEN = {"layers": sparse_layers, **NORM_TOPK}
QWEN_SHARED = experts(
    shared_size=size("shared_expert_intermediate_size"), shared_gate=True, **QWEN,
)
SIGMOID = {
    "score": "sigmoid", "scaling_factor": key("routed_scaling_factor"), "norm_epsilon": 1e-20,
    **NORM_TOPK,
}
DEEPSEEK_KEYS = {
    "count_key": "n_routed_experts", "correction_bias": True, "num_groups": key("n_group"),
    "groups_per_token": key("topk_group"), "shared_size": shared_size(),
    "layers": layers_from("first_k_dense_replace"), **SIGMOID,
}
DEEPSEEK = experts(**DEEPSEEK_KEYS)
GGUF_EXPERT_KEYS = (
    *sorted({key.gguf for key in SCHEMA.values() if key.gguf.startswith("expert_")}),
    "leading_dense_block_count",
)
"""Keys of experts in GGUF files."""
# Why norm_topk_prob is not set: these families compute the softmax over the selected experts, which
# equals the softmax over all experts after normalization.
MIXTRAL = {"count_key": "num_local_experts", "size_key": "intermediate_size"}

MTP_TENSORS = r"mtp\."
ONE_MTP_LAYER = {"num_nextn_predict_layers": 1}

W123_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MIXTRAL_NAMES = {"mlp": "block_sparse_moe", **W123_NAMES}
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
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        layers=layer(only={"use_bias": (False,), "moe_norm_min": (1e-12,)}, rope_interleaved=True),
        moe=experts(
            count_key="moe_num_experts", top_k_key="moe_k", correction_bias="row", norm_min=1e-12,
            shared_size=shared_size("moe_num_shared_experts"), layers=ernie_layers,
        ),
        names={"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
        ignored_tensors=r"model\.mtp_",
        gguf=files("ernie4_5-moe", ignored_keys=("expert_shared_feed_forward_length",)),
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        layers=layer(
            qkv_bias=key("attention_bias"),
            qk_norm=key("use_qk_norm", lambda on: "per_head" if on else None),
        ),
        moe=DEEPSEEK, partial_rotary=True, rope_extra=dense.M_ROPE, defaults=ONE_MTP_LAYER,
        gguf=files(
            "glm4moe", constants={"use_qk_norm": True}, ignored_keys=dense.IMAGE_KEYS,
            names=dense.PRE_MLP_NORM,
        ),
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        layers=layer(
            only={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
            norm="fp32_weight", qkv_bias=True, output_bias=True, hidden_act="clamped_swiglu",
            attention_sinks=True,
        ),
        windows=family.all_but_every(2),
        moe=experts(
            **MIXTRAL, bias=True, inputs_first=True,
        ),
        # Why: the config class also has a base, which would take precedence over a base in a
        # config.json; and published checkpoints lack the dtype.
        defaults={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "torch_dtype": "bfloat16",
        },
        names={"mlp.gate": "mlp.router"},
        gguf=files("gpt-oss", read=expert_size_keys, names=dense.PRE_MLP_NORM, full_every=2),
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", layers=dense.GRANITE, moe=experts(**MIXTRAL), names=GRANITE_NAMES,
        gguf=files("granitemoe", interleaved=True),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared", layers=layer(**dense.GRANITE_KEYS, **dense.LLAMA, fused_gate_up=True),
        moe=experts(**MIXTRAL, shared_size=key("shared_intermediate_size")),
        names=GRANITE_SHARED_NAMES,
        gguf=files(
            "granitemoe", when=has("expert_shared_feed_forward_length"), interleaved=True,
        ),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe", layers=layer(qk_norm="post_rope", **dense.ATTENTION_BIAS),
        moe=experts(
            size_key="intermediate_size", top_k_key="moe_topk",
            shared_size=size("intermediate_size"),
        ),
        rope_extra=dense.HUNYUAN_ROPE,
        names={
            "mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp",
            **dense.HUNYUAN_NAMES,
        },
        gguf=files(
            "hunyuan-moe",
            ignored_keys=(
                "expert_feed_forward_length", "expert_shared_count",
                "expert_shared_feed_forward_length",
            ),
        ),
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3", layers=layer(qk_norm="per_head", **dense.LLAMA),
        moe=experts(
            score="sigmoid", scaling_factor=key("router_scaling_factor"), norm_epsilon=1e-20,
            layers=named_sparse_layers, correction_bias=True,
            shared_size=shared_size("num_shared_experts"),
        ),
        defaults={"first_k_dense_replace": 1},
        names={
            "mlp.gate": "mlp.router.gate", "mlp.shared_experts": "mlp.shared_mlp",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
        gguf=files("hy_v3", read=hunyuan_3_keys),
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", layers=layer(only={"use_qk_norm": (True,)}, qk_norm="all_heads"),
        moe=experts(**MIXTRAL, score="sigmoid", correction_bias=True), partial_rotary=True,
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
        gguf=files("minimax-m2", read=expert_size_keys),
    ),
    "MixtralForCausalLM": Family(
        "mixtral", windows=dense.WINDOW, moe=experts(**MIXTRAL), names=MIXTRAL_NAMES,
        gguf=files("llama", when=has("expert_count"), interleaved=True),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", layers=layer(qk_norm="all_heads", **dense.ATTENTION_BIAS),
        moe=experts(size_key="intermediate_size", **NORM_TOPK), gguf=files("olmoe"),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", layers=layer(**family.from_keys("qkv_bias")), moe=QWEN_SHARED,
        names=SHARED_NAMES,
        windows=family.windows(
            lambda keys, n: n % 2 == 0 and n < keys.get("max_window_layers"), needs_flag=True,
        ), gguf=files("qwen2moe"),
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", layers=dense.QWEN3, moe=experts(**QWEN), rope_extra=dense.M_ROPE,
        windows=family.windows(needs_flag=True, has_types=False),
        gguf=files("qwen3moe", constants={"norm_topk_prob": True})
        | files("qwen3vlmoe", constants={"norm_topk_prob": True}, ignored_keys=dense.IMAGE_KEYS),
    ),
}
# fmt: on
"""Architecture -> its family."""
