"""RopeConfig: how positions become angles, from the keys of either writer of configs.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 nests all of it in
`rope_parameters`. Called by `families.py`; the angles themselves are made in `layers/rotary.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoengine.checkpoint.keys import Json, Keys, checked, refuse_unless
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import check_value, shown

ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor"}),
}
"""Rope type -> its required and its optional parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. Fields that a type doesn't use keep their defaults.

    Attributes:
        theta: base of the wavelengths.
        type: default, linear, llama3, yarn or longrope.
        factor: how many times longer the context is than in pre-training.
        original_max_position_embeddings: context of pre-training [tokens].
        low_freq_factor, high_freq_factor: llama3: the band of wavelengths that is blended.
        beta_fast, beta_slow: yarn: rotations within the original context that bound its blend.
        attention_factor: yarn, longrope: factor on cos and sin.
        truncate: yarn: round the blend's bounds to whole dimensions.
        short_factor, long_factor: longrope: what slows each pair of dimensions in an engine whose
            `max_model_len` is within the original context, and in one with a longer one.
        llama_4_scaling_beta: queries grow by 1 + beta * log(1 + position // original context).
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    llama_4_scaling_beta: float = 0.0


def read_rope(keys: Keys, *, extra: Mapping[str, bool], partial: bool) -> RopeConfig:
    """The RoPE parameters of all layers.

    Args:
        extra: further keys of `rope_parameters` -> whether they are obeyed; others have no effect
            on text.
        partial: the family obeys `partial_rotary_factor`, which `read_rotary_dim` reads.
    """
    key, given = _dict_of(keys)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"{key}={shown(given)}: parameters for each layer type are not implemented"
        )
    return _rope(given, keys, keys.get("rope_theta", 10000.0), key, extra, partial)


def read_ropes_by_kind(keys: Keys, bases: Mapping[str, tuple[str, float]]) -> dict[str, RopeConfig]:
    """RoPE by layer type, each with the key and the default of its base; scaling, where there is
    any, is for the layers that see everything."""
    nested, scaling = keys.get("rope_parameters") or {}, keys.get("rope_scaling") or {}
    if unknown := sorted(nested.keys() - bases.keys()):
        raise UnsupportedModelError(
            f"rope_parameters of this family has {shown(unknown)}; supported: {', '.join(bases)}"
        )
    found = {}
    for kind, base in bases.items():
        where = f"config.json: rope_parameters: {kind}"
        own = check_value(nested.get(kind), dict[str, Any] | None, where, UnsupportedModelError)
        given = {**(own or {}), **(scaling if kind == "full_attention" else {})}
        found[kind] = _rope(given, keys, keys.get(*base), "rope_parameters", {}, partial=False)
    return found


def read_rotary_dim(keys: Keys, head_dim: int, default: float) -> int:
    """How many of a head's first dimensions are turned."""
    (_, given), outside = _dict_of(keys), keys.get("partial_rotary_factor", default)
    factor = given.get("partial_rotary_factor") or outside
    factor = checked({"partial_rotary_factor": factor}, "config.json")["partial_rotary_factor"]
    size = keys.get("rotary_dim") or int(head_dim * factor)
    if not 2 <= size <= head_dim or size % 2:
        raise UnsupportedModelError(
            f"partial_rotary_factor={factor} turns {size} of head_dim={head_dim}; supported: an"
            " even number of them"
        )
    return size


def _dict_of(keys: Keys) -> tuple[str, Json]:
    key = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    return key, keys.get(key) or {}


def _rope(
    raw: Json, keys: Keys, theta: float, key: str, extra: Mapping[str, bool], partial: bool
) -> RopeConfig:
    given = checked(raw, f"config.json: {key}")
    factor = given.pop("partial_rotary_factor", None)
    if not partial:
        refuse_unless("partial_rotary_factor", factor, (1, 1.0))
    for name in [name for name, obeyed in extra.items() if not obeyed]:
        given.pop(name, None)
    legacy_type = given.pop("type", "default")
    kind = given.pop("rope_type", legacy_type)
    kind = "longrope" if kind == "su" else kind
    theta = float(given.pop("rope_theta", theta))
    if kind not in ROPE_KEYS:
        raise UnsupportedModelError(
            f"rope type {shown(kind)} is not implemented; supported: {', '.join(ROPE_KEYS)}"
        )
    original = given.pop("original_max_position_embeddings", None)
    required, optional = ROPE_KEYS[kind]
    if missing := sorted(required - given.keys()):
        raise UnsupportedModelError(f"rope type {kind!r} needs {', '.join(missing)}")
    if unknown := {
        key: given[key] for key in sorted(given.keys() - required - optional - {*extra})
    }:
        raise UnsupportedModelError(f"rope type {kind!r} has unknown parameters {shown(unknown)}")
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise UnsupportedModelError(
            f"rope type 'llama3' needs low_freq_factor={given['low_freq_factor']} below"
            f" high_freq_factor={given['high_freq_factor']}"
        )
    if kind == "longrope":
        original = original or keys.get("original_max_position_embeddings")
    if kind in ("llama3", "yarn", "longrope"):
        given["original_max_position_embeddings"] = original or keys.require(
            "max_position_embeddings"
        )
    if kind == "yarn":
        given["attention_factor"] = _yarn_attention_factor(
            given["factor"],
            given.get("attention_factor"),
            given.pop("mscale", None),
            given.pop("mscale_all_dim", None),
        )
    if kind == "longrope":
        _complete_longrope(given, keys.require("max_position_embeddings"))
    return RopeConfig(theta=theta, type=kind, **given)


def _complete_longrope(given: dict[str, Any], max_position: int) -> None:
    """Source: LongRoPE (arXiv 2402.13753), and its magnitude as in the model code of Phi-3."""
    original = given["original_max_position_embeddings"]
    factor = given.pop("factor", None) or max_position / original
    if given.get("attention_factor") is None:
        stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
        given["attention_factor"] = math.sqrt(1 + stretch)
    for name in ("short_factor", "long_factor"):
        given[name] = tuple(given[name])
        if not all(1e-3 <= number <= 1e6 for number in given[name]):
            raise UnsupportedModelError(
                f"rope type 'longrope' has {name}={shown(given[name])}; supported: numbers from"
                " 0.001 to 1,000,000"
            )


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
