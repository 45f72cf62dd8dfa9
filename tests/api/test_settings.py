"""Settings and parameters: accepted, refused and converted values of each field of each class."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest

from nanoengine import BeamSearchParams, DiskTier, HostTier, Row
from nanoengine.errors import ConfigError, NanoEngineError, RequestError
from nanoengine.settings import vllm_names
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.params import GREEDY_BELOW, MAX_STRINGS, SamplingParams

CLASSES: dict[type, tuple[dict[str, Any], type[Exception]]] = {
    EngineConfig: ({"model": "m"}, ConfigError),
    SamplingParams: ({}, RequestError),
    BeamSearchParams: ({"beam_width": 2, "max_tokens": 4}, RequestError),
    HostTier: ({"gib": 1}, ConfigError),
    DiskTier: ({"path": "p", "gib": 1}, ConfigError),
    Row: ({"prompt": "one"}, RequestError),
}
"""Class -> its required arguments, and the exception that it raises."""

WRONG: dict[Any, tuple[object, ...]] = {
    bool: ("false", "no", "", 0, 1, 0.0, [True]),
    int: ("5", True, False, 1.0, math.nan, [5], np.bool_(True), np.float32(2)),
    float: ("0.5", True, math.nan, math.inf, -math.inf, 10**400, [0.5], np.float32("nan")),
    str: (5, True, 0.5, ["m"]),
    Literal: ("nothing", "", 5, True, ["auto"]),
    tuple: ("none", 5, True, [5.5], [None], {"a": 1}),
    dict: (5, "x", [1], {None: 1}),
    Mapping: (5, "x", [1]),
}
"""Field type -> refused values; every type also refuses `OBJECTS`."""

OBJECTS = (object(), b"x", 1j)
OPEN = {(Row, "prompt"), (SamplingParams, "structured_outputs"), (SamplingParams, "stop")}
"""Fields that are checked where they are used, by another class, or in the tests below."""

FIELDS = [
    pytest.param(cls, name, kind, id=f"{cls.__name__}.{name}")
    for cls in CLASSES
    for name, kind in typing.get_type_hints(cls).items()
    if name != "_" and (cls, name) not in OPEN
]


@pytest.mark.parametrize(("cls", "name", "hint"), FIELDS)
def test_a_value_of_a_wrong_type_raises_with_its_name(cls, name, hint):
    needed, error = CLASSES[cls]
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    wrong = [*OBJECTS, *WRONG.get(get_origin(kinds[0]) or kinds[0], ())]
    if types.NoneType not in kinds and name not in vllm_names.LLM_OPTIONS:
        wrong.append(None)
    if name in vllm_names.SAMPLING_PARAMS:  # vLLM's True means 1
        wrong = [value for value in wrong if not isinstance(value, bool | np.bool_)]
    for value in wrong:
        with pytest.raises(error, match=rf"{name}(\[.*\])? must be "):
            cls(**{**needed, name: value})


@pytest.mark.parametrize("cls", CLASSES)
def test_an_assignment_raises_and_mentions_replace(cls):
    needed, _ = CLASSES[cls]
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError, match=rf"dataclasses.replace\(.*, {name}="):
        setattr(cls(**needed), name, 5)


INVALID: list[tuple[type, dict[str, Any], str]] = [
    (EngineConfig, {"trust_remote_code": 1}, "trust_remote_code must be True or False, got 1"),
    (EngineConfig, {"revision": 5}, "revision must be a string or None, got 5"),
    (EngineConfig, {"overlap": "no"}, "overlap must be True, False or None, got 'no'"),
    (EngineConfig, {"dtype": "fp4"}, "dtype must be one of auto, float32, .*, got 'fp4'"),
    (EngineConfig, {"kv_cache_gib": math.inf}, "must be a finite number or None, got inf"),
    (EngineConfig, {"model": ""}, "model must be a directory or hub id, got ''"),
    (EngineConfig, {"max_modle_len": 5}, "unknown option .*did you mean 'max_model_len'"),
    (HostTier, {"polisy": "load"}, "'polisy' of HostTier; did you mean 'policy'"),
    (DiskTier, {"path": 5}, "path must be a string or a path, got 5"),
    (Row, {"keys": "a"}, "did you mean 'key'"),
    (Row, {"sampling_params": {"n": 1}}, "sampling_params must be SamplingParams or None"),
    (BeamSearchParams, {"beam_width": 0}, "beam_width must be at least 1, got 0"),
    (BeamSearchParams, {"early_stopping": "no"}, "must be True, False or 'never', got 'no'"),
    (BeamSearchParams, {"beam_with": 2}, "unknown option 'beam_with' of .*did you mean 'beam_wid"),
    (SamplingParams, {"max_token": 5}, "'max_token' of SamplingParams; did you mean 'max_tokens'"),
    (SamplingParams, {"zzz": 5}, "'zzz' of SamplingParams; known: n, presence_penalty, "),
    (SamplingParams, {"min_tokens": 5, "max_tokens": 4}, "at most max_tokens=4, got 5"),
    (SamplingParams, {"n": 2, "temperature": 0}, "n must be 1 when sampling is greedy"),
    (SamplingParams, {"stop": "x", "detokenize": False}, "stop strings need detokenize=True"),
    (SamplingParams, {"logit_bias": {3: math.nan}}, r"logit_bias\[3\] must be a finite number"),
]


@pytest.mark.parametrize(("cls", "options", "message"), INVALID, ids=lambda one: str(one)[:40])
def test_messages_contain_field_value_and_allowed_values(cls, options, message):
    needed, error = CLASSES[cls]
    with pytest.raises(error, match=message) as caught:
        cls(**needed | options)
    assert isinstance(caught.value, NanoEngineError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", (1, 8), (0, -1, 16_385)),
        ("temperature", (0, 0.0, 1e-6, 2, 1e300), (-0.1, -1e-9)),
        ("top_k", (-1, 0, 1, 10**9), (-2,)),
        ("top_p", (1e-9, 0.5, 1), (0, -0.1, 1.0001)),
        ("min_p", (0, 0.5, 1), (-0.1, 1.1)),
        ("repetition_penalty", (0.1, 1, 5, 10**9), (0, -1, 1e-39, 1e39, 2**63)),
        ("presence_penalty", (-2, 0, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 0, 2), (-2.1, 2.1)),
        ("seed", (None, 0, 2**63 - 1), (-2, 2**63)),
        ("max_tokens", (None, 1, 10**6), (0, -1)),
        ("min_tokens", (0, 16), (-1, 17)),
        ("logprobs", (None, 0, 20, -1), (-2,)),
        ("prompt_logprobs", (None, 0, 20, -1), (-2,)),
        ("prompt_logprobs_start", (0, 2**31 - 1), (-1, 2**31, 2**70)),
        ("priority", (-5, 0, 5, -(10**400)), ()),
        ("stop", (None, "x", ["x", "yz"], ("x",)), ([""], "", [1], 5, [None], "a\ud800")),
        ("bad_words", (None, ["x"], ("x", "y")), ([""], "x", [1])),
        ("stop_token_ids", (None, [], [0, 7], {7}), ([-1], [1.0], [True], ["1"], 7)),
        ("allowed_token_ids", (None, [0, 7]), ([], [-1])),
        ("logit_bias", (None, {}, {0: 100, 7: -100.0}),
         ({0: 100.1}, {0: -101}, {-1: 0.0}, {"0": 1.0}, {0: "1"}, {0: True}, {0: None})),
    ],
)  # fmt: skip
def test_sampling_params_check_ranges(name, good, bad):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", list(MAX_STRINGS))
def test_strings_of_a_request_are_limited(name):
    """Regression: 50,000 stop strings took 5 ms per token and sequence."""
    max_texts, max_chars = MAX_STRINGS[name]
    assert len(getattr(SamplingParams(**{name: ["x"] * max_texts}), name)) == max_texts
    SamplingParams(**{name: ["x" * max_chars]})
    for texts in (["x"] * (max_texts + 1), ["x" * max_chars, "y"]):
        with pytest.raises(RequestError, match=f"{name} must have at most {max_texts:,} strings"):
            SamplingParams(**{name: texts})


@pytest.mark.parametrize(
    ("options", "is_greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 9e-6}, True),
        ({"temperature": GREEDY_BELOW, "n": 2}, False),
        ({"min_tokens": 99, "max_tokens": None}, False),
        ({"stop_token_ids": [3], "detokenize": False}, False),
    ],
)
def test_compatible_parameters_are_accepted(options, is_greedy):
    assert SamplingParams(**options).is_greedy is is_greedy


def test_the_callers_objects_are_copied_and_never_changed():
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(
        stop=stop, stop_token_ids=ids, allowed_token_ids=ids, bad_words=stop, logit_bias=bias
    )
    clone = params.clone()
    assert clone == params and clone is not params and clone.logit_bias is not params.logit_bias
    stop.append("b")
    ids.append(2)
    bias[5] = 9.0
    assert params.stop == params.bad_words == SamplingParams(stop="a").stop == ("a",)
    assert params.stop_token_ids == params.allowed_token_ids == (1,)
    assert params.logit_bias == {1: 2.0}


def test_the_first_fields_may_be_given_by_position_in_vllms_order():
    first = (1, 0.1, 0.2, 1.1, 0.5, 0.9, 7, 0.05, 3, ["x"], [4], True, 9, 2, 0, 1)
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert SamplingParams(*first) == SamplingParams(**dict(zip(names, first, strict=False)))
    with pytest.raises(RequestError, match=r"n must be an integer, got 0\.8"):
        SamplingParams(0.8, 0.95)
    for wrong in (lambda: SamplingParams(*first, True), lambda: SamplingParams(1, n=1)):
        with pytest.raises(TypeError, match="__init__"):
            wrong()
    assert BeamSearchParams(2, 4, True, 0.0, 0.5, include_stop_str_in_output=False) == (
        BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True, length_penalty=0.5)
    )


def test_paths_may_be_path_objects():
    config = EngineConfig.from_kwargs(model=Path("a"), tokenizer=Path("b"))
    assert (config.model, config.tokenizer) == ("a", "b")
