"""The GPU's sampling path, run on the CPU, samples the tokens of the CPU's path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.core.plan import AdmittedSequence
from nanoengine.runner.sampling.draw import (
    FIRST_WIDTH,
    DrawParams,
    SamplingKind,
    draw_top_k,
    mix,
    random_bits,
    sample_on_device,
)
from nanoengine.runner.sampling.sampler import Sampler
from nanoengine.settings.params import SamplingParams
from tests.support.logits import random_logits, uniforms_of

NUM_LINES = 12
CPU = torch.device("cpu")


def sampler_of(kind, vocab_size, seed):
    """A CPU sampler whose rows have random parameters of that kind."""
    rng, sampler = np.random.default_rng(seed), Sampler(vocab_size, NUM_LINES)
    filtered = kind is SamplingKind.FILTERED
    for row in range(NUM_LINES):
        params, max_top_k = {}, FIRST_WIDTH if row % 2 else vocab_size
        if filtered and row % 5:
            params["top_k"] = int(min(rng.integers(1, vocab_size + 1), max_top_k))
            params["top_p"] = float(rng.choice([1.0, 1e-6, 0.5, 0.95]))
            params["min_p"] = float(rng.choice([0.0, 0.05, 1.0]))
        greedy = kind is SamplingKind.GREEDY or rng.random() < 0.2
        temperature = 0.0 if greedy else float(rng.choice([1e-3, 0.6, 1.0, 3.0]))
        drawn = SamplingParams(temperature=temperature, **params)
        sampler.admit(
            AdmittedSequence(row, row, [1], 1, 0, drawn, seed=int(rng.integers(0, 2**63)))
        )
    return sampler


def packed(sampler, positions):
    """The sampler's parameters as `DrawParams`."""
    seeds = torch.from_numpy(sampler.seeds)
    uniform = random_bits(seeds, torch.from_numpy(positions)).double() * 2.0**-53
    return DrawParams(torch.cat((torch.from_numpy(sampler.params), uniform[None])))


@pytest.mark.parametrize("kind", list(SamplingKind))
@pytest.mark.parametrize("vocab_size", [5, 131, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_gpu_path_samples_the_tokens_of_the_cpu_path(kind, vocab_size, dtype):
    sampler, positions = sampler_of(kind, vocab_size, seed=vocab_size), np.arange(NUM_LINES) + 7
    logits = random_logits(vocab_size, NUM_LINES, vocab_size).to(dtype)
    logits[:, 0] = 0.0
    found, valid = sample_on_device(logits, packed(sampler, positions), kind)
    expected = sampler.sample(logits, np.arange(NUM_LINES), positions)
    assert found.tolist() == expected.token_ids.tolist()
    assert valid.all()
    assert sampler.kind(np.arange(NUM_LINES)) is kind


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.integers(1, 200),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    steps=st.sampled_from([1, 4, 1000]),
    uniform=st.sampled_from([0.0, 0.3, 0.999, 1 - 2.0**-53]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_a_full_sort_draws_the_same_tokens_as_a_search(
    seed, vocab_size, spread, steps, uniform, top_p, min_p
):
    """Covers ties, -0.0, -inf, tiny and huge logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab_size, generator=generator) * spread
    logits = (logits * steps).round() / steps
    logits[0, seed % vocab_size] = -torch.inf if vocab_size > 1 else 0.0
    top_k = [1 + seed % vocab_size, vocab_size, max(1, vocab_size // 2)]
    columns = np.array([[0.7] * 3, top_k, [top_p] * 3, [min_p] * 3])
    params = DrawParams.pack(columns, np.full(3, uniform), CPU)
    largest = logits.amax(-1, keepdim=True)
    expected = draw_top_k(logits, largest, params)
    sorted_all = draw_top_k(logits, largest, DrawParams(params.packed))
    assert sorted_all.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", list(SamplingKind))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_invalid_line_is_reported_and_the_other_lines_are_unchanged(kind, bad):
    sampler, positions = sampler_of(kind, 100, seed=4), np.arange(NUM_LINES)
    logits = random_logits(2, NUM_LINES, 100)
    logits[:, 0] = 0.0
    expected = sample_on_device(logits.clone(), packed(sampler, positions), kind)[0].tolist()
    logits[5] = bad
    found, valid = sample_on_device(logits, packed(sampler, positions), kind)
    expected[5] = 0
    assert found.tolist() == expected
    assert valid.tolist() == [line != 5 for line in range(NUM_LINES)]


def test_the_device_generates_the_same_random_numbers():
    seeds = np.array([0, 7, 2**63 - 1, 2**62 + 12345])
    positions = np.array([0, 1, 2**40, 99])
    found = random_bits(mix(torch.from_numpy(seeds)), torch.from_numpy(positions))
    assert (found.double() * 2.0**-53).tolist() == uniforms_of(seeds, positions).tolist()
