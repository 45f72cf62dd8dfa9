"""The argmax of an LM head from an int8 copy of its weights (`ScreenedHead`) equals the argmax of
all logits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.kernels.cpu_argmax import MAX_SUM, MIN_SLACK, SMALLEST, largest_of
from nanoengine.kernels.cpu_linear import BF16_DOTS, PANEL
from nanoengine.layers import packed
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.packed import MAX_ROWS, MAX_ROWS_OF_PAIRS, PackedLinear, PrunedArgmaxHead
from nanoengine.layers.placement import place_buffers
from nanoengine.runner.sampling.draw import argmax
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run, tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _screen_small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MIN_PRUNED_BYTES", 0)


def head(weight: torch.Tensor) -> PrunedArgmaxHead:
    outputs, inputs = weight.shape
    method = PrunedArgmaxHead("lm_head")
    method.create((outputs, inputs), torch.float32, CPU)
    method.load(weight)
    return method


def copy_of(method: PrunedArgmaxHead) -> np.ndarray:
    """The int8 copy times its scales, [N, K] float64; N is a multiple of 16."""
    outputs, inputs = method.shape
    pairs = method.values.view(len(method.values), -1, PANEL, 2)  # pairs of inputs, zero-padded
    values = pairs.transpose(1, 2).reshape(outputs, -1)[:, :inputs]
    return values.double().numpy() * method.scales.double().numpy()[:, None]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks_of(allowed: np.ndarray) -> np.ndarray:
    """Packs booleans [L, N] into bits, [L, ceil(N / 32)] int32."""
    whole = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(whole, axis=1, bitorder="little").view(np.int32)


def check(method: PrunedArgmaxHead, x: torch.Tensor) -> bool:
    """Returns whether the head found the tokens. If so, they must equal the argmax of all
    outputs."""
    found = method.argmax(x)
    if found is None:
        return False
    ids, largest = argmax(method.apply(x, None))
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1].isnan(), largest.isnan())
    assert torch.equal(found[1].nan_to_num(), largest.nan_to_num()), "other bits than apply's"
    return True


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 64), (1003, 130), (8208, 2100), (15, 8)])
def test_the_largest_output_has_the_index_and_bits_of_all(outputs: int, inputs: int) -> None:
    method = head(normal(outputs, inputs))
    found = [check(method, normal(rows, inputs, seed=rows)) for rows in (*range(10), MAX_ROWS)]
    assert all(found) or (outputs, inputs) != (4096, 64), "too many panels were left"
    assert any(found[1:])


@pytest.mark.parametrize("rounds", [False, True])
def test_with_many_rows_all_outputs_are_computed(rounds: bool, monkeypatch) -> None:
    method = PrunedArgmaxHead("lm_head", rounds_inputs=rounds)
    method.create((4096, 64), torch.bfloat16, CPU)
    method.load(normal(4096, 64).bfloat16())
    screened = []
    monkeypatch.setattr(packed.cpu_argmax, "largest_outputs", lambda *args: screened.append(args))
    max_rows = MAX_ROWS_OF_PAIRS if rounds and BF16_DOTS else MAX_ROWS
    assert method.argmax(normal(max_rows, 64)) is None and len(screened) == 1
    assert check(method, normal(max_rows + 1, 64)) and len(screened) == 1
    assert method.argmax(normal(max_rows + 1, 64), 30.0) is None, "a softcap may make outputs equal"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["equal rows", "neighbours", "outliers", "scales", "sparse", "far from zero"]),
)
def test_the_argmax_is_exact_for_adversarial_weights(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((4096, 40)).astype(np.float32)
    x = random.standard_normal((2, 40)).astype(np.float32)
    best = (weight @ x[0]).argmax()
    others = random.integers(0, 4096, 5)
    if kind == "equal rows":
        weight[others] = weight[best]
    elif kind == "neighbours":  # weights that differ only in the last bit
        weight[others] = weight[best]
        weight[others, random.integers(0, 40, 5)] *= np.float32(1 + 2**-23)
    elif kind == "outliers":  # in weights and inputs, so that most values of a row round to zero
        weight[others, random.integers(0, 40, 5)] *= 1e4
        x[:, random.integers(0, 40)] *= 1e3
    elif kind == "scales":
        weight *= (10.0 ** random.uniform(-20, 12, 4096))[:, None].astype(np.float32)
    elif kind == "sparse":
        weight[random.random((4096, 40)) < 0.9] = 0
    else:
        weight += 100
    found = check(head(torch.from_numpy(weight)), torch.from_numpy(x))
    assert found or kind in ("outliers", "scales", "far from zero"), "nothing was tested"


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0])
def test_all_outputs_are_computed_if_the_softcap_may_make_two_equal(softcap: float) -> None:
    """A clear maximum is found. If rounding may hide the maximum, all outputs are computed."""
    weight, found = normal(4096, 40), 0
    x = normal(16, 40, seed=1) / 4
    method = head(weight.clone())
    for row in x:
        capped = torch.tanh(method.apply(row[None], None) / softcap) * softcap
        result = method.argmax(row[None], softcap)
        if result is not None:
            assert torch.equal(result[0], argmax(capped)[0])
            found += 1
    assert found >= (12 if softcap > 1 else 0)
    near_tie = weight.clone()
    best = (weight @ x[0]).argmax()
    near_tie[best // 2] = weight[best] * (1 - 2**-22)  # an earlier, slightly smaller output
    method = head(near_tie)
    assert method.argmax(x[:1])[0] == best
    assert method.argmax(x[:1], softcap) is None


@pytest.mark.parametrize("outputs", [4096, 1003, 15])
def test_masks_restrict_the_argmax_to_allowed_outputs(outputs: int) -> None:
    random, found = np.random.default_rng(outputs), []
    method = head(normal(outputs, 40))
    x = normal(6, 40, seed=outputs)
    for share in (0.999, 0.9, 0.5, 0.03, 2 / outputs):
        allowed = random.random((6, outputs)) < share
        allowed[0] = True
        allowed[1] = False
        allowed[2, outputs // 3 :] = False
        result = method.argmax(x, masks=partial(masks_of, allowed))
        if result is None:
            continue
        banned = torch.from_numpy(~allowed)
        ids, largest = argmax(method.apply(x, None).masked_fill(banned, -torch.inf))
        assert torch.equal(result[1], largest)
        has_output = largest.isfinite()
        assert has_output.tolist()[:2] == [True, False]
        assert torch.equal(result[0][has_output], ids[has_output])
        found.append(share)
    assert len(found) > 2, "too many panels were left"


def quantized_head(outputs: int, inputs: int, bits: int = 8) -> CPUQuantizedLinear:
    size = None if bits == 8 else 32
    method = CPUQuantizedLinear("lm_head", bits=bits, group_size=size, activations="int8")
    method.create((outputs, inputs), torch.float32, CPU)
    method.load(normal(outputs, inputs))
    return method


@pytest.mark.parametrize(("outputs", "bits"), [(4096, 8), (1003, 4), (15, 8)])
def test_a_quantized_head_gives_the_largest_of_all_its_outputs(outputs: int, bits: int) -> None:
    method, x = quantized_head(outputs, 64, bits), normal(5, 64, seed=1)
    x[3, 7] = torch.nan
    x[4] = 0  # all outputs are equal
    everything = method.apply(x, None)
    ids, largest = argmax(everything)
    found = method.argmax(x)
    assert torch.equal(found[0], ids)
    assert torch.equal(found[1].nan_to_num(), largest.nan_to_num())
    assert found[1].isnan().nonzero().tolist() == [[3]]
    allowed = np.random.default_rng(outputs).random((5, outputs)) < 0.1
    allowed[0] = False
    kept = [0, 1, 2]
    found = method.argmax(x[kept], masks=partial(masks_of, allowed[kept]))
    ids, largest = argmax(everything.masked_fill(torch.from_numpy(~allowed), -torch.inf)[kept])
    assert torch.equal(found[1], largest)
    assert torch.equal(found[0][1:], ids[1:])
    assert method.argmax(x, softcap=30.0) is None, "a softcap may make outputs equal"


@pytest.mark.parametrize("workers", [1, 3])
def test_the_argmax_orders_infinities_nans_and_equal_outputs(workers: int) -> None:
    outputs = torch.full((6, 100), -1.0)
    outputs[0] = -torch.inf
    outputs[1, [3, 50]] = torch.tensor([-0.0, 0.0])  # equal: the first one wins
    outputs[2, [40, 90]] = torch.inf
    outputs[3, [41, 90]] = torch.tensor([torch.inf, torch.nan])
    outputs[4, 99] = -torch.nan
    outputs[5] -= torch.arange(100).flip(0)  # ascending, all negative
    ids, largest = np.empty(6, np.int64), np.empty(6, np.float32)
    largest_of(outputs.numpy(), packed.NO_MASKS, ids, largest, workers)
    assert ids.tolist() == [0, 3, 40, 90, 99, 99]
    np.testing.assert_array_equal(largest, [-np.inf, 0, np.inf, np.nan, np.nan, -1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(-10, 10), st.floats(-8, 8))
def test_every_output_is_within_its_slack(seed: int, weight_size: float, x_size: float) -> None:
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((64, 333)) * 10**weight_size).astype(np.float32)
    x = (random.standard_normal((1, 333)) * 10**x_size).astype(np.float32)
    method = head(torch.from_numpy(weight.copy()))
    estimate = copy_of(method) @ x[0].astype(float)
    distance = np.abs(estimate - weight.astype(float) @ x[0].astype(float))
    margin = method.slack.numpy() * np.linalg.norm(x.astype(float))
    assert (distance < margin).all()
    assert (margin < 0.02 * np.linalg.norm(weight, axis=1) * np.linalg.norm(x)).all(), "too wide"


def test_the_slack_is_tight_for_the_worst_input() -> None:
    """The slack is tight: an input parallel to an output's error nearly reaches it."""
    weight = normal(64, 333)
    method = head(weight.clone())
    errors = weight.double().numpy() - copy_of(method)
    worst = errors.astype(np.float32)
    distance = np.abs(np.sum(errors * worst, axis=1))
    margin = method.slack.double().numpy() * np.linalg.norm(worst.astype(float), axis=1)
    assert (distance < margin).all()
    assert (distance > 0.95 * margin).all(), "the rest covers rounding of inputs and sums"
    check(method, torch.from_numpy(worst[:MAX_ROWS]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
def test_outputs_with_unbounded_weights_are_always_computed(value: float) -> None:
    weight = normal(4096, 64)
    weight[1234, 5] = value
    method = head(weight)
    x = normal(2, 64)
    assert check(method, x)
    assert check(method, -x)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20, 0.0, 1e-20])
