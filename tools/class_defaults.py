"""Writes nanoengine/checkpoint/defaults.json: `python tools/class_defaults.py`.

The file has the values of keys that a config.json lacks, as defined by transformers' config
classes: per `model_type`, the `SCHEMA` whose default in the class differs from the default in
    `KEYS`.
Intentional differences from transformers are in the families' table. Run it after a change of
`SCHEMA` or of the families, or for a new version of transformers; a test compares the two.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from nanoengine.checkpoint.config_reader import NO_CLASS_DEFAULT, SCHEMA  # noqa: E402
from nanoengine.checkpoint.families import TEXT_TYPES, Family, every_family  # noqa: E402

FILE = ROOT / "nanoengine" / "checkpoint" / "defaults.json"

SIZES = frozenset((
    "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings",
    "num_attention_heads", "intermediate_size", "num_experts", "num_local_experts",
    "n_routed_experts", "moe_num_experts", "num_experts_per_tok", "moe_k", "moe_topk",
    "top_k_experts", "moe_intermediate_size", "shared_intermediate_size",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
))  # fmt: skip
"""Keys that a config must have. Why: sizes have no defaults, and a config without them is
incomplete."""


def model_types() -> Iterator[tuple[str, Family]]:
    """Each `model_type`, and the family that reads its configs."""
    every = every_family()
    yield from ((family.model_type, family) for family in every.values())
    yield from ((model_type, every[name]) for model_type, name in TEXT_TYPES.items())


def signature_of(kind: type) -> dict[str, Any]:
    """The defaults in a config class's signature, also under the names that it maps to them.

    Why not the values of an instance: it computes some from others, such as head_dim.
    """
    parameters = inspect.signature(kind).parameters.values()
    found = {p.name: p.default for p in parameters if p.default is not p.empty}
    aliases = {alias: found[name] for alias, name in kind.attribute_map.items() if name in found}
    return aliases | found


def rope_of(kind: type, family: Family) -> dict[str, Any]:
    """Keys of RoPE: a base and a partial factor; a dict if there is scaling."""
    rope = getattr(kind(), "rope_parameters", None) or {}
    full, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", rope)
    if {each.get("rope_type", "default") for each in (full, sliding)} - {"default"}:
        base = {} if family.rope_theta_keys else {"rope_theta": kind.default_theta}
        return base | {"rope_parameters": {k: v for k, v in rope.items() if k not in SIZES}}
    if family.rope_theta_keys:
        bases = zip(family.rope_theta_keys, (full, sliding), strict=True)
        return {name: each["rope_theta"] for name, each in bases}
    return {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}


def defaults_of(model_type: str, family: Family) -> dict[str, Any]:
    """The entry of a `model_type`."""
    kind = CONFIG_MAPPING[model_type]
    usual = signature_of(kind)
    if family.normalize is not None:
        # Why the layers: one family has their number only as a list, from which the class computes
        # it.
        listed = {k: v for k, v in kind().to_dict().items() if k == "layers_block_type"}
        usual = family.normalize({**usual, **listed})
    usual = {**usual, **rope_of(kind, family)}
    found = {}
    for key in sorted(usual.keys() & SCHEMA.keys() - NO_CLASS_DEFAULT - SIZES):
        value = json.loads(json.dumps(usual[key]))  # tuples become lists
        if value is not None and value != SCHEMA[key].default:
            found[key] = float(value) if SCHEMA[key].kind is float else value
    return found


def make() -> dict[str, dict[str, Any]]:
    """The file's content, for the config classes of the installed transformers."""
    known = {name: family for name, family in model_types() if name in CONFIG_MAPPING}
    # Why both: a family may read keys that the class of its text part lacks.
    return {
        name: defaults_of(family.model_type, family) | defaults_of(name, family)
        for name, family in sorted(known.items())
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
