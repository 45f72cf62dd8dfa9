"""Null and absent keys have the same values as in transformers' config classes.

The tests cover every key in `SCHEMA` and every family in `FAMILIES`.
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
from nanoengine.checkpoint.config_reader import SCHEMA, ConfigReader
from nanoengine.checkpoint.families import OUTER_KEYS
from nanoengine.checkpoint.rope import COMMON_KEYS, ROPE_KEYS
from nanoengine.errors import UnsupportedModelError
from nanoengine.layers.rotary import inverse_frequencies
from tests.support.checkpoints import FAMILIES, make_config

pytestmark = pytest.mark.guards("nanoengine/checkpoint/**/*.py", "tests/data/models.yaml")

Raw = dict[str, Any]

MERGED_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq",
         "partial_rotary_factor")  # fmt: skip
"""Keys that transformers merges into `rope_parameters`."""

NESTED = ("gemma4", "gemma4_moe", "gemma4_unified", "gemma4_vision")
"""Families without config files from transformers 4."""

NAMES = {"architectures", "model_type", "text_config"}
"""Keys that select the family and the text config."""

PROPERTIES = {(family, "layer_types") for family in ("bamba", "falcon_h1", "nemotron_h")}
"""Keys that transformers computes from others. It may raise if a file has them."""
PROPERTIES |= {("nemotron_h", "mamba_proj_bias")}  # The model code of transformers ignores it.


@functools.cache
def written(family: str) -> PreTrainedConfig:
    return make_config(family)


def configs(family: str) -> Iterator[Raw]:
    """Yields the (text) config.json of a tiny model in the format of transformers 4, then the same
    without lists of layers that can be computed from other keys."""
    raw = written(family).get_text_config().to_dict()
    if family in NESTED:
        yield raw
        return
    rope = raw.pop("rope_parameters", None) or {}  # some families have no RoPE
    if rope:
        raw |= {"rope_theta": rope.get("full_attention", rope)["rope_theta"]}
    if "sliding_attention" in rope:
        raw |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    if "partial_rotary_factor" in rope:
        raw |= {"partial_rotary_factor": rope["partial_rotary_factor"]}
    if rope.get("rope_type", "default") != "default":
        raw |= {"rope_scaling": rope}
    if raw.keys() & {"layer_norm_epsilon", "norm_eps"}:
        raw.pop("rms_norm_eps", None)  # The test models set it, but the class lacks it.
    yield raw
    by_layer = ("layer_types", "mlp_layer_types", "no_rope_layers")
    shorter = {key: raw[key] for key in raw if key not in by_layer}
    window = {"use_sliding_window": True, "sliding_window": 8}
    window = window if "use_sliding_window" in raw else {}
    shorter |= window | {"num_hidden_layers": 8}
    if not isinstance(parsed(complete(family, shorter)), str):
        yield shorter


def complete(family: str, raw: Raw) -> Raw:
    """The config.json of the model with this text config."""
    outer = written(family)
    names = IMAGE_MODELS if family.endswith("_vision") else CAUSAL_MODELS
    architecture = {"architectures": [names[outer.model_type]]}
    if not family.endswith("_vision"):
        return copy.deepcopy(raw) | architecture
    rest = {key: value for key, value in outer.to_dict().items() if key not in OUTER_KEYS}
    return rest | architecture | {"text_config": copy.deepcopy(raw)}


def theirs(family: str, raw: Raw) -> PreTrainedConfig | None:
    """The config that transformers reads; None: it raises."""
    try:
        return type(written(family)).from_dict(complete(family, raw)).get_text_config()
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
        get, require_one_of, reject_unread, spy = (
            ConfigReader.get,
            ConfigReader.require_one_of,
            ConfigReader.reject_unread,
            self,
        )

        def recorded_get(keys: ConfigReader, key: str) -> Any:
            if keys.where != "config.json":
                return get(keys, key)
            spy.found[key] = "refused"
            spy.found[key] = get(keys, key)
            return spy.found[key]

        def recorded_require(keys: ConfigReader, key: str, *values: Any) -> None:
            if keys.where == "config.json" and spy.reading:
                spy.found[key] = keys.raw.get(key, values[0])
            require_one_of(keys, key, *values)

        def stop_recording(keys: ConfigReader) -> None:
            spy.reading = False
            reject_unread(keys)

        monkeypatch.setattr(ConfigReader, "get", recorded_get)
        monkeypatch.setattr(ConfigReader, "require_one_of", recorded_require)
        monkeypatch.setattr(ConfigReader, "reject_unread", stop_recording)

    def parse(self, family: str, raw: Raw) -> ModelConfig | str:
        self.found, self.reading = {}, True
        return parsed(complete(family, raw))


def problem(spy: Spy, family: str, raw: Raw, key: str) -> str:
    """How our config differs from transformers' config of the same file; "" if it does not."""
    ours = spy.parse(family, raw)
    if key not in spy.found:
        return ""  # this family does not read the key
    if isinstance(ours, str):
        return "" if key in ours else f"is rejected by an error that does not name it: {ours}"
    value, their = spy.found[key], theirs(family, raw)
    if (family, key) in PROPERTIES:
        return ""
    if their is None:
        return f"is read as {value!r}, but transformers raises"
    if key in MERGED_KEYS and getattr(their, "rope_parameters", None) is None:
        return ""
    if key in MERGED_KEYS:
        rope = copy.deepcopy(their.rope_parameters)
        if not any(isinstance(one, dict) for one in rope.values()):
            rope.setdefault("partial_rotary_factor", 1.0)  # the default in the model code
        explicit = {k: v for k, v in raw.items() if k not in MERGED_KEYS} | {
            "rope_parameters": rope
        }
    else:
        # Why a default: the class may lack the key, or write only one of several names.
        saved = their.to_dict().get(key, value) if family in NESTED else value
        expected = saved if family in NESTED else getattr(their, key, value)
        if value == expected:
            return ""
        explicit = raw | {key: expected}
    if spy.parse(family, explicit) != ours:
        return f"is read as {value!r}, not as {explicit.get(key, explicit)!r}"
    return ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_null_key_has_the_value_that_it_has_in_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is the same, or the error names the key."""
    spy = Spy(monkeypatch)
    found = [
        f"{key} {what}"
        for raw in configs(family)
        for key in SCHEMA.keys() - NAMES
        if (what := problem(spy, family, raw | {key: None}, key))
    ]
    assert not found


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_has_the_value_that_it_has_in_transformers(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value is the same, or the error names the key. Exceptions: without eos_token_id there are
    no EOS tokens, and transformers reads the dtype from the weight files."""
    spy, exceptions = Spy(monkeypatch), {"eos_token_id", "dtype", "torch_dtype"}
    found = [
        f"{key} {what}"
        for raw in configs(family)
        for key in SCHEMA.keys() - NAMES - exceptions
        if (what := problem(spy, family, {k: v for k, v in raw.items() if k != key}, key))
    ]
    assert not found