def test_unbounded_inputs_need_all_outputs(value: float) -> None:
    method = head(normal(4096, 64))
    x = normal(3, 64)
    x[1] = value
    assert method.argmax(x) is None
    assert check(method, x[::2])


def test_inputs_with_too_wide_a_range_need_all_outputs() -> None:
    method = head(normal(4096, 1024))
    x = torch.full((1, 1024), 0.49)
    x[0, 7] = 32000.0  # the scale becomes 1, so all other inputs round to 0
    assert method.argmax(x) is None
    x[0, 7] = 320.0
    assert check(method, x)


def test_estimates_stay_normal_if_the_cpu_flushes_subnormals_to_zero() -> None:
    """With `torch.set_flush_denormal` no estimate becomes 0, and the slack covers K products that
    do."""
    min_normal = 2.0**-126
    min_unit = SMALLEST / (32000 * MAX_SUM) ** 0.5  # the smallest scale of inputs with that norm
    min_factor = SMALLEST / 127 * min_unit
    assert min_factor > 10 * min_normal
    min_margin = MIN_SLACK * SMALLEST
    assert min_margin > 2**18 * min_normal


def test_equal_outputs_are_all_computed() -> None:
    assert head(normal(1, 64).expand(4096, 64).clone()).argmax(normal(1, 64)) is None


