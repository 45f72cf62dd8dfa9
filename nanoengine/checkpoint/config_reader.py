"""ConfigReader: reads a config.json, and rejects keys that change the computation but are not read.

`SCHEMA` defines each key once: the type and range of its values, its default, what happens if the
family does not read it, and its name in GGUF files. Every value is checked before it is used. A
family reads the keys that it supports. Uses plain json, neither torch nor transformers.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, describe_allowed, quoted

Json = Mapping[str, Any]


class Key(NamedTuple):
    """One key of config.json, or of a dict in it.

    Attributes:
        kind: the type of its value, as `check_value` expects it.
        minimum, maximum: the range of a number. Why so wide: it excludes only
            impossible tensor sizes; `check_sizes` compares sizes with the tensors.
        default: the value of an absent key, unless the family or transformers' config class
            (`defaults.json`) defines another. If the default is None, null is allowed and means
            None; otherwise null is rejected, unless the key is `nullable`.
        if_unread: what happens to a key that the family does not read. "reject": raises an error,
            unless the value is the default, because the key changes the computation; "warn": a
            warning names the key, because its effect is unknown; "ignore": nothing, because the key
            has no effect on results.
        nullable: null means None, even if the default is another value.
        gguf: its name in the metadata of a GGUF file, after the architecture prefix. Keys that have
            different names in different families may have the same name there.
    """

    kind: Any
    minimum: float | None = None
    maximum: float | None = None
    default: Any = None
    if_unread: Literal["reject", "warn", "ignore"] = "warn"
    nullable: bool = False
    gguf: str = ""


MAX_POSITIONS = 2**31 - 1
_LAYERS, _EXPERTS, _FACTOR = (0, 10_000), (0, 4096), (1e-3, 1e6)
_IGNORE: dict[str, Any] = {"if_unread": "ignore"}
_FLAG, _REJECT_FLAG = Key(bool, default=False), Key(bool, default=False, if_unread="reject")
_REJECT, _SOFTCAP = Key(Any, if_unread="reject"), Key(float, *_FACTOR, None, "reject", True)
_MULTIPLIER, _RANK = Key(float, *_FACTOR, 1.0, "reject"), Key(int, 1, 2**15, None, "reject")
_FIRST_LAYERS = Key(int, *_LAYERS, 0, "reject")


def _each(names: str, key: Key) -> dict[str, Key]:
    """The entries of several keys with the same definition."""
    return dict.fromkeys(names.split(), key)


SCHEMA: dict[str, Key] = {
    # the model
    "architectures": Key(list[str], **_IGNORE),
    **_each("model_type dtype torch_dtype", Key(str, **_IGNORE)),
    **_each("text_config quantization_config", Key(dict[str, Any], **_IGNORE)),
    "compression_config": _REJECT,
    "eos_token_id": Key(int | list[int], **_IGNORE),
    "vocab_size": Key(int, 1, 2**19),  # the sampler's sums of weights are exact up to this size
    "hidden_size": Key(int, 1, 2**20, gguf="embedding_length"),
    "num_hidden_layers": Key(int, 1, 10_000, gguf="block_count"),
    "max_position_embeddings": Key(int, 1, MAX_POSITIONS, gguf="context_length"),
    "num_nextn_predict_layers": Key(int, 0, 100, 0),
    **_each("tie_word_embeddings tie_embedding", _FLAG),
    "embedding_multiplier": _MULTIPLIER._replace(gguf="embedding_scale"),
    "residual_multiplier": _MULTIPLIER._replace(gguf="residual_scale"),
    "logits_scaling": _MULTIPLIER._replace(gguf="logit_scale"),
    "final_logit_softcapping": _SOFTCAP._replace(gguf="final_logit_softcapping"),
    "attn_logit_softcapping": _SOFTCAP._replace(gguf="attn_logit_softcapping"),
    "clip_qkv": _SOFTCAP,
    # norms
    "rms_norm_eps": Key(float, 0, 1, 1e-6, gguf="attention.layer_norm_rms_epsilon"),
    **_each(
        "layer_norm_epsilon norm_eps",
        Key(float, 0, 1, 1e-5, gguf="attention.layer_norm_epsilon"),
    ),
    "use_qk_norm": _REJECT_FLAG,
    **_each("use_sandwich_norm use_attention_gate", Key(bool, default=True)),
    # attention
    "num_attention_heads": Key(int, 1, 2**16, gguf="attention.head_count"),
    "num_key_value_heads": Key(int, 1, 2**16, gguf="attention.head_count_kv"),
    "head_dim": Key(int, 2, 2**16, gguf="attention.key_length"),
    **_each("attention_bias attention_out_bias qkv_bias use_bias", _REJECT_FLAG),
    **_each("attention_chunk_size dual_chunk_attention_config", _REJECT),
    "is_causal": Key(bool, default=True, if_unread="reject"),
    **_each("use_mla attn_output_gate attention_k_eq_v", _REJECT_FLAG),
    "kv_lora_rank": _RANK._replace(gguf="attention.kv_lora_rank"),
    **_each("qk_nope_head_dim qk_rope_head_dim v_head_dim", _RANK),
    "q_lora_rank": _RANK._replace(nullable=True, gguf="attention.q_lora_rank"),
    "num_kv_shared_layers": _FIRST_LAYERS._replace(gguf="attention.shared_kv_layers"),
    "use_bidirectional_attention": Key(bool | str, default=False, if_unread="reject"),
    "global_head_dim": Key(int, 2, 2**16, 512),
    "num_global_key_value_heads": Key(int, 1, 2**16),
    "per_layer_config": Key(dict[str, Any], if_unread="reject"),
    "hidden_size_per_layer_input": Key(
        int, 0, 2**16, 0, "reject", gguf="embedding_length_per_layer_input"
    ),
    "vocab_size_per_layer_input": Key(int, 1, 2**19, **_IGNORE),
    "query_pre_attn_scalar": Key(int, 1, 2**20, None, "reject"),
    "attention_multiplier": Key(float, 1e-6, 1e6, None, "reject", gguf="attention.scale"),
    **_each("layer_types layers_block_type", Key(list[str])),
    "sliding_window": Key(
        int, 0, MAX_POSITIONS, None, "reject", nullable=True, gguf="attention.sliding_window"
    ),
    "use_sliding_window": _REJECT_FLAG,
    "max_window_layers": Key(int, *_LAYERS, 28, "ignore"),
    "sliding_window_pattern": Key(int | str, default=4, **_IGNORE),
    # RoPE: in config.json, or in a dict of its own
    **_each("rope_parameters rope_scaling", Key(dict[str, Any], nullable=True)),
    **_each("rope_type type", Key(str, default="default")),
    "rope_theta": Key(float, 1.001, 1e15, 1e4, gguf="rope.freq_base"),
    "rope_local_base_freq": Key(float, 1.001, 1e15, 1e4, gguf="rope.freq_base_swa"),
    "original_max_position_embeddings": Key(int, 1, MAX_POSITIONS, 0, "ignore"),
    "factor": Key(float, *_FACTOR, gguf="rope.scaling.factor"),
    **_each("low_freq_factor high_freq_factor", Key(float, *_FACTOR)),
    "beta_fast": Key(float, *_FACTOR, gguf="rope.scaling.yarn_beta_fast"),
    "beta_slow": Key(float, *_FACTOR, gguf="rope.scaling.yarn_beta_slow"),
    "attention_factor": Key(float, 1e-3, 1e3, gguf="rope.scaling.yarn_attn_factor"),
    "mscale_all_dim": Key(float, 0, 1e3, gguf="rope.scaling.yarn_log_multiplier"),
    "mscale": Key(float, 0, 1e3),
    "alpha": Key(float, 1, 1e6),
    "truncate": Key(bool, default=True),
    **_each("short_factor long_factor", Key(list[float])),
    "llama_4_scaling_beta": Key(float, 0, 1e3, 0.0, gguf="attention.temperature_scale"),
    "partial_rotary_factor": Key(float, 0, 1, 1.0, "reject"),
    "rotary_dim": Key(int, 2, 2**16, None, "reject", gguf="rope.dimension_count"),
    "rope_interleaved": _REJECT_FLAG,
    "rope_interleave": Key(bool, default=True, if_unread="reject"),
    "no_rope_layers": Key(list[int], if_unread="reject"),
    # the MLP
    "intermediate_size": Key(int, 1, 2**22, gguf="feed_forward_length"),
    "block_ff_dim": Key(int, 1, 2**22),
    **_each("hidden_act hidden_activation", Key(str, default="silu", if_unread="reject")),
    **_each("mlp_bias use_double_wide_mlp enable_moe_block", _REJECT_FLAG),
    **_each("swiglu_alpha swiglu_limit", Key(float, if_unread="reject")),
    "block_auto_adjust_ff_dim": Key(bool, default=True),
    "block_ffn_dim_multiplier": Key(float, 1e-3, 1e3, 1.0),
    "block_multiple_of": Key(int, 1, 2**20, 256, "ignore"),
    # experts
    "num_local_experts": Key(int, *_EXPERTS, gguf="expert_count"),
    "num_experts_per_tok": Key(int, *_EXPERTS, gguf="expert_used_count"),
    **_each("num_experts moe_num_experts moe_k moe_topk top_k_experts", Key(int, *_EXPERTS)),
    "n_routed_experts": Key(int, *_EXPERTS, 0, "reject"),
    **_each(
        "n_shared_experts num_shared_experts moe_num_shared_experts",
        Key(int, *_EXPERTS, 0, "reject", gguf="expert_shared_count"),
    ),
    "moe_intermediate_size": Key(int, 0, 2**22, gguf="expert_feed_forward_length"),
    **_each(
        "shared_expert_intermediate_size shared_intermediate_size",
        Key(int, 0, 2**22, 0, "reject", gguf="expert_shared_feed_forward_length"),
    ),
    "n_group": Key(int, *_EXPERTS, 1, gguf="expert_group_count"),
    "topk_group": Key(int, *_EXPERTS, 1, gguf="expert_group_used_count"),
    **_each(
        "routed_scaling_factor router_scaling_factor",
        Key(float, *_FACTOR, 1.0, gguf="expert_weights_scale"),
    ),
    "moe_norm_min": Key(float, 0, 1, 1e-12, "reject"),
    "topk_method": Key(str, if_unread="reject"),
    "mlp_layer_types": Key(list[str], if_unread="reject"),
    "moe_layer_freq": Key(int, 1, 10_000, 1, "reject"),
    "scoring_func": Key(str, default="softmax", if_unread="reject"),
    "first_k_dense_replace": _FIRST_LAYERS._replace(gguf="leading_dense_block_count"),
    **_each(
        "num_dense_layers moe_layer_start_index",
        Key(int, *_LAYERS, gguf="leading_dense_block_count"),
    ),
    "moe_layer_end_index": Key(int, -1, 10_000, -1),
    # every n-th layer, or a list of them
    "full_attention_interval": Key(int, 1, 10_000, 4),
    "no_rope_layer_interval": Key(int, 1, 10_000),
    "moe_layer_interval": Key(int, 1, 10_000, gguf="interleave_moe_layer_step"),
    "decoder_sparse_step": Key(int, 1, 10_000, 1),
    **_each("mlp_only_layers full_attn_idxs attn_layer_indices", Key(list[int])),
    # linear attention, short convolutions, Mamba
    "conv_L_cache": Key(int, 2, 64, gguf="shortconv.l_cache"),
    **_each("linear_conv_kernel_dim mamba_d_conv", Key(int, 2, 64, gguf="ssm.conv_kernel")),
    **_each("linear_key_head_dim mamba_d_state", Key(int, 1, 2**12, gguf="ssm.state_size")),
    **_each("linear_num_key_heads mamba_n_groups", Key(int, 1, 2**12, gguf="ssm.group_count")),
    **_each("linear_value_head_dim linear_num_value_heads mamba_n_heads", Key(int, 1, 2**12)),
    "conv_bias": _REJECT_FLAG,
    "mamba_d_head": Key(int | str, default="auto"),
    "mamba_expand": Key(int, 1, 64, 2),
    **_each("use_expert_bias mamba_conv_bias mamba_norm_before_gate", Key(bool, default=True)),
    "norm_topk_prob": _FLAG._replace(gguf="expert_weights_norm"),
    **_each("mamba_proj_bias mamba_rms_norm projectors_bias", _FLAG),
    "time_step_limit": Key(list[Any], default=[0.0, math.inf]),
    "mamba_d_ssm": Key(int, 1, 2**22, nullable=True),
    **_each(
        "lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier"
        " ssm_in_multiplier ssm_out_multiplier",
        Key(float, 1e-9, 1e9, 1.0),
    ),
    **_each("mlp_multipliers ssm_multipliers", Key(list[float])),
    "moe_latent_size": Key(int, if_unread="reject"),
    "moe_shared_expert_intermediate_size": Key(
        int, 1, 2**22, gguf="expert_shared_feed_forward_length"
    ),
    "position_embedding_type": Key(str, if_unread="ignore"),
}
"""Keys that some family supports, and keys that change the computation -> their definitions."""

PER_LAYER = "moe_topk", "moe_intermediate_size"
"""Keys whose value may be a list with one number per layer, if all the numbers are equal."""

NO_CLASS_DEFAULT = frozenset((
    "dtype", "torch_dtype", "eos_token_id", "layer_types", "num_nextn_predict_layers",
    "original_max_position_embeddings", "quantization_config", "rope_scaling",
))  # fmt: skip
"""Keys without an entry in `defaults.json`. Why: configs that lack only these keys are
parsed without loading that file."""

HARMLESS = frozenset((
    # metadata of the file, and settings for building and training the model
    "auto_map", "chunk_size_feed_forward", "gradient_checkpointing", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "output_attentions",
    "output_hidden_states", "pretraining_tp", "problem_type", "return_dict", "tokenizer_class",
    "torchscript", "transformers_version", "use_bfloat16", "name_or_path", "finetuning_task",
    "prefix", "pruned_heads", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
    "cross_attention_hidden_size", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    # token ids of BOS, padding and others
    "bos_token_id", "decoder_start_token_id", "eod_token_id", "pad_token_id", "sep_token_id",
    "unk_token_id",
    # only for training
    "attention_dropout", "classifier_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop",
    "residual_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    # settings of transformers' own implementations
    "cache_implementation", "use_cache", "mamba_chunk_size", "num_logits_to_keep", "chunk_size",
    "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "use_mamba_kernels",
    "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    # initial weights
    "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min", "expand",
    "z_loss_coefficient",
    # the sum of two other keys; the dtype of an addition
    "qk_head_dim", "enable_moe_fp32_combine",
))  # fmt: skip
"""Further keys that do not affect generation. `ConfigReader.unknown_keys` returns all other keys
that are not read."""


@functools.cache
def class_defaults() -> Mapping[str, Json]:
    """`model_type` -> the defaults of transformers' config class, where they differ from `SCHEMA`.

    `tools/class_defaults.py` writes the file.
    """
    return json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))


def check_values(raw: Json, where: str) -> dict[str, Any]:
    """Checks types and ranges of the keys that are in `SCHEMA` and not null.

    Raises:
        UnsupportedModelError: the message has file, key, value and what is allowed.
    """
    values = dict(raw)
    for key in values.keys() & SCHEMA.keys():
        if values[key] is None:
            continue
        kind, low, high, *_ = SCHEMA[key]
        if key in PER_LAYER and isinstance(values[key], list) and values[key]:
            first, *rest = values[key]
            values[key] = first if rest and rest == [first] * len(rest) else values[key]
        values[key] = check_value(values[key], kind, f"{where}: {key}", UnsupportedModelError)
        if low is not None and high is not None and not low <= values[key] <= high:
            raise UnsupportedModelError(
                f"{where}: {key} must be from {low:,} to {high:,}, got {quoted(values[key])}"
            )
    return values


class ConfigReader:
    """Reads the keys of a config.json, or of a dict in it, and records which keys are read.

    Args:
        defaults: the family's defaults, which take precedence over all others.
        where: the prefix of messages.
        model_type: the entry of `class_defaults`, which takes precedence over `SCHEMA`.

    Attributes:
        raw: the values in the file, after checking their types and ranges.
        ignored_keys: keys of nested dicts that no family reads.
    """

    def __init__(
        self, raw: Json, defaults: Json | None = None, where: str = "config.json",
        model_type: str | None = None,
    ) -> None:  # fmt: skip
        self.raw, self._defaults, self.where = check_values(raw, where), defaults or {}, where
        self._model_type = model_type
        self._read: set[str] = set()
        self.ignored_keys: list[str] = []

    def __contains__(self, key: str) -> bool:
        """Whether the file, the family's defaults or the config class has the key."""
        return key in self.raw or key in self._defaults_of(key)

    def _defaults_of(self, key: str) -> Json:
        """The dict that may have a default of this key, which takes precedence over `SCHEMA`."""
        if key in self._defaults or key in NO_CLASS_DEFAULT or self._model_type is None:
            return self._defaults
        return class_defaults().get(self._model_type, {})

    def get(self, key: str) -> Any:
        """The value of a key, or its default. The caller must support every allowed value.

        Raises:
            UnsupportedModelError: the value is null, but has a default and is not nullable.
        """
        self._read.add(key)
        spec = SCHEMA.get(key, Key(Any))
        value = self.raw.get(key)
        if value is not None or (key in self.raw and spec.nullable):
            return value
        default = self._defaults_of(key).get(key, spec.default)
        if key in self.raw and default is not None:
            raise UnsupportedModelError(
                f"{self.where}: {key} must be {describe_allowed(spec.kind)}, got null; without"
                f" the key it is {quoted(default)}"
            )
        return default

    def get_dict(self, key: str) -> Json:
        """The value of a key that is a dict; the default if it is null or empty."""
        return self.get(key) or self._defaults_of(key).get(key) or {}

    def require(self, key: str) -> int:
        """The value of a required size, which must not be 0. `SCHEMA` allows 0 for some sizes,
        because models that do not use them have the key too."""
        value = self.get(key)
        if not value:
            raise UnsupportedModelError(
                f"config.json needs {key}, from 1 to {SCHEMA[key].maximum:,}, got {value}"
            )
        return value

    @property
    def head_dim(self) -> int:
        """The head dim in the file, or else the hidden size divided by the number of heads."""
        size = self.get("head_dim")
        return size or self.require("hidden_size") // self.require("num_attention_heads")

    def require_one_of(self, key: str, *values: Any) -> None:
        """Raises UnsupportedModelError if the file has the key with a value not in `values`."""
        self._read.add(key)
        if key in self.raw and self.raw[key] not in values:
            names = " or ".join(repr(str(v)) for v in values if v is not None) or "null"
            raise UnsupportedModelError(
                f"{key}={quoted(self.raw[key])} is not implemented; supported: {names}"
            )

    def reject_unread(self) -> None:
        """Raises UnsupportedModelError for a key that changes the computation and was not read,
        unless its value is the default or null."""
        for key, spec in SCHEMA.items():
            if spec.if_unread == "reject" and key in self.raw.keys() - self._read:
                self.require_one_of(key, spec.default, None)

    def unknown_keys(self) -> list[str]:
        """Keys that were not read and whose effect is unknown, except null.

        A test checks that all keys of transformers' config classes are read, rejected or harmless.
        So unknown keys come from another library or a newer model. Names that begin with "_" are
        skipped: they are attributes of transformers that it saves with a config.
        """
        harmless = HARMLESS | {key for key, k in SCHEMA.items() if k.if_unread == "ignore"}
        present = {key for key, value in self.raw.items() if value is not None}
        unknown = present - self._read - harmless
        return sorted(key for key in unknown if key[0] != "_") + self.ignored_keys
