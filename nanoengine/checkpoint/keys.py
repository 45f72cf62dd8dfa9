"""Keys: a config.json read key by key, so that no key is ignored that would change the maths.

Every value is checked before anything else looks at it, by the tables `KINDS` and `RANGES`. A
family reads the keys that it obeys; of those that nobody has read, `refuse_others` refuses each one
whose value would ask for something else. Plain json, neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, shown

Json = Mapping[str, Any]

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "original_max_position_embeddings", "query_pre_attn_scalar", "sliding_window",
    "max_window_layers", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "decoder_sparse_step",
    "rotary_dim", "no_rope_layer_interval", "num_nextn_predict_layers", "full_attention_interval",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "conv_L_cache", "num_dense_layers",
    "block_multiple_of", "block_ff_dim",
)  # fmt: skip
_NUMBERS = (
    "rms_norm_eps", "layer_norm_eps", "norm_eps", "block_ffn_dim_multiplier",
    "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "logit_scale", "attn_logit_softcapping",
    "final_logit_softcapping", "routed_scaling_factor", "partial_rotary_factor", "rope_theta",
    "rope_local_base_freq", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta",
    "swiglu_alpha", "swiglu_limit",
)  # fmt: skip
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias",
    "use_bias", "use_qkv_bias", "use_sliding_window", "norm_topk_prob", "use_parallel_residual",
    "use_qk_norm", "qk_layernorm", "truncate", "attn_output_gate", "conv_bias", "tie_embedding",
    "use_expert_bias", "block_auto_adjust_ff_dim",
)  # fmt: skip

KINDS: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_FLAGS, bool),
    "architectures": list[str],
    "model_type": str,
    "text_config": dict[str, Any],
    "layer_types": list[str],
    "sliding_window_pattern": int | str,
    "mlp_only_layers": list[int],
    "no_rope_layers": list[int],
    "full_attn_idxs": list[int],
    "hidden_act": str,
    "hidden_activation": str,
    "dtype": str,
    "torch_dtype": str,
    "quantization_config": dict[str, Any],
    "eos_token_id": int | list[int],
    # RoPE: its keys stand in config.json or in a dict of their own
    "rope_scaling": dict[str, Any],
    "rope_parameters": dict[str, Any],
    "rope_type": str,
    "type": str,
    "short_factor": list[float],
    "long_factor": list[float],
}
"""Key that is obeyed -> what its value is."""

MOST_POSITIONS = 2**31 - 1
_EXPERTS, _FACTOR = (0, 4096), (1e-3, 1e6)
RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**19),  # the sampler's sums of weights are exact up to here
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "rotary_dim": (2, 2**16),
    "max_position_embeddings": (1, MOST_POSITIONS),
    "original_max_position_embeddings": (1, MOST_POSITIONS),
    "rms_norm_eps": (0, 1),
    "layer_norm_eps": (0, 1),
    "norm_eps": (0, 1),
    "query_pre_attn_scalar": (1, 2**20),
    "sliding_window": (0, MOST_POSITIONS),
    "max_window_layers": (0, 10_000),
    "no_rope_layer_interval": (1, 10_000),
    "num_nextn_predict_layers": (0, 100),
    "full_attention_interval": (1, 10_000),
    "linear_conv_kernel_dim": (2, 64),
    "conv_L_cache": (2, 64),
    "linear_key_head_dim": (1, 2**12),
    "linear_value_head_dim": (1, 2**12),
    "linear_num_key_heads": (1, 2**12),
    "linear_num_value_heads": (1, 2**12),
    "num_dense_layers": (0, 10_000),
    "block_multiple_of": (1, 2**20),
    "block_ff_dim": (1, 2**22),
    "block_ffn_dim_multiplier": (1e-3, 1e3),
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "n_shared_experts": _EXPERTS,
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "moe_intermediate_size": (0, 2**22),
    "shared_expert_intermediate_size": (0, 2**22),
    "first_k_dense_replace": (0, 10_000),
    "decoder_sparse_step": (1, 10_000),
    "routed_scaling_factor": _FACTOR,
    "embedding_multiplier": _FACTOR,
    "residual_multiplier": _FACTOR,
    "attention_multiplier": (1e-6, 1e6),
    "logits_scaling": _FACTOR,
    "logit_scale": _FACTOR,
    "attn_logit_softcapping": _FACTOR,
    "final_logit_softcapping": _FACTOR,
    "partial_rotary_factor": (0, 1),
    "rope_theta": (1.001, 1e15),
    "rope_local_base_freq": (1.001, 1e15),
    "factor": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "attention_factor": (1e-3, 1e3),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
    "llama_4_scaling_beta": (0, 1e3),
}
"""Key -> its least and its largest value. Why so far out: no model comes near them, and products of
them are still sizes that a tensor can have; what a model is made of decides `check_sizes`."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (),
    "use_sliding_window": (False,),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "use_bidirectional_attention": (False,),
    "attention_bias": (False,),
    "attention_out_bias": (False,),
    "qkv_bias": (False,),
    "use_qkv_bias": (False,),
    "use_bias": (False,),
    "mlp_bias": (False,),
    "lm_head_bias": (False,),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_dim": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "rope_interleaved": (False,),
    "dual_chunk_attention_config": (),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "n_routed_experts": (0,),
    "first_k_dense_replace": (0,),
    "no_rope_layers": (),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False, 0),
    "kv_lora_rank": (),
    "num_kv_shared_layers": (0,),
    "swiglu_limit": (),
    "swiglu_alpha": (),
    "scoring_func": ("softmax",),
    "use_mla": (False,),
    "attn_output_gate": (False,),
    "conv_bias": (False,),
}
"""Key that would change the maths -> the values that don't; absent and null never do."""


