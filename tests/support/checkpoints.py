"""Tiny random checkpoints of every model family, written by transformers: the oracle's own files.

Weights are wide enough that greedy tokens vary, and norms and biases are not the ones and zeros
that would hide a forgotten one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}

ROUTED = ("gate.weight", "router.weight", "experts.gate_up_proj", "experts.up_proj",
          "experts.down_proj")  # fmt: skip
"""Ends of the names of what a mixture of experts adds."""

MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LOCAL_MOE: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED_MOE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    **ROUTED_MOE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 16,
    },
}
NEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
CONV: dict[str, Any] = {
    "num_hidden_layers": 3,
    "conv_L_cache": 3,
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
    "norm_eps": 1e-4,
}
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "vocab_size_per_layer_input": 256,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeConfig",
        {**MOE, "head_dim": 32, "num_shared_experts": 1, "num_dense_layers": 1, "route_scale": 1.5,
         "layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 16, "mup_enabled": True},
    ),
    "apertus": ("ApertusConfig", {"attention_bias": True, "max_position_embeddings": 16_384}),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25, "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        {"layer_types": [SLIDING, FULL], "sliding_window": 16, "logit_scale": 0.25},
    ),
    "cwm": (
        "CwmConfig",
        {"head_dim": 32, "sliding_window": 16, "layer_types": [FULL, SLIDING], "pad_token_id": 0},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**LATENT, "norm_topk_prob": False, "topk_method": "greedy", "n_group": None,
         "topk_group": None, "q_lora_rank": None},
    ),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "dots1": ("Dots1Config", {**ROUTED_MOE, "layer_types": [FULL, FULL, SLIDING],
                              "sliding_window": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"num_hidden_layers": 4, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3,
         "moe_num_shared_experts": 2, "moe_layer_interval": 2},
    ),
    "exaone": ("ExaoneConfig", {}),
    "exaone4": (
        "Exaone4Config",
        {
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**MOE, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 16,
         "mlp_layer_types": ["dense", "sparse", "sparse"], "num_shared_experts": 2},
    ),
    "flex_olmo": (
        "FlexOlmoConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0},
    ),
    "falcon": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96, "bias": True},
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "lm_head_multiplier": 0.7,
            "embedding_multiplier": 1.3,
            "mlp_multipliers": [0.8, 1.2],
            "key_multiplier": 1.4,
            "attention_out_multiplier": 0.6,
            "attention_in_multiplier": 1.5,
            "ssm_multipliers": [1.2, 0.9, 1.1, 0.7, 1.3],
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 0.9,
        },
    ),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": [SLIDING, SLIDING, FULL],
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_vision": ("Gemma3Config", {"text": "gemma3", "mm_tokens_per_image": 4}),
    "gemma4": (
        "Gemma4TextConfig",
        {**GEMMA_4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
         "hidden_size_per_layer_input": 16, "final_logit_softcapping": 10.0},
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {**GEMMA_4, "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL],
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 2, "head_dim": 32, "global_head_dim": 16,
         "enable_moe_block": True,
         "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4_unified": (
        "Gemma4UnifiedTextConfig",
        {key: value for key, value in GEMMA_4.items() if key != "vocab_size_per_layer_input"},
    ),
    "gemma4_unified_vision": ("Gemma4UnifiedConfig", {"text": "gemma4_unified"}),
    "gemma4_vision": ("Gemma4Config", {"text": "gemma4"}),
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "glm4": ("Glm4Config", {"head_dim": 32, "pad_token_id": 0}),
    "glm4_moe": ("Glm4MoeConfig", {**ROUTED_MOE, "use_qk_norm": True, "head_dim": 16}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "mlp_layer_types": ["dense", "sparse", "dense"],
         "rope_parameters": None},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **LOCAL_MOE,
            "head_dim": 32,
            "sliding_window": 16,
            "layer_types": [SLIDING, FULL],
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt2": ("GPT2Config", {"n_inner": 96, "num_key_value_heads": 4}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_inner": 96, "num_key_value_heads": 1}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "gptj": ("GPTJConfig", {"n_inner": 96, "rotary_dim": 8, "num_key_value_heads": 4}),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            **LOCAL_MOE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**LOCAL_MOE, "shared_intermediate_size": 48, "attention_multiplier": 0.2,
         "residual_multiplier": 0.4},
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {"sliding_window": 16, "layer_types": [FULL, SLIDING], "layer_rope_theta": [0, 5000.0],
         "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
         "logits_scaling": 2.0},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {**LOCAL_MOE, "shared_intermediate_size": 48, "attention_multiplier": 0.2,
         "residual_multiplier": 0.4, "sliding_window": 16, "layer_types": [SLIDING, FULL]},
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **LOCAL_MOE,
            **MAMBA,
            "shared_intermediate_size": 48,
            "layer_types": ["linear_attention", FULL, "linear_attention"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "helium": ("HeliumConfig", {"head_dim": 16, "mlp_bias": True}),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 32, "attention_bias": True}),
    "hunyuan_moe": (
        "HunYuanMoEV1Config",
        {"num_experts": 6, "moe_topk": 2, "head_dim": 32,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0,
                             "factor": 1.0}},
    ),
    "hy_v3": ("HYV3Config", {**MOE, "head_dim": 32, "num_shared_experts": 2}),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
    ),
    "jais2": ("Jais2Config", {}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", FULL, "conv"], **CONV}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**MOE, **CONV, "layer_types": ["conv", FULL, "conv"], "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3Config",
        {"layer_types": ["conv", FULL, "conv", SLIDING], "num_hidden_layers": 4, "head_dim": 32,
         "sliding_window": 16, "conv_L_cache": 4, "pad_token_id": 0},
    ),
    "llama": ("LlamaConfig", {}),
    "mellum": (
        "MellumConfig",
        {**MOE, "head_dim": 32, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 16,
         "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "minimax_m2": ("MiniMaxM2Config", {**LOCAL_MOE, "head_dim": 32, "rotary_dim": 16}),
    "ministral": (
        "MinistralConfig",
        {"head_dim": 32, "sliding_window": 16, "layer_types": [FULL, SLIDING]},
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "mistral3_vision": ("Mistral3Config", {"text": "mistral"}),
    "mixtral": ("MixtralConfig", {**LOCAL_MOE, "sliding_window": 16}),
    "nanochat": ("NanoChatConfig", {"final_logit_softcapping": 10.0}),
    "nemotron": ("NemotronConfig", {"mlp_bias": True, "attention_bias": True}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "layers_block_type": ["linear_attention", "moe", FULL, "mlp", "linear_attention"],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 48,
            "mlp_bias": False,
            "use_bias": True,
            "time_step_min": 1e-9,
        },
    ),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.8, "rms_norm_eps": None}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {
            "num_hidden_layers": 3,
            "sliding_window": 16,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "olmoe": ("OlmoeConfig", {**MOE, "moe_intermediate_size": None}),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "num_key_value_heads": 4, "init_std": 0.15, "rms_norm_eps": None},
    ),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5, "rms_norm_eps": None}),
    "phimoe": ("PhimoeConfig", {**LOCAL_MOE, "attention_bias": True, "lm_head_bias": True,
                                "sliding_window": 16}),
    "phi3": (
        "Phi3Config",
        {"partial_rotary_factor": 0.5, "sliding_window": 16, "pad_token_id": 0},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**MOE, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_vision": ("Qwen3VLConfig", {"text": "qwen3"}),
    "qwen3_next": ("Qwen3NextConfig", {**NEXT, **MOE, "shared_expert_intermediate_size": 48}),
    "qwen3_5": ("Qwen3_5TextConfig", NEXT),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**NEXT, **MOE, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5_vision": ("Qwen3_5Config", {"text": "qwen3_5"}),
    "qwen3_5_moe_vision": ("Qwen3_5MoeConfig", {"text": "qwen3_5_moe"}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32, "mlp_bias": True}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "solar_open": ("SolarOpenConfig", {**ROUTED_MOE, "head_dim": 32, "first_k_dense_replace": 0}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "minicpm3": (
        "MiniCPM3Config",
        {key: value for key, value in LATENT.items() if key not in ROUTED_MOE}
        | {"scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32, "rope_parameters": None},
    ),
    "youtu": ("YoutuConfig", {k: v for k, v in LATENT.items() if k not in ROUTED_MOE}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 16}),
    "vaultgemma": (
        "VaultGemmaConfig",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
}  # fmt: skip
"""Name -> the class of its config in transformers, and what differs from `COMMON`. "text" names the
family that a multimodal checkpoint's text part is of."""

