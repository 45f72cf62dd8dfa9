"""Readers of the families in `more_families.py`, as those of `readers.py`: plans of latents and of
layers that differ, which layers keep a state, and mixtures of experts, which are fields of
`MoEConfig`."""

from __future__ import annotations

import math
from typing import Any

from nanoengine.checkpoint.keys import Json, Keys
from nanoengine.checkpoint.plan import LatentPlan, MoEConfig, StatePlan
from nanoengine.checkpoint.readers import CONV, FULL, LINEAR, SLIDING, Reader, made, size, those
from nanoengine.checkpoint.varied_plan import VariedPlan
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown


def varied(keys: Keys) -> VariedPlan:
    """Gemma 4: layers without a window have other heads, and the last ones no keys."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("layer_types")
    kinds = kinds or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    if kinds[-1] != FULL:
        raise UnsupportedModelError(f"layer_types ends with {shown(kinds[-1])}, not with {FULL!r}")
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
                f"per_layer_config={shown(by_layer)} is not implemented; supported: head_dim and"
                f" num_key_value_heads, the same for each layer of {FULL!r}"
            )
        full = first.get("head_dim", window[0]), first.get("num_key_value_heads", window[1])
    found = VariedPlan(
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


def mup_scale(keys: Keys) -> float:
    """AFMoE: embeddings grow with the hidden size where `mup_enabled` says so."""
    return keys.require("hidden_size") ** 0.5 if keys.get("mup_enabled") else 1.0


def ernie_layers(keys: Keys) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer between two has experts; -1 names the last one."""
    layers, every = keys.require("num_hidden_layers"), keys.get("moe_layer_interval")
    first, last = keys.get("moe_layer_start_index"), keys.get("moe_layer_end_index")
    end = layers if last == -1 else min(last + 1, layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % every == 0)