HARMLESS = frozenset((
    # what a file is, and how to build and train on it
    "architectures", "auto_map", "chunk_size_feed_forward", "dtype", "gradient_checkpointing",
    "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict",
    "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_bfloat16",
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "name_or_path",
    # ids of tokens that end or begin a text, or fill it
    "bos_token_id", "decoder_start_token_id", "eod_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id",
    # of training alone
    "attention_dropout", "classifier_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop",
    "residual_dropout", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    # how transformers runs, not what
    "cache_implementation", "use_cache",
    # of what a key that is read has switched off: windows, stretched positions, adjusted sizes
    "block_multiple_of", "max_window_layers", "original_max_position_embeddings",
    "sliding_window_pattern", "_sliding_window_pattern",
    # obeyed elsewhere
    "quantization_config", "text_config",
))  # fmt: skip
"""Keys that change no result of generating, and may be left unread. Any other key that nobody reads
is told: see `Keys.unread`."""


def checked(raw: Json, where: str) -> dict[str, Any]:
    """The keys that have a value, those that are obeyed being of the right type and range.

    null means that a key is absent, as transformers means it.

    Raises:
        UnsupportedModelError: names file, key, value and what is allowed.
    """
    given = {key: value for key, value in raw.items() if value is not None}
    for key in given.keys() & KINDS.keys():
        given[key] = check_value(given[key], KINDS[key], f"{where}: {key}", UnsupportedModelError)
    for key in given.keys() & RANGES.keys():
        least, most = RANGES[key]
        if not least <= given[key] <= most:
            raise UnsupportedModelError(
                f"{where}: {key} must be from {least:,} to {most:,}, got {shown(given[key])}"
            )
    return given


def refuse_unless(key: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raises UnsupportedModelError if `value` is none of the neutral ones, and not absent."""
    if value is None or value in neutral:
        return
    allowed = " or ".join(repr(v) for v in dict.fromkeys(map(str, neutral))) or "no value"
    raise UnsupportedModelError(f"{key}={shown(value)} is not implemented; supported: {allowed}")


class Keys:
    """The keys of one config.json, with a family's values for those that are absent.

    Attributes:
        given: what the file says, checked; null is absent.
    """

    def __init__(self, raw: Json, defaults: Json) -> None:
        self.given = checked(raw, "config.json")
        self._values = {**defaults, **self.given}
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, which the caller obeys."""
        self._read.add(key)
        return self._values.get(key, default)

    def require(self, key: str) -> int:
        """A size that this model can't do without. Why 0 is in the range of some: other models have
        the key too, and say so that they don't use it."""
        value = self.get(key)
        if not value:
            raise UnsupportedModelError(
                f"config.json needs {key}, from 1 to {RANGES[key][1]:,}, got {value}"
            )
        return value

    def allow(self, key: str, *values: Any) -> Any:
        """The key's value, which must be one of these or absent: the only ones implemented."""
        refuse_unless(key, self.get(key), values)
        return self.get(key)

    def refuse_others(self) -> None:
        """Raises UnsupportedModelError for a key that nobody has read and that asks for other
        maths."""
        for key, neutral in NEUTRAL_VALUES.items():
            if key not in self._read:
                refuse_unless(key, self.given.get(key), neutral)

    def unread(self) -> list[str]:
        """Keys that nobody has read and of which nothing is known.

        What the config class of transformers has for a type is read, refused or harmless, which a
        test holds. So these are another library's, or a newer model's.
        """
        known = self._read | NEUTRAL_VALUES.keys() | HARMLESS
        return sorted(self.given.keys() - known)
