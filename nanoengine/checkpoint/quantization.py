"""Quantization as a config says it: what a checkpoint stores, and what the engine makes of it.

`parse_quantization` reads the `quantization_config` of a config.json in the dialects of GPTQ, AWQ,
compressed-tensors and MXFP4; `resolve_quantization` joins it with the user's option. Plain json, no
torch. Called by `load_model_config` and by `build_engine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanoengine.errors import ConfigError, UnsupportedModelError
from nanoengine.settings.checks import check_value, shown

Json = Mapping[str, Any]

KINDS: dict[str, Any] = {
    **dict.fromkeys(("bits", "w_bit", "num_bits", "group_size", "q_group_size"), int),
    **dict.fromkeys(("desc_act", "lm_head", "symmetric"), bool),
    **dict.fromkeys(("quant_method", "format", "checkpoint_format", "version", "strategy"), str),
    **dict.fromkeys(("modules_to_not_convert", "ignore"), list[str]),
    **dict.fromkeys(("weights", "input_activations", "sparsity_config"), dict[str, Any]),
    "config_groups": dict[str, dict[str, Any]],
}
"""Key that is read -> what its value is, wherever in `quantization_config` it stands."""

GGUF_WEIGHT_ONLY = "gguf_weight_only"
"""The option that runs a GGUF file with activations as they are."""

MOST_REPEATS = 4
"""Quantifiers in an expression of `ignore`. Why: time grows with the power of their number."""

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Last part of a fused layer's name -> those of the matrices that checkpoints hold."""
STATES = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The same of layers that keep a state, in GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint's linear layers are stored.

    Attributes:
        format: gptq, awq, pack-quantized or int-quantized; mxfp4 holds experts only; gguf: each
            matrix in a type of its own.
        bits: 4 or 8; of gguf the one that is nearer to what its types have.
        group_size: inputs that share a scale; None: a whole row does.
        symmetric: there are no zero points. GPTQ and AWQ store them in any case.
        zero_offset: what to add to stored zero points.
        scattered: GPTQ: the inputs of a group lie anywhere, so a matrix must say of each its group.
        activations: what the checkpoint was made for; "int8" are quantized token by token.
        skipped: regular expressions of the names of linear layers that are stored as floats.
        types: gguf: the name of a matrix -> its type.
    """

    format: Literal["gptq", "awq", "pack-quantized", "int-quantized", "mxfp4", "gguf"]
    bits: int
    group_size: int | None
    symmetric: bool = False
    zero_offset: int = 0
    scattered: bool = False
    activations: Literal["int8", "float"] = "float"
    skipped: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The `quant_method` that stores so: a key of `METHODS`."""
        return self.format if self.format in (*METHODS, "gguf") else "compressed-tensors"

    def holds(self, name: str) -> bool:
        """Whether the linear layer of this full name is stored quantized.

        Raises:
            UnsupportedModelError: of matrices that are fused here, some are and some are not.
        """
        if self.format == "mxfp4":
            return ".experts." in name
        beside, _, last = name.rpartition(".")
        names = [f"{beside}.{part}" for part in FUSED[last]] if last in FUSED else [name]
        if self.format == "gguf":
            names = [f"{beside}.{part}" for part in STATES[last]] if last in STATES else names
            # Why all: of those that are multiplied as one, a float can't be made blocks.
            return name in self.types or all(part in self.types for part in names)
        held = [not any(re.match(skipped, part) for skipped in self.skipped) for part in names]
        if any(held) and not all(held):
            raise UnsupportedModelError(
                f"quantization_config quantizes only some of {', '.join(names)}, which are"
                " multiplied as one; supported: all or none of them"
            )
        return held[0]


