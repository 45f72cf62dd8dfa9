"""ModelConfig: the config.json of a checkpoint in normalised form.

`load_model_config` reads the formats of transformers 4 (rope_theta, rope_scaling, torch_dtype) and
transformers 5 (rope_parameters, dtype, layer_types) into equal values. A key that changes the
computation and is not implemented raises an error with its name and value, so a model that loads is
computed as its config says. Differences between families are in `families/`. Called when an engine
starts; uses plain json, neither torch nor transformers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from nanoengine.checkpoint import families
from nanoengine.checkpoint.config_reader import MAX_POSITIONS, ConfigReader, Json, check_values
from nanoengine.checkpoint.families import FAMILIES, Family, every_family
from nanoengine.checkpoint.layer_config import (
    ATTENTION,
    FULL,
    SLIDING,
    LayerConfig,
    LinearAttentionConfig,
    MoEConfig,
)
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.rope import RopeConfig, read_rope, read_ropes_by_kind, read_rotary_dim
from nanoengine.errors import ConfigError, ModelError, RequestError, UnsupportedModelError
from nanoengine.settings.checks import check_value, join_names, quoted
from nanoengine.settings.files import is_gguf, read_object
from nanoengine.settings.params import SamplingParams

logger = logging.getLogger(__name__)
warn_once = cache(logger.warning)
"""Logs a warning once per process, because a command may read a config several times."""

Ropes = tuple[RopeConfig | None, ...]
Dtype = Literal["float32", "float16", "bfloat16", "float64"]

GENERATION_DEFAULTS = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens"
"""Fields of SamplingParams that generation_config.json may set. Source: vLLM's `ModelConfig`."""


OTHER_PARTS = (
    r"(?!(model\.)?(language_model|text_model|layers|norm|embed_tokens\w*|per_layer\w*)\.|lm_head\.)"
    r"(model\.)?\w+\.?"
)
"""Regular expression of prefixes of tensors of a multimodal checkpoint that are not in its text
part."""


class UnknownArchitectureError(UnsupportedModelError):
    """No family has the architecture; transformers may have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a model computes. Fields have the names of transformers' configs where one exists.

    Attributes:
        architecture: the entry of `every_family` that describes the model.
        max_position_embeddings: longest context [tokens], including an extension by YaRN.
        rms_norm_eps: epsilon of all norms.
        plan: what the layers compute.
        ropes: RoPE parameters per layer; None: the layer has no RoPE.
        sliding_windows: per layer None, or w: a token attends to itself and the w - 1 tokens before
            it.
        states: the recurrent layers, if there are any.
        moe: the mixture of experts, if there is one.
        tensor_names: parts of our tensor names -> their names in the checkpoint.
        ignored_tensors: regular expression of prefixes of tensors that are not loaded, such as
            tensors for images or MTP; "": all tensors are loaded.
        dtype: dtype of the stored weights, as torch names it.
        quantization: how linear layers are stored, if they are quantized.
        eos_sources: pairs of the source of an EOS token (a file or a key) and the token id.
        generation_defaults: sampling settings that the authors recommend.
        headless: the checkpoint has no language head; it is an embedding model or a classifier.
        model_impl: whose modules compute the model.
        mtp: the same config with one more layer, the MTP layer; None: none is loaded (`mtp.py`).
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
    tie_word_embeddings: bool
    plan: LayerConfig
    ropes: Ropes
    sliding_windows: tuple[int | None, ...]
    states: LinearAttentionConfig | None = None
    moe: MoEConfig | None = None
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    ignored_tensors: str = ""
    dtype: str = "float32"
    quantization: StoredQuantization | None = None
    eos_sources: tuple[tuple[str, int | None], ...] = ()
    generation_defaults: dict[str, float] = field(default_factory=dict)
    headless: bool = False
    model_impl: Literal["native", "transformers"] = "native"
    mtp: ModelConfig | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The EOS token ids: the ids of `eos_sources` that are in the vocabulary."""
        return tuple(dict.fromkeys(i for _, i in self.eos_sources if i in range(self.vocab_size)))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        if self.plan.layers_block_type is not None:
            return tuple(n for n, kind in enumerate(self.plan.layers_block_type) if kind == FULL)
        recurrent = self.states.layers if self.states and self.plan.falcon_h1 is None else ()
        return tuple(n for n in range(self.num_hidden_layers) if n not in recurrent)

    @property
    def largest_head(self) -> int:
        """The largest head dim of all layers."""
        gemma4 = self.plan.gemma4
        return self.head_dim if gemma4 is None else max(size for size, _ in gemma4.shapes)

    @property
    def linear_inputs(self) -> dict[str, int]:
        """Key of config.json -> its value, for the input sizes of linear layers."""
        sizes = {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}
        if self.moe is not None:
            sizes["moe_intermediate_size"] = self.moe.intermediate_size
        return sizes

    def context_len(self, max_model_len: int | None) -> int:
        """The longest sequence: `max_model_len` if it is set, else the model's context [tokens].

        Raises:
            ConfigError: the model's context is shorter.
        """
        longest = self.max_position_embeddings
        if (max_model_len or 0) > longest:
            limit = f"at most the model's context of {longest}"
            raise ConfigError(f"max_model_len must be {limit}, got {max_model_len}")
        return max_model_len or longest


