"""parse_quantization: reads the `quantization_config` of a config.json, as GPTQ, AWQ,
compressed-tensors, fp8 and MXFP4 write it.

Imported only if a checkpoint has this key. Plain json, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanoengine.checkpoint.quantization import METHODS, MXFP4_EXPERTS, StoredQuantization
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, quoted, truncate

Json = Mapping[str, Any]

KEY_TYPES: dict[str, Any] = {
    **dict.fromkeys(("bits", "w_bit", "num_bits", "group_size", "q_group_size"), int),
    **dict.fromkeys(("desc_act", "lm_head", "symmetric"), bool),
    **dict.fromkeys(("quant_method", "format", "checkpoint_format", "version", "strategy"), str),
    **dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignore", "targets"), list[str]),
    **dict.fromkeys(("weight_block_size", "block_structure"), list[int]),
    **dict.fromkeys(("weights", "input_activations", "sparsity_config"), dict[str, Any]),
    "kv_cache_scheme": dict[str, Any],
    "config_groups": dict[str, dict[str, Any]],
}
"""Key -> the type of its value, anywhere in `quantization_config`."""

MAX_QUANTIFIERS = 4
"""Maximum number of quantifiers in a regular expression of `ignore`. Why: the time for matching
grows exponentially with their number."""


def parse_quantization(raw: Json, *, tied: bool) -> StoredQuantization:
    """Normalises a `quantization_config`.

    Args:
        tied: the language head is the embedding, which no format quantizes.

    Raises:
        UnsupportedModelError: a method or a setting is not implemented.
    """
    raw = _checked(raw)
    method = raw.get("quant_method")
    if method not in PARSERS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={quoted(method)}; supported:"
            f" {', '.join(PARSERS)}"
        )
    return PARSERS[method](raw, ("lm_head$",) if tied else ())


def _checked(raw: Json) -> dict[str, Any]:
    """Returns the keys whose values are not null, after checking their types."""
    values = {key: value for key, value in raw.items() if value is not None}
    for key in values.keys() & KEY_TYPES.keys():
        where = f"config.json: quantization_config: {key}"
        values[key] = check_value(values[key], KEY_TYPES[key], where, UnsupportedModelError)
    return values


def _gptq(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: AutoGPTQ's `BaseQuantizeConfig` and GPTQModel's `QuantizeConfig`."""
    layout = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    _require("gptq", "checkpoint_format", layout, "gptq", "gptq_v2")
    _require("gptq", "bits", raw.get("bits"), 4, 8)
    usual = {"is_marlin_format": False, "pack_dtype": "int32", "dynamic": {}}
    for key, value in {**usual, "modules_in_block_to_quantize": []}.items():
        _require("gptq", key, raw.get(key) or value, value)
    group_size = _group_size(raw.get("group_size", -1))
    return StoredQuantization(
        format="gptq",
        bits=raw["bits"],
        group_size=group_size,
        desc_act=raw.get("desc_act", False) and group_size is not None,
        zero_offset=1 if layout == "gptq" else 0,
        skipped=skipped if raw.get("lm_head") else (*skipped, "lm_head$"),
    )


