"""The families: what each one's config.json means, and how its checkpoints differ from Llama's.

`FAMILIES` is the table: a row is a family, its readers say which keys it obeys, and what it doesn't
say is as in Llama. A new family of known mechanisms is a row; a new mechanism is a field of
`LayerPlan` or `MoEConfig` besides. Called by `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nanoengine.checkpoint import readers
from nanoengine.checkpoint.keys import Json, Keys
from nanoengine.checkpoint.plan import LayerPlan, MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: a row of `FAMILIES`.

    Attributes:
        model_type: as config.json names it.
        plan: what its layers compute.
        states: which of them keep a state, and of what kind; None: all keep keys and values.
        windows: which layers have the sliding window.
        ropes: how each layer turns its heads.
        moe: its mixture of experts.
        defaults: values of absent keys, where they are not those of all families.
        partial: the default of `partial_rotary_factor`; None: the family turns whole heads.
        rope_extra: further keys of `rope_parameters` -> whether they change the maths of text.
        names: parts of our tensors' names -> what they are called in its checkpoints.
        left_out: expression that begins the names of tensors that are for drafts.
        inner: the MLP's inner size.
        eps: the key of what norms add to a variance; None: the usual one.
    """

    model_type: str
    plan: Callable[[Keys], LayerPlan] = readers.plain
    states: readers.StatesReader | None = None
    windows: readers.WindowsReader = readers.never
    ropes: readers.RopesReader = readers.same
    moe: Callable[[Keys], MoEConfig] | None = None
    defaults: Json = field(default_factory=dict)
    partial: float | None = None
    rope_extra: Mapping[str, bool] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""
    inner: Callable[[Keys], int] = readers.inner_size
    eps: str | None = None


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
LFM2_NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
LFM2_DEFAULTS = {
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
NEXT_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2}
SHARED_NAMES = {"shared_experts": "shared_expert"}
DRAFTS = r"mtp\."
M_ROPE = {"mrope_section": False, "mrope_interleaved": False}
"""Where positions of images go. Why without effect: all positions of a text are the same."""