def load_model_config(directory: str | Path, *, model_impl: str = "auto") -> ModelConfig:
    """Reads `config.json` and, if it exists, `generation_config.json`; or the metadata of a GGUF
    file.

    Args:
        model_impl: "transformers": its modules compute the model; "auto": only if no family here
            has the architecture.

    Raises:
        ConfigError: `directory` has no config.json.
        ModelError: a file does not contain a JSON object, or is not a regular file.
        UnsupportedModelError: the architecture or a key that changes the computation is not
            supported, or a value is impossible; the message has file, key, value and what is
            allowed.
    """
    directory = Path(directory)
    if is_gguf(directory):
        from nanoengine.checkpoint.gguf_models import read_config

        return read_config(directory, parse_model_config, _by_transformers)
    if not os.path.lexists(directory / "config.json"):
        raise ConfigError(f"model={str(directory)!r} is not a checkpoint: it has no config.json")
    raw = read_object(directory / "config.json", ModelError)
    generation_path = directory / "generation_config.json"
    found = os.path.lexists(generation_path)
    generation = read_object(generation_path, ModelError) if found else {}
    try:
        if model_impl == "auto":
            return parse_model_config(raw, generation)
    except UnknownArchitectureError:
        from nanoengine.checkpoint.transformers_config import is_decoder

        if not is_decoder(raw):
            raise
    return _by_transformers(directory, raw, generation, warn=model_impl == "auto")


def _by_transformers(model: Path, raw: Json, generation: Json, *, warn: bool = True) -> ModelConfig:
    """The ModelConfig of a checkpoint or a GGUF file that transformers' modules compute."""
    from nanoengine.checkpoint.transformers_config import sizes_of

    if warn:
        warn_once("%s has no native model: transformers' modules compute it", model)
    named, ours = raw.get("architectures"), ("dtype", "torch_dtype", "eos_token_id")
    keys = ConfigReader({key: raw.get(key) for key in ours})
    return ModelConfig(
        architecture=str(named[0] if named else raw.get("model_type")),
        dtype=_dtype(keys),
        eos_sources=tuple(_eos_sources(keys, generation)),
        generation_defaults=_generation_defaults(generation),
        model_impl="transformers",
        **sizes_of(model),
    )