def _awq(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: AutoAWQ's `AwqConfig`; `modules_to_not_convert` has parts of names of layers."""
    bits = raw.get("bits", raw.get("w_bit"))
    _require("awq", "bits", bits, 4)
    _require("awq", "version", str(raw.get("version", "gemm")).lower(), "gemm")
    _require("awq", "zero_point", raw.get("zero_point", True), True)
    names = raw.get("modules_to_not_convert") or []
    return StoredQuantization(
        format="awq",
        bits=4,
        group_size=_group_size(raw.get("group_size", raw.get("q_group_size", -1))),
        skipped=(*skipped, "lm_head$", *(f".*{re.escape(name)}" for name in names)),
    )


def _fp8(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """e4m3 floats with a scale per block, or per matrix. The language head is not quantized.

    Source: transformers' `FineGrainedFP8Config` and `should_convert_module`; AutoFP8 and vLLM's
    `Fp8Config` for whole matrices.
    """
    block = raw.get("weight_block_size")
    group_rows, group_size = _block("fp8", "weight_block_size", block) if block else (None, None)
    _require("fp8", "activation_scheme", raw.get("activation_scheme", "dynamic"), *SCALINGS)
    _require("fp8", "expert_dtype", raw.get("expert_dtype", "fp8"), "fp8")
    _require("fp8", "modules_to_convert", raw.get("modules_to_convert") or [], [])
    listed = raw.get("modules_to_not_convert", raw.get("ignored_layers", []))
    names = [name for name in listed if name != "lm_head"]
    starts = "|".join(_pattern(f"re:{name}", "modules_to_not_convert") for name in names)
    ends = "|".join(map(re.escape, names))
    # Perf: one expression for all 144 names of Qwen3-30B-A3B-FP8 takes a fifth of the time that 144
    # expressions take (0.5 s).
    pattern = rf"(?:{starts})(?:(?<=\.)|(?=\.|$))|.*(?:{ends})$"
    return StoredQuantization(
        format="fp8",
        bits=8,
        group_size=group_size,
        group_rows=group_rows,
        symmetric=True,
        activations="e4m3",
        skipped=(*skipped, "lm_head$", *([pattern] if names else [])),
    )


def _compressed_tensors(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: compressed-tensors' `QuantizationConfig`, `QuantizationScheme`,
    `QuantizationArgs`."""
    method = "compressed-tensors"
    sparsity = (raw.get("sparsity_config") or {}).get("format") or "dense"
    _require(method, "sparsity_config.format", sparsity, "dense")
    _require(method, "transform_config", raw.get("transform_config") or {}, {})
    if (cache := raw.get("kv_cache_scheme")) is not None:
        # Its scales are read with the weights; the option `kv_cache_dtype` selects fp8.
        scheme = {key: cache.get(key, default) for key, default in FP8_KV.items()}
        _require(method, "kv_cache_scheme", {**cache, **scheme}, {**cache, **FP8_KV})
    skipped = (*skipped, *(_pattern(name, "ignore") for name in raw.get("ignore") or []))
    groups = list((raw.get("config_groups") or {}).values())
    schemes = tuple(
        replace(_scheme(method, _checked({"format": raw.get("format"), **group})), skipped=skipped)
        for group in map(_checked, groups)
    )
    if not schemes or len({scheme.activations == "int8" for scheme in schemes}) > 1:
        raise UnsupportedModelError(
            f"quantization_config has {len(groups)} config_groups; supported: at least one, and"
            " int8 activations in all groups or in none"
        )
    return replace(schemes[0], schemes=schemes) if len(schemes) > 1 else schemes[0]


def _scheme(method: str, group: Json) -> StoredQuantization:
    """Parses one of the `config_groups`."""
    layout: Any = group.get("format")
    _require(method, "format", layout, *FORMATS)
    kind, bits, strategies = FORMATS[layout]
    weights, inputs = _checked(group.get("weights", {})), group.get("input_activations")
    _require(method, "output_activations", group.get("output_activations"), None)
    _require(method, "weights.type", weights.get("type", "int"), kind)
    _require(method, "weights.num_bits", weights.get("num_bits"), *bits)
    strategy = weights.get("strategy")
    _require(method, "weights.strategy", strategy, *strategies)
    symmetric = weights.get("symmetric", True)
    if layout != "pack-quantized":
        _require(method, "weights.symmetric", symmetric, True)
    if layout == "int-quantized":
        settings = {key: (inputs or {}).get(key) for key in TOKEN_ACTIVATIONS}
        _require(method, "input_activations", settings, TOKEN_ACTIVATIONS)
    elif inputs is not None:
        is_float = kind == "float" and inputs.get("type") == "float"
        _require(method, "input_activations", None if is_float else inputs, None)
    group_size, group_rows = weights.get("group_size"), 1 if strategy != "tensor" else None
    if strategy == "block":
        structure = weights.get("block_structure") or []
        group_rows, group_size = _block(method, "weights.block_structure", structure)
    elif strategy == "tensor_group":
        _require(method, "weights.group_size", group_size, 16)
    elif strategy != "group":
        group_size = None
    return StoredQuantization(
        format=layout,
        bits=weights["num_bits"],
        group_size=_group_size(group_size),
        group_rows=group_rows,
        symmetric=symmetric,
        activations=ACTIVATIONS.get(layout, "float") if inputs else "float",
        targets=tuple(
            "" if name == "Linear" else _pattern(name, "targets")
            for name in group.get("targets") or ["Linear"]
        ),
    )


def _mxfp4(raw: Json, skipped: tuple[str, ...]) -> StoredQuantization:
    """Source: transformers' `Mxfp4Config`. Only experts are quantized, so other names in
    `modules_to_not_convert` change nothing."""
    method, names = "mxfp4", raw.get("modules_to_not_convert") or []
    for name in names:
        if "experts" in name or not name.strip(".*"):
            raise UnsupportedModelError(
                f"quantization_config of {method} has modules_to_not_convert={quoted(name)};"
                " supported: names of layers that are not experts"
            )
    return MXFP4_EXPERTS


ACTIVATIONS: Any = {"int-quantized": "int8", "float-quantized": "e4m3"}
"""Format of compressed-tensors -> the activations, if the checkpoint quantizes them."""

SCALINGS = ("dynamic", "static")
"""How an fp8 checkpoint scales activations. The engine ignores it: if activations are quantized, it
uses one scale per token."""

FP8_KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
"""The scheme of compressed-tensors whose scales an fp8 cache uses."""

FORMATS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "pack-quantized": ("int", (4, 8), ("channel", "group")),
    "int-quantized": ("int", (8,), ("channel",)),
    "float-quantized": ("float", (8,), ("tensor", "channel", "group", "block")),
    "nvfp4-pack-quantized": ("float", (4,), ("tensor_group",)),
}
"""Format of compressed-tensors -> type, bits and strategies of the weights."""

TOKEN_ACTIVATIONS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""The int8 activations of compressed-tensors that are supported. The engine uses a scale per group
of inputs instead of a scale per token."""

PARSERS = dict(zip(METHODS, (_gptq, _awq, _compressed_tensors, _fp8, _mxfp4), strict=True))
"""`quant_method` -> its parser."""


def _pattern(name: str, key: str) -> str:
    """Converts an entry of a list (a full name, or "re:" and a regular expression) to a regular
    expression that matches from the start. `key` is the key of the list, for messages.

    Raises:
        UnsupportedModelError: the expression is invalid, or matching may take too long.
    """
    if not name.startswith("re:"):
        return re.escape(name) + "$"
    pattern = name.removeprefix("re:")
    quantifiers = len(re.findall(r"[*+{]", pattern))
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(
            f"quantization_config: {key} has {quoted(name)}, which is not a valid regular"
            f" expression: {truncate(error)}"
        ) from error
    if quantifiers > MAX_QUANTIFIERS or re.search(r"\)[*+{]", pattern):
        raise UnsupportedModelError(
            f"quantization_config: {key} has {quoted(name)}; supported: at most"
            f" {MAX_QUANTIFIERS} quantifiers (* + {{), and none after a group"
        )
    return pattern


def _require(method: str, key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise UnsupportedModelError(
            f"quantization_config of {method} has {key}={quoted(value)}; supported:"
            f" {' or '.join(map(repr, allowed))}"
        )


def _block(method: str, key: str, value: list[int]) -> tuple[int, int]:
    """The number of outputs and inputs of a block."""
    if len(value) != 2 or min(value) < 1:
        raise UnsupportedModelError(
            f"quantization_config of {method} has {key}={quoted(value)}; supported: two"
            " positive integers"
        )
    return value[0], value[1]


def _group_size(value: Any) -> int | None:
    if value in (None, -1):
        return None
    if not 1 <= value < 2**31:
        raise UnsupportedModelError(
            f"quantization_config has group_size={quoted(value)}; supported: a positive"
            " integer or -1"
        )
    return value
