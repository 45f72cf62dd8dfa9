"""Readers of configs with Mamba layers, for rows of `more_families.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from nanoengine.checkpoint.keys import Json, Keys
from nanoengine.checkpoint.plan import Factors, StatePlan
from nanoengine.checkpoint.readers import ATTENTION, FULL, LINEAR, MAMBA, those
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown


def mamba_states(keys: Keys) -> StatePlan:
    """Granite 4: as `layer_types` says, which may call them "mamba"; Bamba: all but
    `attn_layer_indices`; others say it in ways of their own."""
    every, attending = range(keys.require("num_hidden_layers")), keys.get("attn_layer_indices")
    kinds = keys.get("layer_types") or [FULL if n in (attending or ()) else LINEAR for n in every]
    heads, size, inner = map(keys.get, ("mamba_n_heads", "mamba_d_head", "mamba_d_ssm"))
    expanded = keys.get("mamba_expand") * keys.require("hidden_size")
    inner = expanded if inner is None else inner
    size = inner // heads if size == "auto" else size
    if heads * size != inner:
        raise UnsupportedModelError(
            f"mamba_n_heads={heads} times mamba_d_head={shown(size)} must be mamba_d_ssm, or"
            f" mamba_expand * hidden_size where that is null: {inner}"
        )
    return _states(keys, [n for n in every if kinds[n : n + 1] in ([LINEAR], [MAMBA])], size)


def _states(keys: Keys, layers: Iterable[int], size: int) -> StatePlan:
    """Such layers, with heads of this size."""
    heads, groups = keys.get("mamba_n_heads"), keys.get("mamba_n_groups")
    if heads % groups:
        raise UnsupportedModelError(
            f"mamba_n_heads={heads} must be a multiple of mamba_n_groups={groups}"
        )
    return StatePlan(
        kind="mamba",
        layers=tuple(layers),
        kernel=keys.get("mamba_d_conv"),
        channels=heads * size + 2 * groups * keys.get("mamba_d_state"),
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=keys.get("mamba_d_state"),
        value_dim=size,
        bias=keys.get("mamba_proj_bias"),
        conv_bias=keys.get("mamba_conv_bias"),
        output_bias=keys.get("mamba_proj_bias"),
        norm="behind",
        step_limits=_limits(keys),
    )


def falcon_states(keys: Keys) -> StatePlan:
    """Falcon-H1: in every layer, beside attention."""
    norm = "before" if keys.get("mamba_norm_before_gate") else "behind"
    return replace(
        mamba_states(keys),
        layers=tuple(range(keys.require("num_hidden_layers"))),
        norm=norm if keys.get("mamba_rms_norm") else None,
        output_bias=keys.get("projectors_bias"),
    )


def factors(keys: Keys) -> Factors:
    """Falcon-H1's multipliers."""
    of_mlp, projected = keys.get("mlp_multipliers"), keys.get("ssm_multipliers")
    of_mlp, projected = of_mlp or [1.0] * 2, projected or [1.0] * 5
    if (len(of_mlp), len(projected)) != (2, 5):
        raise UnsupportedModelError(
            f"mlp_multipliers={shown(of_mlp)} must be 2 numbers, and"
            f" ssm_multipliers={shown(projected)} 5"
        )
    return Factors(
        mamba_in=keys.get("ssm_in_multiplier"),
        attention_in=keys.get("attention_in_multiplier"),
        projected=tuple(projected),
        mamba_out=keys.get("ssm_out_multiplier"),
        attention_out=keys.get("attention_out_multiplier"),
        gate=of_mlp[0],
        down=of_mlp[1],
    )


PATTERN = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""A letter of Nemotron-H's `hybrid_override_pattern` -> what the layer is."""
NEMOTRON_KEYS = {
    "mamba_num_heads": "mamba_n_heads", "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups", "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
}  # fmt: skip
"""What Nemotron-H calls sizes of Mamba -> what others call them."""


NEMOTRON_OLDER = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias")
"""Others' names that older configs have, and that count before its own."""


def nemotron_layers(raw: Json) -> Json:
    """Nemotron-H's config with others' names of keys, and as many layers as it names."""
    usual = {name: value for name, value in raw.items() if name not in NEMOTRON_KEYS.values()}
    given = {NEMOTRON_KEYS.get(name, name): value for name, value in usual.items()}
    given |= {name: raw[name] for name in NEMOTRON_OLDER if name in raw}
    pattern, named = given.pop("hybrid_override_pattern", ""), given.get("layers_block_type")
    kinds = [*pattern] if isinstance(pattern, str) and not named else named
    old = {**PATTERN, MAMBA: LINEAR, ATTENTION: FULL}
    kinds = [old.get(kind, kind) for kind in kinds] if isinstance(kinds, list) else kinds
    if not kinds or not isinstance(kinds, list) or {*map(str, kinds)} - {*PATTERN.values()}:
        raise UnsupportedModelError(
            f"layers_block_type={shown(named)} or hybrid_override_pattern={shown(pattern)} must say"
            f" of each layer what it is: {', '.join(PATTERN.values())}, or {' '.join(PATTERN)}"
        )
    given.pop("num_nextn_predict_layers", None)  # drafts have names of their own, and are left out
    return {**given, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def nemotron_blocks(keys: Keys) -> tuple[str, ...]:
    return tuple(keys.get("layers_block_type"))


def nemotron_states(keys: Keys) -> StatePlan:
    size = keys.get("mamba_d_head")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(f"mamba_head_dim must be a size, got {shown(size)}")
    return _states(keys, those(nemotron_blocks(keys), LINEAR), size)


def nemotron_experts(keys: Keys) -> tuple[int, ...]:
    """The layers that are experts; a model of none may have keys of them."""
    for name in ("n_routed_experts", "norm_topk_prob", "routed_scaling_factor"):
        keys.get(name)
    return those(nemotron_blocks(keys), "moe")


def _limits(keys: Keys) -> tuple[float, float]:
    """Between which Mamba's dt stays. transformers writes infinity as {"__float__": "Infinity"}."""
    given = keys.get("time_step_limit")
    try:
        low, high = (float(each["__float__"] if isinstance(each, dict) else each)
                     for each in given)  # fmt: skip
    except (KeyError, TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 <= low < high:
        raise UnsupportedModelError(
            f"config.json: time_step_limit must be two numbers, from 0 and the second larger, got"
            f" {shown(given)}"
        )
    return low, high