def latent(keys: Keys, value_dim: int | None = None) -> LatentPlan:
    """DeepSeek-V2's sizes of attention."""
    rope_dim = keys.require("qk_rope_head_dim")
    if rope_dim % 2:
        raise UnsupportedModelError(f"qk_rope_head_dim={rope_dim} must be even")
    return LatentPlan(
        rank=keys.require("kv_lora_rank"),
        query_rank=keys.get("q_lora_rank"),
        nope_dim=keys.require("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=value_dim or keys.require("v_head_dim"),
    )


def minicpm_latent(keys: Keys) -> LatentPlan:
    """The same where values may have the size that plain heads would have."""
    plain = keys.require("hidden_size") // keys.require("num_attention_heads")
    return latent(keys, keys.get("v_head_dim") or plain)


def depth_scale(keys: Keys) -> float:
    """MiniCPM's factor on what a layer adds."""
    layers: int = keys.require("num_hidden_layers")
    depth: float | None = keys.get("scale_depth")
    return 1.0 if depth is None else depth / layers**0.5


def lfm2_inner_size(keys: Keys) -> int:
    """Two thirds of what the config names, rounded up, unless it says that this is the size."""
    found = size("block_ff_dim", "intermediate_size")(keys)
    if keys.get("block_auto_adjust_ff_dim"):
        found = int(keys.get("block_ffn_dim_multiplier") * int(2 * found / 3))
        multiple = keys.get("block_multiple_of")
        found = multiple * -(-found // multiple)
    return found


def delta_states(*, merged: bool) -> Reader[StatePlan]:
    """Qwen3-Next: every layer but each `full_attention_interval`-th."""

    def states(keys: Keys) -> StatePlan:
        key_heads, key_dim = keys.get("linear_num_key_heads"), keys.get("linear_key_head_dim")
        heads, value_dim = keys.get("linear_num_value_heads"), keys.get("linear_value_head_dim")
        if heads % key_heads:
            raise UnsupportedModelError(
                f"linear_num_value_heads={heads} must be a multiple of"
                f" linear_num_key_heads={key_heads}"
            )
        every = keys.get("full_attention_interval")
        kinds = keys.get("layer_types") or [
            FULL if (n + 1) % every == 0 else LINEAR
            for n in range(keys.require("num_hidden_layers"))
        ]
        return StatePlan(
            kind="delta",
            layers=those(kinds, LINEAR),
            kernel=keys.get("linear_conv_kernel_dim"),
            channels=2 * key_heads * key_dim + heads * value_dim,
            num_key_heads=key_heads,
            num_value_heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
            merged=merged,
        )

    return states


def conv_states(keys: Keys) -> StatePlan:
    """LFM2: as `layer_types` says, else all but `full_attn_idxs`."""
    every, full = range(keys.require("num_hidden_layers")), keys.get("full_attn_idxs")
    kinds = keys.get("layer_types") or [FULL if full is None or n in full else CONV for n in every]
    return StatePlan(
        kind="conv",
        layers=those(kinds, CONV),
        kernel=keys.get("conv_L_cache"),
        channels=keys.require("hidden_size"),
        bias=keys.get("conv_bias"),
    )


def lfm3_layers(raw: Json) -> Json:
    """LFM3's config, with what its layers are where it doesn't say."""
    layers = raw.get("num_hidden_layers")
    if raw.get("layer_types") is not None or not isinstance(layers, int):
        return raw
    return {**raw, "layer_types": [CONV, *([CONV, FULL, CONV, SLIDING] * layers)[: layers - 1]]}


def limited(name: str) -> Reader[int]:
    """DeepSeek-V2: what this key says, in the large one; the others have no groups of experts."""
    return lambda keys: (
        keys.require(name) if keys.get("topk_method") == "group_limited_greedy" else 1
    )


def sparse_layers(keys: Keys) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer has experts, `mlp_only_layers` never."""
    step, dense = keys.get("decoder_sparse_step"), keys.get("mlp_only_layers") or ()
    layers = range(keys.require("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)


def named_sparse_layers(keys: Keys) -> tuple[int, ...]:
    """As `mlp_layer_types` says, else as `layers_from`."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("mlp_layer_types")
    if not kinds:
        return layers_from("first_k_dense_replace")(keys)
    keys.get("first_k_dense_replace")  # the older name of the same
    if len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"mlp_layer_types={shown(kinds)} must be 'dense' or 'sparse' for each of"
            f" num_hidden_layers={layers}"
        )
    return those(kinds, "sparse")


def experts(
    *,
    count: str = "num_experts",
    taken: str = "num_experts_per_tok",
    inner: str = "moe_intermediate_size",
    score: str = "softmax",
    **fields: Any,
) -> Reader[MoEConfig]:
    """A mixture of experts, by the keys that say how many there are, how many of them a token takes
    and of which inner size they are."""

    def read(keys: Keys) -> MoEConfig:
        if score == "sigmoid":
            keys.allow("scoring_func", score)
        usual = {
            # Why a second: some writers of Qwen3-MoE call them so.
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
    """A mixture of experts where there are `some`."""
    return lambda keys: moe(keys) if some(keys) else None


def layers_from(name: str) -> Reader[tuple[int, ...]]:
    """The first layers, as many as this key says, are dense."""
    return lambda keys: tuple(range(keys.get(name), keys.require("num_hidden_layers")))


def shared_size(name: str = "n_shared_experts") -> Reader[int]:
    """DeepSeek-V3: as many shared experts of an expert's size as this key says."""

    def read(keys: Keys) -> int:
        count = keys.get(name)
        count = keys.require(name) if count is None else count
        return count * keys.require("moe_intermediate_size")

    return read


# --- models before Llama --------------------------------------------------------------------------

BEFORE = {"gelu_fast": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}
BEFORE |= {name: name for name in ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")}
"""`hidden_act` -> what `LayerPlan.activation` calls it."""


def activation(keys: Keys) -> str:
    """Of an MLP without a gate."""
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
    """A config whose keys have the usual names, which count where there are both."""
    return {OLDER[name]: raw[name] for name in OLDER if name in raw} | {
        name: value for name, value in raw.items() if name not in OLDER
    }


NEOX = {
    "qkv_proj": "query_key_value", "o_proj": "dense", "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}  # fmt: skip


def falcon(raw: Json) -> Json:
    """Falcon: one KV head, but in the newer form."""
    heads = raw.get("num_kv_heads") or raw.get("num_attention_heads")
    newer = raw.get("new_decoder_architecture")
    return {**older(raw), "num_key_value_heads": heads if newer else 1}


def falcon_norms(keys: Keys) -> str:
    """Attention and MLP side by side, behind one norm, or in the newer form two."""
    newer, count = keys.get("new_decoder_architecture"), "num_ln_in_parallel_attn"
    keys.allow("parallel_attn", True)
    keys.allow(count, None, 1, 2 if newer else 1)
    return "parallel each" if newer and keys.get(count) != 1 else "parallel"


def falcon_names(keys: Keys) -> dict[str, str]:
    """What the norms are called depends on how many there are."""
    two = falcon_norms(keys) == "parallel each"
    norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"} if two else {}
    return {
        "model.embed_tokens": "model.word_embeddings", "model.layers": "model.h",
        "model.norm": "model.ln_f", "self_attn": "self_attention", **NEOX, **norms,
    }  # fmt: skip


def opt_positions(keys: Keys) -> int:
    """OPT: two rows of the table are before the first position."""
    keys.allow("word_embed_proj_dim", keys.require("hidden_size"), None)
    return 2
