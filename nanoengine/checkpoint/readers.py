"""Readers: what a family's layers are, read from its config's keys; rows of `families.py` choose.

Five kinds: a plan of the layers, which of them keep a state, which have a window, how each turns
its heads, and the mixture of experts. A reader obeys each key that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanoengine.checkpoint.keys import Keys
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig, StatePlan
from nanoengine.checkpoint.rope import RopeConfig, read_ropes_by_kind
from nanoengine.errors import UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR, CONV = "linear_attention", "conv"


def attention_bias(keys: Keys) -> dict[str, bool]:
    """Biases on all four projections of attention, where the config asks for them."""
    bias = keys.get("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


# --- plans ----------------------------------------------------------------------------------------


def llama(keys: Keys) -> LayerPlan:
    return LayerPlan(mlp_bias=keys.get("mlp_bias", False), **attention_bias(keys))


def plain(keys: Keys) -> LayerPlan:
    return LayerPlan()


def qwen2(keys: Keys) -> LayerPlan:
    """Biases on q, k and v only, always."""
    keys.allow("attention_bias", True)
    return LayerPlan(qkv_bias=True)


def qwen2_moe(keys: Keys) -> LayerPlan:
    return LayerPlan(qkv_bias=keys.get("qkv_bias", True))


def qwen3(keys: Keys) -> LayerPlan:
    return LayerPlan(head_norm="head", **attention_bias(keys))


def gemma2(keys: Keys) -> LayerPlan:
    """Norms on both sides, embeddings times sqrt(hidden_size), softcaps."""
    for key in ("hidden_act", "hidden_activation"):
        keys.allow(key, "gelu_pytorch_tanh")
    return LayerPlan(
        norms="both",
        norm="centered",
        activation="gelu_pytorch_tanh",
        embedding_scale=keys.require("hidden_size") ** 0.5,
        attention_scale=keys.require("query_pre_attn_scalar") ** -0.5,
        attention_softcap=keys.get("attn_logit_softcapping"),
        logit_softcap=keys.get("final_logit_softcapping"),
        **attention_bias(keys),
    )


def gemma3(keys: Keys) -> LayerPlan:
    """Gemma 2 with a norm of heads and without softcaps."""
    keys.allow("attn_logit_softcapping")
    keys.allow("final_logit_softcapping")
    return replace(gemma2(keys), head_norm="head")


def granite(keys: Keys) -> LayerPlan:
    return replace(
        llama(keys),
        embedding_scale=keys.get("embedding_multiplier", 1.0),
        residual_scale=keys.get("residual_multiplier", 1.0),
        logit_scale=1 / keys.get("logits_scaling", 1.0),
        attention_scale=keys.get("attention_multiplier", 1.0),
    )


def olmo2(keys: Keys) -> LayerPlan:
    """Norms behind attention and MLP only, and one over all query and one over all key heads."""
    return LayerPlan(norms="behind", norm="wide", head_norm="width", **attention_bias(keys))


def olmoe(keys: Keys) -> LayerPlan:
    return LayerPlan(norm="rms", head_norm="width", **attention_bias(keys))


def exaone4(keys: Keys) -> LayerPlan:
    return LayerPlan(norms="behind", head_norm="head")


def cohere2(keys: Keys) -> LayerPlan:
    """Attention and MLP start from one LayerNorm without a bias; neighbours turn together."""
    return LayerPlan(
        norms="parallel",
        norm="layer",
        interleaved=True,
        logit_scale=keys.get("logit_scale"),
        **attention_bias(keys),
    )


def stablelm(keys: Keys) -> LayerPlan:
    parallel = keys.get("use_parallel_residual", False)
    return LayerPlan(
        norms="parallel" if parallel else "before",
        norm="layer",
        norm_bias=True,
        qkv_bias=keys.get("use_qkv_bias", False),
    )


def arcee(keys: Keys) -> LayerPlan:
    """An MLP without a gate, and relu squared in it."""
    keys.allow("hidden_act", "relu2")
    return replace(llama(keys), gated=False, activation="relu2")


def seed_oss(keys: Keys) -> LayerPlan:
    return LayerPlan(
        qkv_bias=keys.get("attention_bias", True),
        output_bias=keys.get("attention_out_bias", False),
        mlp_bias=keys.get("mlp_bias", False),
    )


def phi3(keys: Keys) -> LayerPlan:
    return LayerPlan(merged=True)


def glm(keys: Keys) -> LayerPlan:
    """Half of each head is turned, neighbours together; gate and up are one tensor."""
    return LayerPlan(qkv_bias=keys.get("attention_bias", True), merged_gate=True, interleaved=True)


def glm4(keys: Keys) -> LayerPlan:
    """GLM with a norm behind attention and MLP too."""
    return replace(glm(keys), norms="both")


def glm4_moe(keys: Keys) -> LayerPlan:
    head_norm = "head" if keys.get("use_qk_norm", False) else None
    return LayerPlan(qkv_bias=keys.get("attention_bias", False), head_norm=head_norm)


def ernie(keys: Keys) -> LayerPlan:
    bias = keys.get("use_bias", False)
    return LayerPlan(interleaved=True, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def hunyuan(keys: Keys) -> LayerPlan:
    """Heads are normed behind their rotation."""
    return LayerPlan(head_norm="rotated", **attention_bias(keys))


def minimax_m2(keys: Keys) -> LayerPlan:
    keys.allow("use_qk_norm", True)
    return LayerPlan(head_norm="width")


def gpt_oss(keys: Keys) -> LayerPlan:
    """Sinks, biases on all four projections of attention, experts with a clamped gate."""
    keys.allow("attention_bias", True)
    keys.allow("swiglu_alpha", 1.702)
    keys.allow("swiglu_limit", 7.0)
    return LayerPlan(
        norm="wide", qkv_bias=True, output_bias=True, activation="clamped_swiglu", sinks=True
    )


def qwen3_next(keys: Keys) -> LayerPlan:
    """Centred norms, and a gate on what each head has attended."""
    keys.allow("attn_output_gate", True)
    return LayerPlan(norm="centered", head_norm="head", output_gate=True, **attention_bias(keys))


def lfm2(keys: Keys) -> LayerPlan:
    keys.allow("tie_embedding", True)
    return LayerPlan(head_norm="head")


# --- the MLP's inner size -------------------------------------------------------------------------


def inner_size(keys: Keys) -> int:
    return keys.require("intermediate_size")


def lfm2_inner_size(keys: Keys) -> int:
    """Two thirds of what the config names, rounded up, unless it says that this is the size."""
    size = keys.get("block_ff_dim") or keys.require("intermediate_size")
    if keys.get("block_auto_adjust_ff_dim", True):
        size = int(keys.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        multiple = keys.get("block_multiple_of", 256)
        size = multiple * -(-size // multiple)
    return size


# --- which layers keep a state --------------------------------------------------------------------

StatesReader = Callable[[Keys], StatePlan]


def delta_states(*, merged: bool) -> StatesReader:
    """Qwen3-Next: every layer but each `full_attention_interval`-th."""

    def states(keys: Keys) -> StatePlan:
        key_heads, key_dim = keys.get("linear_num_key_heads", 16), _get(keys, "key")
        heads, value_dim = keys.get("linear_num_value_heads", 32), _get(keys, "value")
        if heads % key_heads:
            raise UnsupportedModelError(
                f"linear_num_value_heads={heads} must be a multiple of"
                f" linear_num_key_heads={key_heads}"
            )
        every = keys.get("full_attention_interval", 4)
        kinds = keys.get("layer_types") or [
            FULL if (n + 1) % every == 0 else LINEAR
            for n in range(keys.require("num_hidden_layers"))
        ]
        return StatePlan(
            kind="delta",
            layers=_those(kinds, LINEAR),
            kernel=keys.get("linear_conv_kernel_dim", 4),
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
    every = range(keys.require("num_hidden_layers"))
    full = keys.get("full_attn_idxs", list(every))
    kinds = keys.get("layer_types") or [FULL if n in full else CONV for n in every]
    return StatePlan(
        kind="conv",
        layers=_those(kinds, CONV),
        kernel=keys.get("conv_L_cache", 3),
        channels=keys.require("hidden_size"),
        bias=keys.get("conv_bias", False),
    )


def _get(keys: Keys, kind: str) -> int:
    return keys.get(f"linear_{kind}_head_dim", 128)


def _those(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    return tuple(n for n, given in enumerate(kinds) if given == kind)


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""

WindowsReader = Callable[[Keys, Kinds, int], list[bool]]
"""The third argument is the number of layers."""


def never(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return [False] * layers


def all_layers(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return [keys.get("sliding_window") is not None] * layers


def named_or_all(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    return _named(kinds) or all_layers(keys, kinds, layers)


def all_if_asked(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    window, asked = keys.get("sliding_window"), keys.get("use_sliding_window", False)
    return [asked and window is not None] * layers


def from_max_window_layers(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    """Qwen: as `layer_types` says, else from layer `max_window_layers` on."""
    if not all_if_asked(keys, kinds, layers)[0]:
        return [False] * layers
    return _named(kinds) or [n >= keys.get("max_window_layers", 28) for n in range(layers)]


def dots(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    if keys.get("sliding_window") is None:
        return [False] * layers
    return _named(kinds) or [n >= keys.get("max_window_layers", 62) for n in range(layers)]


def named_if_asked(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    if not all_if_asked(keys, kinds, layers)[0]:
        return [False] * layers
    if kinds is None:
        raise UnsupportedModelError(
            "use_sliding_window=True needs layer_types, which say which layers have the window"
        )
    return _named(kinds)


def all_but_every(default: int) -> WindowsReader:
    """As `layer_types` says, else every layer but each n-th, n being `sliding_window_pattern`."""

    def slides(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
        every = keys.get("sliding_window_pattern", default)
        if isinstance(every, int) and not 1 <= every <= 10_000:
            raise UnsupportedModelError(
                f"config.json: sliding_window_pattern must be from 1 to 10,000, got {every}"
            )
        if kinds is None and isinstance(every, str):
            return [every[n % len(every)] == "L" and n + 1 < layers for n in range(layers)]
        return _named(kinds) or [(n + 1) % every != 0 for n in range(layers)]

    return slides


def exaone_windows(keys: Keys, kinds: Kinds, layers: int) -> list[bool]:
    if keys.get("sliding_window") is None:
        return [False] * layers
    return all_but_every(4)(keys, kinds, layers)


def _named(kinds: Kinds) -> list[bool]:
    return [kind == SLIDING for kind in kinds or ()]


# --- how layers turn heads ------------------------------------------------------------------------

Ropes = tuple[RopeConfig | None, ...]
"""Layer by layer; None: its heads are not turned."""

ReadRope = Callable[[], RopeConfig]
"""Reads the rotation that all layers of a model have which are turned."""

RopesReader = Callable[[Keys, ReadRope, Sequence[bool]], Ropes]
"""The second argument says which layers have a window."""


def same(keys: Keys, read: ReadRope, slides: Sequence[bool]) -> Ropes:
    return (read(),) * len(slides)


def by_window(full: tuple[str, float], sliding: tuple[str, float]) -> RopesReader:
    """Layers with a window have angles of their own; key and default of each kind's base."""

    def ropes(keys: Keys, read: ReadRope, slides: Sequence[bool]) -> Ropes:
        found = read_ropes_by_kind(keys, {FULL: full, SLIDING: sliding})
        return tuple(found[SLIDING if slide else FULL] for slide in slides)

    return ropes