def parse_model_config(
    raw: Json, generation: Json | None = None, make_keys: Callable[..., ConfigReader] = ConfigReader
) -> ModelConfig:
    """Normalises a parsed config.json; see `load_model_config`. `make_keys` creates its reader."""
    generation, (raw, architecture, is_part) = generation or {}, _text_part(raw)
    family = FAMILIES.get(architecture) or every_family()[architecture]
    raw = family.normalize(raw) if family.normalize else raw
    ignored_tensors = [OTHER_PARTS] if is_part else []
    ignored_tensors += [family.ignored_tensors] if family.ignored_tensors else []
    model_type = raw["model_type"] if is_part else family.model_type
    keys = make_keys(raw, family.defaults, model_type=model_type)
    heads, hidden_size = keys.require("num_attention_heads"), keys.require("hidden_size")
    kv_heads = keys.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = keys.head_dim
    if head_dim < 2 or head_dim % 2:
        raise UnsupportedModelError(
            f"head_dim={head_dim} must be even and at least 2; if config.json lacks it, it is"
            f" hidden_size={hidden_size} divided by num_attention_heads={heads}"
        )
    layer = family.layers(keys)
    if layer.mla is not None:
        kv_heads, head_dim = 1, layer.mla.size
        layer = replace(layer, rotary_dim=layer.mla.qk_rope_head_dim)
    if layer.gemma4 is not None:
        head_dim, kv_heads = layer.gemma4.largest_shape
        ignored_tensors += _unused_kv_tensors(keys, layer.gemma4.num_kv_shared)
    if family.partial_rotary:
        rotary_dim = read_rotary_dim(keys, head_dim)
        layer = replace(layer, rotary_dim=None if rotary_dim == head_dim else rotary_dim)
    states = _states(family, keys, layer)
    windows = _sliding_windows(architecture, family, keys, states)
    slides = [window is not None for window in windows]
    if family.rope_theta_keys:
        full, sliding = read_ropes_by_kind(keys, *family.rope_theta_keys)
        ropes: Ropes = tuple(sliding if slide else full for slide in slides)
    else:
        rope = read_rope(keys, extra=family.rope_extra, partial=family.partial_rotary)
        ropes = tuple(rope if used else None for used in family.rope_layers(keys, slides))
    headless = not is_part and architecture not in (raw.get("architectures") or [architecture])
    # Why tied if headless: then no head is allocated.
    tied = keys.get("tie_word_embeddings") or headless
    vocab_size = keys.require("vocab_size")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=family.intermediate_size(keys),
        num_hidden_layers=keys.require("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_longest_context(keys, ropes),
        rms_norm_eps=keys.get(family.norm_eps),
        tie_word_embeddings=tied,
        plan=layer,
        ropes=ropes,
        sliding_windows=windows,
        states=states,
        moe=family.moe(keys) if family.moe else None,
        tensor_names=family.names,
        ignored_tensors="|".join(ignored_tensors) or _mtp_tensors(keys),
        dtype=_dtype(keys),
        quantization=_quantization(keys, family, layer, is_part=is_part, tied=tied),
        eos_sources=tuple(_eos_sources(keys, generation)),
        generation_defaults=_generation_defaults(generation),
        headless=headless,
    )
    _check_longrope(config)
    keys.reject_unread()
    if unknown := keys.unknown_keys():
        names = join_names([*map(quoted, unknown)])
        logger.warning("config.json has unknown keys, which are ignored: %s", names)
    return config


