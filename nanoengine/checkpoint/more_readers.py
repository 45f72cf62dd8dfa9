"""Readers of the families in `more_families.py`, as those of `readers.py`."""

from __future__ import annotations

import math

from nanoengine.checkpoint.keys import Keys
from nanoengine.checkpoint.plan import MoEConfig
from nanoengine.checkpoint.readers import FULL, SLIDING, experts
from nanoengine.checkpoint.varied_plan import VariedPlan
from nanoengine.errors import UnsupportedModelError
from nanoengine.settings.checks import shown


def mup_attention(keys: Keys) -> float:
    """HyperCLOVA X: `attention_multiplier`, else as in Llama."""
    size = keys.get("head_dim")
    size = size or keys.require("hidden_size") // keys.require("num_attention_heads")
    return keys.get("attention_multiplier") or size**-0.5


def varied(keys: Keys) -> VariedPlan:
    """Gemma 4: layers without a window have other heads, and the last ones no keys."""
    layers, kinds = keys.require("num_hidden_layers"), keys.get("layer_types")
    kinds = kinds or [SLIDING if (n + 1) % 6 else FULL for n in range(layers)]
    if kinds[-1] != FULL:
        raise UnsupportedModelError(f"layer_types ends with {shown(kinds[-1])}, not with {FULL!r}")
    window = keys.require("head_dim"), keys.require("num_key_value_heads")
    keys_are_values, shared = keys.get("attention_k_eq_v"), keys.get("num_kv_shared_layers")
    kv_heads = keys.get("num_global_key_value_heads") if keys_are_values else None
    full = keys.get("global_head_dim"), kv_heads or window[1]
    by_layer = keys.get("per_layer_config")
    if "per_layer_config" in keys and not by_layer:  # as transformers reads and writes it
        full = window
    if by_layer:
        wanted = [n for n, kind in enumerate(kinds) if kind == FULL]
        named = sorted(int(name) if name.isdigit() else -1 for name in by_layer)
        first, *others = by_layer.values()
        alike = isinstance(first, dict) and first.keys() <= {"head_dim", "num_key_value_heads"}
        if named != wanted or others != [first] * len(others) or not alike:
            raise UnsupportedModelError(
                f"per_layer_config={shown(by_layer)} is not implemented; supported: head_dim and"
                f" num_key_value_heads, the same for each layer of {FULL!r}"
            )
        full = first.get("head_dim", window[0]), first.get("num_key_value_heads", window[1])
    found = VariedPlan(
        shapes=(window, full),
        keys_are_values=keys_are_values,
        num_shared=shared,
        shared_width=2 if keys.get("use_double_wide_mlp") else 1,
        input_size=keys.get("hidden_size_per_layer_input"),
    )
    (narrow, wide), own = sorted(map(math.prod, found.shapes)), kinds[: layers - shared]
    if wide % narrow or not {*kinds} <= {*own}:
        raise UnsupportedModelError(
            f"layers of {window[1]} KV heads of {window[0]} and of {full[1]} of {full[0]}, and"
            f" num_kv_shared_layers={shared} of {layers}, are not implemented; supported: one kind"
            " that keeps a multiple of the other, each with a layer that has its own keys"
        )
    if found.input_size and keys.get("vocab_size_per_layer_input") != keys.require("vocab_size"):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={keys.get('vocab_size_per_layer_input')} is not"
            f" implemented; supported: vocab_size={keys.require('vocab_size')}"
        )
    return found


def varied_experts(keys: Keys) -> MoEConfig | None:
    """Gemma 4: in all layers beside the MLP, or in none."""
    return experts(taken="top_k_experts")(keys) if keys.get("enable_moe_block") else None


def mup_scale(keys: Keys) -> float:
    """AFMoE: embeddings grow with the hidden size where `mup_enabled` says so."""
    return keys.require("hidden_size") ** 0.5 if keys.get("mup_enabled") else 1.0


def ernie_layers(keys: Keys) -> tuple[int, ...]:
    """Every `moe_layer_interval`-th layer between two has experts; -1 names the last one."""
    layers, every = keys.require("num_hidden_layers"), keys.get("moe_layer_interval")
    first, last = keys.get("moe_layer_start_index"), keys.get("moe_layer_end_index")
    end = layers if last == -1 else min(last + 1, layers)
    return tuple(layer for layer in range(first, end) if (layer + 1) % every == 0)
