"""The families: what each one's config.json means, and how its checkpoints differ from Llama's.

`FAMILIES` is the table, with `more_families.py`: a row is a family, its readers say which keys it
obeys, and what it doesn't say is as in Llama. A new family of known mechanisms is a row; a new
mechanism is a field of `LayerPlan` or `MoEConfig` besides. Called by `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nanoengine.checkpoint import readers
from nanoengine.checkpoint.keys import Json
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig, StatePlan
from nanoengine.checkpoint.readers import Reader, all_but_every, biases, key, plan, size, windows

PLAIN, INNER_SIZE = plan(), size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Family:
    """One family: a row of `FAMILIES`.

    Attributes:
        model_type: as config.json names it.
        rewritten: its config.json -> one whose keys say in the usual way how many layers it has.
        plan: what its layers compute.
        states: which of them keep a state, and of what kind; None: all keep keys and values.
        windows: which layers have the sliding window.
        turned: which layers turn their heads.
        bases: the keys of the angles' base in layers that see everything, and in those with a
            window, where the two differ; None: angles are the same in all layers.
        moe: its mixture of experts.
        partial: whether it supports `partial_rotary_factor`; others apply RoPE to whole heads.
        defaults: values of absent keys, where they are neither those that transformers' config
            class has (`defaults.json`) nor those of `KEYS`.
        rope_extra: further keys of `rope_parameters` -> whether they change the maths of text.
        names: parts of our tensors' names -> what they are called in its checkpoints; or what reads
            this from a config.
        left_out: expression that begins the names of tensors that are for drafts.
        inner: the MLP's inner size.
        eps: the key of what norms add to a variance.
    """

    model_type: str
    rewritten: Callable[[Json], Json] | None = None
    plan: Reader[LayerPlan] = PLAIN
    states: Reader[StatePlan] | None = None
    windows: readers.WindowsReader = readers.never
    turned: readers.TurnedReader = readers.always
    bases: tuple[str, str] | None = None
    moe: Reader[MoEConfig | None] | None = None
    partial: bool = False
    defaults: Json = field(default_factory=dict)
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] | Reader[Mapping[str, str]] = field(default_factory=dict)
    left_out: str = ""
    inner: Reader[int] = INNER_SIZE
    eps: str = "rms_norm_eps"


# fmt: off
# --- what several rows have: plans ----------------------------------------------------------------

ATTENTION_BIAS = {"qkv_bias": key("attention_bias"), "output_bias": key("attention_bias")}
LLAMA = {"mlp_bias": key("mlp_bias"), **ATTENTION_BIAS}
QWEN3 = plan(head_norm="head", **ATTENTION_BIAS)
OLMO2 = plan(norms="behind", norm="wide", head_norm="width", **ATTENTION_BIAS)
GLM = {"qkv_bias": key("attention_bias"), "merged_gate": True, "interleaved": True}
COHERE = plan(
    norms="parallel", norm="layer", interleaved=True, logit_scale=key("logit_scale"),
    **ATTENTION_BIAS,
)
GELU = "gelu_pytorch_tanh"
GEMMA_1 = {
    "norm": "centered", "activation": GELU,
    "embedding_scale": key("hidden_size", lambda n: n**0.5), **ATTENTION_BIAS,
}
GEMMA = {
    "only": {"hidden_act": (GELU, None), "hidden_activation": (GELU,)}, "norms": "both",
    "attention_scale": key("query_pre_attn_scalar", lambda n: n**-0.5), **GEMMA_1,
}
GEMMA_2 = {
    "attention_softcap": key("attn_logit_softcapping"),
    "logit_softcap": key("final_logit_softcapping"), **GEMMA,
}
GRANITE_KEYS = {
    "embedding_scale": key("embedding_multiplier"), "residual_scale": key("residual_multiplier"),
    "attention_scale": key("attention_multiplier"),
    "logit_scale": key("logits_scaling", lambda scaling: 1 / scaling),
}
GRANITE = plan(**GRANITE_KEYS, **LLAMA)

# --- experts and windows --------------------------------------------------------------------------

WINDOW = windows(readers.every_layer, named=False)
QWEN_WINDOWS = windows(readers.from_max_window_layers, asked=True)

# --- values of absent keys ------------------------------------------------------------------------

# Why in code: configs of other families must have these sizes. Gemma 3's published ones lack them.
GEMMA_2_DEFAULTS = {"max_position_embeddings": 8192}
GEMMA_3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}
# Why: in other families no token ends a text that the files don't name.
GLM_DEFAULTS = {"eos_token_id": [151_329, 151_336, 151_338]}
# Why without effect: a config that has an alpha has these too, and nobody reads them.
HUNYUAN_ROPE = dict.fromkeys(
    ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), False,
)
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Where positions of images go. Why without effect: all positions of a text are the same."""

