"""ModelConfig: a checkpoint's config.json, normalised: one meaning, one field, any writer.

`load_model_config` reads what transformers 4 wrote (rope_theta, rope_scaling, torch_dtype) and what
transformers 5 writes (rope_parameters, dtype, layer_types) into equal values. A key that changes
the maths and is not implemented is refused by name and value: a model that runs is the model that
was asked for. Every value is checked before anything else looks at it, by the tables `KINDS` and
`RANGES`. Called by whoever starts an engine; plain json, neither torch nor transformers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanoengine.checkpoint.quantization import StoredQuantization, parse_quantization
from nanoengine.checks import check_value, shown
from nanoengine.errors import ConfigError, ModelError, RequestError, UnsupportedModelError
from nanoengine.json_file import read_object
from nanoengine.sampling_params import SamplingParams

Json = Mapping[str, Any]

Dtype = Literal["float32", "float16", "bfloat16", "float64"]

KINDS: dict[str, Any] = {
    "architectures": list[str],
    "model_type": str,
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "tie_word_embeddings": bool,
    "attention_bias": bool,
    "query_pre_attn_scalar": int,
    "layer_types": list[str],
    "sliding_window": int,
    "sliding_window_pattern": int,
    "use_sliding_window": bool,
    "max_window_layers": int,
    "num_experts": int,
    "num_local_experts": int,
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "norm_topk_prob": bool,
    "decoder_sparse_step": int,
    "mlp_only_layers": list[int],
    "dtype": str,
    "torch_dtype": str,
    "quantization_config": dict[str, Any],
    "eos_token_id": int | list[int],
    # RoPE: its keys stand in config.json or in a dict of their own
    "rope_scaling": dict[str, Any],
    "rope_parameters": dict[str, Any],
    "rope_theta": float,
    "rope_local_base_freq": float,
    "rope_type": str,
    "type": str,
    "factor": float,
    "original_max_position_embeddings": int,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "beta_fast": float,
    "beta_slow": float,
    "attention_factor": float,
    "mscale": float,
    "mscale_all_dim": float,
    "truncate": bool,
}
"""Key that is obeyed -> what its value is."""

MOST_POSITIONS = 2**31 - 1
RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**19),  # the sampler's sums of weights are exact up to here
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "max_position_embeddings": (1, MOST_POSITIONS),
    "original_max_position_embeddings": (1, MOST_POSITIONS),
    "rms_norm_eps": (0, 1),
    "query_pre_attn_scalar": (1, 2**20),
    "sliding_window": (0, MOST_POSITIONS),
    "sliding_window_pattern": (1, 10_000),
    "max_window_layers": (0, 10_000),
    "num_experts": (0, 4096),
    "num_local_experts": (0, 4096),
    "num_experts_per_tok": (0, 4096),
    "moe_intermediate_size": (0, 2**22),
    "decoder_sparse_step": (1, 10_000),
    "rope_theta": (1.001, 1e15),
    "rope_local_base_freq": (1.001, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
}
"""Key -> its least and its largest value. Why so far out: no model comes near them, and products of
them are still sizes that a tensor can have; what a model is made of decides `check_sizes`."""

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma3ForCausalLM": "gemma3_text",
}
"""Supported architecture -> its model_type, which is also the name of its module here."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "use_bidirectional_attention": (False,),
    "mlp_bias": (False,),
    "compression_config": (),
    "partial_rotary_factor": (1, 1.0),
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
}
"""Key that would change the maths -> the values that don't; absent and null never do."""

FAMILY_NEUTRAL_VALUES: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": None,
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
    },
}
"""Architecture -> where it differs from `NEUTRAL_VALUES`; None: the key is obeyed."""

FAMILY_DEFAULTS: dict[str, Json] = {
    "Qwen3ForCausalLM": {"head_dim": 128},
    "Gemma3ForCausalLM": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}
"""Architecture -> values of absent keys, where they are not those of all families."""

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
}
"""Rope type -> its required and its optional parameters."""

