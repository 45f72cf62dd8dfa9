"""Null and absent keys mean what transformers' config classes take them for.

The tests cover every key in `KEYS` and every family in `FAMILIES` without further code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_MODELS,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoengine.checkpoint.config import ModelConfig, parse_model_config
from nanoengine.checkpoint.config_reader import KEYS, ConfigReader
from nanoengine.checkpoint.families import OUTSIDE
from nanoengine.checkpoint.rope import EVERYWHERE, ROPE_KEYS
from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.rotary import inverse_frequencies
from tests.support.checkpoints import FAMILIES, make_config

pytestmark = pytest.mark.guards("nanoengine/checkpoint/**/*.py", "tests/data/models.yaml")

Raw = dict[str, Any]

TURNS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq",
         "partial_rotary_factor")  # fmt: skip
"""Keys that transformers merges into `rope_parameters`."""

NESTED = ("mellum", "gemma4", "gemma4_moe", "gemma4_unified", "gemma4_unified_vision",
          "gemma4_vision")  # fmt: skip
"""Families without config files from transformers 4."""

NAMES = {"architectures", "model_type", "text_config"}
"""Keys that select the family and the text config."""

PROPERTIES = {(family, "layer_types") for family in ("bamba", "falcon_h1", "nemotron_h")}
"""Keys that transformers derives from others. It may raise where a file has them."""
PROPERTIES |= {("falcon", "head_dim")}
PROPERTIES |= {("nemotron_h", "mamba_proj_bias")}  # transformers' model code ignores it


@functools.cache
def written(family: str) -> PreTrainedConfig:
    return make_config(family)


def configs(family: str) -> Iterator[Raw]:
    """Yields the (text) config.json of a tiny model as transformers 4 wrote it, then the same
    without per-layer keys that repeat other keys."""
    raw = written(family).get_text_config().to_dict()
    if family in NESTED:
        yield raw
        return
    turns = raw.pop("rope_parameters", None) or {}  # some families have no RoPE
    if turns:
        raw |= {"rope_theta": turns.get("full_attention", turns)["rope_theta"]}
    if "sliding_attention" in turns:
        raw |= {"rope_local_base_freq": turns["sliding_attention"]["rope_theta"]}
    if "partial_rotary_factor" in turns:
        raw |= {"partial_rotary_factor": turns["partial_rotary_factor"]}
    if turns.get("rope_type", "default") != "default":
        raw |= {"rope_scaling": turns}
    if raw.keys() & {"layer_norm_eps", "layer_norm_epsilon", "norm_eps"}:
        raw.pop("rms_norm_eps", None)  # set by the tests: the class does not have it
    yield raw
    by_layer = ("layer_types", "mlp_layer_types", "no_rope_layers")
    each = {key: raw[key] for key in raw if key not in by_layer}
    asked = {"use_sliding_window": True, "sliding_window": 8}
    asked = asked if "use_sliding_window" in raw else {}
    each |= asked | {"num_hidden_layers": 8}
    if not isinstance(parsed(whole(family, each)), str):
        yield each


def whole(family: str, raw: Raw) -> Raw:
    """The config.json that contains this text config."""
    outer = written(family)
    names = IMAGE_MODELS if family.endswith("_vision") else CAUSAL_MODELS
    architecture = {"architectures": [names[outer.model_type]]}
    if not family.endswith("_vision"):
        return copy.deepcopy(raw) | architecture
    beside = {key: value for key, value in outer.to_dict().items() if key not in OUTSIDE}
    return beside | architecture | {"text_config": copy.deepcopy(raw)}


def theirs(family: str, raw: Raw) -> PreTrainedConfig | None:
    """The config that transformers parses, or None if it raises."""
    try:
        return type(written(family)).from_dict(whole(family, raw)).get_text_config()
    except Exception:  # transformers may raise any exception
        return None


def parsed(raw: Raw) -> ModelConfig | str:
    """The config, or the error message."""
    try:
        return parse_model_config(raw)
    except UnsupportedModelError as error:
        return str(error)


class Spy:
    """Records the value of each config.json key that a family reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Raw = {}
        self.reading = True
        get, allow, reject_unread, spy = (
            ConfigReader.get,
            ConfigReader.allow,
            ConfigReader.reject_unread,
            self,
        )

        def seen(keys: ConfigReader, key: str) -> Any:
            if keys.where != "config.json":
                return get(keys, key)
            spy.found[key] = "refused"
            spy.found[key] = get(keys, key)
            return spy.found[key]

        def allowed(keys: ConfigReader, key: str, *values: Any) -> None:
            if keys.where == "config.json" and spy.reading:
                spy.found[key] = keys.given.get(key, values[0])
            allow(keys, key, *values)

        def others(keys: ConfigReader) -> None:
            spy.reading = False
            reject_unread(keys)

        monkeypatch.setattr(ConfigReader, "get", seen)
        monkeypatch.setattr(ConfigReader, "allow", allowed)
        monkeypatch.setattr(ConfigReader, "reject_unread", others)

    def parse(self, family: str, raw: Raw) -> ModelConfig | str:
        self.found, self.reading = {}, True
        return parsed(whole(family, raw))


