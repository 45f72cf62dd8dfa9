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
        defaults: values of absent keys, where they are not those of `KEYS`. A family that has one
            of `partial_rotary_factor` obeys that key; others turn whole heads.
        rope: `rope_parameters` of a config that has none, by layer type where there are `bases`.
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
    defaults: Json = field(default_factory=dict)
    rope: Json = field(default_factory=dict)
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

COHERE_DEFAULTS = {"logit_scale": 0.0625, "tie_word_embeddings": True}
GEMMA_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}
GEMMA_2_DEFAULTS = {
    **GEMMA_DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GLM_DEFAULTS = {
    "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "eos_token_id": [151_329, 151_336, 151_338],
}
HUNYUAN_DEFAULTS = {"rms_norm_eps": 1e-5}
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
        defaults={"rms_norm_eps": 1e-5},
    ),
    "CohereForCausalLM": Family(
        "cohere", plan=COHERE, defaults=COHERE_DEFAULTS | {"rope_theta": 5e5}, eps="layer_norm_eps",
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", plan=COHERE, windows=all_but_every(), turned=readers.only_with_window,
        defaults=COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4},
        eps="layer_norm_eps",
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        plan=plan(
            interleaved=True, **biases("use_bias"),
        ),
        defaults={
            "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", plan=plan(norms="behind", head_norm="head"), windows=all_but_every(),
        turned=readers.exaone_turned,
        defaults={
            "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        names=GEMMA_NAMES,
    ),
    "GemmaForCausalLM": Family(
        # Why gelu too: so the published files call the approximation.
        "gemma", plan=plan(only={"hidden_act": (GELU, "gelu"), "hidden_activation": (GELU, None)},
                           **GEMMA_1),
        defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True},
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", plan=plan(**GEMMA_2), windows=all_but_every(2), defaults=GEMMA_2_DEFAULTS,
        names=GEMMA_NAMES,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", plan=plan(head_norm="head", **GEMMA), windows=all_but_every(),
        bases=("rope_theta", "rope_local_base_freq"),
        defaults={
            **GEMMA_DEFAULTS, "vocab_size": 262_208, "num_attention_heads": 8,
            "max_position_embeddings": 131_072, "sliding_window_pattern": 6, "rope_theta": 1e6,
        },
        names=GEMMA_NAMES,
    ),
    "GlmForCausalLM": Family("glm", plan=plan(**GLM), defaults=GLM_DEFAULTS),
    "Glm4ForCausalLM": Family(
        "glm4", plan=plan(norms="both", **GLM), defaults=GLM_DEFAULTS,
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "GraniteForCausalLM": Family("granite", plan=GRANITE, defaults={"attention_multiplier": 1.0}),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", plan=plan(head_norm="rotated", **ATTENTION_BIAS),
        defaults=HUNYUAN_DEFAULTS, rope_extra=HUNYUAN_ROPE, names=HUNYUAN_NAMES,
    ),
    "LlamaForCausalLM": Family("llama", plan=plan(**LLAMA)),
    "Ministral3ForCausalLM": Family(
        "ministral3", windows=WINDOW,
        defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        rope={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
            "original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
    ),
    "MinistralForCausalLM": Family(
        "ministral", windows=windows(readers.every_layer),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "MistralForCausalLM": Family(
        "mistral", windows=WINDOW, defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", plan=OLMO2, defaults={"rms_norm_eps": 1e-5}, names=GEMMA_NAMES,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", plan=OLMO2, windows=all_but_every(4),
        bases=("rope_theta", "rope_theta"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
        names=GEMMA_NAMES,
    ),
    "Phi3ForCausalLM": Family(
        "phi3", plan=plan(merged="parts", merged_gate=True), windows=WINDOW,
        defaults={
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", plan=plan(only={"attention_bias": (True,)}, qkv_bias=True), windows=QWEN_WINDOWS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", plan=QWEN3, windows=QWEN_WINDOWS,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
        rope_extra=M_ROPE,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", plan=plan(**LLAMA), windows=windows(readers.not_turned, asked=True),
        turned=readers.smollm_turned,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
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

TEXT_DEFAULTS: dict[str, Json] = {"qwen3_vl_text": {"rope_theta": 5e5}}
"""`model_type` of a `text_config` -> values of absent keys that its architecture's row hasn't."""

OUTSIDE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Keys of a multimodal config that count before those of its `text_config`."""