GENERATION_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Key of generation_config.json -> field of SamplingParams. Source: vLLM's `ModelConfig`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. Fields that a type doesn't use keep their defaults.

    Attributes:
        theta: base of the wavelengths.
        type: default, linear, llama3 or yarn.
        factor: how many times longer the context is than in pre-training.
        original_max_position_embeddings: context of pre-training [tokens].
        low_freq_factor, high_freq_factor: llama3: the band of wavelengths that is blended.
        beta_fast, beta_slow: yarn: rotations within the original context that bound its blend.
        attention_factor: yarn: factor on cos and sin, from mscale or `factor` if not given.
        truncate: yarn: round the blend's bounds to whole dimensions.
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: in `layers` the MLP is `num_experts` small ones, of which a token takes
    `num_experts_per_tok`."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a checkpoint computes. Names are Hugging Face's where one exists.

    Attributes:
        architecture: a key of `ARCHITECTURES`.
        max_position_embeddings: longest context [tokens], extended by yarn where it is configured.
        sliding_windows: per layer None, or w: a token sees itself and the w - 1 tokens before it.
        attention_bias: the q, k and v projections have biases.
        hidden_act: of the MLP's gate, a key of `layers.ops.GATES`.
        local_rope: the angles of layers with a window, where they have their own.
        query_pre_attn_scalar: its inverse root scales attention; None: head_dim.
        dtype: of the stored weights, as torch names it.
        quantization: how linear layers are stored, where they are not floats.
        eos_token_ids: generation_config.json's, then config.json's; any of them ends a sequence.
        generation_defaults: sampling settings that the authors recommend.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    sliding_windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    local_rope: RopeConfig | None = None
    query_pre_attn_scalar: int | None = None
    moe: MoEConfig | None = None
    dtype: str = "float32"
    quantization: StoredQuantization | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, float] = field(default_factory=dict)


def load_model_config(directory: str | Path) -> ModelConfig:
    """Reads `config.json` and, where there is one, `generation_config.json`.

    Raises:
        ConfigError: `directory` holds no config.json.
        ModelError: a file holds no JSON object, or is no regular file.
        UnsupportedModelError: the architecture, a key that changes its maths, or a value that can't
            be; the message names file, key, value and what is allowed.
    """
    directory = Path(directory)
    if not os.path.lexists(directory / "config.json"):
        raise ConfigError(f"model={str(directory)!r} is no checkpoint: it has no config.json")
    raw = read_object(directory / "config.json", ModelError)
    generation_path = directory / "generation_config.json"
    found = os.path.lexists(generation_path)
    return parse_model_config(raw, read_object(generation_path, ModelError) if found else {})


