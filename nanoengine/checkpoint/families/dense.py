"""Dense families with attention in every layer: Llama, and families that differ from it in a few
fields."""

from __future__ import annotations

from nanoengine.checkpoint.families import family
from nanoengine.checkpoint.families.family import Family, biases, files, has, key, plan, same

# fmt: off
ATTENTION_BIAS = {"qkv_bias": key("attention_bias"), "output_bias": key("attention_bias")}
LLAMA = {**same("mlp_bias"), **ATTENTION_BIAS}
RELU2 = {"only": {"hidden_act": ("relu2",)}, "gated_mlp": False, "hidden_act": "relu2"}
GELU = "gelu_pytorch_tanh"
QWEN3 = plan(qk_norm="per_head", **ATTENTION_BIAS)
OLMO2 = plan(norms="post", norm="wide", qk_norm="all_heads", **ATTENTION_BIAS)
GLM = {"qkv_bias": key("attention_bias"), "fused_gate_up": True, "rope_interleaved": True}
COHERE = plan(
    norms="parallel", norm="layer", rope_interleaved=True, logit_scale=key("logit_scale"),
    **ATTENTION_BIAS,
)
GRANITE_KEYS = {
    **same("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logit_scale": key("logits_scaling", lambda scaling: 1 / scaling),
}
GRANITE = plan(**GRANITE_KEYS, **LLAMA)

WINDOW = family.windows(named=False)
QWEN_WINDOWS = family.windows(family.from_max_window_layers, asked=True)

# Why: no other family has EOS tokens that are missing in the files.
GLM_DEFAULTS = {"eos_token_id": [151_329, 151_336, 151_338]}
# Why without effect: a config with an alpha has these too, and transformers reads none of them.
HUNYUAN_ROPE = dict.fromkeys(
    ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), False,
)
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Positions of images. Why without effect: all positions of a text are the same."""

POST_NORM_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
HUNYUAN_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
MERGED_GATE = {"ffn_up": "mlp.gate_up_proj"}
IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys of GGUF files for positions and features of images. All positions of a text are the same."""
NO_STATES = (
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.inner_size", "ssm.time_step_rank",
)
"""Keys that dense Granite 4 has in common with the hybrids: an MLP's size, and sizes of states that
it does not have."""

FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": Family(
        "apertus",
        plan=plan(
            only={"hidden_act": ("xielu",)}, hidden_act="xielu", gated_mlp=False,
            qk_norm="per_head", **ATTENTION_BIAS,
        ),
        names={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
    "ArceeForCausalLM": Family(
        "arcee",
        plan=plan(**RELU2, **LLAMA),
        gguf=files("arcee", pairs=True),
    ),
    "CohereForCausalLM": Family(
        "cohere", plan=COHERE, norm_eps="layer_norm_eps", gguf=files("command-r"),
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2", plan=COHERE, windows=family.all_but_every(),
        rope_layers=family.only_with_window, norm_eps="layer_norm_eps",
        gguf=files("cohere2", slides=4),
    ),
    "CwmForCausalLM": Family(
        "cwm", plan=plan(**same("mlp_bias")), windows=family.all_but_first_of_four,
        defaults={"eos_token_id": [128_001, 128_008, 128_009]},  # as GLM_DEFAULTS
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5", plan=plan(rope_interleaved=True, **biases("use_bias")), gguf=files("ernie4_5"),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", plan=plan(norms="post", qk_norm="per_head"), windows=family.all_but_every(),
        rope_layers=family.exaone_rope, names=POST_NORM_NAMES, gguf=files("exaone4", slides=4),
    ),
    "GlmForCausalLM": Family(
        "glm", plan=plan(**GLM), partial=True, defaults=GLM_DEFAULTS,
        gguf=files("chatglm", names=MERGED_GATE),
    ),
    "Glm4ForCausalLM": Family(
        "glm4", plan=plan(norms="sandwich", **GLM), partial=True, defaults=GLM_DEFAULTS,
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        gguf=files("glm4", names=MERGED_GATE),
    ),
    "GraniteForCausalLM": Family(
        "granite", plan=GRANITE, gguf=files("granite", pairs=True, unread=NO_STATES),
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa", plan=plan(**GRANITE_KEYS, **LLAMA, attention_sinks=True),
        windows=family.all_but_first_of_four, rope_layers=family.layer_bases,
    ),
    "HeliumForCausalLM": Family(
        "helium",
        plan=plan(rope_interleaved=True, qkv_bias=key("attention_bias"), **same("mlp_bias")),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", plan=plan(qk_norm="post_rope", **ATTENTION_BIAS),
        rope_extra=HUNYUAN_ROPE, names=HUNYUAN_NAMES, gguf=files("hunyuan-dense"),
    ),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax",
        plan=plan(
            norms=key("use_post_norm", lambda asked: "sandwich" if asked else "pre"),
            **{**GRANITE_KEYS, "logit_scale": key("logits_scaling"),
               "attention_multiplier":
                   lambda keys: keys.get("attention_multiplier") or keys.head_dim**-0.5},
        ),
        names={"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"},
    ),
    "Jais2ForCausalLM": Family(
        "jais2",
        plan=plan(norm="layer", norm_bias=True, **RELU2, **LLAMA), norm_eps="layer_norm_eps",
        gguf=files("jais2"),
    ),
    "LlamaForCausalLM": Family(
        "llama", plan=plan(**LLAMA), gguf=files("exaone") | files("internlm2", "llama", pairs=True),
    ),
    "MinistralForCausalLM": Family("ministral", windows=family.windows()),
    "Ministral3ForCausalLM": Family(
        "ministral3", windows=WINDOW,
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
        gguf=files("mistral3", when=has("attention.temperature_scale"), pairs=True),
    ),
    "MistralForCausalLM": Family("mistral", windows=WINDOW, gguf=files("mistral3", pairs=True)),
    "NanoChatForCausalLM": Family(
        "nanochat",
        plan=plan(
            norm="bare", qk_norm="post_rope", rope_reversed=True, embedding_norm=True, **RELU2,
            **same("final_logit_softcapping"), **ATTENTION_BIAS,
        ),
        names={"up_proj": "fc1", "down_proj": "fc2"},
    ),
    "NemotronForCausalLM": Family(
        "nemotron",
        plan=plan(norm="centered layer", norm_bias=True, **RELU2, **LLAMA),
        partial=True, norm_eps="norm_eps", gguf=files("nemotron"),
    ),
    "OlmoForCausalLM": Family(
        "olmo", plan=plan(norm="bare layer", **same("clip_qkv"), **ATTENTION_BIAS),
        norm_eps="layer_norm_eps",
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", plan=OLMO2, names=POST_NORM_NAMES, gguf=files("olmo2", slides=4),
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", plan=OLMO2, windows=family.all_but_every(4), bases=("rope_theta", "rope_theta"),
        names=POST_NORM_NAMES, gguf=files("olmo2", when=has("attention.sliding_window"), slides=4),
    ),
    "PhiForCausalLM": Family(
        "phi",
        plan=plan(
            only={"hidden_act": ("gelu_new",)}, norms="parallel", norm="layer", norm_bias=True,
            gated_mlp=False, hidden_act=GELU, qkv_bias=True, output_bias=True, mlp_bias=True,
            lm_head_bias=True,
        ),
        partial=True, norm_eps="layer_norm_eps",
        names={
            "model.norm": "model.final_layernorm", "o_proj": "dense", "up_proj": "fc1",
            "down_proj": "fc2",
        },
        gguf=files("phi2"),
    ),
    "Phi3ForCausalLM": Family(
        "phi3", plan=plan(fused_qkv="parts", fused_gate_up=True), windows=WINDOW, partial=True,
        defaults={"original_max_position_embeddings": 4096},
        gguf=files("phi3", names=MERGED_GATE | {"attn_qkv": "self_attn.qkv_proj"}),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", plan=plan(only={"attention_bias": (True,)}, qkv_bias=True), windows=QWEN_WINDOWS,
        gguf=files("qwen2") | files("qwen2vl", unread=IMAGES),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", plan=QWEN3, windows=QWEN_WINDOWS, rope_extra=M_ROPE,
        gguf=files("qwen3") | files("qwen3vl", unread=IMAGES),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        plan=plan(
            qkv_bias=key("attention_bias"), output_bias=key("attention_out_bias"),
            **same("mlp_bias"),
        ),
        gguf=files("seed_oss", names=BEFORE_MLP),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", plan=plan(**LLAMA), rope_layers=family.smollm_rope,
        windows=family.windows(family.smollm_window, asked=True),
        gguf=files("smollm3", pairs=True),
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        plan=plan(
            norms=key("use_parallel_residual", lambda asked: "parallel" if asked else "pre"),
            norm="layer", norm_bias=True, qkv_bias=key("use_qkv_bias"),
        ),
        partial=True, norm_eps="layer_norm_eps", gguf=files("stablelm"),
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        plan=plan(
            only={"hidden_act": (GELU,)}, norm="layer", norm_bias=True, gated_mlp=False,
            hidden_act=GELU, **biases("use_bias"),
        ),
        windows=WINDOW, names={"up_proj": "c_fc", "down_proj": "c_proj"}, norm_eps="norm_epsilon",
        gguf=files("starcoder2"),
    ),
}
# fmt: on
"""Architecture -> its family."""
