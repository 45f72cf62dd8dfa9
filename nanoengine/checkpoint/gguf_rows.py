"""ARCHITECTURES: what each architecture of GGUF is here, as data.

A row says which family it is, what its files leave unsaid, and what they call tensors. What a
family computes stays in `families/`, what its keys are called in `keys.py`. Called by
`gguf_tensors.py` and `gguf_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoengine.checkpoint import gguf_keys as read
from nanoengine.checkpoint.gguf_keys import Metadata
from nanoengine.checkpoint.keys import Json


def where(key: str, name: str) -> Callable[[Metadata], str | None]:
    """The name, where the key asks for something."""
    return lambda given: name if given.get(key, Any) else None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture of GGUF is here.

    Attributes:
        name: a key of `every_family`.
        also: the name in place of that, of files that ask for it.
        fixed: keys of config.json that its files leave unsaid.
        more: reads keys that say something else than a key of config.json does.
        names: parts of its tensors' names -> ours, where they are not those of `NAMES`.
        pairs: rows of queries and keys lie so that neighbours turn together, which they do not in
            the family's own checkpoints.
        slides: where the file has a window, all layers but each n-th have it; 0: its family knows.
        unread: keys of its metadata that change nothing of a text.
        tiled: rows of value heads of linear attention lie in another order: see `gguf_tensors.py`.
    """

    name: str
    also: Callable[[Metadata], str | None] = lambda given: None
    fixed: Json = field(default_factory=dict)
    more: Callable[[Metadata], Json] = lambda given: {}
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    slides: int = 0
    unread: tuple[str, ...] = ()
    tiled: bool = False


# fmt: off
# --- keys that change nothing ----------------------------------------------------------------

IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
"""Where positions and features of images go: positions of a text are all the same."""
NO_STATES = (
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.inner_size", "ssm.time_step_rank",
)
"""What dense Granite 4 has of its hybrids: an MLP's size once more, and that of no states."""

# --- names of tensors -----------------------------------------------------------------------------

MATRICES = ("gate", "up", "down")
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "attention_output_norm", "post_ffw_norm": "mlp_output_norm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in MATRICES},
    **{f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in MATRICES},
    **{f"ffn_{x}_exps.bias": f"mlp.experts.{x}_proj_bias" for x in MATRICES},
    **{f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in MATRICES},
    "ffn_gate_up_exps": "mlp.experts.{}.{}_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "token_embd_norm": "model.norm",
}
"""A tensor's name, without the layer before it and mostly without ".weight" -> ours; {} is the
number of an expert in a stack; where there are two, rows of its gate and its up lie together."""
DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj", "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
GEMMA_4 = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_mlp_norm", "post_ffw_norm_2": "post_experts_norm",
    "pre_ffw_norm_2": "pre_experts_norm", "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale",
    **{f"ffn_{x}_exps": f"experts.{{}}.{x}_proj" for x in MATRICES},
    "ffn_gate_up_exps": "experts.{}.{}_proj",
}
BEFORE_MLP = {"post_attention_norm": "post_attention_layernorm"}
MERGED_GATE = {"ffn_up": "mlp.gate_up_proj"}
SPLIT: dict[str, dict[str, tuple[int, ...]]] = {
    "attn_qkv": {"self_attn.q_proj": (0,), "self_attn.k_proj": (1,), "self_attn.v_proj": (2,)},
    "ssm_in": {"linear_attn.in_proj_qkv": (0, 1, 2), "linear_attn.in_proj_z": (3,)},
    "ssm_ba": {"linear_attn.in_proj_b": (0,), "linear_attn.in_proj_a": (1,)},
}
"""A tensor that is several of ours, unless its architecture names it -> which parts of its rows are
each: see `GGUFModel._sizes`."""


