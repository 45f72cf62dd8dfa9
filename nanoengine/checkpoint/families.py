"""The families: what each one's config.json means, and how its checkpoints differ from Llama's.

`FAMILIES` is the table: a row is a family, its functions say which keys it obeys, and what it
doesn't say is as in Llama. A new family of known mechanisms is a row; a new mechanism is a field of
`LayerPlan` or `MoEConfig` besides. Called by `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nanoengine.checkpoint.keys import Json, Keys
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig
from nanoengine.checkpoint.rope import RopeConfig, read_rope, read_ropes_by_kind
from nanoengine.errors import UnsupportedModelError

SLIDING, FULL = "sliding_attention", "full_attention"


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


# --- which layers have a window -------------------------------------------------------------------

Kinds = Sequence[str] | None
"""`layer_types`; None: absent."""


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


def all_but_every(default: int) -> Callable[[Keys, Kinds, int], list[bool]]:
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


def same(keys: Keys, family: Family, slides: Sequence[bool]) -> Ropes:
    rope = read_rope(keys, extra=family.rope_extra, partial=family.partial is not None)
    return (rope,) * len(slides)


def by_window(
    full: tuple[str, float], sliding: tuple[str, float]
) -> Callable[[Keys, Family, Sequence[bool]], Ropes]:
    """Layers with a window have angles of their own; key and default of each kind's base."""

    def ropes(keys: Keys, family: Family, slides: Sequence[bool]) -> Ropes:
        found = read_ropes_by_kind(keys, {FULL: full, SLIDING: sliding})
        return tuple(found[SLIDING if slide else FULL] for slide in slides)

    return ropes


def only_with_window(keys: Keys, family: Family, slides: Sequence[bool]) -> Ropes:
    return tuple(
        rope if slide else None
        for rope, slide in zip(same(keys, family, slides), slides, strict=True)
    )


def exaone_ropes(keys: Keys, family: Family, slides: Sequence[bool]) -> Ropes:
    """In a model with windows, layers that see everything are not turned."""
    windowed = keys.get("sliding_window") is not None
    return (only_with_window if windowed else same)(keys, family, slides)


def smollm_ropes(keys: Keys, family: Family, slides: Sequence[bool]) -> Ropes:
    """`no_rope_layers` has a 0 for each layer that is not turned."""
    every, given = keys.get("no_rope_layer_interval", 4), keys.get("no_rope_layers")
    turned = given or [int((n + 1) % every != 0) for n in range(len(slides))]
    if len(turned) < len(slides):
        raise UnsupportedModelError(
            f"no_rope_layers has {len(turned)} entries, num_hidden_layers={len(slides)}"
        )
    ropes = same(keys, family, slides)
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


def mixtral_experts(keys: Keys) -> MoEConfig:
    """A softmax over the experts taken is the same as one over all, divided by their sum."""
    return experts(keys, count_key="num_local_experts", size_key="intermediate_size")


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


def minimax_experts(keys: Keys) -> MoEConfig:
    keys.allow("scoring_func", "sigmoid")
    return experts(
        keys,
        count_key="num_local_experts",
        size_key="intermediate_size",
        score="sigmoid",
        correction_bias=True,
    )


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: a row of `FAMILIES`.

    Attributes:
        model_type: as config.json names it.
        plan: what its layers compute.
        windows: which layers have the sliding window.
        ropes: how each layer turns its heads.
        moe: its mixture of experts.
        defaults: values of absent keys, where they are not those of all families.
        partial: the default of `partial_rotary_factor`; None: the family turns whole heads.
        rope_extra: further keys of `rope_parameters` -> whether they change the maths of text.
        names: parts of our tensors' names -> what they are called in its checkpoints.
    """

    model_type: str
    plan: Callable[[Keys], LayerPlan] = plain
    windows: Callable[[Keys, Kinds, int], list[bool]] = never
    ropes: Callable[[Keys, Family, Sequence[bool]], Ropes] = same
    moe: Callable[[Keys], MoEConfig] | None = None
    defaults: Json = field(default_factory=dict)
    partial: float | None = None
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


GEMMA_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
MIXTRAL_NAMES = {
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Where positions of images go. Why without effect: all positions of a text are the same."""

FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(model_type="arcee", plan=arcee),
    "CohereForCausalLM": Family(
        model_type="cohere", plan=cohere2,
        defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        plan=cohere2,
        windows=all_but_every(4),
        ropes=only_with_window,
        defaults={"sliding_window": 4096, "logit_scale": 0.0625, "tie_word_embeddings": True},
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1", plan=qwen3, windows=dots, moe=glm_experts,
        defaults={"norm_topk_prob": False},
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5", plan=ernie,
        defaults={"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4", plan=exaone4, windows=exaone_windows, ropes=exaone_ropes,
        names=GEMMA_NAMES,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        plan=gemma2,
        windows=all_but_every(2),
        defaults={
            **GEMMA_DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=GEMMA_NAMES,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        plan=gemma3,
        windows=all_but_every(6),
        ropes=by_window(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        names=GEMMA_NAMES,
    ),
    "GlmForCausalLM": Family(
        model_type="glm", plan=glm, partial=0.5, defaults={"head_dim": 128}
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        plan=glm4,
        partial=0.5,
        defaults={"head_dim": 128},
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe", plan=glm4_moe, moe=glm_experts, partial=0.5,
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "GraniteForCausalLM": Family(model_type="granite", plan=granite),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        plan=granite,
        moe=mixtral_experts,
        names={
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        model_type="hunyuan_v1_dense", plan=hunyuan,
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    ),
    "LlamaForCausalLM": Family(model_type="llama", plan=llama),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        plan=minimax_m2,
        moe=minimax_experts,
        partial=1.0,
        defaults={"head_dim": 128, "rope_theta": 5e6},
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        windows=all_layers,
        defaults={"head_dim": 128},
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
    ),
    "MinistralForCausalLM": Family(model_type="ministral", windows=named_or_all),
    "MistralForCausalLM": Family(model_type="mistral", windows=all_layers),
    "MixtralForCausalLM": Family(
        model_type="mixtral", windows=all_layers, moe=mixtral_experts,
        defaults={"rope_theta": 1e6}, names=MIXTRAL_NAMES,
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", plan=olmo2, names=GEMMA_NAMES),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        plan=olmo2,
        windows=all_but_every(4),
        ropes=by_window(("rope_theta", 5e5), ("rope_theta", 5e5)),
        defaults={"sliding_window": 4096},
        names=GEMMA_NAMES,
    ),
    "OlmoeForCausalLM": Family(model_type="olmoe", plan=olmoe, moe=olmoe_experts),
    "Phi3ForCausalLM": Family(model_type="phi3", plan=phi3, windows=all_layers, partial=1.0),
    "Qwen2ForCausalLM": Family(model_type="qwen2", plan=qwen2, windows=from_max_window_layers),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe", plan=qwen2_moe, windows=named_if_asked, moe=qwen2_experts,
        names={"shared_experts": "shared_expert"},
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3", plan=qwen3, windows=from_max_window_layers, defaults={"head_dim": 128},
        rope_extra=M_ROPE,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe", plan=qwen3, windows=all_if_asked, moe=qwen_experts
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss", plan=seed_oss, defaults={"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3", plan=llama, windows=named_if_asked, ropes=smollm_ropes,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "StableLmForCausalLM": Family(model_type="stablelm", plan=stablelm, partial=0.25),
}  # fmt: skip
"""Supported architecture -> its row."""

VISION = r"(model\.)?(vision_tower|multi_modal_projector|visual)\."
TEXT_PARTS: dict[str, tuple[Mapping[str, str], str]] = {
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, VISION),
    "Mistral3ForConditionalGeneration": (
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        VISION,
    ),
    "Qwen3VLForConditionalGeneration": ({"qwen3_vl_text": "Qwen3ForCausalLM"}, VISION),
}
"""Multimodal architecture -> the `model_type` of its `text_config` -> the architecture of its text
part; and the expression that begins the names of tensors that this part has no use for."""