# --- names of tensors -----------------------------------------------------------------------------

GEMMA_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
HUNYUAN_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

# --- the table ------------------------------------------------------------------------------------

FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(
        "arcee",
        plan=plan(only={"hidden_act": ("relu2",)}, gated=False, activation="relu2", **LLAMA),
    ),
    "CohereForCausalLM": Family("cohere", plan=COHERE, eps="layer_norm_eps"),
    "Cohere2ForCausalLM": Family(
        "cohere2", plan=COHERE, windows=all_but_every(), turned=readers.only_with_window,
        eps="layer_norm_eps",
    ),
    "Ernie4_5ForCausalLM": Family("ernie4_5", plan=plan(interleaved=True, **biases("use_bias"))),
    "Exaone4ForCausalLM": Family(
        "exaone4", plan=plan(norms="behind", head_norm="head"), windows=all_but_every(),
        turned=readers.exaone_turned, names=GEMMA_NAMES,
    ),
    "GemmaForCausalLM": Family(
        # Why gelu too: so the published files call the approximation.
        "gemma", plan=plan(only={"hidden_act": (GELU, "gelu"), "hidden_activation": (GELU, None)},
                           **GEMMA_1),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", plan=plan(**GEMMA_2), windows=all_but_every(2), defaults=GEMMA_2_DEFAULTS,
        names=GEMMA_NAMES,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", plan=plan(head_norm="head", **GEMMA), windows=all_but_every(),
        bases=("rope_theta", "rope_local_base_freq"),
        defaults={**GEMMA_3_DEFAULTS, "sliding_window_pattern": 6}, names=GEMMA_NAMES,
    ),
    "GlmForCausalLM": Family("glm", plan=plan(**GLM), partial=True, defaults=GLM_DEFAULTS),
    "Glm4ForCausalLM": Family(
        "glm4", plan=plan(norms="both", **GLM), partial=True, defaults=GLM_DEFAULTS,
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "GraniteForCausalLM": Family("granite", plan=GRANITE),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", plan=plan(head_norm="rotated", **ATTENTION_BIAS),
        rope_extra=HUNYUAN_ROPE, names=HUNYUAN_NAMES,
    ),
    "LlamaForCausalLM": Family("llama", plan=plan(**LLAMA)),
    "Ministral3ForCausalLM": Family(
        "ministral3", windows=WINDOW,
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
    ),
    "MinistralForCausalLM": Family("ministral", windows=windows(readers.every_layer)),
    "MistralForCausalLM": Family("mistral", windows=WINDOW),
    "Olmo2ForCausalLM": Family("olmo2", plan=OLMO2, names=GEMMA_NAMES),
    "Olmo3ForCausalLM": Family(
        "olmo3", plan=OLMO2, windows=all_but_every(4), bases=("rope_theta", "rope_theta"),
        names=GEMMA_NAMES,
    ),
    "Phi3ForCausalLM": Family(
        "phi3", plan=plan(merged="parts", merged_gate=True), windows=WINDOW, partial=True,
        defaults={"original_max_position_embeddings": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", plan=plan(only={"attention_bias": (True,)}, qkv_bias=True), windows=QWEN_WINDOWS,
    ),
    "Qwen3ForCausalLM": Family("qwen3", plan=QWEN3, windows=QWEN_WINDOWS, rope_extra=M_ROPE),
    "SmolLM3ForCausalLM": Family(
        "smollm3", plan=plan(**LLAMA), windows=windows(readers.not_turned, asked=True),
        turned=readers.smollm_turned,
    ),
}
# fmt: on
"""Supported architecture -> its row; those that a plain prompt may need."""


TEXT_PARTS: dict[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
}
"""Multimodal architecture -> the `model_type` of its `text_config` -> the architecture of its text
part."""

OUTSIDE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys of a multimodal config that count before those of its `text_config`."""