def test_without_slack_the_argmax_makes_errors() -> None:
    """A check of the other tests: without slack only the int8 copy decides, and makes errors."""
    method = head(normal(4096, 64))
    x = normal(200, 64, seed=1)
    expected = argmax(method.apply(x, None))[0]
    method.slack.zero_()
    ids = torch.cat([method.argmax(row)[0] for row in x.split(1)])
    assert 0 < (ids != expected).sum() < 50


def test_moved_buffers_are_read_at_their_new_address() -> None:
    """Loading a model moves its buffers. An array over the old memory would keep a second copy."""
    method, x = head(normal(4096, 64)), normal(1, 64)
    place_buffers(method)
    assert check(method, x)
    method.slack.fill_(torch.inf)
    assert method.argmax(x) is None, "the slack was not read from the buffer"


def test_an_engine_uses_it_only_for_greedy_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens need no logits. Every other sampling option makes the engine compute them."""
    calls: list[str] = []
    for name in ("apply", "argmax"):
        original = getattr(PrunedArgmaxHead, name)

        def recorded(self, *args, original=original, name=name):
            calls.append(name)
            return original(self, *args)

        monkeypatch.setattr(PrunedArgmaxHead, name, recorded)
    directory = checkpoint("qwen3", vocab_size=4096)
    prompts, options = random_prompts(3, (9, 12)), {"attention_backend": "cpu", "dtype": "float32"}
    plain = greedy(6)
    engine = make_engine(directory, **options)
    expected = tokens(run(engine, prompts, plain))
    assert set(calls) == {"argmax"}
    for change in ({"logprobs": 1}, {"logit_bias": {3: 0.0}}, {"temperature": 1.0, "top_k": 1}):
        calls.clear()
        assert tokens(run(engine, prompts, replace(plain, **change))) == expected, change
        assert set(calls) == {"apply"}, change
    monkeypatch.setattr(packed, "PrunedArgmaxHead", PackedLinear)
    assert tokens(run(make_engine(directory, **options), prompts, plain)) == expected
