"""A GGUF file as a checkpoint: its metadata as a config.json, its tensors by our names.

`ARCHITECTURES` is the table: a row says what an architecture of GGUF is here, which keys its files
have besides those of all, and what they leave unsaid. What a family computes stays in
`families.py`. Rows of queries and keys that a file stores in another order are put back while they
are read, so that models and kernels are those of the original checkpoint. A key that changes the
maths and is not implemented is refused by name and value. Called by `config.py` and `files.py`
where a model is a GGUF file; knows neither layers nor how blocks of numbers are read.

Source: what writes such files and what reads them, conversion/ and src/models/ of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from nanoengine.checkpoint.gguf import FLOATS, TYPES, GGUFTensor, StoredRows, read_gguf, read_rows
from nanoengine.checkpoint.keys import Json
from nanoengine.checkpoint.more_families import every_family
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.readers import CONV, FULL, LINEAR, SLIDING
from nanoengine.checkpoint.rope import ORIGINAL
from nanoengine.errors import UnsupportedModelError, WeightLoadError
from nanoengine.settings.checks import check_value, plain, shown

if TYPE_CHECKING:
    from nanoengine.checkpoint.plan import LayerPlan, MoEConfig, StatePlan


class Metadata:
    """The keys of a file, read one by one so that none is ignored that would change the maths."""

    def __init__(self, path: Path, raw: Json, tensors: Mapping[str, GGUFTensor]) -> None:
        self.path, self.raw, self.tensors, self._read = path, raw, tensors, set[str]()
        self.architecture = self.read("general.architecture", str)

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a key, which is a `kind`: see `check_value`."""
        self._read.add(key)
        if key not in self.raw:
            return default
        return check_value(self.raw[key], kind, f"{self.path}: {key}", UnsupportedModelError)

    def get(self, name: str, kind: Any, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.read(f"{self.architecture}.{name}", kind, default)

    def one(self, name: str, kind: Any, default: Any = None) -> Any:
        """A number that is the same in all layers."""
        value = self.get(name, kind | list[kind], default)
        if not isinstance(value, list):
            return value
        return value[0] if len(set(value)) == 1 else self.refuse(name, "one number for all layers")

    def each(self, name: str) -> list[int]:
        """A number for each layer."""
        value = self.get(name, int | list[int], 0)
        found = value if isinstance(value, list) else [value] * self.layers
        return found if len(found) == self.layers else self.refuse(name, "one number a layer")

    @property
    def layers(self) -> int:
        """How many layers the file has, those for drafts included."""
        found = self.get("block_count", int, 0)
        return found if 1 <= found <= 10_000 else self.refuse("block_count", "1 to 10,000")

    @property
    def main_layers(self) -> int:
        """How many layers there are but those."""
        drafts, layers = self.get("nextn_predict_layers", int, 0), self.layers
        if not 0 <= drafts < layers:
            self.refuse("nextn_predict_layers", f"0 to {layers - 1}")
        return layers - drafts

    @property
    def head_dim(self) -> int:
        """The size of a query's and a key's head."""
        heads, width = self.one("attention.head_count", int), self.get("embedding_length", int)
        return self.one("attention.key_length", int) or (width or 0) // (heads or 1)

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raises UnsupportedModelError for what a key says."""
        key = f"{self.architecture}.{name}"
        raise UnsupportedModelError(
            f"{self.path}: {key}={shown(plain(self.raw.get(key)))} is not implemented; supported:"
            f" {supported}"
        )

    def refuse_others(self) -> None:
        """Raises UnsupportedModelError for a key of the architecture that nobody has read, unless
        it is harmless, or asks for nothing."""
        for key in self.raw.keys() - self._read:
            name = key.removeprefix(f"{self.architecture}.")
            if name != key and name not in HARMLESS and plain(self.raw[key]):
                self.refuse(name, "files without this key")


HARMLESS = frozenset(("vocab_size", "rope.scaling.finetuned", "tensor_data_layout"))
"""Keys of an architecture that change no result, or say what the tensors show."""


def _nothing(given: Metadata) -> Json:
    return {}


def where(key: str, name: str) -> Callable[[Metadata], str | None]:
    """The name, where the key asks for something."""
    return lambda given: name if given.get(key, Any) else None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an architecture of GGUF is here.

    Attributes:
        name: a key of `every_family`.
        also: the name in place of that, of files that ask for it.
        keys: keys of its metadata, besides `KEYS` -> what config.json calls them.
        fixed: keys of config.json that its files leave unsaid.
        more: reads further keys.
        names: parts of its tensors' names -> ours, where they are not those of `NAMES`.
        pairs: rows of queries and keys lie so that neighbours turn together, which they do not in
            the family's own checkpoints.
        slides: where the file has a window, all layers but each n-th have it; 0: its family knows.
        unread: keys of its metadata that change nothing of a text.
        tiled: rows of value heads of linear attention lie in another order: see `_grouped`.
    """

    name: str
    also: Callable[[Metadata], str | None] = lambda given: None
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Json = field(default_factory=dict)
    more: Callable[[Metadata], Json] = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    slides: int = 0
    unread: tuple[str, ...] = ()
    tiled: bool = False


# fmt: off
# --- what files say, and leave unsaid -------------------------------------------------------------

KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}
"""Keys of all architectures -> what config.json calls them."""
CONVOLVED = {"shortconv.l_cache": "conv_L_cache"}
CAPS = {"final_logit_softcapping": "final_logit_softcapping"}
EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED = EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ROUTED = EXPERTS | {
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob", "leading_dense_block_count": "first_k_dense_replace",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
}
DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
}
SCALES = {
    "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
}
KV_HEADS = ("attention.head_count_kv",)
"""Of latents: one, or as many as there are heads, by the writer."""
IMAGES = ("rope.dimension_sections", "n_deepstack_layers")
"""Where positions and features of images go: positions of a text are all the same."""
NO_STATES = (
    "expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
    "ssm.inner_size", "ssm.time_step_rank",
)
"""What dense Granite 4 has of its hybrids: an MLP's size once more, and that of no states."""
YARN = {
    "yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
GROWING = {
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
"""Keys of models whose queries grow with their position -> those of `rope_parameters`."""
SCORES = {1: "softmax", 2: "sigmoid"}
"""What router logits become, by its number."""
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of `general.sampling` -> those of generation_config.json."""
BIASES = {
    "qkv_bias": (".q_proj.bias", ".qkv_proj.bias"), "output_bias": (".o_proj.bias",),
    "mlp_bias": (".mlp.down_proj.bias",), "head_bias": ("lm_head.bias",),
}
"""Field of `LayerPlan` -> ends of the names that show it. Why not a key: no file has one."""
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
)
"""Control tokens that end an answer whatever else does: files name one or two of those that a
generation_config.json has. Source: `llama_vocab::impl::load` of llama.cpp."""
CONTROL = 3
"""The type of a control token."""


def _gemma(given: Metadata) -> Json:
    """By what scores are scaled: a head's size, but in the largest models, which their number of
    layers shows, the hidden size a head."""
    heads, width = given.one("attention.head_count", int, 1), given.get("embedding_length", int, 0)
    wide = given.layers in (46, 62)
    return {"query_pre_attn_scalar": width // max(1, heads) if wide else given.head_dim}


def _lfm2(given: Metadata, without: str = CONV) -> Json:
    """Layers without keys are convolutions."""
    heads = given.each("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [FULL if count else without for count in heads],
    }


def _delta(given: Metadata) -> Json:
    """Which layers have linear attention, and the sizes of its heads."""
    every, layers = given.get("full_attention_interval", int, 4) or 1, given.layers
    kinds = given.get("attention.recurrent_layers", list[bool])
    kinds = kinds or [(n + 1) % every != 0 for n in range(layers)]
    heads, inner = given.get("ssm.time_step_rank", int), given.get("ssm.inner_size", int, 0)
    return {
        "layer_types": [LINEAR if linear else FULL for linear in kinds[: given.main_layers]],
        "linear_num_value_heads": heads, "linear_value_head_dim": inner // (heads or 1),
    }


def _normed(given: Metadata) -> Json:
    """For families that always divide the weights of a token's experts by their sum."""
    if not given.get("expert_weights_norm", bool, True):
        given.refuse("expert_weights_norm", "True")
    return {}


def _mamba(given: Metadata) -> Json:
    """The sizes of Mamba's heads."""
    heads, inner = given.get("ssm.time_step_rank", int, 0), given.get("ssm.inner_size", int, 0)
    return {"mamba_n_heads": heads, "mamba_d_head": inner // (heads or 1), "mamba_d_ssm": inner}


def _granite_hybrid(given: Metadata) -> Json:
    """Layers without keys are Mamba's."""
    found = {**_lfm2(given, LINEAR), **_mamba(given)}
    turned, count = given.get("rope.scaling.finetuned", bool), given.get("expert_count", int, 0)
    if turned is None:
        given.refuse("rope.scaling.finetuned", "a key that says whether heads are turned")
    if turned:
        return found
    none = {} if count else dict.fromkeys(("intermediate_size", "num_experts_per_tok"))
    return found | none | {"num_local_experts": count}


def _nemotron(given: Metadata) -> Json:
    """A layer is one thing: attention has keys, an MLP or experts have an inner size."""
    keys, inner = given.each("attention.head_count_kv"), given.each("feed_forward_length")
    dense, sizes = given.architecture == "nemotron_h", _mamba(given)
    # Why: writers name experts of such files too, of which there are none.
    none = ("num_local_experts", "num_experts_per_tok", "n_group", "topk_group") if dense else ()
    mlp = "mlp" if dense else "moe"
    both = list(zip(keys, inner, strict=True))[: given.main_layers]
    return {
        "layers_block_type": [FULL if kv else mlp if size else LINEAR for kv, size in both],
        "num_key_value_heads": max(keys), "intermediate_size": max(inner) or None,
        "mamba_num_heads": sizes["mamba_n_heads"], "mamba_head_dim": sizes["mamba_d_head"],
        **dict.fromkeys(none),
    }


def _latent(given: Metadata) -> Json:
    """The sizes of attention over latents. Files without those of MLA name them as of plain
    heads."""
    turned = given.get("rope.dimension_count", int, 0)
    key = given.get("attention.key_length_mla", int) or given.head_dim
    value = given.get("attention.value_length_mla", int)
    value = value or given.one("attention.value_length", int)
    return {
        "kv_lora_rank": given.get("attention.kv_lora_rank", int),
        "q_lora_rank": given.get("attention.q_lora_rank", int),
        "qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned, "v_head_dim": value,
        "num_key_value_heads": given.get("attention.head_count", int), "head_dim": max(2, turned),
    }


def _deepseek(given: Metadata) -> Json:
    """The same, and experts as llama.cpp has them where keys are absent; what has none names some
    sizes nevertheless."""
    groups, name = given.get("expert_group_count", int) or 1, _deepseek_name(given)
    found = {
        "n_group": groups, "topk_group": given.get("expert_group_used_count", int) or 1,
        "norm_topk_prob": given.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": given.get("expert_weights_scale", float) or 1.0,
        "first_k_dense_replace": given.get("leading_dense_block_count", int, 0),
        "n_shared_experts": given.get("expert_shared_count", int, 0),
        "moe_intermediate_size": given.get("expert_feed_forward_length", int),
    }
    if name == "YoutuForCausalLM":
        found = dict.fromkeys(found)
    elif name is None and groups > 1:
        found["topk_method"] = "group_limited_greedy"
    elif name is None:
        found |= {"n_group": None, "topk_group": None}
    return found | _latent(given)


def _deepseek_name(given: Metadata) -> str | None:
    """Which of the families of this architecture. Why the second: first files of GLM-4.7-Flash name
    no scores, and only sigmoids have such a bias."""
    if not given.get("expert_count", int):
        return "YoutuForCausalLM"
    biased = any(name.endswith(".exp_probs_b.bias") for name in given.tensors)
    sigmoid = SCORES.get(given.get("expert_gating_func", int, 2 if biased else 1)) == "sigmoid"
    return "DeepseekV3ForCausalLM" if sigmoid else None


def _gemma4(given: Metadata) -> Json:
    """What differs in layers that see everything, and which last layers have no keys."""
    kinds = _windows(given, 6, given.layers)["layer_types"]
    heads, inner = given.each("attention.head_count_kv"), given.each("feed_forward_length")
    by_kind = dict(zip(kinds, heads, strict=False))
    window = given.get("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if given.get(name, int, window) != window:
            given.refuse(name, f"{window}, the size of keys")
    other = {"head_dim": given.head_dim, "num_key_value_heads": by_kind.get(FULL, 0)}
    full = [n for n, kind in enumerate(kinds) if kind == FULL]
    return {
        "head_dim": window, "num_key_value_heads": by_kind.get(SLIDING, heads[0]),
        "per_layer_config": {str(n): other for n in full},
        "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] > inner[0],
        "attention_k_eq_v": f"blk.{min(full, default=0)}.attn_v.weight" not in given.tensors,
        "enable_moe_block": bool(given.get("expert_count", int)),
        "top_k_experts": given.get("expert_used_count", int), "num_experts_per_tok": None,
    }


def _proportional(given: Metadata, factors: list[list[float]], full: float, sliding: float) -> Json:
    """Gemma 4: of layers that see everything, pairs that are not turned are slowed without end."""
    each = factors[0] if factors else [1.0]
    turned = each.count(1.0)
    if len(factors) > 1 or min(each[turned:], default=1e30) < 1e29:
        given.refuse("rope.scaling.type", f"1 and then 1e30 in {ROTATIONS[0]}")
    part = {"rope_type": "proportional", "partial_rotary_factor": turned / len(each)}
    return {"rope_parameters": {
        FULL: {**part, "rope_theta": full},
        SLIDING: {"rope_type": "default", "rope_theta": sliding},
    }}


def _hunyuan_3(given: Metadata) -> Json:
    """How many experts are shared, by their size; layers without a router are dense."""
    size = given.get("expert_feed_forward_length", int) or 1
    routers = [f"blk.{n}.ffn_gate_inp.weight" in given.tensors for n in range(given.main_layers)]
    return _normed(given) | {
        "num_shared_experts": given.get("expert_shared_feed_forward_length", int, 0) // size,
        "first_k_dense_replace": routers.index(True) if True in routers else len(routers),
    }


# --- names of tensors -----------------------------------------------------------------------------

ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are read with the config."""
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
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj", "ffn_gate_up_exps": "mlp.experts.{}.{}_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
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
    "ffn_down_exps": "experts.{}.down_proj", "ffn_gate_up_exps": "experts.{}.{}_proj",
    "ffn_gate_exps": "experts.{}.gate_proj", "ffn_up_exps": "experts.{}.up_proj",
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
        "AfmoeForCausalLM", slides=4, fixed={"mup_enabled": True}, more=_normed,
        names={"attn_gate": "self_attn.gate_proj"},
        keys=EXPERTS | {
            "expert_shared_count": "num_shared_experts", "expert_weights_scale": "route_scale",
            "leading_dense_block_count": "num_dense_layers",
        },
    ),
    "arcee": Architecture("ArceeForCausalLM", pairs=True, fixed={"hidden_act": "relu2"}),
    "chatglm": Architecture("GlmForCausalLM", names=MERGED_GATE),
    "cohere2": Architecture("Cohere2ForCausalLM", keys={"logit_scale": "logit_scale"}, slides=4),
    "command-r": Architecture("CohereForCausalLM", keys={"logit_scale": "logit_scale"}),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM", also=_deepseek_name, more=_deepseek, unread=KV_HEADS,
    ),
    "dots1": Architecture("Dots1ForCausalLM", keys=ROUTED),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM", unread=("expert_shared_feed_forward_length",),
        keys=EXPERTS | {
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
    ),
    "exaone": Architecture("LlamaForCausalLM"),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM", keys=ROUTED | {"expert_shared_count": "num_shared_experts"},
        slides=4, unread=("expert_shared_feed_forward_length",),
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", slides=4),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM", keys=MAMBA, more=_mamba,
        names=MAMBA_NAMES | {"ffn_norm": "post_attention_layernorm.weight"},
        fixed={"mamba_norm_before_gate": False, "mamba_rms_norm": True},
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", more=_gemma, slides=2,
        keys=CAPS | {"attn_logit_softcapping": "attn_logit_softcapping"},
    ),
    "gemma3": Architecture("Gemma3ForCausalLM", keys=CAPS, more=_gemma, slides=6),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", more=_gemma4, names=GEMMA_4, slides=6,
        keys=CAPS | EXPERTS | {
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
    ),
    "glm4": Architecture("Glm4ForCausalLM", names=MERGED_GATE),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", keys=ROUTED, fixed={"use_qk_norm": True}, unread=IMAGES,
        names=BEFORE_MLP,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", keys={"expert_feed_forward_length": "intermediate_size"},
        names=BEFORE_MLP, slides=2,
    ),
    "granite": Architecture("GraniteForCausalLM", keys=SCALES, pairs=True, unread=NO_STATES),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", pairs=True, more=_granite_hybrid, names=MAMBA_NAMES,
        also=where("rope.scaling.finetuned", "BambaForCausalLM"),
        keys=MAMBA | SCALES | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", pairs=True,
        also=where("expert_shared_feed_forward_length", "GraniteMoeSharedForCausalLM"),
        keys=SCALES | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1ForCausalLM",
        unread=(*EXPERTS, "expert_shared_count", "expert_shared_feed_forward_length"),
    ),
    "hy_v3": Architecture(
        "HYV3ForCausalLM", more=_hunyuan_3,
        keys=EXPERTS | {"expert_weights_scale": "router_scaling_factor"},
    ),
    "internlm2": Architecture("LlamaForCausalLM", pairs=True),
    "jais2": Architecture("Jais2ForCausalLM", fixed={"hidden_act": "relu2"}),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", keys=CONVOLVED, fixed={"block_auto_adjust_ff_dim": False}, more=_lfm2,
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM", more=_lfm2,
        keys=CONVOLVED | EXPERTS | {"leading_dense_block_count": "num_dense_layers"},
    ),
    "llama": Architecture(
        "LlamaForCausalLM", also=where("expert_count", "MixtralForCausalLM"), pairs=True,
    ),
    "mellum": Architecture(
        "MellumForCausalLM", keys=EXPERTS, fixed={"norm_topk_prob": True}, slides=4,
    ),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", more=_latent, unread=KV_HEADS),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", keys={"expert_feed_forward_length": "intermediate_size"},
    ),
    "mistral3": Architecture(
        "MistralForCausalLM", also=where("attention.temperature_scale", "Ministral3ForCausalLM"),
        pairs=True,
    ),
    "nemotron": Architecture("NemotronForCausalLM", fixed={"hidden_act": "relu2"}),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), Architecture(
        "NemotronHForCausalLM", more=_nemotron, names=MAMBA_NAMES,
        keys=ROUTED | {
            "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size",
            "ssm.group_count": "n_groups",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        },
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
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", keys=SHARED),
    "qwen2vl": Architecture("Qwen2ForCausalLM", unread=IMAGES),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", keys=EXPERTS, fixed={"norm_topk_prob": True}),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", keys=DELTA, more=_delta, names=DELTA_NAMES, unread=IMAGES,
        tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", keys=DELTA | SHARED, more=_delta, names=DELTA_NAMES, unread=IMAGES,
        tiled=True,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", keys=DELTA | SHARED, more=_delta, names=DELTA_NAMES,
    ),
    "qwen3vl": Architecture("Qwen3ForCausalLM", unread=IMAGES),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", keys=EXPERTS, fixed={"norm_topk_prob": True}, unread=IMAGES,
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", names=BEFORE_MLP),
    "smollm3": Architecture("SmolLM3ForCausalLM", pairs=True),
    "stablelm": Architecture(
        "StableLmForCausalLM", keys={"use_parallel_residual": "use_parallel_residual"},
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM"),
}
# fmt: on
"""`general.architecture` -> its row."""


Change = Callable[[torch.Tensor], torch.Tensor]


class Entry(NamedTuple):
    """One of our tensors in a file.

    Attributes:
        tensor: where it is; of a stack of experts, one expert's matrix.
        shape: as layers have it.
        changes: what its rows become when they are read, one after the other.
    """

    tensor: GGUFTensor
    shape: tuple[int, ...]
    changes: tuple[Change, ...] = ()


class GGUFModel:
    """One file, or set of files, of a known architecture.

    Raises:
        UnsupportedModelError: the architecture is unknown, or the file is no language model.
        WeightLoadError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.tensors, metadata = read_gguf(path)[::-1]
        self.given = given = Metadata(path, metadata, self.tensors)
        kind = given.read("general.type", str, "model")
        if kind != "model" or given.architecture not in ARCHITECTURES:
            what = {"architecture": given.architecture} if kind == "model" else {"type": kind}
            ((key, value),) = what.items()
            raise UnsupportedModelError(
                f"{path} has general.{key}={shown(value)}; supported are models of"
                f" {', '.join(ARCHITECTURES)}"
            )
        row = ARCHITECTURES[given.architecture]
        self.row = replace(row, name=row.also(given) or row.name)

    def entries(self) -> dict[str, Entry]:
        """All tensors by our names. One that is nothing here keeps its part of the name, and is
        told as unexpected."""
        found, changes = dict[str, Entry](), self._changes()

        def put(ours: str, tensor: GGUFTensor, shape: tuple[int, ...], *first: Change) -> None:
            then = changes.get(ours.split(".", 3)[-1])
            found[ours] = Entry(tensor, shape, (*first, *((then,) if then else ())))

        for name, tensor in self.tensors.items():
            if name in ROTATIONS:
                continue
            ours, shape, stem = self._our_name(name), tensor.shape, name.split(".")[-2:][0]
            parts = ("gate", "up") if ours.count("{}") == 2 else ("",)
            stacked = "{}" in ours and not {"{", "}"} & set(name)
            if stacked and len(shape) == 3 and not shape[1] % len(parts):
                one = tensor._replace(shape=(shape[1] // len(parts), shape[2]))
                for n in range(shape[0] * len(parts)):
                    place = tensor.offset + n * one.num_rows * one.row_bytes
                    each = ours.format(n // len(parts), parts[n % len(parts)])
                    put(each, one._replace(offset=place), one.shape)
                continue
            if stem in SPLIT and stem not in self.row.names:
                groups, sizes = self._sizes(stem)
                if (expected := groups * sum(sizes)) != shape[0]:
                    raise WeightLoadError(
                        f"{tensor.file}: {shown(name)} has {shape[0]} rows; by the sizes that the"
                        f" file names it has {expected}"
                    )
                for part, wanted in SPLIT[stem].items():
                    rows = groups * sum(sizes[n] for n in wanted)
                    own = partial(_parts, groups=groups, sizes=sizes, wanted=wanted)
                    put(ours.replace(stem, part), tensor, (rows, *shape[1:]), own)
                continue
            if ours.endswith("shared_expert_gate.weight"):
                shape = (1, prod(shape))
            elif ours.endswith(("conv.conv.weight", "conv1d.weight")):
                shape = (shape[0], 1, prod(shape[1:]))
            elif ours.endswith((".A_log", ".D", ".mamba.norm.weight")):
                shape = (prod(shape),)
            elif ours.endswith((".k_b_proj.weight", ".v_b_proj.weight")):
                shape = (prod(shape[:-1]), shape[-1])
                tensor = tensor._replace(shape=shape)
            put(ours, tensor, shape)
        return found

    def _changes(self) -> dict[str, Change]:
        """What our names have behind their layer -> what rows become when they are read."""
        given, found = self.given, dict[str, Change]()
        if self.row.pairs:
            unpaired = partial(_unpaired, head_dim=given.head_dim)
            found |= {
                f"self_attn.{x}_proj.{end}": unpaired for x in "qk" for end in ("weight", "bias")
            }
        found |= dict.fromkeys(("linear_attn.A_log", "mamba.A_log"), lambda rows: (-rows).log())
        key_heads, heads = (given.get(f"ssm.{n}", int) for n in ("group_count", "time_step_rank"))
        if self.row.tiled and key_heads and heads:
            grouped = partial(_grouped, key_heads=key_heads, each=max(1, heads // key_heads))
            skipping = partial(grouped, skipped=2 * key_heads * given.get("ssm.state_size", int, 0))
            names = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias")
            found |= {f"linear_attn.{name}": grouped for name in names}
            skipped = ("in_proj_qkv.weight", "conv1d.weight")
            found |= {f"linear_attn.{name}": skipping for name in skipped}
            found["linear_attn.A_log"] = lambda rows: grouped(-rows).log()
        return found

    def _sizes(self, stem: str) -> tuple[int, tuple[int, ...]]:
        """In how many groups the rows of a tensor of `SPLIT` lie, and how many rows of a group each
        part has."""
        given = self.given
        if stem == "attn_qkv":
            heads = given.one("attention.head_count", int, 0)
            key_heads = given.one("attention.head_count_kv", int, heads)
            return 1, tuple(given.head_dim * count for count in (heads, key_heads, key_heads))
        groups = given.get("ssm.group_count", int) or 1
        each, key, value = (
            given.get(f"ssm.{name}", int, 0)
            for name in ("time_step_rank", "state_size", "inner_size")
        )
        each, value = each // groups, value // groups
        return groups, (each, each) if stem == "ssm_ba" else (key, key, value, value)

    def _our_name(self, name: str) -> str:
        begin, _, rest = name.partition(".")
        layer, _, part = rest.partition(".") if begin == "blk" else ("", "", name)
        stem, _, end = part.rpartition(".")
        names = NAMES | self.row.names
        ours = names.get(part) or f"{names.get(stem, stem)}.{end}"
        return f"model.layers.{layer}.{ours}" if layer else ours


def _unpaired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of whole heads of which neighbours turn together, in the order in which the halves of a
    head do."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _grouped(rows: torch.Tensor, key_heads: int, each: int, skipped: int = 0) -> torch.Tensor:
    """Rows of value heads, in a file first the first of each key head, in the order of their key
    heads; those that are skipped are of other heads."""
    values = rows[skipped:].unflatten(0, (each, key_heads, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((rows[:skipped], values))


def _parts(
    rows: torch.Tensor, groups: int, sizes: tuple[int, ...], wanted: tuple[int, ...]
) -> torch.Tensor:
    """Of rows of so many groups, each of parts of these sizes: those of the wanted parts, one part
    behind the other."""
    parts = rows.unflatten(0, (groups, -1)).split(sizes, dim=1)
    return torch.cat([parts[n].flatten(0, 1) for n in wanted])


# --- the config -----------------------------------------------------------------------------------


def config_json(model: GGUFModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config.json and a generation_config.json of the same model would say.

    Raises:
        UnsupportedModelError: a key that changes the maths is not implemented, or is of the wrong
            type; the message names file, key, value and what is allowed.
    """
    raw = _config_json(model)
    model.given.refuse_others()
    return raw, _generation_json(model.given)


def differences(
    model: GGUFModel,
    plan: LayerPlan,
    moe: MoEConfig | None,
    states: StatePlan | None,
    layers: int,
    unused: str,
) -> Json:
    """Fields of a ModelConfig, made of `config_json` with these, that are others in a file."""
    here = model.entries()
    biases = {part: any(name.endswith(ends) for name in here) for part, ends in BIASES.items()}
    # Why wide: writers add the 1 that such norms leave out.
    norm = {"centered": "wide", "centered layer": "layer"}.get(plan.norm, plan.norm)
    drafting = range(layers, model.given.layers)
    left_out = [unused] if plan.varied else []
    left_out += [rf"model\.layers\.({'|'.join(map(str, drafting))})\."] if drafting else []
    kinds = {entry.tensor.type for entry in here.values() if len(entry.shape) > 1}
    merged = plan.merged_gate and not any(name.endswith(".gate_proj.weight") for name in here)
    if moe is not None:
        moe = replace(moe, inputs_first=False, correction_bias=bool(moe.correction_bias))
    if states is not None:
        states = replace(states, merged=False, tiled=model.row.tiled)
    if states is not None and states.kind == "mamba":
        parts = {name.partition(".mamba.")[2] for name in here}
        norm_of = states.norm if "norm.weight" in parts else None
        states = replace(states, conv_bias="conv1d.bias" in parts, norm=norm_of)
    return {
        "plan": replace(plan, norm=norm, merged_gate=merged, **biases),
        "moe": moe,
        "states": states,
        "tensor_names": {},
        "left_out": "|".join(filter(None, left_out)),
        "dtype": {"F16": "float16", "BF16": "bfloat16"}.get("".join(kinds), "float32"),
        "quantization": _quantization(here),
    }


def _config_json(model: GGUFModel) -> dict[str, Any]:
    """What a config.json of the same model would say."""
    given, row, tensors = model.given, model.row, model.tensors
    family, more = every_family()[row.name], row.more(given)
    raw: dict[str, Any] = {"architectures": [row.name], "eos_token_id": [], **row.fixed}
    keys = {name: key for name, key in (KEYS | row.keys).items() if more.get(key) is None}
    raw |= {key: given.one(name, float | bool) for name, key in keys.items()}
    for name in row.unread:
        given.get(name, Any)
    raw["num_hidden_layers"] = given.main_layers
    if "num_key_value_heads" not in more:
        heads = raw["num_attention_heads"]
        raw["num_key_value_heads"] = given.one("attention.head_count_kv", int, heads)
    head_dim = raw["head_dim"] = given.head_dim
    is_latent = "kv_lora_rank" in more
    if given.one("attention.value_length", int, head_dim) != head_dim and not is_latent:
        given.refuse("attention.value_length", f"{head_dim}, the size of keys")
    epsilons = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
    # Why both: a norm of either kind may have the key of the other one.
    names = epsilons if family.eps != "rms_norm_eps" else epsilons[::-1]
    found = [value for name in names if (value := given.get(name, float)) is not None]
    raw[family.eps] = found[0] if found else given.refuse(epsilons[1], "a number")
    if not given.get("attention.causal", bool, True):
        given.refuse("attention.causal", "True")
    turned = given.get("rope.dimension_count", int, head_dim)
    if "partial_rotary_factor" in family.defaults:
        raw["rotary_dim"] = turned
    elif turned != head_dim and not is_latent:
        given.refuse("rope.dimension_count", f"{head_dim}, the size of a head")
    if family.moe is not None:
        raw["num_local_experts"] = given.get("expert_count", int)
        raw["num_experts_per_tok"] = given.one("expert_used_count", int)
    if score := given.get("expert_gating_func", int):
        raw["scoring_func"] = SCORES.get(score) or given.refuse("expert_gating_func", "1 and 2")
    if "use_qk_norm" in raw:
        raw["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if "token_embd.weight" in tensors:
        size = tensors["token_embd.weight"].shape[0]
        raw |= {"vocab_size": size, "vocab_size_per_layer_input": size}
    raw["tie_word_embeddings"] = "output.weight" not in tensors
    raw |= _windows(given, row.slides, raw["num_hidden_layers"]) | _rotation(model)
    return {key: value for key, value in raw.items() if value is not None} | more


def _windows(given: Metadata, every: int, layers: int) -> Json:
    """Which layers have the window, and how large it is."""
    window = given.get("attention.sliding_window", int) or None
    if not every:
        return {"sliding_window": window}
    pattern = given.get("attention.sliding_window_pattern", int | list[bool | int], every)
    if not isinstance(pattern, list):
        pattern = [not pattern or (n + 1) % pattern != 0 for n in range(given.layers)]
    kinds = [SLIDING if slides and window else FULL for slides in pattern[:layers]]
    return {"sliding_window": window, "layer_types": kinds}


def _rotation(model: GGUFModel) -> Json:
    """How positions become angles. A tensor of factors slows each pair of dimensions by its own:
    llama3's rule as numbers, or longrope's two lists."""
    given, family = model.given, every_family()[model.row.name]
    base = given.get("rope.freq_base", float, 1e4)
    full, sliding = family.bases or ("rope_theta", "rope_theta")
    usual = base if sliding == full or given.architecture == "mellum" else 1e4
    other = given.get("rope.freq_base_swa", float, usual)
    if sliding == full and other != base:
        given.refuse("rope.freq_base_swa", f"{base}, as in layers without a window")
    found: dict[str, Any] = {full: base, sliding: other}
    kind = given.get("rope.scaling.type", str, "linear")
    factor = given.get("rope.scaling.factor", float) or given.get("rope.scale_linear", float) or 1
    magnitude = given.get("rope.scaling.attn_factor", float, 1.0)
    stored = [model.tensors[name] for name in ROTATIONS if name in model.tensors]
    factors = [read_rows(tensor).flatten().tolist() for tensor in stored]
    scaling: dict[str, Any] = {}
    if FULL in family.rope:
        return _proportional(given, factors, base, other)
    if factors:
        long, short = factors[0], factors[-1]
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        scaling["attention_factor"] = magnitude
        if len(factors) > 2 or kind == "yarn" or factor != 1:
            given.refuse("rope.scaling.type", f"none beside tensors such as {ROTATIONS[0]}")
    elif kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "truncate": family.rope.get("truncate")}
        scaling |= {key: given.get(f"rope.scaling.{name}", float) for name, key in YARN.items()}
        if "llama_4_scaling_beta" in family.rope:
            scaling |= {key: given.get(name, float) for name, key in GROWING.items()}
            scaling["mscale"] = 1.0  # Why: no file says another one.
        elif given.architecture == "deepseek2":
            # Why ten times: writers multiply it by 0.1. No file says another one for `mscale`.
            log = 10 * given.get("rope.scaling.yarn_log_multiplier", float, 0.0)
            scaling |= {"mscale": log, "mscale_all_dim": log} if log else {}
        if given.get("rope.scaling.yarn_ext_factor", float, 1.0) != 1:
            given.refuse("rope.scaling.yarn_ext_factor", "1")
    elif kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        given.refuse("rope.scaling.type", "none, linear, yarn, longrope with its tensors")
    if "llama_4_scaling_beta" in family.rope.keys() - scaling.keys():
        given.refuse("attention.temperature_scale", "0 without yarn")
    if magnitude != 1 and not factors:
        given.refuse("rope.scaling.attn_factor", "1 without longrope's tensors")
    original = given.get("rope.scaling.original_context_length", int)
    if scaling:
        found["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
        found[ORIGINAL] = original or given.get("context_length", int)
    return found


def _generation_json(given: Metadata) -> dict[str, Any]:
    """What a generation_config.json of the same model would say."""
    found = {theirs: given.read(f"general.sampling.{n}", float) for n, theirs in SAMPLING.items()}
    words = "tokenizer.ggml"
    tokens = given.read(f"{words}.tokens", list[str], [])
    kinds = given.read(f"{words}.token_type", list[int], [])
    ends = {
        text: number
        for number, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
        if text in ENDS and kind == CONTROL
    }
    if {"<|return|>", "<|call|>"} <= ends.keys():
        ends.pop("<|end|>", None)  # Why: there it ends a message, and an answer has several.
    named = [given.read(f"{words}.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    ids = dict.fromkeys([*(number for number in named if number is not None), *ends.values()])
    return {key: value for key, value in found.items() if value is not None} | {
        "eos_token_id": list(ids)
    }


def _quantization(here: Mapping[str, Entry]) -> StoredQuantization | None:
    """How matrices are stored; None: as floats."""
    stored = {name: entry.tensor.type for name, entry in here.items()}
    types = {name.removesuffix(".weight"): it for name, it in stored.items() if it not in FLOATS}
    if not types:
        return None
    blocks = [TYPES[it] for it in types.values()]
    bits = sum(8 * block.bytes / block.inputs for block in blocks) / len(blocks)
    return StoredQuantization(
        format="gguf",
        bits=8 if bits > 6.5 else 4,
        group_size=None,
        activations="int8",
        types=types,
    )


# --- tensors --------------------------------------------------------------------------------------


def read_entries(
    path: Path, parts: Mapping[str, tuple[slice, ...]]
) -> Iterator[tuple[str, torch.Tensor | StoredRows]]:
    """See `read_tensors`. Rows of a quantized tensor come whole, as bytes that are read later."""
    here = GGUFModel(path).entries()
    for name, part in parts.items():
        tensor, shape, changes = here[name]
        first, last, columns = 0, tensor.num_rows, part
        if part and shape == tensor.shape and len(shape) == 2:
            (first, last, _), columns = part[0].indices(shape[0]), (slice(None), *part[1:])
        if tensor.type not in FLOATS and not changes:
            yield name, StoredRows(tensor, first, last)
            continue
        found = read_rows(tensor, first, last)
        whole = tensor.type in FLOATS and len(found) == tensor.num_rows
        found = found.view(tensor.shape) if whole else found
        for change in changes:
            found = change(found)
        found = found.view(shape) if whole else found
        yield name, found[columns] if tensor.type in FLOATS else found


def files_of(path: Path) -> list[Path]:
    """The file, or all parts of its set."""
    return sorted({tensor.file for tensor in read_gguf(path).tensors.values()})