FAMILIES: dict[str, Family] = {
    "ArceeForCausalLM": Family(model_type="arcee", plan=readers.arcee),
    "CohereForCausalLM": Family(
        model_type="cohere",
        plan=readers.cohere2,
        defaults={"logit_scale": 0.0625, "tie_word_embeddings": True},
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        plan=readers.cohere2,
        windows=readers.all_but_every(4),
        ropes=readers.only_with_window,
        defaults={"sliding_window": 4096, "logit_scale": 0.0625, "tie_word_embeddings": True},
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1",
        plan=readers.qwen3,
        windows=readers.dots,
        moe=readers.glm_experts,
        defaults={"norm_topk_prob": False},
    ),
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        plan=readers.ernie,
        defaults={"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True},
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        plan=readers.exaone4,
        windows=readers.exaone_windows,
        ropes=readers.exaone_ropes,
        names=GEMMA_NAMES,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        plan=readers.gemma2,
        windows=readers.all_but_every(2),
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
        plan=readers.gemma3,
        windows=readers.all_but_every(6),
        ropes=readers.by_window(("rope_theta", 1e6), ("rope_local_base_freq", 1e4)),
        defaults={
            **GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        names=GEMMA_NAMES,
    ),
    "GlmForCausalLM": Family(
        model_type="glm", plan=readers.glm, partial=0.5, defaults={"head_dim": 128}
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        plan=readers.glm4,
        partial=0.5,
        defaults={"head_dim": 128},
        names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        plan=readers.glm4_moe,
        moe=readers.glm_experts,
        partial=0.5,
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        plan=readers.gpt_oss,
        windows=readers.all_but_every(2),
        moe=readers.gpt_oss_experts,
        defaults={
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16",
        },
        names={"mlp.gate": "mlp.router"},
    ),
    "GraniteForCausalLM": Family(model_type="granite", plan=readers.granite),
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe",
        plan=readers.granite,
        moe=readers.mixtral_experts,
        names={
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
            "mlp.experts.down_proj": "block_sparse_moe.output_linear.weight",
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        model_type="hunyuan_v1_dense",
        plan=readers.hunyuan,
        names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    ),
    "Lfm2ForCausalLM": Family(
        model_type="lfm2",
        plan=readers.lfm2,
        states=readers.conv_states,
        defaults=LFM2_DEFAULTS,
        names=LFM2_NAMES,
        inner=readers.lfm2_inner_size,
        eps="norm_eps",
    ),
    "Lfm2MoeForCausalLM": Family(
        model_type="lfm2_moe",
        plan=readers.lfm2,
        states=readers.conv_states,
        moe=readers.lfm2_experts,
        defaults=LFM2_DEFAULTS,
        names=LFM2_NAMES | {"mlp.gate.e_score_correction_bias": "feed_forward.expert_bias"},
        eps="norm_eps",
    ),
    "LlamaForCausalLM": Family(model_type="llama", plan=readers.llama),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        plan=readers.minimax_m2,
        moe=readers.minimax_experts,
        partial=1.0,
        defaults={"head_dim": 128, "rope_theta": 5e6},
        names={
            **MIXTRAL_NAMES,
            "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        windows=readers.all_layers,
        defaults={"head_dim": 128},
        rope_extra={"llama_4_scaling_beta": True, "max_position_embeddings": False},
    ),
    "MinistralForCausalLM": Family(model_type="ministral", windows=readers.named_or_all),
    "MistralForCausalLM": Family(model_type="mistral", windows=readers.all_layers),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        windows=readers.all_layers,
        moe=readers.mixtral_experts,
        defaults={"rope_theta": 1e6},
        names=MIXTRAL_NAMES,
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", plan=readers.olmo2, names=GEMMA_NAMES),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        plan=readers.olmo2,
        windows=readers.all_but_every(4),
        ropes=readers.by_window(("rope_theta", 5e5), ("rope_theta", 5e5)),
        defaults={"sliding_window": 4096},
        names=GEMMA_NAMES,
    ),
    "OlmoeForCausalLM": Family(model_type="olmoe", plan=readers.olmoe, moe=readers.olmoe_experts),
    "Phi3ForCausalLM": Family(
        model_type="phi3", plan=readers.phi3, windows=readers.all_layers, partial=1.0
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", plan=readers.qwen2, windows=readers.from_max_window_layers
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        plan=readers.qwen2_moe,
        windows=readers.named_if_asked,
        moe=readers.qwen2_experts,
        names=SHARED_NAMES,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        plan=readers.qwen3,
        windows=readers.from_max_window_layers,
        defaults={"head_dim": 128},
        rope_extra=M_ROPE,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        plan=readers.qwen3,
        windows=readers.all_if_asked,
        moe=readers.qwen_experts,
    ),
    "Qwen3NextForCausalLM": Family(
        model_type="qwen3_next",
        plan=readers.qwen3_next,
        states=readers.delta_states(merged=True),
        moe=readers.qwen3_next_experts,
        defaults=NEXT_DEFAULTS,
        partial=0.25,
        names=SHARED_NAMES,
        left_out=DRAFTS,
    ),
    "Qwen3_5ForCausalLM": Family(
        model_type="qwen3_5_text",
        plan=readers.qwen3_next,
        states=readers.delta_states(merged=False),
        defaults=NEXT_DEFAULTS | {"num_key_value_heads": 4},
        partial=0.25,
        rope_extra=M_ROPE,
        left_out=DRAFTS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        model_type="qwen3_5_moe_text",
        plan=readers.qwen3_next,
        states=readers.delta_states(merged=False),
        moe=readers.qwen3_next_experts,
        # Why a size: all layers have experts, and such configs name no other MLP.
        defaults=NEXT_DEFAULTS | {"intermediate_size": 1},
        partial=0.25,
        rope_extra=M_ROPE,
        names=SHARED_NAMES,
        left_out=DRAFTS,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss", plan=readers.seed_oss, defaults={"head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        plan=readers.llama,
        windows=readers.named_if_asked,
        ropes=readers.smollm_ropes,
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    "StableLmForCausalLM": Family(model_type="stablelm", plan=readers.stablelm, partial=0.25),
}
"""Supported architecture -> its row."""

VISION = r"(model\.)?(vision_tower|multi_modal_projector|visual)\."
TEXT_PARTS: dict[str, tuple[Mapping[str, str], str]] = {
    "Gemma3ForConditionalGeneration": ({"gemma3_text": "Gemma3ForCausalLM"}, VISION),
    "Mistral3ForConditionalGeneration": (
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
        VISION,
    ),
    "Qwen3_5ForConditionalGeneration": (
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        rf"{VISION}|{DRAFTS}",
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        rf"{VISION}|{DRAFTS}",
    ),
    "Qwen3VLForConditionalGeneration": ({"qwen3_vl_text": "Qwen3ForCausalLM"}, VISION),
}
"""Multimodal architecture -> the `model_type` of its `text_config` -> the architecture of its text
part; and the expression that begins the names of tensors that this part has no use for."""
