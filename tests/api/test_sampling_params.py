"""SamplingParams: every rule of validity, and that no caller's later change reaches a request."""

import dataclasses
import math

import numpy as np
import pytest

from nanoengine.errors import NanoEngineError, RequestError
from nanoengine.settings.params import GREEDY_BELOW, SamplingParams

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = ("n", "top_k", "min_tokens", "priority", "seed", "max_tokens", "logprobs")
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("n", (1, 8), (0, -1)),
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
        ("priority", (-5, 0, 5), ()),
        ("stop", (None, "x", ["x", "yz"], ("x",)), ([""], "", [1], 5, [None], "a\ud800")),
        ("bad_words", (None, ["x"], ("x", "y")), ([""], "x", [1], 5)),
        ("stop_token_ids", (None, [], [0, 7], {7}), ([-1], [1.0], [True], ["1"], 7)),
        ("allowed_token_ids", (None, [0, 7]), ([], [-1], [1.5], 7)),
        ("logit_bias", (None, {}, {0: 100, 7: -100.0}),
         ({0: 100.1}, {0: -101}, {-1: 0.0}, {"0": 1.0}, {0: "1"}, {0: True}, {0: None}, [1], 5)),
        ("ignore_eos", (True, False), (0, 1, None, "yes")),
    ],
)  # fmt: skip
def test_ranges(name, good, bad):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, True, "1", None, [1.0]])
def test_numbers_must_be_finite_numbers(name, value):
    with pytest.raises(RequestError, match=f"{name} must be a finite number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_biases_must_be_finite(value):
    with pytest.raises(RequestError, match=r"logit_bias\[3\] must be a finite number"):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize("name", [*INTEGERS, "prompt_logprobs"])
@pytest.mark.parametrize("value", [1.0, math.nan, True, "1", None])
def test_integers_must_be_integers(name, value):
    if value is None and name in OPTIONAL:
        assert getattr(SamplingParams(**{name: None}), name) is None
        return
    if value is True and name.endswith("logprobs"):  # vLLM's 1
        assert getattr(SamplingParams(**{name: True}), name) == 1
        return
    with pytest.raises(RequestError, match=f"{name} must be an integer"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags_must_be_booleans(name):
    for value in (0, 1, None, "no"):
        with pytest.raises(RequestError, match=f"{name} must be True or False"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4, got 5"),
        ({"n": 2, "temperature": 0}, "n must be 1 when sampling is greedy"),
        ({"stop": "x", "detokenize": False}, "stop strings need text"),
    ],
)
def test_parameters_that_contradict_each_other(params, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_parameters_that_go_together():
    SamplingParams(min_tokens=99, max_tokens=None)
    SamplingParams(n=2, temperature=GREEDY_BELOW)
    SamplingParams(stop_token_ids=[3], detokenize=False)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("temprature", "did you mean 'temperature'?"),
        ("zzz", "known: n, presence_penalty, "),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, hint):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: 5})
    assert f"unknown option {name!r} of SamplingParams; {hint}" in str(caught.value)


def test_errors_are_value_errors_of_this_package():
    with pytest.raises(ValueError, match="top_p") as caught:
        SamplingParams(top_p=2)
    assert isinstance(caught.value, NanoEngineError)


def test_greedy_is_a_temperature_too_small_to_divide_by():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).is_greedy
    assert not SamplingParams().is_greedy


def test_the_callers_objects_are_copied_and_never_changed():
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(
        stop=stop, stop_token_ids=ids, allowed_token_ids=ids, bad_words=stop, logit_bias=bias
    )
    stop.append("b")
    ids.append(2)
    bias[5] = 9.0
    assert params.stop == params.bad_words == ("a",)
    assert params.stop_token_ids == params.allowed_token_ids == (1,)
    assert params.logit_bias == {1: 2.0}


def test_parameters_are_frozen():
    params = SamplingParams()
    for name in ("max_tokens", "temperature"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, name, 1)


def test_an_assignment_says_how_to_change_parameters():
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"dataclasses.replace\(.*max_tokens"):
        SamplingParams().max_tokens = 5


def test_numpys_numbers_are_numbers():
    params = SamplingParams(
        n=np.int32(1), temperature=np.float32(0.5), top_k=np.int64(5), top_p=np.float64(0.5),
        seed=np.int64(4), ignore_eos=np.bool_(True), max_tokens=np.uint8(3),
        stop_token_ids=np.array([1, 2]), allowed_token_ids=[np.int64(3)],
        logit_bias={np.int64(4): np.float16(0.5)},
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_k=5, top_p=0.5, seed=4, ignore_eos=True, max_tokens=3,
        stop_token_ids=[1, 2], allowed_token_ids=[3], logit_bias={4: 0.5},
    )  # fmt: skip
    numbers = (params.n, params.temperature, params.top_k, params.seed, params.ignore_eos)
    assert [type(number) for number in numbers] == [int, float, int, int, bool]
    assert [type(token_id) for token_id in params.stop_token_ids] == [int, int]


def test_the_first_fields_may_be_given_by_position_in_vllms_order():
    first = (1, 0.1, 0.2, 1.1, 0.5, 0.9, 7, 0.05, 3, ["x"], [4], True, 9, 2, 0, 1)
    names = (
        "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed"
        " stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs"
    )
    assert SamplingParams(*first) == SamplingParams(**dict(zip(names.split(), first, strict=True)))
    with pytest.raises(RequestError, match=r"n must be an integer, got 0\.8"):
        SamplingParams(0.8, 0.95)
    for wrong in (lambda: SamplingParams(*first, True), lambda: SamplingParams(1, n=1)):
        with pytest.raises(TypeError, match="__init__"):
            wrong()


def test_a_clone_is_a_copy():
    params = SamplingParams(seed=3, logit_bias={1: 2.0})
    clone = params.clone()
    assert clone == params
    assert clone is not params
    assert clone.logit_bias is not params.logit_bias


@pytest.mark.parametrize("name", LISTS)
def test_lists_become_tuples(name):
    value = ["x"] if name in ("stop", "bad_words") else [4]
    assert getattr(SamplingParams(**{name: value}), name) == tuple(value)
    assert SamplingParams(stop="x").stop == ("x",)
