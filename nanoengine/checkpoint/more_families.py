"""The second half of the families' table: experts, states, latents, and what fewer people run.

Loaded where a config names none of the first half, so that a plain prompt loads no rows but those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nanoengine.checkpoint import mamba, more_readers, readers
from nanoengine.checkpoint.families import (
    ATTENTION_BIAS,
    FAMILIES,
    GELU,
    GEMMA_2,
    GEMMA_2_DEFAULTS,
    GEMMA_3_DEFAULTS,
    GEMMA_NAMES,
    GRANITE,
    GRANITE_KEYS,
    HUNYUAN_NAMES,
    HUNYUAN_ROPE,
    LLAMA,
    M_ROPE,
    OLMO2,
    QWEN3,
    WINDOW,
    Family,
)
from nanoengine.checkpoint.keys import Json
from nanoengine.checkpoint.more_readers import experts, layers_from, limited, shared_size
from nanoengine.checkpoint.readers import all_but_every, biases, key, plan, size, windows

# fmt: off
# Why: where all layers have experts, configs need name no other MLP.
EXPERT_SIZE = size("intermediate_size", "moe_intermediate_size")
LFM2 = plan(only={"tie_embedding": (True,)}, head_norm="head")
QWEN_NEXT = plan(
    only={"attn_output_gate": (True,)}, norm="centered", head_norm="head", output_gate="behind",
    **ATTENTION_BIAS,
)
NORM_TOPK = {"norm_topk_prob": key("norm_topk_prob")}
QWEN = {"layers": more_readers.sparse_layers, **NORM_TOPK}
QWEN_SHARED = experts(
    shared_size=size("shared_expert_intermediate_size"), shared_gate=True, **QWEN,
)
SCALED = {
    "score": "sigmoid", "scaling_factor": key("routed_scaling_factor"), "norm_epsilon": 1e-20,
    **NORM_TOPK,
}
DEEPSEEK_KEYS = {
    "count": "n_routed_experts", "correction_bias": True, "num_groups": key("n_group"),
    "groups_per_token": key("topk_group"), "shared_size": shared_size(),
    "layers": layers_from("first_k_dense_replace"), **SCALED,
}
DEEPSEEK = experts(**DEEPSEEK_KEYS)
DEEPSEEK_PLAN = plan(
    only={"topk_method": ("noaux_tc",)}, latent=more_readers.latent, **ATTENTION_BIAS,
    interleaved=key("rope_interleave"),
)
NUMBERED = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
LFM_NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
    **NUMBERED,
}
LFM2_NAMES = {
    "q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj", **LFM_NAMES,
}
SHARED_NAMES = {"shared_experts": "shared_expert"}
DRAFTS = r"mtp\."
# Why in code: a key of `COMMON`. Published checkpoints have one layer for drafts.
UNUSED_HEAD = {"head_dim": 64}  # Why: MLA has other sizes, and one computed from others may be odd
DRAFT_LAYER = {"num_nextn_predict_layers": 1}
# Why no key of norms: a softmax over the experts taken is one over all, divided by their sum.
MIXTRAL = {"count": "num_local_experts", "inner": "intermediate_size"}
# Why another key: these families name experts so that all take.
SHARED = {"correction_bias": True, "shared_size": shared_size("num_shared_experts")}
GRANITE_NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
}
GRANITE_SHARED_NAMES = GRANITE_NAMES | {
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}
GRANITE_4_NAMES = GRANITE_NAMES | {
    f"mlp.{part}{ours}": f"shared_mlp.{theirs}_linear"
    for ours, theirs in (("gate_up_proj", "input"), ("down_proj", "output"))
    for part in ("", "shared_experts.")
}
FALCON_NAMES = {
    "model.norm": "model.final_layernorm", "post_attention_layernorm": "pre_ff_layernorm",
    "mlp": "feed_forward",
}
NEMOTRON_NAMES = {
    "model.embed_tokens": "model.embeddings", "model.norm": "model.norm_f",
    "input_layernorm": "norm", "mamba": "mixer", "self_attn": "mixer", "mlp": "mixer",
}
PLAIN = {
    "norm": "layer", "norm_bias": True, "gated": False, "activation": more_readers.activation,
}
GPT = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "positions": 0, **PLAIN}
OLD: Json = {
    "inner": lambda keys: keys.get("intermediate_size") or 4 * keys.require("hidden_size"),
    "eps": "layer_norm_epsilon",
}
GPT_NAMES = {
    "model.embed_tokens": "model.wte", "model.layers": "model.h", "model.norm": "model.ln_f",
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
}
GPT_2_NAMES = GPT_NAMES | {
    "model.embed_positions": "model.wpe", "self_attn": "attn", "qkv_proj": "c_attn",
    "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj",
}
MIXTRAL_NAMES = {"mlp": "block_sparse_moe", **NUMBERED}

GEMMA_4 = Family(
    "gemma4_text",
    plan=plan(
        only={"hidden_activation": (GELU,), "use_bidirectional_attention": ("vision", False, None)},
        norms="both", norm="wide", head_norm="head", activation=GELU, attention_scale=1.0,
        embedding_scale=key("hidden_size", lambda n: n**0.5), varied=more_readers.varied,
        logit_softcap=key("final_logit_softcapping"), **ATTENTION_BIAS,
    ),
    windows=all_but_every(6), bases=("rope_theta", "rope_local_base_freq"),
    moe=more_readers.where_any(key("enable_moe_block"), experts(taken="top_k_experts")),
    # Why a base: for a config whose `rope_parameters` has none.
    defaults={**GEMMA_3_DEFAULTS, "vocab_size": 262_144, "rope_theta": 1e6},
    names={
        **GEMMA_NAMES, "post_mlp_norm": "post_feedforward_layernorm_1",
        "post_experts_norm": "post_feedforward_layernorm_2",
        "pre_experts_norm": "pre_feedforward_layernorm_2",
    },
)

MORE_FAMILIES: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        "afmoe",
        plan=plan(
            only={"attention_bias": (False,)}, norms="both", norm="wide", head_norm="head",
            output_gate="beside", embedding_scale=more_readers.mup_scale,
        ),
        windows=all_but_every("global_attn_every_n_layers"), turned=readers.only_with_window,
        moe=experts(
            score="sigmoid", scaling_factor=key("route_scale"), norm_epsilon=1e-20,
            layers=layers_from("num_dense_layers"), **SHARED,
        ),
        names={
            "attention_output_norm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_mlp_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
            "mlp.gate": "mlp.router.gate", "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
    ),
    "ApertusForCausalLM": Family(
        "apertus",
        plan=plan(
            only={"hidden_act": ("xielu",)}, head_norm="head", gated=False, activation="xielu",
            **ATTENTION_BIAS,
        ),
        names={
            "input_layernorm": "attention_layernorm",
            "post_attention_layernorm": "feedforward_layernorm",
        },
    ),
    "BambaForCausalLM": Family(
        "bamba", plan=plan(**LLAMA), states=mamba.mamba_states, partial=True, names=FALCON_NAMES,
    ),
    "CwmForCausalLM": Family(
        "cwm", plan=plan(mlp_bias=key("mlp_bias")), windows=readers.all_but_first_of_four,
        defaults={"eos_token_id": [128_001, 128_008, 128_009]},  # as GLM_DEFAULTS
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek_v2",
        plan=plan(
            only={
                "topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,),
            },
            latent=more_readers.latent, interleaved=True, **LLAMA,
        ),
        moe=experts(
            count="n_routed_experts", norm_topk_prob=False, shared_size=shared_size(),
            scaling_factor=key("routed_scaling_factor"),
            layers=layers_from("first_k_dense_replace"),
            num_groups=limited("n_group"), groups_per_token=limited("topk_group"),
            best_of_group=1,
        ),
        defaults=UNUSED_HEAD,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3", plan=DEEPSEEK_PLAN, moe=DEEPSEEK, defaults=UNUSED_HEAD | DRAFT_LAYER,
    ),
    "Dots1ForCausalLM": Family(
        "dots1", plan=QWEN3, windows=windows(readers.from_max_window_layers), moe=DEEPSEEK,
        defaults={"n_shared_experts": None},  # Why: the class has None, which is no number.
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        plan=plan(only={"use_bias": (False,), "moe_norm_min": (1e-12,)}, interleaved=True),
        moe=experts(
            count="moe_num_experts", taken="moe_k", correction_bias="row", norm_least=1e-12,
            shared_size=shared_size("moe_num_shared_experts"),
            layers=more_readers.ernie_layers,
        ),
        names={"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
        left_out=r"model\.mtp_",
    ),
    "ExaoneForCausalLM": Family(
        "exaone", more_readers.older, plan=plan(**LLAMA), eps="layer_norm_epsilon",
        names={
            **GPT_NAMES, "self_attn": "attn.attention", "o_proj": "out_proj",
            "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
        },
    ),
    "ExaoneMoeForCausalLM": Family(
        "exaone_moe", plan=plan(head_norm="head"), windows=all_but_every(),
        turned=readers.exaone_turned,
        moe=experts(**{**DEEPSEEK_KEYS, "count": "num_experts", **SHARED,
                       "layers": more_readers.named_sparse_layers}),
        names={"mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias"}, left_out=DRAFTS,
    ),
    "FalconForCausalLM": Family(
        "falcon", more_readers.falcon,
        plan=plan(norms=more_readers.falcon_norms, merged="heads", **PLAIN, **biases("bias")),
        defaults={"max_position_embeddings": 2048}, names=more_readers.falcon_names, **OLD,
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        plan=plan(
            factors=mamba.factors, embedding_scale=key("embedding_multiplier"),
            logit_scale=key("lm_head_multiplier"), **LLAMA,
            # Why here: a factor on keys is one on q.k.
            attention_scale=lambda keys: keys.get("key_multiplier") * keys.head_dim**-0.5,
        ),
        states=mamba.falcon_states, names=FALCON_NAMES,
    ),
    "FlexOlmoForCausalLM": Family(
        "flex_olmo", plan=OLMO2, moe=experts(inner="intermediate_size", **NORM_TOPK),
        names=GEMMA_NAMES,
    ),
    "Gemma4ForCausalLM": GEMMA_4,
    "Gemma4UnifiedForCausalLM": replace(
        GEMMA_4, model_type="gemma4_unified_text",
        defaults={**GEMMA_4.defaults, "max_position_embeddings": 262_144},
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        plan=plan(
            qkv_bias=key("attention_bias"),
            head_norm=key("use_qk_norm", lambda asked: "head" if asked else None),
        ),
        moe=DEEPSEEK, partial=True, defaults=DRAFT_LAYER,
    ),
    "Glm4MoeLiteForCausalLM": Family(
        "glm4_moe_lite", plan=DEEPSEEK_PLAN,
        moe=experts(**{**DEEPSEEK_KEYS, "layers": more_readers.named_sparse_layers}),
        defaults={"first_k_dense_replace": 1, **DRAFT_LAYER},
    ),
    "GPT2LMHeadModel": Family(
        "gpt2", more_readers.older, plan=plan(merged="parts", inputs_first=True, **GPT),
        turned=readers.nowhere, names=GPT_2_NAMES, **OLD,
    ),
    "GPTBigCodeForCausalLM": Family(
        "gpt_bigcode", more_readers.older, plan=plan(merged="parts", **GPT),
        # Why: the class says so as `multi_query`.
        turned=readers.nowhere, defaults={"num_key_value_heads": 1}, names=GPT_2_NAMES, **OLD,
    ),
    "GPTJForCausalLM": Family(
        "gptj", more_readers.older,
        plan=plan(norms="parallel", interleaved=True, head_bias=True, mlp_bias=True, **PLAIN),
        partial=True,
        names={
            **GPT_NAMES, "self_attn": "attn", "o_proj": "out_proj", "up_proj": "fc_in",
            "down_proj": "fc_out",
        },
        **OLD,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", more_readers.older,
        plan=plan(
            norms=key("use_parallel_residual", lambda on: "parallel each" if on else "before"),
            merged="heads", mlp_bias=True, **PLAIN, **ATTENTION_BIAS,
        ),
        partial=True,
        names={
            "model.embed_tokens": "model.embed_in", "model.norm": "model.final_layer_norm",
            "self_attn": "attention", **more_readers.NEOX,
        },
        eps="layer_norm_eps",
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
        # Why: the class has a base in it too, which would count before a config's own. And the
        # published files don't say in which dtype they are.
        defaults={
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "torch_dtype": "bfloat16",
        },
        names={"mlp.gate": "mlp.router"},
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe", plan=GRANITE, moe=experts(**MIXTRAL), names=GRANITE_NAMES,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid", plan=plan(merged_gate=True, **GRANITE_KEYS, **ATTENTION_BIAS),
        states=mamba.mamba_states, turned=readers.if_named_rope,
        moe=more_readers.where_any(
            key("num_local_experts"),
            experts(**MIXTRAL, shared_size=size("shared_intermediate_size")),
        ),
        # Why: without, a model would have no experts.
        defaults={
            "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
        },
        names=GRANITE_4_NAMES, inner=size("shared_intermediate_size"),
    ),
    "GraniteMoeSharedForCausalLM": Family(
        "granitemoeshared", plan=plan(**GRANITE_KEYS, **LLAMA, merged_gate=True),
        moe=experts(**MIXTRAL, shared_size=key("shared_intermediate_size")),
        names=GRANITE_SHARED_NAMES,
    ),
    "GraniteMoeSWAForCausalLM": Family(
        "granitemoe_swa", plan=plan(**GRANITE_KEYS, **ATTENTION_BIAS, merged_gate=True, sinks=True),
        windows=readers.all_but_first_of_four, turned=readers.layer_bases,
        moe=experts(**MIXTRAL, shared_size=key("shared_intermediate_size")),
        names={
            "mlp": "block_sparse_moe", "mlp.gate": "block_sparse_moe.router",
            **{n: of for n, of in GRANITE_SHARED_NAMES.items() if ".shared_experts." in n},
        },
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa", plan=plan(**GRANITE_KEYS, **LLAMA, sinks=True),
        windows=readers.all_but_first_of_four, turned=readers.layer_bases,
    ),
    "HeliumForCausalLM": Family(
        "helium",
        plan=plan(interleaved=True, qkv_bias=key("attention_bias"), mlp_bias=key("mlp_bias")),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "hunyuan_v1_moe", plan=plan(head_norm="rotated", **ATTENTION_BIAS),
        moe=experts(
            inner="intermediate_size", taken="moe_topk", shared_size=size("intermediate_size"),
        ),
        rope_extra=HUNYUAN_ROPE,
        names={
            **HUNYUAN_NAMES, "mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp",
        },
    ),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax",
        plan=plan(
            norms=key("use_post_norm", lambda asked: "both" if asked else "before"),
            **{**GRANITE_KEYS, "logit_scale": key("logits_scaling"),
               "attention_scale":
                   lambda keys: keys.get("attention_multiplier") or keys.head_dim**-0.5},
        ),
        names={"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"},
    ),
    "HYV3ForCausalLM": Family(
        "hy_v3", plan=plan(head_norm="head", **LLAMA),
        moe=experts(
            score="sigmoid", scaling_factor=key("router_scaling_factor"), norm_epsilon=1e-20,
            layers=more_readers.named_sparse_layers, **SHARED,
        ),
        defaults={"first_k_dense_replace": 1},
        names={
            "mlp.gate": "mlp.router.gate", "mlp.shared_experts": "mlp.shared_mlp",
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        },
    ),
    "Jais2ForCausalLM": Family(
        "jais2",
        plan=plan(
            only={"hidden_act": ("relu2",)}, norm="layer", norm_bias=True, gated=False,
            activation="relu2", **LLAMA,
        ),
        eps="layer_norm_eps",
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2", plan=LFM2, states=more_readers.conv_states,
        names=LFM2_NAMES, inner=more_readers.lfm2_inner_size, eps="norm_eps",
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe", plan=LFM2, states=more_readers.conv_states,
        moe=experts(
            correction_bias=key("use_expert_bias"), layers=layers_from("num_dense_layers"),
            **{**SCALED, "norm_epsilon": 1e-6},
        ),
        names=LFM2_NAMES | {"mlp.gate.e_score_correction_bias": "feed_forward.expert_bias"},
        eps="norm_eps",
    ),
    "Lfm3ForCausalLM": Family(
        "lfm3", more_readers.lfm3_layers,
        plan=plan(
            only={"attention_bias": (False,)}, head_norm="head",
            norms=key("use_sandwich_norm", lambda asked: "both" if asked else "before"),
            output_gate=key("use_attention_gate", lambda asked: "heads" if asked else False),
        ),
        states=more_readers.conv_states, windows=windows(readers.no_layer),
        bases=("rope_theta", "rope_local_base_freq"),
        names={
            "attention_output_norm": "post_operator_norm", "mlp_output_norm": "post_ffn_norm",
            # Why: a name alone, that of the MLP's gate is another.
            "self_attn.gate_proj": "self_attn.gate_proj", **LFM_NAMES,
        },
        eps="norm_eps",
    ),
    "MellumForCausalLM": Family(
        "mellum", plan=QWEN3, windows=windows(readers.no_layer),
        bases=("rope_theta", "rope_local_base_freq"),
        moe=experts(layers=more_readers.named_sparse_layers, **NORM_TOPK), left_out=DRAFTS,
    ),
    "MiniCPM3ForCausalLM": Family(
        "minicpm3",
        plan=plan(
            latent=more_readers.minicpm_latent, embedding_scale=key("scale_emb"),
            residual_scale=more_readers.depth_scale, **LLAMA,
            logit_scale=lambda keys: keys.require("dim_model_base") / keys.require("hidden_size"),
        ),
        # Why in code: other families with MLA must have these sizes.
        defaults={
            "head_dim": 32, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2", plan=plan(only={"use_qk_norm": (True,)}, head_norm="width"),
        moe=experts(**MIXTRAL, score="sigmoid", correction_bias=True), partial=True,
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral", windows=WINDOW, moe=experts(**MIXTRAL), names=MIXTRAL_NAMES,
    ),
    "NanoChatForCausalLM": Family(
        "nanochat",
        plan=plan(
            only={"hidden_act": ("relu2",)}, norm="bare", head_norm="rotated", backwards=True,
            embedding_norm=True, gated=False, activation="relu2",
            logit_softcap=key("final_logit_softcapping"), **ATTENTION_BIAS,
        ),
        names={"up_proj": "fc1", "down_proj": "fc2"},
    ),
    "NemotronForCausalLM": Family(
        "nemotron",
        plan=plan(
            only={"hidden_act": ("relu2",)}, norm="centered layer", norm_bias=True, gated=False,
            activation="relu2", **LLAMA,
        ),
        partial=True, eps="norm_eps",
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", mamba.nemotron_layers,
        plan=plan(
            only={
                "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",),
                "residual_in_fp32": (False,), "n_shared_experts": (1,),
            },
            blocks=mamba.nemotron_blocks, norm="wide", gated=False, activation="relu2",
            mlp_bias=key("mlp_bias"),
        ),
        states=mamba.nemotron_states, turned=readers.nowhere,
        moe=more_readers.where_any(mamba.nemotron_experts, experts(**{
            **DEEPSEEK_KEYS, "shared_size": size("moe_shared_expert_intermediate_size"),
            "layers": mamba.nemotron_experts, "gated": False,
        })),
        names=NEMOTRON_NAMES, left_out=DRAFTS, eps="layer_norm_epsilon",
    ),
    "OPTForCausalLM": Family(
        "opt", more_readers.older,
        plan=plan(positions=more_readers.opt_positions, **PLAIN, **biases("enable_bias")),
        turned=readers.nowhere,
        names={
            "model.norm": "model.final_layer_norm", "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm", "o_proj": "out_proj",
            "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
        },
        eps="layer_norm_eps",
    ),
    "OlmoForCausalLM": Family(
        "olmo", plan=plan(norm="bare layer", clip=key("clip_qkv"), **ATTENTION_BIAS),
        eps="layer_norm_eps",
    ),
    "OlmoeForCausalLM": Family(
        "olmoe", plan=plan(head_norm="width", **ATTENTION_BIAS),
        moe=experts(inner="intermediate_size", **NORM_TOPK),
    ),
    "PhiForCausalLM": Family(
        "phi",
        plan=plan(
            only={"hidden_act": ("gelu_new",)}, norms="parallel", norm="layer", norm_bias=True,
            gated=False, activation=GELU, qkv_bias=True, output_bias=True, mlp_bias=True,
            head_bias=True,
        ),
        partial=True, eps="layer_norm_eps",
        names={
            "model.norm": "model.final_layernorm", "o_proj": "dense", "up_proj": "fc1",
            "down_proj": "fc2",
        },
    ),
    "PhimoeForCausalLM": Family(
        "phimoe",
        plan=plan(
            norm="layer", norm_bias=True, head_bias=key("lm_head_bias"), **ATTENTION_BIAS,
        ),
        windows=WINDOW,
        moe=experts(**MIXTRAL, score="sparsemixer", jitter=key("router_jitter_noise")),
        rope_extra={"short_mscale": True, "long_mscale": True}, names=MIXTRAL_NAMES,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", plan=plan(qkv_bias=key("qkv_bias")),
        windows=windows(readers.alternate, asked=True), moe=QWEN_SHARED, names=SHARED_NAMES,
    ),
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text", plan=QWEN_NEXT, states=more_readers.delta_states(merged=False),
        partial=True, rope_extra=M_ROPE, left_out=DRAFTS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text", plan=QWEN_NEXT, states=more_readers.delta_states(merged=False),
        # Why: the class has no such key, its model code divides always.
        moe=QWEN_SHARED, partial=True, defaults={"norm_topk_prob": True},
        rope_extra=M_ROPE, names=SHARED_NAMES, left_out=DRAFTS, inner=EXPERT_SIZE,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe", plan=QWEN3, windows=windows(readers.every_layer, asked=True, named=False),
        moe=experts(**QWEN),
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next", plan=QWEN_NEXT, states=more_readers.delta_states(merged=True),
        moe=QWEN_SHARED, partial=True, names=SHARED_NAMES, left_out=DRAFTS,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        plan=plan(
            qkv_bias=key("attention_bias"), output_bias=key("attention_out_bias"),
            mlp_bias=key("mlp_bias"),
        ),
    ),
    "SolarOpenForCausalLM": Family(
        "solar_open", plan=plan(qkv_bias=key("attention_bias")),
        moe=experts(**{n: read for n, read in DEEPSEEK_KEYS.items() if n != "layers"}),
        partial=True, inner=EXPERT_SIZE,
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        plan=plan(
            norms=key("use_parallel_residual", lambda asked: "parallel" if asked else "before"),
            norm="layer", norm_bias=True, qkv_bias=key("use_qkv_bias"),
        ),
        partial=True, eps="layer_norm_eps",
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        plan=plan(
            only={"hidden_act": (GELU,)}, norm="layer", norm_bias=True, gated=False,
            activation=GELU, **biases("use_bias"),
        ),
        windows=WINDOW, names={"up_proj": "c_fc", "down_proj": "c_proj"}, eps="norm_epsilon",
    ),
    "VaultGemmaForCausalLM": Family(
        "vaultgemma", plan=plan(**{**GEMMA_2, "norms": "before"}), windows=all_but_every(2),
        defaults=GEMMA_2_DEFAULTS, names={"post_attention_layernorm": "pre_feedforward_layernorm"},
    ),
    "YoutuForCausalLM": Family(
        "youtu",
        plan=plan(latent=more_readers.latent, interleaved=key("rope_interleave"), **ATTENTION_BIAS),
        defaults={
            "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
}
# fmt: on


OTHER_NAMES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Architecture as published checkpoints name it -> as transformers does."""


def every_family() -> Mapping[str, Family]:
    """Supported architecture -> its row; all of the table."""
    return FAMILIES | MORE_FAMILIES