def only_with_window(keys: Keys, read: ReadRope, slides: Sequence[bool]) -> Ropes:
    return tuple(
        rope if slide else None
        for rope, slide in zip(same(keys, read, slides), slides, strict=True)
    )


def exaone_ropes(keys: Keys, read: ReadRope, slides: Sequence[bool]) -> Ropes:
    """In a model with windows, layers that see everything are not turned."""
    windowed = keys.get("sliding_window") is not None
    return (only_with_window if windowed else same)(keys, read, slides)


def smollm_ropes(keys: Keys, read: ReadRope, slides: Sequence[bool]) -> Ropes:
    """`no_rope_layers` has a 0 for each layer that is not turned."""
    every, given = keys.get("no_rope_layer_interval", 4), keys.get("no_rope_layers")
    turned = given or [int((n + 1) % every != 0) for n in range(len(slides))]
    if len(turned) < len(slides):
        raise UnsupportedModelError(
            f"no_rope_layers has {len(turned)} entries, num_hidden_layers={len(slides)}"
        )
    ropes = same(keys, read, slides)
    return tuple(rope if turn else None for rope, turn in zip(ropes, turned, strict=False))


# --- mixtures of experts --------------------------------------------------------------------------


def experts(
    keys: Keys, *, count_key: str, size_key: str = "moe_intermediate_size", **fields: Any
) -> MoEConfig:
    """What all of them say: how many experts of which size, and how many a token takes."""
    count, taken = keys.require(count_key), keys.require("num_experts_per_tok")
    if taken > count:
        raise UnsupportedModelError(
            f"num_experts_per_tok={taken} must be at most {count_key}={count}"
        )
    fields.setdefault("layers", tuple(range(keys.require("num_hidden_layers"))))
    return MoEConfig(
        num_experts=count,
        num_experts_per_tok=taken,
        intermediate_size=keys.require(size_key),
        **fields,
    )


