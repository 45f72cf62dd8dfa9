"""EngineConfig and the tiers: each field is checked by its type, from its annotation alone."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

from nanoengine import BeamSearchParams, DiskTier, HostTier
from nanoengine.errors import ConfigError, RequestError
from nanoengine.settings import vllm_names
from nanoengine.settings.config import EngineConfig

WRONG: dict[Any, tuple[object, ...]] = {
    bool: ("false", "no", "", 0, 1, 0.0, [True]),
    int: ("5", True, False, 1.0, math.nan, [5], np.bool_(True), np.float32(2)),
    float: ("0.5", True, math.nan, math.inf, -math.inf, 10**400, [0.5], np.float32("nan")),
    str: (5, True, 0.5, ["m"]),
    Literal: ("nothing", "", 5, True, ["auto"]),
    tuple: ("none", 5, True, [5], [None], {"a": 1}),
}
"""By the kind of a field: what it refuses; any kind refuses `NOTHINGS_VALUE` too."""

NOTHINGS_VALUE = (object(), b"x", 1j, {"a": 1})

HINTS = typing.get_type_hints(EngineConfig)


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused_by_name(field: Any) -> None:
    hint = HINTS[field.name]
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    wrong = (*NOTHINGS_VALUE, *WRONG[get_origin(kinds[0]) or kinds[0]])
    if types.NoneType not in kinds and field.name not in vllm_names.LLM_OPTIONS:
        wrong += (None,)
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"^{field.name}(\[0\])? must be "):
            EngineConfig(**{"model": "m", field.name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": "false"}, "trust_remote_code must be True or False, got 'false'"),
        ({"trust_remote_code": 1}, "trust_remote_code must be True or False, got 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init must be True or False, got 'no'"),
        ({"debug_checks": "x"}, "debug_checks must be True or False, got 'x'"),
        ({"revision": 5}, "revision must be a string or None, got 5"),
        ({"device": 5}, "device must be a string, got 5"),
        ({"overlap": "no"}, "overlap must be True, False or None, got 'no'"),
        ({"dtype": "fp4"}, "dtype must be one of auto, float32, .*, got 'fp4'"),
        ({"max_num_seqs": 2.0}, "max_num_seqs must be an integer, got 2.0"),
        ({"kv_cache_gib": math.inf}, "kv_cache_gib must be a finite number or None, got inf"),
        ({"model": ""}, "model must be a directory or hub id, got ''"),
        ({"model": 5}, "model must be a string, got 5"),
        ({"max_modle_len": 5}, "unknown option 'max_modle_len' .*did you mean 'max_model_len'"),
    ],
)
def test_messages_name_field_value_and_what_is_allowed(
    options: dict[str, Any], message: str
) -> None:
    for make in (EngineConfig, EngineConfig.from_kwargs):
        with pytest.raises(ConfigError, match=message):
            make(**({"model": "m"} | options))


def test_numpys_numbers_are_numbers() -> None:
    config = EngineConfig(
        model="m", max_num_seqs=np.int64(8), kv_cache_gib=np.float32(0.5), seed=np.uint16(7),
        enable_prefix_caching=np.bool_(False), watermark_frac=np.float64(0.25),
    )  # type: ignore[arg-type]  # fmt: skip
    assert config == EngineConfig(
        model="m", max_num_seqs=8, kv_cache_gib=0.5, seed=7, enable_prefix_caching=False,
        watermark_frac=0.25,
    )  # fmt: skip
    values = (config.max_num_seqs, config.kv_cache_gib, config.seed, config.enable_prefix_caching)
    assert [type(value) for value in values] == [int, float, int, bool]
    assert HostTier(gib=np.float32(0.5)) == HostTier(gib=0.5)  # type: ignore[arg-type]
    params = BeamSearchParams(beam_width=np.int64(2), max_tokens=np.int32(3))  # type: ignore[arg-type]
    assert params == BeamSearchParams(beam_width=2, max_tokens=3)
    assert type(params.beam_width) is int


def test_paths_may_be_path_objects() -> None:
    config = EngineConfig.from_kwargs(model=Path("a"), tokenizer=Path("b"))
    assert (config.model, config.tokenizer) == ("a", "b")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HostTier(gib=True), "gib must be a finite number, got True"),
        (lambda: HostTier(gib=1, polisy="load"), "'polisy' of HostTier; did you mean 'policy'"),
        (lambda: DiskTier(5, gib=1), "path must be a string or a path, got 5"),  # type: ignore[arg-type]
        (lambda: DiskTier("p", gib=math.nan), "gib must be a finite number, got nan"),
    ],
)
def test_tiers_are_checked_alike(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 2.0}, "beam_width must be an integer, got 2.0"),
        ({"beam_width": 0}, "beam_width must be at least 1, got 0"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"early_stopping": "no"}, "early_stopping must be True, False or 'never', got 'no'"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number, got nan"),
        ({"beam_with": 2}, "unknown option 'beam_with' of .*did you mean 'beam_width'"),
    ],
)
def test_beam_search_params_are_checked_alike(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | options))


def test_a_config_stays_as_it_is() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses.replace\(..., seed="):
        EngineConfig(model="m").seed = 5  # type: ignore[misc]