def problem(spy: Spy, family: str, raw: Raw, key: str) -> str:
    """How our config differs from transformers' if `key` is null or absent; "" if it does not."""
    ours = spy.parse(family, raw)
    if key not in spy.found:
        return ""  # this family does not read the key
    if isinstance(ours, str):
        return "" if key in ours else f"is refused without its name: {ours}"
    value, their = spy.found[key], theirs(family, raw)
    if (family, key) in PROPERTIES:
        return ""
    if their is None:
        return f"is taken for {value!r}, and transformers raises"
    if key in TURNS and getattr(their, "rope_parameters", None) is None:
        return ""
    if key in TURNS:
        turns = copy.deepcopy(their.rope_parameters)
        if not any(isinstance(one, dict) for one in turns.values()):
            turns.setdefault("partial_rotary_factor", 1.0)  # the default of its model code
        explicit = {k: v for k, v in raw.items() if k not in TURNS} | {"rope_parameters": turns}
    else:
        # The class may lack the key, or have several for it and write only one.
        each = their.to_dict().get(key, value) if family in NESTED else value
        wanted = each if family in NESTED else getattr(their, key, value)
        if value == wanted:
            return ""
        explicit = raw | {key: wanted}
    if spy.parse(family, explicit) != ours:
        return f"is taken for {value!r}, not for {explicit.get(key, explicit)!r}"
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_what_transformers_takes_it_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is the same, or the error names the key."""
    spy = Spy(monkeypatch)
    found = [
        f"{key} {what}"
        for raw in configs(family)
        for key in KEYS.keys() - NAMES
        if (what := problem(spy, family, raw | {key: None}, key))
    ]
    assert not found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_is_what_transformers_takes_it_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is the same, or the error names the key. Exceptions: an absent eos_token_id sets no
    stop token, and transformers reads the dtype from the weight files."""
    spy, others = Spy(monkeypatch), {"eos_token_id", "dtype", "torch_dtype"}
    found = [
        f"{key} {what}"
        for raw in configs(family)
        for key in KEYS.keys() - NAMES - others
        if (what := problem(spy, family, {k: v for k, v in raw.items() if k != key}, key))
    ]
    assert not found


def test_every_key_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some family reads each key, except keys in nested dicts and keys that are always rejected."""
    spy, read = Spy(monkeypatch), set()
    for family in FAMILIES:
        for raw in configs(family):
            spy.parse(family, raw)
            read |= spy.found.keys()
    in_dicts = EVERYWHERE.union(*(a | b for a, b in ROPE_KEYS.values())) | {"llama_4_scaling_beta"}
    refused = {key for key, spec in KEYS.items() if spec.unread == "refused"}
    in_dicts |= {"alpha", "short_mscale", "long_mscale"}
    where_there = {"block_ff_dim"}
    assert KEYS.keys() - read - NAMES - in_dicts - refused - where_there == set()


TURNED: dict[str, Raw] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0,
             "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False,
             "original_max_position_embeddings": 128},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "longrope": {"factor": 4.0, "attention_factor": 1.5, "short_factor": [1.0] * 8,
                 "long_factor": [2.0] * 8, "original_max_position_embeddings": 128},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (kind, key)
        for kind, (required, optional) in ROPE_KEYS.items()
        for key in sorted(required | optional | EVERYWHERE)
        if (kind, key) != ("proportional", "factor")  # transformers divides by the null, and raises
    ],
)
def test_null_in_a_ropes_dict_is_what_transformers_takes_it_for(kind: str, key: str) -> None:
    turns = {"rope_type": kind, "rope_theta": 1e4, **TURNED[kind], key: None}
    check_angles({"rope_parameters": turns}, key)


@pytest.mark.parametrize(
    "places",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"original_max_position_embeddings": 32,
         "rope_parameters": {"rope_type": "yarn", **TURNED["yarn"]}},
        {"original_max_position_embeddings": 32,
         "rope_parameters": {"rope_type": "llama3", **TURNED["llama3"]}},
    ],
)  # fmt: skip
def test_of_two_places_that_say_it_the_same_one_counts(places: Raw) -> None:
    check_angles(places)


def check_angles(keys: Raw, refused: str = "-") -> None:
    """A Llama with these keys has transformers' RoPE frequencies, or the error names `refused`."""
    raw = written("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    raw |= {"max_position_embeddings": 512, **keys}
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(raw)))
    except Exception:  # transformers may raise any exception
        rotary = None
    found = parsed(raw)
    if isinstance(found, str):
        assert refused in found
        return
    rope = found.ropes[0]
    assert rotary is not None and rope is not None
    torch.testing.assert_close(inverse_frequencies(rope, 16, 100), rotary.inv_freq)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling)
