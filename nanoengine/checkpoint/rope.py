"""RopeConfig: the RoPE parameters of a layer, from a config.json.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes all parameters into
`rope_parameters`. Called by `config.py`; `layers/rotary.py` computes the angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, quoted

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "proportional": (set(), {"factor", "partial_rotary_factor"}),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
"""Rope type -> its required and its optional parameters."""

RENAMED = {"su": "longrope", "mrope": "default"}
"""Older names of rope types. Why default: see `M_ROPE`."""

ORIGINAL = "original_max_position_embeddings"
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL}
"""Parameters that every rope type may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """RoPE parameters. Fields that the type does not use keep their defaults.

    Attributes:
        theta: base of the frequencies.
        type: default, linear, llama3, yarn, longrope or proportional. "dynamic" becomes default.
        factor: length of the context relative to pre-training.
        original_max_position_embeddings: context of pre-training [tokens].
        low_freq_factor, high_freq_factor: llama3: bounds of the wavelengths whose frequencies are
            interpolated between scaled and unscaled.
        beta_fast, beta_slow: yarn: the same bounds, as rotations within the original context.
        attention_factor: yarn, longrope: factor on cos and sin.
        score_factor: yarn: factor on the attention scores of MLA; other attention does not use it.
        truncate: yarn: the bounds are rounded to whole dimensions.
        short_factor, long_factor: longrope: divisors of the frequency of each pair of dimensions.
            `short_factor` is used if `max_model_len` is within the original context.
        partial_rotary_factor: proportional: the share of pairs that RoPE rotates. Their frequencies
            are computed as if all pairs were rotated.
        llama_4_scaling_beta: queries are scaled by 1 + beta * log(1 + position // original
            context).
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
    score_factor: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    llama_4_scaling_beta: float = 0.0


def read_rope(keys: ConfigReader, *, extra: Mapping[str, bool], partial: bool) -> RopeConfig:
    """Reads the RoPE parameters of all layers.

    Args:
        extra: further keys of `rope_parameters` -> True if they are supported, False if they have
            no effect on text.
        partial: whether the family supports `partial_rotary_factor` (see `read_rotary_dim`).
    """
    key, raw = _rope_dict(keys)
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise UnsupportedModelError(
            f"{key}={quoted(raw)}: parameters per layer type are not implemented"
        )
    # Why first: in transformers it takes precedence over the same key in the dict.
    original = keys.get(ORIGINAL)
    return _rope(raw, keys, "rope_theta", original, key, extra, partial)


def read_ropes_by_kind(keys: ConfigReader, full: str, sliding: str) -> list[RopeConfig]:
    """Reads RoPE of layers with full attention and of layers with a window.

    `full` and `sliding` are the keys of their bases. `rope_scaling` applies only to layers with
    full attention. As in transformers, keys of `rope_parameters` other than the layer types are
    ignored.
    """
    nested, scaling = keys.get_dict("rope_parameters"), keys.get("rope_scaling") or {}
    kinds = ("full_attention", full, scaling), ("sliding_attention", sliding, {})
    unused = sorted(nested.keys() - {kind for kind, _, _ in kinds})
    keys.ignored_keys += [f"rope_parameters.{key}" for key in unused]
    found = []
    for kind, base, kind_scaling in kinds:
        where = f"config.json: rope_parameters: {kind}"
        inner = check_value(nested.get(kind), dict[str, Any] | None, where, UnsupportedModelError)
        raw = {**(inner or {}), **kind_scaling}
        found.append(_rope(raw, keys, base, 0, "rope_parameters", {}, partial=False))
    return found


def read_rotary_dim(keys: ConfigReader, head_dim: int) -> int:
    """How many of the first dimensions of a head are rotated."""
    key, raw = _rope_dict(keys)
    rope_keys, name = ConfigReader(raw, where=f"config.json: {key}"), "partial_rotary_factor"
    outer = keys.get(name)
    factor = rope_keys.get(name) if name in rope_keys else outer
    size = keys.get("rotary_dim")
    setting = f"{name}={factor}" if size is None else f"rotary_dim={size}"
    size = int(head_dim * factor) if size is None else size
    if not 2 <= size <= head_dim or size % 2:
        raise UnsupportedModelError(
            f"{setting} rotates {size} of head_dim={head_dim} dimensions; it must be an even number"
        )
    return size


def _rope_dict(keys: ConfigReader) -> tuple[str, Json]:
    key = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    return key, keys.get_dict(key)


def _rope(
    raw: Json, keys: ConfigReader, base: str, original: int, key: str, extra: Mapping[str, bool],
    partial: bool,
) -> RopeConfig:  # fmt: skip
    rope_keys = ConfigReader(raw, where=f"config.json: {key}")
    kind = rope_keys.get("rope_type" if "rope_type" in rope_keys else "type")
    kind = RENAMED.get(kind, kind)
    has_theta = "rope_theta" in rope_keys
    # Why: the outer key is read, and so checked, even if the key in the dict takes precedence.
    theta = keys.get(base) if base in keys.raw or not has_theta else None
    theta = rope_keys.get("rope_theta") if has_theta else theta
    if not partial and kind != "proportional":
        rope_keys.require_one_of("partial_rotary_factor", 1.0)
    if kind == "dynamic" and "alpha" in extra and (alpha := rope_keys.get("alpha")):
        # Source: the model code of HunYuan. With alpha, the angles do not depend on the length.
        size = keys.head_dim
        return RopeConfig(theta=theta * alpha ** (size / (size - 2)))
    if kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"rope type {quoted(kind)} is not implemented; supported: {', '.join(ROPE_KEYS)}"
        )
    required, optional = ROPE_KEYS[kind]
    supported = required | optional | {name for name, supported in extra.items() if supported}
    values = {name: rope_keys.get(name) for name in sorted(supported) if name in rope_keys}
    values = {name: value for name, value in values.items() if value is not None}
    if missing := sorted(required - values.keys()):
        raise UnsupportedModelError(f"rope type {quoted(kind)} needs {', '.join(missing)}")
    known = supported | COMMON_KEYS | {*extra}
    if unknown := {name: raw[name] for name in sorted(raw.keys() - known)}:
        raise UnsupportedModelError(
            f"rope type {quoted(kind)} has unknown parameters {quoted(unknown)}"
        )
    if kind in ("llama3", "yarn", "longrope"):
        from nanoengine.checkpoint.rope_parameters import COMPLETE

        longest = original or rope_keys.get(ORIGINAL) or keys.require("max_position_embeddings")
        values[ORIGINAL] = longest
        COMPLETE[kind](values, keys)
    if kind == "dynamic":
        # Why: angles change only beyond max_position_embeddings, and no sequence is longer.
        return RopeConfig(theta=float(theta))
    return RopeConfig(theta=float(theta), type=kind, **values)