EAGER = ("gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "vaultgemma")
"""Those whose attention transformers has in plain torch alone."""


def make_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The config of a tiny model; `overrides` are fields of it, or of its text part."""
    kind, fields = FAMILIES[family]
    fields = dict(fields)
    if "text" not in fields:
        given = {**COMMON, **fields, **overrides}
        return getattr(transformers, kind)(**given)
    _, text = FAMILIES[fields.pop("text")]
    vision = dict(VISION)
    if kind.startswith("Qwen3"):
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
    if kind == "Qwen3VLConfig":
        vision |= {"deepstack_visual_indexes": [0]}
    text = {**COMMON, **text, **overrides}
    return getattr(transformers, kind)(text_config=text, vision_config=vision, **fields)


def make_model(
    family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of `family` in transformers; `overrides` are fields of its config."""
    config = make_config(family, **overrides)
    torch.manual_seed(seed)
    kind = AutoModelForImageTextToText if family.endswith("_vision") else AutoModelForCausalLM
    model = kind.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager" if family in EAGER else "sdpa",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.randn_like(buffer))
        for name, parameter in model.named_parameters():
            if name.endswith(
                (
                    "norm.weight",
                    "norm_1.weight",
                    "norm_2.weight",
                    ".ln_1.weight",
                    ".ln_2.weight",
                    ".ln_f.weight",
                    ".ln_attn.weight",
                    ".ln_mlp.weight",
                    ".router.scale",
                    "per_expert_scale",
                )
            ):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("A_log"):  # else nothing would be remembered
                parameter.copy_(torch.randn_like(parameter) - 2)
            elif name.endswith((".bias", "_bias", ".D")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            elif name.endswith(".sinks"):
                parameter.copy_(2 * torch.randn_like(parameter))
            elif name.endswith(ROUTED):
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.to(dtype).requires_grad_(False)


def make_checkpoint(
    path: str | Path,
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    fused_experts: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Writes a random checkpoint to `path` and returns the model it was made from.

    `max_shard_size` such as "100KB" splits it into several files with an index; `fused_experts`
    stores all experts of a layer in one tensor, as transformers 5 keeps them in memory.
    """
    model = make_model(family, dtype=dtype, seed=seed, **overrides)
    model.save_pretrained(
        path, max_shard_size=max_shard_size, save_original_format=not fused_experts
    )
    return model