def _text_part(raw: Json) -> tuple[Json, str, bool]:
    """Returns the config of the text model, its architecture, and whether it is part of a
    multimodal model.

    A multimodal config has the keys of the text part in `text_config`, and some of them outside it.
    """
    ours = "architectures", "model_type", "text_config"
    check_values({key: raw.get(key) for key in ours}, "config.json")
    names, model_type = raw.get("architectures") or [], raw.get("model_type")
    for name in names:
        if name in families.TEXT_PARTS:
            text = raw.get("text_config") or _flat_text_config(raw)
            kind = str(text.get("model_type"))
            architecture = families.text_types().get(kind)
            if architecture is None:
                raise UnknownArchitectureError(
                    f"the text of {name} has model_type={quoted(text.get('model_type'))}, which"
                    " no family here has; a checkpoint of the text model alone may run"
                )
            if not text.keys() >= {"hidden_size", "num_hidden_layers"}:
                from nanoengine.checkpoint.transformers_config import complete_text_config

                text = complete_text_config(text)
            outside = {k: raw[k] for k in families.OUTER_KEYS if raw.get(k) is not None}
            return {**families.TEXT_DEFAULTS.get(kind, {}), **text, **outside}, architecture, True
    if model_type == "exaone":  # its files may name Llama's class
        names = ["ExaoneForCausalLM"]
    for name in names:
        if name in FAMILIES:
            return raw, name, False
    every = every_family()
    if len(names) == 1 and names[0] in families.ALIASES:
        names = [families.ALIASES[names[0]]]
        raw = {**raw, "architectures": names}
    by_type = {family.model_type: name for name, family in every.items()}
    for name in names or [by_type.get(model_type or "")]:
        if name in every:
            return raw, name, False
    from nanoengine.checkpoint.pooling import find_decoder

    for name in names:
        if (generator := find_decoder(name, every)) is not None:
            return raw, generator, False
    what = join_names([*map(quoted, names)]) or f"model_type={quoted(model_type)}"
    raise UnknownArchitectureError(
        f"unsupported architecture {what}; supported:"
        f" {join_names([*every, *families.TEXT_PARTS], like=what, limit=3)}"
    )


def _flat_text_config(values: Json) -> Json:
    """The text_config of a config that has all keys outside, as older ones of Qwen-VL."""
    text = {key: v for key, v in values.items() if not key.startswith(("image", "video", "vision"))}
    kind = values.get("model_type")
    return text | {"model_type": kind and f"{kind}_text"}


def _states(family: Family, keys: ConfigReader, layer: LayerConfig) -> LinearAttentionConfig | None:
    states = family.states(keys) if family.states else None
    no_attention = len(states.layers) == keys.require("num_hidden_layers") if states else False
    if layer.layers_block_type is not None:
        no_attention = FULL not in layer.layers_block_type
    if no_attention and layer.falcon_h1 is None:
        raise UnsupportedModelError(
            "layer_types and attn_layer_indices define no layer with attention; supported: models"
            " with at least one"
        )
    return states if states is not None and states.layers else None


def _sliding_windows(
    architecture: str, family: Family, keys: ConfigReader, states: LinearAttentionConfig | None
) -> tuple[int | None, ...]:
    """The window of each layer. The family defines which layers have a window, and `layer_types`
    must not contradict it."""
    num_layers, kinds = keys.require("num_hidden_layers"), keys.get("layer_types")
    if kinds and states is not None:
        kinds = [FULL if n in states.layers else kind for n, kind in enumerate(kinds)]
    kinds = kinds and [FULL if kind == ATTENTION else kind for kind in kinds]
    for kind in kinds or ():
        if kind not in (FULL, SLIDING):
            raise UnsupportedModelError(
                f"layer_types has {quoted(kind)}; supported: {FULL!r}, {SLIDING!r}"
            )
    if kinds and len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"layer_types has {len(kinds)} entries; it must have num_hidden_layers={num_layers}"
        )
    slides = family.windows(keys, kinds or None, num_layers)
    window = keys.require("sliding_window") if any(slides) else None
    if kinds and slides != [kind == SLIDING for kind in kinds]:
        raise UnsupportedModelError(
            f"layer_types={quoted(kinds)} contradicts"
            f" sliding_window={keys.get('sliding_window')!r},"
            f" use_sliding_window={keys.get('use_sliding_window')!r} of {architecture}"
        )
    return tuple(window if slide else None for slide in slides)