# --- the table ------------------------------------------------------------------------------------

ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(
        "AfmoeForCausalLM", slides=4, fixed={"mup_enabled": True}, more=read.normed,
        names={"attn_gate": "self_attn.gate_proj"},
    ),
    "arcee": Architecture("ArceeForCausalLM", pairs=True),
    "chatglm": Architecture("GlmForCausalLM", names=MERGED_GATE),
    "cohere2": Architecture("Cohere2ForCausalLM", slides=4),
    "command-r": Architecture("CohereForCausalLM"),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", also=read.deepseek_name, more=read.deepseek,
    ),
    "dots1": Architecture("Dots1ForCausalLM"),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", unread=("expert_shared_feed_forward_length",),
    ),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM", slides=4, unread=("expert_shared_feed_forward_length",),
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", slides=4),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM", more=read.mamba,
        names=MAMBA_NAMES | {"ffn_norm": "post_attention_layernorm.weight"},
        fixed={"mamba_norm_before_gate": False, "mamba_rms_norm": True},
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", more=read.gemma, slides=2),
    "gemma3": Architecture("Gemma3ForCausalLM", more=read.gemma, slides=6),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", more=read.gemma4, names=GEMMA_4, slides=6,
        unread=("expert_feed_forward_length",),
    ),
    "glm4": Architecture("Glm4ForCausalLM", names=MERGED_GATE),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", fixed={"use_qk_norm": True}, unread=IMAGES, names=BEFORE_MLP,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", more=read.expert_size, names=BEFORE_MLP, slides=2,
    ),
    "granite": Architecture("GraniteForCausalLM", pairs=True, unread=NO_STATES),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", pairs=True, more=read.granite_hybrid, names=MAMBA_NAMES,
        also=where("rope.scaling.finetuned", "BambaForCausalLM"),
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", pairs=True,
        also=where("expert_shared_feed_forward_length", "GraniteMoeSharedForCausalLM"),
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        unread=(
            "expert_feed_forward_length", "expert_shared_count",
            "expert_shared_feed_forward_length",
        ),
    ),
    "hy_v3": Architecture("HYV3ForCausalLM", more=read.hunyuan_3),
    "internlm2": Architecture("LlamaForCausalLM", pairs=True),
    "jais2": Architecture("Jais2ForCausalLM"),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", more=read.lfm2, fixed={"block_auto_adjust_ff_dim": False},
    ),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", more=read.lfm2),
    "llama": Architecture(
        "LlamaForCausalLM", also=where("expert_count", "MixtralForCausalLM"), pairs=True,
    ),
    "mellum": Architecture("MellumForCausalLM", fixed={"norm_topk_prob": True}, slides=4),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", more=read.latent),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", more=read.expert_size),
    "mistral3": Architecture(
        "MistralForCausalLM", also=where("attention.temperature_scale", "Ministral3ForCausalLM"),
        pairs=True,
    ),
    "nemotron": Architecture("NemotronForCausalLM"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        "NemotronHForCausalLM", more=read.nemotron, names=MAMBA_NAMES,
    )),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", also=where("attention.sliding_window", "Olmo3ForCausalLM"), slides=4,
    ),
    "olmoe": Architecture("OlmoeForCausalLM"),
    "phi2": Architecture("PhiForCausalLM"),
    "phi3": Architecture(
        "Phi3ForCausalLM", names=MERGED_GATE | {"attn_qkv": "self_attn.qkv_proj"},
    ),
    "phimoe": Architecture("PhimoeForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", unread=IMAGES),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True}),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", more=read.delta, names=DELTA_NAMES, unread=IMAGES, tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", more=read.delta, names=DELTA_NAMES, unread=IMAGES, tiled=True,
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", more=read.delta, names=DELTA_NAMES),
    "qwen3vl": Architecture("Qwen3ForCausalLM", unread=IMAGES),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", fixed={"norm_topk_prob": True}, unread=IMAGES,
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", names=BEFORE_MLP),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs=True),
    "stablelm": Architecture("StableLmForCausalLM"),
    "starcoder2": Architecture("Starcoder2ForCausalLM"),
}
# fmt: on
"""`general.architecture` -> its row."""
