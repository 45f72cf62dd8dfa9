"""RopeConfig: the RoPE parameters, from the keys of either version of transformers.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 nests all of it in
`rope_parameters`. Called by `config.py`; `layers/rotary.py` computes the angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.checkpoint.config_reader import ConfigReader, Json
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, repr_short

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

ORIGINAL = "original_max_position_embeddings"
EVERYWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", ORIGINAL}
"""Parameters that any rope type may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """RoPE parameters. Fields that a type doesn't use keep their defaults.

    Attributes:
        theta: base of the wavelengths.
        type: default, linear, llama3, yarn, longrope or proportional; dynamic is default here.
        factor: how many times longer the context is than in pre-training.
        original_max_position_embeddings: context of pre-training [tokens].
        low_freq_factor, high_freq_factor: llama3: the band of wavelengths that is blended.
        beta_fast, beta_slow: yarn: rotations within the original context that bound its blend.
        attention_factor: yarn, longrope: factor on cos and sin.
        score_factor: yarn: factor on attention scores of MLA; no other attention has it.
        truncate: yarn: round the blend's bounds to whole dimensions.
        short_factor, long_factor: longrope: divisors of each pair's frequency, for an engine whose
            `max_model_len` is within the original context, and for a longer one.
        partial_rotary_factor: proportional: RoPE rotates this part of the pairs, with frequencies
            computed as if it rotated all.
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
        extra: further keys of `rope_parameters` -> whether they are supported; the others have no
            effect on text.
        partial: the family supports `partial_rotary_factor`, which `read_rotary_dim` reads.
    """
    key, given = _dict_of(keys)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"{key}={repr_short(given)}: parameters for each layer type are not implemented"
        )
    # Why before the dict's own: transformers overwrites that.
    original = keys.get(ORIGINAL)
    return _rope(given, keys, "rope_theta", original, key, extra, partial)


def read_ropes_by_kind(keys: ConfigReader, full: str, sliding: str) -> list[RopeConfig]:
    """Reads RoPE for layers with full attention and for layers with a window, by the keys of their
    bases. Scaling applies only to the former. As in transformers, keys of `rope_parameters` other
    than the layer types are ignored."""
    nested, scaling = keys.nonempty("rope_parameters"), keys.get("rope_scaling") or {}
    kinds = ("full_attention", full, scaling), ("sliding_attention", sliding, {})
    others = sorted(nested.keys() - {kind for kind, _, _ in kinds})
    keys.ignored += [f"rope_parameters.{key}" for key in others]
    found = []
    for kind, base, more in kinds:
        where = f"config.json: rope_parameters: {kind}"
        own = check_value(nested.get(kind), dict[str, Any] | None, where, UnsupportedModelError)
        given = {**(own or {}), **more}
        found.append(_rope(given, keys, base, 0, "rope_parameters", {}, partial=False))
    return found


def read_rotary_dim(keys: ConfigReader, head_dim: int) -> int:
    """How many of a head's first dimensions RoPE rotates."""
    key, raw = _dict_of(keys)
    given, name = ConfigReader(raw, where=f"config.json: {key}"), "partial_rotary_factor"
    outside = keys.get(name)
    factor = given.get(name) if name in given else outside
    size = keys.get("rotary_dim")
    said = f"{name}={factor}" if size is None else f"rotary_dim={size}"
    size = int(head_dim * factor) if size is None else size
    if not 2 <= size <= head_dim or size % 2:
        raise UnsupportedModelError(
            f"{said} turns {size} of head_dim={head_dim}; supported: an even number of them"
        )
    return size


def _dict_of(keys: ConfigReader) -> tuple[str, Json]:
    key = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    return key, keys.nonempty(key)


def _rope(
    raw: Json, keys: ConfigReader, base: str, original: int, key: str, extra: Mapping[str, bool],
    partial: bool,
) -> RopeConfig:  # fmt: skip
    given = ConfigReader(raw, where=f"config.json: {key}")
    kind = given.get("rope_type" if "rope_type" in given else "type")
    kind = "longrope" if kind == "su" else kind
    own = "rope_theta" in given
    # Why: a key outside the dict is checked although the dict's own has precedence; its default is
    # not read.
    theta = keys.get(base) if base in keys.given or not own else None
    theta = given.get("rope_theta") if own else theta
    if not partial and kind != "proportional":
        given.allow("partial_rotary_factor", 1.0)
    if kind == "dynamic" and "alpha" in extra and (alpha := given.get("alpha")):
        # Source: the model code of HunYuan; the angles don't depend on a prompt's length.
        size = keys.head_dim
        return RopeConfig(theta=theta * alpha ** (size / (size - 2)))
    if kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"rope type {repr_short(kind)} is not implemented; supported: {', '.join(ROPE_KEYS)}"
        )
    required, optional = ROPE_KEYS[kind]
    obeyed = required | optional | {name for name, obeyed in extra.items() if obeyed}
    values = {name: given.get(name) for name in sorted(obeyed) if name in given}
    values = {name: value for name, value in values.items() if value is not None}
    if missing := sorted(required - values.keys()):
        raise UnsupportedModelError(f"rope type {repr_short(kind)} needs {', '.join(missing)}")
    if unknown := {name: raw[name] for name in sorted(raw.keys() - obeyed - EVERYWHERE - {*extra})}:
        raise UnsupportedModelError(
            f"rope type {repr_short(kind)} has unknown parameters {repr_short(unknown)}"
        )
    if kind in ("llama3", "yarn", "longrope"):
        from nanoengine.checkpoint.rope_parameters import COMPLETED

        longest = original or given.get(ORIGINAL) or keys.require("max_position_embeddings")
        values[ORIGINAL] = longest
        COMPLETED[kind](values, keys)
    if kind == "dynamic":
        # Why: the angles change only beyond max_position_embeddings, which no sequence exceeds
        # here.
        return RopeConfig(theta=float(theta))
    return RopeConfig(theta=float(theta), type=kind, **values)
