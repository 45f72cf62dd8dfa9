"""The families: what each one's config.json means, and how its checkpoints differ from Llama's.

`FAMILIES` is the table: a row is a family, its readers say which keys it obeys, and what it doesn't
say is as in Llama. A new family of known mechanisms is a row; a new mechanism is a field of
`LayerPlan` or `MoEConfig` besides. Called by `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nanoengine.checkpoint import readers
from nanoengine.checkpoint.keys import Json
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig, StatePlan
from nanoengine.checkpoint.readers import Reader, all_but_every, experts, key, plan, size, windows

PLAIN, INNER_SIZE = plan(), size("intermediate_size")


@dataclass(frozen=True, slots=True)
class Family:
    """One family: a row of `FAMILIES`.

    Attributes:
        model_type: as config.json names it.
        plan: what its layers compute.
        states: which of them keep a state, and of what kind; None: all keep keys and values.
        windows: which layers have the sliding window.
        turned: which layers turn their heads.
        bases: the keys of the angles' base in layers that see everything, and in those with a
            window, where the two differ; None: angles are the same in all layers.
        moe: its mixture of experts.
        defaults: values of absent keys, where they are not those of `KEYS`. A family that has one
            of `partial_rotary_factor` obeys that key; others turn whole heads.
        rope: `rope_parameters` of a config that has none.
        rope_extra: further keys of `rope_parameters` -> whether they change the maths of text.
        names: parts of our tensors' names -> what they are called in its checkpoints.
        left_out: expression that begins the names of tensors that are for drafts.
        inner: the MLP's inner size.
        eps: the key of what norms add to a variance.
    """

    model_type: str
    plan: Reader[LayerPlan] = PLAIN
    states: Reader[StatePlan] | None = None
    windows: readers.WindowsReader = readers.never
    turned: readers.TurnedReader = readers.always
    bases: tuple[str, str] | None = None
    moe: Reader[MoEConfig] | None = None
    defaults: Json = field(default_factory=dict)
    rope: Json = field(default_factory=dict)
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
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
LFM2 = plan(only={"tie_embedding": (True,)}, head_norm="head")
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
GRANITE = plan(
    embedding_scale=key("embedding_multiplier"), residual_scale=key("residual_multiplier"),
    attention_scale=key("attention_multiplier"),
    logit_scale=key("logits_scaling", lambda scaling: 1 / scaling), **LLAMA,
)
QWEN_NEXT = plan(
    only={"attn_output_gate": (True,)}, norm="centered", head_norm="head", output_gate=True,
    **ATTENTION_BIAS,
)

# --- experts and windows --------------------------------------------------------------------------

NORM_TOPK = {"norm_topk_prob": key("norm_topk_prob")}
# Why no key of norms: a softmax over the experts taken is one over all, divided by their sum.
MIXTRAL = {"count": "num_local_experts", "inner": "intermediate_size"}
QWEN = {"layers": readers.sparse_layers, **NORM_TOPK}
QWEN_SHARED = experts(
    shared_size=size("shared_expert_intermediate_size"), shared_gate=True, **QWEN,
)
SCALED = {"score": "sigmoid", "scaling_factor": key("routed_scaling_factor"), **NORM_TOPK}
DEEPSEEK_KEYS = {
    "count": "n_routed_experts", "correction_bias": True, "num_groups": key("n_group"),
    "groups_per_token": key("topk_group"), "shared_size": readers.shared_size,
    "layers": readers.layers_from("first_k_dense_replace"), **SCALED,
}
DEEPSEEK = experts(**DEEPSEEK_KEYS)
DEEPSEEK_PLAN = plan(
    only={"topk_method": ("noaux_tc",)}, latent=readers.latent, **ATTENTION_BIAS,
    interleaved=key("rope_interleave"),
)
WINDOW = windows(readers.every_layer, named=False)
QWEN_WINDOWS = windows(readers.from_max_window_layers, asked=True)

# --- values of absent keys ------------------------------------------------------------------------

COHERE_DEFAULTS = {"logit_scale": 0.0625, "tie_word_embeddings": True}
GEMMA_DEFAULTS = {
    "head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True,
}
GLM_DEFAULTS = {
    "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "eos_token_id": [151_329, 151_336, 151_338],
}
LFM2_DEFAULTS = {"num_key_value_heads": 8, "rope_theta": 1e6, "tie_word_embeddings": True}
NEXT_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Where positions of images go. Why without effect: all positions of a text are the same."""

# --- names of tensors -----------------------------------------------------------------------------

