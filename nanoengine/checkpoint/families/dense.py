"""Dense families with attention in every layer: Llama, and families that differ from it in a few
fields."""

from __future__ import annotations

from nanoengine.checkpoint.families import family
from nanoengine.checkpoint.families.family import Family, files, from_keys, has, key, layer

# fmt: off
ATTENTION_BIAS = {"qkv_bias": key("attention_bias"), "output_bias": key("attention_bias")}
LLAMA = {**from_keys("mlp_bias"), **ATTENTION_BIAS}
GELU = "gelu_pytorch_tanh"
QWEN3 = layer(qk_norm="per_head", **ATTENTION_BIAS)
OLMO2 = layer(norms="post", norm="fp32_weight", qk_norm="all_heads", **ATTENTION_BIAS)
GLM = {"qkv_bias": key("attention_bias"), "fused_gate_up": True, "rope_interleaved": True}
GRANITE_KEYS = {
    **from_keys("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    "logit_scale": key("logits_scaling", lambda scaling: 1 / scaling),
}
GRANITE = layer(**GRANITE_KEYS, **LLAMA)

WINDOW = family.windows(has_types=False)
QWEN_WINDOWS = family.windows(
    lambda keys, layer: layer >= keys.get("max_window_layers"), needs_flag=True,
)

# Why: checkpoints of GLM may lack EOS tokens, unlike all others.
GLM_DEFAULTS = {"eos_token_id": [151_329, 151_336, 151_338]}
# Why without effect: a config with alpha also has these keys, but transformers does not read them.
HUNYUAN_ROPE = dict.fromkeys(
    ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), False,
)
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Positions of images. Why without effect: the positions of a text are the same in all sections."""

POST_NORM_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
HUNYUAN_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

PRE_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
FUSED_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
IMAGE_KEYS = ("rope.dimension_sections", "n_deepstack_layers")
"""Keys of GGUF files for positions and features of images, which do not affect text."""
UNUSED_SSM_KEYS = (
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.inner_size", "ssm.time_step_rank",
)
"""Keys of the hybrid models that files of dense Granite 4 have too."""

FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5", gguf=files("ernie4_5"), layers=layer(
            rope_interleaved=True,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), key("use_bias")),
        ),
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4", layers=layer(norms="post", qk_norm="per_head"), windows=family.all_but_every(),
        rope_layers=family.exaone_rope, names=POST_NORM_NAMES, gguf=files("exaone4", full_every=4),
    ),
    "GlmForCausalLM": Family(
        "glm", layers=layer(**GLM), partial_rotary=True, defaults=GLM_DEFAULTS,
        gguf=files("chatglm", names=FUSED_GATE_UP),
    ),
    "Glm4ForCausalLM": Family(
        "glm4", layers=layer(norms="sandwich", **GLM), partial_rotary=True, defaults=GLM_DEFAULTS,
        rope_extra=M_ROPE,
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        gguf=files("glm4", names=FUSED_GATE_UP),
    ),
    "GraniteForCausalLM": Family(
        "granite", layers=GRANITE,
        gguf=files("granite", interleaved=True, ignored_keys=UNUSED_SSM_KEYS),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense", layers=layer(qk_norm="post_rope", **ATTENTION_BIAS),
        rope_extra=HUNYUAN_ROPE, names=HUNYUAN_NAMES, gguf=files("hunyuan-dense"),
    ),
    "LlamaForCausalLM": Family(
        "llama", layers=layer(**LLAMA),
        gguf=files("exaone") | files("internlm2", "llama", interleaved=True),
    ),
    "MinistralForCausalLM": Family("ministral", windows=family.windows()),
    "Ministral3ForCausalLM": Family(
        "ministral3", windows=WINDOW,
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
        gguf=files("mistral3", when=has("attention.temperature_scale"), interleaved=True),
    ),
    "MistralForCausalLM": Family(
        "mistral", windows=WINDOW, gguf=files("mistral3", interleaved=True),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2", layers=OLMO2, names=POST_NORM_NAMES, gguf=files("olmo2", full_every=4),
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", layers=OLMO2, windows=family.all_but_every(4),
        rope_theta_keys=("rope_theta", "rope_theta"), names=POST_NORM_NAMES,
        gguf=files("olmo2", when=has("attention.sliding_window"), full_every=4),
    ),
    "Phi3ForCausalLM": Family(
        "phi3", layers=layer(fused_qkv=True, fused_gate_up=True), windows=WINDOW,
        partial_rotary=True, defaults={"original_max_position_embeddings": 4096},
        gguf=files("phi3", names=FUSED_GATE_UP | {"attn_qkv": "self_attn.qkv_proj"}),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", layers=layer(only={"attention_bias": (True,)}, qkv_bias=True),
        windows=QWEN_WINDOWS, rope_extra=M_ROPE,
        gguf=files("qwen2") | files("qwen2vl", ignored_keys=IMAGE_KEYS),
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", layers=QWEN3, windows=QWEN_WINDOWS, rope_extra=M_ROPE,
        gguf=files("qwen3") | files("qwen3vl", ignored_keys=IMAGE_KEYS),
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        layers=layer(
            qkv_bias=key("attention_bias"), output_bias=key("attention_out_bias"),
            **from_keys("mlp_bias"),
        ),
        gguf=files("seed_oss", names=PRE_MLP_NORM),
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3", layers=layer(**LLAMA), rope_layers=family.smollm_rope,
        windows=family.windows(family.smollm_window, needs_flag=True),
        gguf=files("smollm3", interleaved=True),
    ),
}
# fmt: on
"""Architecture -> its family."""