def qwen_experts(keys: Keys) -> MoEConfig:
    """Every `decoder_sparse_step`-th layer has experts, `mlp_only_layers` never."""
    step, dense = keys.get("decoder_sparse_step", 1), set(keys.get("mlp_only_layers", []))
    given = keys.get("num_experts") is not None
    return experts(
        keys,
        count_key="num_experts" if given else "num_local_experts",
        norm_topk_prob=keys.get("norm_topk_prob", False),
        layers=tuple(
            layer
            for layer in range(keys.require("num_hidden_layers"))
            if layer not in dense and (layer + 1) % step == 0
        ),
    )


def qwen2_experts(keys: Keys) -> MoEConfig:
    """Qwen3's, and a shared expert with a gate."""
    size = keys.require("shared_expert_intermediate_size")
    return replace(qwen_experts(keys), shared_size=size, shared_gate=True)


def qwen3_next_experts(keys: Keys) -> MoEConfig:
    """Qwen2's; weights are divided by their sum unless the config says otherwise."""
    norm = keys.get("norm_topk_prob", True)
    return replace(qwen2_experts(keys), norm_topk_prob=norm)


def mixtral_experts(keys: Keys) -> MoEConfig:
    """A softmax over the experts taken is the same as one over all, divided by their sum."""
    return experts(keys, count_key="num_local_experts", size_key="intermediate_size")