def _unused_kv_tensors(keys: ConfigReader, num_shared: int) -> list[str]:
    """Patterns of `ignored_tensors` for layers that use the KV cache of another layer."""
    layers = keys.require("num_hidden_layers")
    numbers = "|".join(map(str, range(layers - num_shared, layers)))
    names = rf"[\w.]*layers\.({numbers})\.self_attn\.[kv]_(proj|norm)\."
    return [names] if num_shared else []


def _mtp_tensors(keys: ConfigReader) -> str:
    """Pattern of `ignored_tensors` for the MTP layers (multi-token prediction), which follow the
    last layer of the model."""
    first, count = keys.require("num_hidden_layers"), keys.get("num_nextn_predict_layers")
    numbers = "|".join(str(first + n) for n in range(count))
    return rf"model\.layers\.({numbers})\." if count else ""


def _longest_context(keys: ConfigReader, ropes: Ropes) -> int:
    longest = keys.require("max_position_embeddings")
    for rope in ropes:
        if rope is not None and rope.type == "yarn":
            extended = int(rope.factor * rope.original_max_position_embeddings)
            longest = min(max(longest, extended), MAX_POSITIONS)
    return longest


def _check_longrope(config: ModelConfig) -> None:
    pairs = (config.plan.rotary_dim or config.head_dim) // 2
    for rope in config.ropes:
        if rope is not None and rope.type == "longrope":
            for name in ("short_factor", "long_factor"):
                if len(getattr(rope, name)) != pairs:
                    raise UnsupportedModelError(
                        f"rope type 'longrope' has {len(getattr(rope, name))} entries in {name};"
                        f" it must have rotary_dim / 2 = {pairs}"
                    )


def _quantization(
    keys: ConfigReader, family: Family, layer: LayerConfig, *, is_part: bool, tied: bool
) -> StoredQuantization | None:
    raw = keys.get("quantization_config")
    if not raw:
        return None
    from nanoengine.checkpoint.quantization_parsers import parse_quantization

    stored = parse_quantization(raw, tied=tied)
    if stored.format == "mxfp4" and family.model_type != "gpt_oss":
        raise UnsupportedModelError(
            f"quantization_config of mxfp4 is not implemented for {family.model_type}; supported:"
            " the experts of gpt_oss"
        )
    if is_part:
        raise UnsupportedModelError(
            f"quantization_config of {stored.format} is not implemented for the text part of a"
            " multimodal checkpoint; supported: unquantized checkpoints"
        )
    # Why: these patterns match the checkpoint's tensor names, but layers look them up by ours.
    patterns = *stored.skipped, *stored.targets
    skipped = [pattern for pattern in patterns if pattern not in ("lm_head$", "")]
    if skipped and (family.names or layer.fused_qkv or layer.fused_gate_up):
        raise UnsupportedModelError(
            "quantization_config skips layers, which is not implemented for"
            f" {family.model_type}: {quoted(skipped)}"
        )
    return stored


def _dtype(keys: ConfigReader) -> str:
    key = "dtype" if keys.get("dtype") else "torch_dtype"
    name = (keys.get(key) or "float32").removeprefix("torch.")
    return check_value(name, Dtype, f"config.json: {key}", UnsupportedModelError)


def _eos_sources(keys: ConfigReader, generation: Json) -> Iterator[tuple[str, int | None]]:
    """The EOS ids of generation_config.json, then of config.json: see `ModelConfig.eos_sources`."""
    key = "eos_token_id"
    first = ConfigReader({key: generation.get(key)}, where="generation_config.json")
    where = keys.where if keys.raw.get(key) is not None else "the architecture's default"
    for source, value in ((first.where, first.get(key)), (where, keys.get(key))):
        for token_id in value if isinstance(value, list) else [value]:
            yield source, token_id


def _generation_defaults(generation: Json) -> dict[str, float]:
    """The sampling settings of generation_config.json, as valid fields of SamplingParams."""
    found = {}
    for ours in GENERATION_DEFAULTS:
        name = "max_new_tokens" if ours == "max_tokens" else ours
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