def test_every_key_is_read_by_some_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exceptions: keys in nested dicts, and keys that are always rejected."""
    spy, read = Spy(monkeypatch), set()
    for family in FAMILIES:
        for raw in configs(family):
            spy.parse(family, raw)
            read |= spy.found.keys()
    in_dicts = COMMON_KEYS.union(*(a | b for a, b in ROPE_KEYS.values())) | {"llama_4_scaling_beta"}
    rejected = {key for key, spec in SCHEMA.items() if spec.if_unread == "reject"}
    in_dicts |= {"alpha"}
    absent_here = {"block_ff_dim"}
    assert SCHEMA.keys() - read - NAMES - in_dicts - rejected - absent_here == set()


ROPE_DICTS: dict[str, Raw] = {
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
        for key in sorted(required | optional | COMMON_KEYS)
        if (kind, key) != ("proportional", "factor")  # transformers raises for null
    ],
)
def test_null_in_rope_parameters_has_the_value_that_it_has_in_transformers(
    kind: str, key: str
) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPE_DICTS[kind], key: None}
    check_angles({"rope_parameters": rope}, key)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"original_max_position_embeddings": 32,
         "rope_parameters": {"rope_type": "yarn", **ROPE_DICTS["yarn"]}},
        {"original_max_position_embeddings": 32,
         "rope_parameters": {"rope_type": "llama3", **ROPE_DICTS["llama3"]}},
    ],
)  # fmt: skip
def test_of_two_keys_with_the_same_meaning_the_same_one_takes_precedence(keys: Raw) -> None:
    check_angles(keys)


def check_angles(keys: Raw, rejected: str = "-") -> None:
    """A Llama with these keys has the same RoPE frequencies as in transformers, or an error names
    the key `rejected`."""
    raw = written("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}
    raw |= {"max_position_embeddings": 512, **keys}
    try:
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(raw)))
    except Exception:  # transformers may raise any exception
        rotary = None
    found = parsed(raw)
    if isinstance(found, str):
        assert rejected in found
        return
    rope = found.ropes[0]
    assert rotary is not None and rope is not None
    torch.testing.assert_close(inverse_frequencies(rope, 16, 100), rotary.inv_freq)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling)