def gpt_oss_experts(keys: Keys) -> MoEConfig:
    """A softmax over the logits taken is one over all, divided by the sum of those taken."""
    return replace(
        mixtral_experts(keys),
        router_bias=True,
        expert_bias=True,
        interleaved=True,
        inputs_first=True,
    )


def olmoe_experts(keys: Keys) -> MoEConfig:
    return experts(
        keys,
        count_key="num_experts",
        size_key="intermediate_size",
        norm_topk_prob=keys.get("norm_topk_prob", False),
    )


def glm_experts(keys: Keys) -> MoEConfig:
    """DeepSeek-V3's routing: sigmoid scores, a bias for the choice, groups; dense layers first."""
    keys.allow("scoring_func", "sigmoid")
    count, groups = keys.require("n_routed_experts"), keys.get("n_group", 1)
    size, shared = keys.require("moe_intermediate_size"), keys.get("n_shared_experts", 0)
    first, layers = keys.get("first_k_dense_replace", 0), keys.require("num_hidden_layers")
    kept = keys.get("topk_group", 1)
    if not 1 <= kept <= groups or count % groups or count // groups < 2:
        raise UnsupportedModelError(
            f"n_group={groups} and topk_group={kept} must make equal groups of two and more of"
            f" n_routed_experts={count}"
        )
    return experts(
        keys,
        count_key="n_routed_experts",
        score="sigmoid",
        correction_bias=True,
        norm_topk_prob=keys.get("norm_topk_prob", True),
        num_groups=groups,
        groups_per_token=kept,
        scaling_factor=keys.get("routed_scaling_factor", 1.0),
        shared_size=shared * size,
        layers=tuple(range(first, layers)),
    )


def lfm2_experts(keys: Keys) -> MoEConfig:
    """Sigmoid scores and a bias for the choice; the first layers are dense."""
    first, layers = keys.get("num_dense_layers", 2), keys.require("num_hidden_layers")
    return experts(
        keys,
        count_key="num_experts",
        score="sigmoid",
        correction_bias=keys.get("use_expert_bias", True),
        norm_topk_prob=keys.get("norm_topk_prob", True),
        norm_epsilon=1e-6,
        scaling_factor=keys.get("routed_scaling_factor", 1.0),
        layers=tuple(range(first, layers)),
    )


def minimax_experts(keys: Keys) -> MoEConfig:
    keys.allow("scoring_func", "sigmoid")
    return experts(
        keys,
        count_key="num_local_experts",
        size_key="intermediate_size",
        score="sigmoid",
        correction_bias=True,
    )