IN_MXFP4 = StoredQuantization(format="mxfp4", bits=4, group_size=32, symmetric=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the engine holds and multiplies linear layers.

    Attributes:
        bits: of a weight.
        activations: "int8": quantized token by token; "float": as they are.
        stored: how the checkpoint holds them; None: as floats, to be quantized while they load.
    """

    bits: int
    activations: Literal["int8", "float"]
    stored: StoredQuantization | None = None

    def __str__(self) -> str:
        if self.stored and self.stored.format == "gguf":
            types = ", ".join(sorted(set(self.stored.types.values())))
            return f"GGUF weights ({types}), {self.activations} activations"
        source = f"stored as {self.stored.format}" if self.stored else "quantized at load"
        return f"int{self.bits} weights ({source}), {self.activations} activations"


def resolve_quantization(
    option: str | None, stored: StoredQuantization | None, *, device: str
) -> Quantization | None:
    """What `EngineConfig.quantization` means for this checkpoint; None: plain floats.

    A checkpoint that is stored quantized is run as it was made; an option of the same number of
    bits may still choose how activations are taken, and one that names its format changes nothing.

    Raises:
        ConfigError: the option contradicts the checkpoint or can't be obeyed on this device.
        UnsupportedModelError: the checkpoint is quantized and can't be run.
    """
    asked = "gguf" if option == GGUF_WEIGHT_ONLY else option
    if asked in (*METHODS, "gguf"):
        found = stored.method if stored else "floats"
        if asked != found:
            raise ConfigError(
                f"quantization={option!r} contradicts the checkpoint, which is stored as {found}:"
                " leave the option out, or give a checkpoint of that format"
            )
        if stored and option == GGUF_WEIGHT_ONLY:
            stored = replace(stored, activations="float")
        option = None
    if option is not None and stored and stored.format == "gguf":
        raise ConfigError(
            f"quantization={option!r} would quantize a GGUF file that is quantized already, in"
            f" {', '.join(sorted(set(stored.types.values())))}: leave the option out, ask for"
            f" {GGUF_WEIGHT_ONLY!r}, or give a file of floats"
        )
    if option is not None:
        bits, floats = int(option[3]), option.endswith("weight_only")
        activations: Literal["int8", "float"] = "float" if floats else "int8"
    elif stored is None:
        return None
    elif stored.format == "mxfp4" and device != "cpu":
        return None  # held as floats: layers read the stored form into what they hold
    else:
        bits, activations = stored.bits, stored.activations
    what = f"quantization={option!r}" if option else "a quantized checkpoint"
    if stored and bits != stored.bits:
        raise ConfigError(
            f"{what} contradicts the checkpoint, which is stored in int{stored.bits}"
            f" ({stored.format}): leave the option out, or ask for 'int{stored.bits}' or"
            f" 'int{stored.bits}_weight_only'"
        )
    if device != "cpu":
        raise ConfigError(
            f"{what} runs on the CPU only, got device={device!r}: use device='cpu', or a"
            " checkpoint and options without quantization"
        )
    return Quantization(bits=bits, activations=activations, stored=stored)


def parse_quantization(raw: Json, *, tied: bool) -> StoredQuantization:
    """The normalised form of a config's `quantization_config`.

    Args:
        tied: the head is the embedding, which no format quantizes.

    Raises:
        UnsupportedModelError: a method, or a setting of it, that is not implemented.
    """
    raw = _checked(raw)
    method = raw.get("quant_method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={shown(method)}; supported: {', '.join(METHODS)}"
        )
    return METHODS[method](raw, ("lm_head$",) if tied else ())


def _checked(raw: Json) -> dict[str, Any]:
    """The keys that have a value, those that are read being of the right type."""
    given = {key: value for key, value in raw.items() if value is not None}
    for key in given.keys() & KINDS.keys():
        where = f"config.json: quantization_config: {key}"
        given[key] = check_value(given[key], KINDS[key], where, UnsupportedModelError)
    return given


def _gptq(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: AutoGPTQ's `BaseQuantizeConfig` and GPTQModel's `QuantizeConfig`."""
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _allow("gptq", "checkpoint_format", layout, "gptq", "gptq_v2")
    _allow("gptq", "bits", raw.get("bits"), 4, 8)
    usual = {"is_marlin_format": False, "pack_dtype": "int32", "dynamic": {}}
    for key, value in {**usual, "modules_in_block_to_quantize": []}.items():
        _allow("gptq", key, raw.get(key) or value, value)
    group_size = _group_size(raw.get("group_size", -1))
    return StoredQuantization(
        format="gptq",
        bits=raw["bits"],
        group_size=group_size,
        scattered=raw.get("desc_act", False) and group_size is not None,
        zero_offset=1 if layout == "gptq" else 0,
        skipped=skipped if raw.get("lm_head") else (*skipped, "lm_head$"),
    )


def _awq(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: AutoAWQ's `AwqConfig`; `modules_to_not_convert` names parts of layers' names."""
    bits = raw.get("bits", raw.get("w_bit"))
    _allow("awq", "bits", bits, 4)
    _allow("awq", "version", str(raw.get("version", "gemm")).lower(), "gemm")
    _allow("awq", "zero_point", raw.get("zero_point", True), True)
    names = raw.get("modules_to_not_convert") or []
    return StoredQuantization(
        format="awq",
        bits=4,
        group_size=_group_size(raw.get("group_size", raw.get("q_group_size", -1))),
        skipped=(*skipped, "lm_head$", *(f".*{re.escape(name)}" for name in names)),
    )


def _compressed_tensors(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: compressed-tensors' `QuantizationConfig`, `QuantizationScheme`,
    `QuantizationArgs`."""
    method = "compressed-tensors"
    groups = list((raw.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"quantization_config has {len(groups)} config_groups; supported: one, of all layers"
        )
    group = _checked(groups[0])
    layout = group.get("format") or raw.get("format")
    weights, inputs = _checked(group.get("weights", {})), group.get("input_activations")
    packed = layout == "pack-quantized"
    sparsity = (raw.get("sparsity_config") or {}).get("format") or "dense"
    _allow(method, "format", layout, "pack-quantized", "int-quantized")
    _allow(method, "targets", group.get("targets"), ["Linear"])
    _allow(method, "kv_cache_scheme", raw.get("kv_cache_scheme"), None)
    _allow(method, "sparsity_config.format", sparsity, "dense")
    _allow(method, "transform_config", raw.get("transform_config") or {}, {})
    _allow(method, "output_activations", group.get("output_activations"), None)
    _allow(method, "weights.type", weights.get("type", "int"), "int")
    _allow(method, "weights.num_bits", weights.get("num_bits"), *((4, 8) if packed else (8,)))
    strategy = weights.get("strategy")
    _allow(method, "weights.strategy", strategy, "channel", *(["group"] if packed else []))
    symmetric = weights.get("symmetric", True)
    if packed:
        _allow(method, "input_activations", inputs, None)
    else:
        _allow(method, "weights.symmetric", symmetric, True)
        given = {key: (inputs or {}).get(key) for key in TOKEN_ACTIVATIONS}
        _allow(method, "input_activations", given, TOKEN_ACTIVATIONS)
    return StoredQuantization(
        format=layout,
        bits=weights["num_bits"],
        group_size=_group_size(weights.get("group_size")) if strategy == "group" else None,
        symmetric=symmetric,
        activations="float" if packed else "int8",
        skipped=(*skipped, *(_ignored(name) for name in raw.get("ignore") or [])),
    )


def _mxfp4(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: transformers' `Mxfp4Config`. Whatever it leaves out besides, it quantizes experts."""
    method, names = "mxfp4", raw.get("modules_to_not_convert") or []
    for name in names:
        if "experts" in name or not name.strip(".*"):
            raise UnsupportedModelError(
                f"quantization_config of {method} has modules_to_not_convert={shown(name)};"
                " supported: experts all in 4 bits, and names of other layers"
            )
    return IN_MXFP4


TOKEN_ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""Activations of compressed-tensors that are those of `quantize_rows`."""

METHODS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
"""`quant_method` -> its reader."""


def _ignored(name: str) -> str:
    """compressed-tensors: a full name, or "re:" and an expression that matches from the start.

    Raises:
        UnsupportedModelError: the expression is none, or one that may take for ever.
    """
    if not name.startswith("re:"):
        return re.escape(name) + "$"
    pattern = name.removeprefix("re:")
    repeats = len(re.findall(r"[*+{]", pattern))
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(
            f"quantization_config: ignore has {shown(name)}, which is no expression: {error}"
        ) from error
    if repeats > MOST_REPEATS or re.search(r"\)[*+{]", pattern):
        raise UnsupportedModelError(
            f"quantization_config: ignore has {shown(name)}; supported: expressions with up to"
            f" {MOST_REPEATS} repeats, and none of a group"
        )
    return pattern


def _allow(method: str, key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise UnsupportedModelError(
            f"quantization_config of {method} has {key}={shown(value)}; supported:"
            f" {' or '.join(map(repr, allowed))}"
        )


def _group_size(value: Any) -> int | None:
    if value in (None, -1):
        return None
    if not 1 <= value < 2**31:
        raise UnsupportedModelError(
            f"quantization_config has group_size={value!r}; supported: a positive integer or -1"
        )
    return value