GEMMA_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
MIXTRAL_NAMES = {"mlp": "block_sparse_moe", **NUMBERED}
LFM2_NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    **NUMBERED,
}
SHARED_NAMES = {"shared_experts": "shared_expert"}
DRAFTS = r"mtp\."

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
    "CwmForCausalLM": Family(
        "cwm", plan=plan(mlp_bias=key("mlp_bias")), windows=readers.all_but_first_of_four,
        defaults={
            "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "sliding_window": 8192, "eos_token_id": [128_001, 128_008, 128_009],
        },
        rope={
            "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        plan=plan(
            only={
                "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,),
            },
            latent=readers.latent, interleaved=True, mlp_bias=key("mlp_bias"), **ATTENTION_BIAS,
        ),
        moe=experts(
            count="n_routed_experts", norm_topk_prob=False, shared_size=readers.shared_size,
            scaling_factor=key("routed_scaling_factor"),
            layers=readers.layers_from("first_k_dense_replace"),
            num_groups=readers.limited("n_group"), groups_per_token=readers.limited("topk_group"),
            best_of_group=1,
        ),
        defaults={
            "head_dim": 64, "n_shared_experts": 2, "q_lora_rank": 1536, "topk_method": "greedy",
        },
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", plan=DEEPSEEK_PLAN, moe=DEEPSEEK,
        defaults={
            "head_dim": 64, "norm_topk_prob": True, "n_shared_experts": 1, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "num_key_value_heads": 128,
        },
    ),
    "Dots1ForCausalLM": Family(
        "dots1", plan=QWEN3, windows=windows(readers.from_max_window_layers), moe=DEEPSEEK,
        defaults={
            "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62,
            "n_shared_experts": None,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        plan=plan(
            interleaved=True, qkv_bias=key("use_bias"), output_bias=key("use_bias"),
            mlp_bias=key("use_bias"),
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
        "gemma2",
        plan=plan(
            attention_softcap=key("attn_logit_softcapping"),
            logit_softcap=key("final_logit_softcapping"), **GEMMA,
        ),
        windows=all_but_every(2),
        defaults={
            **GEMMA_DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
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
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        plan=plan(
            qkv_bias=key("attention_bias"),
            head_norm=key("use_qk_norm", lambda asked: "head" if asked else None),
        ),
        moe=DEEPSEEK,
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", plan=DEEPSEEK_PLAN,
        moe=experts(**{**DEEPSEEK_KEYS, "layers": readers.named_sparse_layers}),
        defaults={
            "head_dim": 64, "norm_topk_prob": True, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
            "num_nextn_predict_layers": 1, "q_lora_rank": 768, "num_key_value_heads": 20,
        },
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        plan=plan(
            only={"attention_bias": (True,), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
            norm="wide", qkv_bias=True, output_bias=True, activation="clamped_swiglu", sinks=True,
        ),
        windows=all_but_every(2),
        moe=experts(
            **MIXTRAL, router_bias=True, expert_bias=True, interleaved=True, inputs_first=True,
        ),
        defaults={
            "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
            "rope_theta": 150_000.0, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        },
        rope={
            "rope_type": "yarn", "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        names={"mlp.gate": "mlp.router"},
    ),
    "GraniteForCausalLM": Family("granite", plan=GRANITE, defaults={"attention_multiplier": 1.0}),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", plan=GRANITE, moe=experts(**MIXTRAL), defaults={"attention_multiplier": 1.0},
        names={
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        },
    ),
    "HeliumForCausalLM": Family(
        "helium",
        plan=plan(interleaved=True, qkv_bias=key("attention_bias"), mlp_bias=key("mlp_bias")),
        defaults={
            "head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8, "rope_theta": 1e5,
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", plan=plan(head_norm="rotated", **ATTENTION_BIAS),
        defaults={"rms_norm_eps": 1e-5},
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2", plan=LFM2, states=readers.conv_states, defaults=LFM2_DEFAULTS, names=LFM2_NAMES,
        inner=readers.lfm2_inner_size, eps="norm_eps",
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe", plan=LFM2, states=readers.conv_states,
        moe=experts(
            correction_bias=key("use_expert_bias"), norm_epsilon=1e-6,
            layers=readers.layers_from("num_dense_layers"), **SCALED,
        ),
        defaults=LFM2_DEFAULTS | {"norm_topk_prob": True},
        names=LFM2_NAMES | {"mlp.gate.e_score_correction_bias": "feed_forward.expert_bias"},
        eps="norm_eps",
    ),
    "LlamaForCausalLM": Family("llama", plan=plan(**LLAMA)),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        plan=plan(
            latent=readers.minicpm_latent, embedding_scale=key("scale_emb"),
            residual_scale=readers.depth_scale, logit_scale=readers.width_scale, **LLAMA,
        ),
        defaults={
            "head_dim": 32, "num_key_value_heads": 40, "rms_norm_eps": 1e-5, "kv_lora_rank": 256,
            "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12.0,
            "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", plan=plan(only={"use_qk_norm": (True,)}, head_norm="width"),
        moe=experts(**MIXTRAL, score="sigmoid", correction_bias=True),
        defaults={
            "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6,
            "partial_rotary_factor": 1.0,
        },
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
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
    "MixtralForCausalLM": Family(
        "mixtral", windows=WINDOW, moe=experts(**MIXTRAL),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names=MIXTRAL_NAMES,
    ),
    "NemotronForCausalLM": Family(
        "nemotron",
        plan=plan(
            only={"hidden_act": ("relu2",)}, norm="centered layer", norm_bias=True, gated=False,
            activation="relu2", **LLAMA,
        ),
        defaults={"partial_rotary_factor": 0.5}, eps="norm_eps",
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
    "OlmoeForCausalLM": Family(
        "olmoe", plan=plan(head_norm="width", **ATTENTION_BIAS),
        moe=experts(inner="intermediate_size", **NORM_TOPK), defaults={"rms_norm_eps": 1e-5},
    ),
    "Phi3ForCausalLM": Family(
        "phi3", plan=plan(merged=True), windows=WINDOW,
        defaults={
            "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", plan=plan(only={"attention_bias": (True,)}, qkv_bias=True), windows=QWEN_WINDOWS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", plan=plan(qkv_bias=key("qkv_bias")),
        windows=windows(readers.alternate, asked=True), moe=QWEN_SHARED,
        defaults={"num_key_value_heads": 16, "sliding_window": 4096, "qkv_bias": True},
        names=SHARED_NAMES,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", plan=QWEN3, windows=QWEN_WINDOWS,
        defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
        rope_extra=M_ROPE,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", plan=QWEN3, windows=windows(readers.every_layer, asked=True, named=False),
        moe=experts(**QWEN), defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", plan=QWEN_NEXT, states=readers.delta_states(merged=True), moe=QWEN_SHARED,
        defaults=NEXT_DEFAULTS | {"norm_topk_prob": True}, names=SHARED_NAMES, left_out=DRAFTS,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", plan=QWEN_NEXT, states=readers.delta_states(merged=False),
        defaults=NEXT_DEFAULTS | {"num_key_value_heads": 4}, rope_extra=M_ROPE, left_out=DRAFTS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text", plan=QWEN_NEXT, states=readers.delta_states(merged=False),
        moe=QWEN_SHARED,
        # Why a size: all layers have experts, and such configs name no other MLP.
        defaults=NEXT_DEFAULTS | {"norm_topk_prob": True, "intermediate_size": 1},
        rope_extra=M_ROPE, names=SHARED_NAMES, left_out=DRAFTS,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        plan=plan(
            qkv_bias=key("attention_bias"), output_bias=key("attention_out_bias"),
            mlp_bias=key("mlp_bias"),
        ),
        defaults={"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True},
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", plan=plan(**LLAMA), windows=windows(readers.not_turned, asked=True),
        turned=readers.smollm_turned,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        plan=plan(
            norms=key("use_parallel_residual", lambda asked: "parallel" if asked else "before"),
            norm="layer", norm_bias=True, qkv_bias=key("use_qkv_bias"),
        ),
        defaults={"num_key_value_heads": 32, "partial_rotary_factor": 0.25}, eps="layer_norm_eps",
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        plan=plan(
            only={"hidden_act": (GELU,)}, norm="layer", norm_bias=True, gated=False,
            activation=GELU, qkv_bias=key("use_bias"), output_bias=key("use_bias"),
            mlp_bias=key("use_bias"),
        ),
        windows=WINDOW,
        defaults={"num_key_value_heads": 2, "use_bias": True, "tie_word_embeddings": True},
        names={"up_proj": "c_fc", "down_proj": "c_proj"}, eps="norm_epsilon",
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        plan=plan(latent=readers.latent, interleaved=key("rope_interleave"), **ATTENTION_BIAS),
        defaults={
            "head_dim": 64, "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}
# fmt: on
"""Supported architecture -> its row."""

TEXT_PARTS: dict[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
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