def parse_model_config(raw: Json, generation: Json | None = None) -> ModelConfig:
    """The normalised form of a parsed config.json; see `load_model_config`."""
    generation = generation or {}
    given = _checked(raw, "config.json")
    architecture = _architecture(given)
    is_gemma = architecture == "Gemma3ForCausalLM"
    for key, neutral in (NEUTRAL_VALUES | FAMILY_NEUTRAL_VALUES.get(architecture, {})).items():
        if neutral is not None:
            _refuse_unless(key, raw.get(key), neutral)
    raw = {**FAMILY_DEFAULTS.get(architecture, {}), **given}
    heads, hidden_size = _require(raw, "num_attention_heads"), _require(raw, "hidden_size")
    kv_heads = _get(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = _get(raw, "head_dim", hidden_size // heads)
    if head_dim < 2 or head_dim % 2:
        raise UnsupportedModelError(
            f"head_dim={head_dim} must be even and at least 2; where config.json has none, it is"
            f" hidden_size={hidden_size} divided by num_attention_heads={heads}"
        )
    rope, local_rope = _gemma3_ropes(raw) if is_gemma else (_rope(raw), None)
    tied = _get(raw, "tie_word_embeddings", False)
    stored = raw.get("quantization_config")
    vocab_size = _require(raw, "vocab_size")
    max_position = _require(raw, "max_position_embeddings")
    if rope.type == "yarn":
        extended = int(rope.factor * rope.original_max_position_embeddings)
        max_position = min(max(max_position, extended), MOST_POSITIONS)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_require(raw, "intermediate_size"),
        num_hidden_layers=_require(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=_get(raw, "rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        query_pre_attn_scalar=_require(raw, "query_pre_attn_scalar") if is_gemma else None,
        tie_word_embeddings=tied,
        attention_bias=_attention_bias(architecture, raw),
        sliding_windows=_sliding_windows(architecture, raw),
        moe=_moe(raw) if architecture == "Qwen3MoeForCausalLM" else None,
        dtype=_dtype(raw),
        quantization=parse_quantization(stored, tied=tied) if stored else None,
        eos_token_ids=_end_ids(vocab_size, raw, generation),
        generation_defaults=_generation_defaults(generation),
    )


def _checked(raw: Json, where: str) -> dict[str, Any]:
    """The keys that have a value, those that are obeyed being of the right type and range.

    null means that a key is absent, as transformers means it.
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


def _get(raw: Json, key: str, default: Any) -> Any:
    """`raw[key]`, where null means the default, as transformers means it."""
    value = raw.get(key)
    return default if value is None else value


def _require(raw: Json, key: str) -> int:
    """A size that this model can't do without. Why 0 is in the range of some: other models have
    the key too, and say so that they don't use it."""
    if not raw.get(key):
        raise UnsupportedModelError(
            f"config.json needs {key}, from 1 to {RANGES[key][1]:,}, got {raw.get(key)}"
        )
    return raw[key]


def _refuse_unless(key: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value is None or value in neutral:
        return
    allowed = " or ".join(repr(v) for v in dict.fromkeys(map(str, neutral))) or "no value"
    raise UnsupportedModelError(f"{key}={shown(value)} is not implemented; supported: {allowed}")


def _architecture(raw: Json) -> str:
    """The first supported entry of `architectures`; where that is missing, the one of
    `model_type`."""
    named = raw.get("architectures") or []
    by_type = {model_type: name for name, model_type in ARCHITECTURES.items()}
    for name in named or [by_type.get(raw.get("model_type", ""))]:
        if name in ARCHITECTURES:
            return name
    what = ", ".join(map(shown, named)) or f"model_type={shown(raw.get('model_type'))}"
    raise UnsupportedModelError(
        f"unsupported architecture {what}; supported: {', '.join(ARCHITECTURES)}"
    )


def _attention_bias(architecture: str, raw: Json) -> bool:
    if architecture == "Qwen2ForCausalLM":
        _refuse_unless("attention_bias", raw.get("attention_bias"), (True,))
        return True
    if architecture == "MistralForCausalLM":
        _refuse_unless("attention_bias", raw.get("attention_bias"), (False,))
    return _get(raw, "attention_bias", False)


def _sliding_windows(architecture: str, raw: Json) -> tuple[int | None, ...]:
    """Each family says in its own way which layers slide; see the family's module."""
    num_layers = _require(raw, "num_hidden_layers")
    layer_types = raw.get("layer_types")
    for kind in layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer_types has {shown(kind)}; supported: 'full_attention', 'sliding_attention'"
            )
    if layer_types and len(layer_types) != num_layers:
        raise UnsupportedModelError(
            f"layer_types has {len(layer_types)} entries, num_hidden_layers={num_layers}"
        )
    window = raw.get("sliding_window")
    if architecture == "Gemma3ForCausalLM":
        every, window = _require(raw, "sliding_window_pattern"), _require(raw, "sliding_window")
        kinds = layer_types or [
            "sliding_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        ]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "LlamaForCausalLM":
        _refuse_unless("sliding_window of a Llama model", window, ())
    elif architecture != "MistralForCausalLM" and not raw.get("use_sliding_window"):
        window = None
    if window is None:
        slides = [False] * num_layers
    elif architecture not in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        slides = [True] * num_layers
    elif layer_types:
        slides = [kind == "sliding_attention" for kind in layer_types]
    else:
        first = _get(raw, "max_window_layers", 28)
        slides = [layer >= first for layer in range(num_layers)]
    if any(slides):
        _require(raw, "sliding_window")
    if layer_types and slides != [kind == "sliding_attention" for kind in layer_types]:
        raise UnsupportedModelError(
            f"layer_types={shown(layer_types)} contradicts"
            f" sliding_window={raw.get('sliding_window')!r},"
            f" use_sliding_window={raw.get('use_sliding_window')!r} of {architecture}"
        )
    return tuple(window if slide else None for slide in slides)


def _rope(raw: Json) -> RopeConfig:
    """RoPE parameters of either writer: transformers 5 nests them all in `rope_parameters`."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(key) or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"{key}={shown(given)}: parameters for each layer type are not implemented"
        )
    given = _checked(given, f"config.json: {key}")
    _refuse_unless("partial_rotary_factor", given.pop("partial_rotary_factor", None), (1, 1.0))
    legacy_type = given.pop("type", "default")
    kind = given.pop("rope_type", legacy_type)
    theta = float(given.pop("rope_theta", _get(raw, "rope_theta", 10000.0)))
    if kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"rope type {shown(kind)} is not implemented; supported: {', '.join(ROPE_KEYS)}"
        )
    original = given.pop("original_max_position_embeddings", None)
    required, optional = ROPE_KEYS[kind]
    if missing := sorted(required - given.keys()):
        raise UnsupportedModelError(f"rope type {kind!r} needs {', '.join(missing)}")
    if unknown := {key: given[key] for key in sorted(given.keys() - required - optional)}:
        raise UnsupportedModelError(f"rope type {kind!r} has unknown parameters {shown(unknown)}")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise UnsupportedModelError(
            f"rope type 'llama3' needs low_freq_factor={given['low_freq_factor']} below"
            f" high_freq_factor={given['high_freq_factor']}"
        )
    if kind in ("llama3", "yarn"):
        given["original_max_position_embeddings"] = original or _require(
            raw, "max_position_embeddings"
        )
    if kind == "yarn":
        given["attention_factor"] = _yarn_attention_factor(
            given["factor"],
            given.get("attention_factor"),
            given.pop("mscale", None),
            given.pop("mscale_all_dim", None),
        )
    return RopeConfig(theta=theta, type=kind, **given)


def _gemma3_ropes(raw: Json) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of full and of sliding layers; scaling, where there is any, is for the full ones."""
    nested = raw.get("rope_parameters") or {}
    kinds = ("full_attention", "sliding_attention")
    if unknown := sorted(nested.keys() - set(kinds)):
        raise UnsupportedModelError(
            f"rope_parameters of a Gemma 3 model has {shown(unknown)}; supported:"
            f" {', '.join(kinds)}"
        )
    for kind in kinds:
        where = f"config.json: rope_parameters: {kind}"
        check_value(nested.get(kind), dict[str, Any] | None, where, UnsupportedModelError)
    bases = {
        "full_attention": ("rope_theta", 1e6),
        "sliding_attention": ("rope_local_base_freq", 1e4),
    }
    scaling = {"full_attention": raw.get("rope_scaling") or {}, "sliding_attention": {}}
    full, sliding = (
        _rope(
            {
                **raw,
                "rope_parameters": {**(nested.get(kind) or {}), **scaling[kind]},
                "rope_scaling": None,
                "rope_theta": _get(raw, *bases[kind]),
            }
        )
        for kind in kinds
    )
    return full, sliding


def _yarn_attention_factor(
    factor: float, given: float | None, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """The temperature of attention's softmax as a factor on cos and sin.

    Source: YaRN (arXiv 2309.00071) section 3.4, equation 22; the mscale pair is DeepSeek-V2's.
    """

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given is not None:
        return float(given)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _moe(raw: Json) -> MoEConfig:
    """Qwen3-MoE: every `decoder_sparse_step`-th layer has experts, `mlp_only_layers` never."""
    step, dense = _get(raw, "decoder_sparse_step", 1), set(_get(raw, "mlp_only_layers", []))
    count_key = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    count, taken = _require(raw, count_key), _require(raw, "num_experts_per_tok")
    if taken > count:
        raise UnsupportedModelError(
            f"num_experts_per_tok={taken} must be at most {count_key}={count}"
        )
    return MoEConfig(
        num_experts=count,
        num_experts_per_tok=taken,
        intermediate_size=_require(raw, "moe_intermediate_size"),
        norm_topk_prob=_get(raw, "norm_topk_prob", False),
        layers=tuple(
            layer
            for layer in range(_require(raw, "num_hidden_layers"))
            if layer not in dense and (layer + 1) % step == 0
        ),
    )


def _dtype(raw: Json) -> str:
    key = "dtype" if "dtype" in raw else "torch_dtype"
    name = _get(raw, key, "float32").removeprefix("torch.")
    return check_value(name, Dtype, f"config.json: {key}", UnsupportedModelError)


def _end_ids(vocab_size: int, raw: Json, generation: Json) -> tuple[int, ...]:
    """Every EOS id of both files once, generation_config.json's first."""
    key, found = "eos_token_id", []
    for where, value in (
        ("generation_config.json", _checked({key: generation.get(key)}, "generation_config.json")),
        ("config.json", raw),
    ):
        given = value.get(key, [])
        for token_id in given if isinstance(given, list) else [given]:
            if not 0 <= token_id < vocab_size:
                raise UnsupportedModelError(
                    f"{where}: {key} must be from 0 to {vocab_size - 1} (vocab_size - 1), got"
                    f" {shown(given)}"
                )
            found.append(token_id)
    return tuple(dict.fromkeys(found))


def _generation_defaults(generation: Json) -> dict[str, float]:
    """The authors' sampling settings, as fields of SamplingParams that it accepts."""
    found = {}
    for name, ours in GENERATION_DEFAULTS.items():
        if generation.get(name) is None:
            continue
        kind = int if name in ("top_k", "max_new_tokens") else float
        where = f"generation_config.json: {name}"
        found[ours] = check_value(generation[name], kind, where, UnsupportedModelError)
        try:
            SamplingParams(**{ours: found[ours]})
        except RequestError as error:
            raise UnsupportedModelError(f"{where}: {error}") from error
    return found
