"""The sampling kernel in Triton's interpreter, compared with its reference implementation."""

import numpy as np
import pytest
import torch
import triton

from nanoengine.kernels import triton_sampling as kernels
from nanoengine.runner.sampling import triton_sampling
from nanoengine.runner.sampling.draw import (
    DrawParams,
    SamplingKind,
    draw_top_k,
    sample_on_device,
)
from nanoengine.runner.sampling.triton_sampling import sample_lines
from tests.support.attention_cases import DEVICE
from tests.support.logits import random_logits, uniforms_of

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/triton_sampling.py",
    "nanoengine/runner/sampling/draw.py",
    "nanoengine/runner/sampling/triton_sampling.py",
)

ALMOST_ONE = 1 - 2.0**-53
"""The largest uniform number: it draws the last token that the filters keep."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tiles, so that a short row of logits has several."""
    monkeypatch.setattr(triton_sampling, "BLOCK", 64)


@pytest.fixture(params=[(64, 128), (8, 16), (2, 2)])
def candidate_capacity(request, monkeypatch):
    """Number and capacity of candidates: always, sometimes and never enough for the filters."""
    set_capacity(monkeypatch, *request.param)


def set_capacity(monkeypatch, num_candidates, capacity):
    monkeypatch.setattr(triton_sampling, "NUM_CANDIDATES", num_candidates)
    monkeypatch.setattr(triton_sampling, "CAPACITY", capacity)


def params_of(num_lines, size, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, uniform=0.5):
    columns = [temperature, size if top_k is None else top_k, top_p, min_p, uniform]
    rows = [np.broadcast_to(np.asarray(column, np.float64), num_lines) for column in columns]
    return torch.from_numpy(np.stack(rows)).to(DEVICE)


def reference(logits, params, kind):
    return sample_on_device(logits.cpu(), DrawParams(params.cpu()), kind)[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_drawn_tokens_match_the_reference(dtype):
    num_lines, size = 16, 150
    rng = np.random.default_rng(1)
    logits = random_logits(1, num_lines, size).to(DEVICE, dtype)
    logits[:, 0] = 0.0
    params = params_of(
        num_lines, size, temperature=rng.choice([0.0, 1e-3, 0.7, 3.0], num_lines),
        uniform=uniforms_of(np.arange(num_lines), np.full(num_lines, 7)),
    )  # fmt: skip
    ids, valid = sample_lines(logits, params, draws=True, filters=False)
    assert ids.tolist() == reference(logits, params, SamplingKind.DRAWN)
    assert valid.all()
    assert sample_lines(logits, params, False, False)[0].tolist() == reference(
        logits, params, SamplingKind.GREEDY
    )


@pytest.mark.usefixtures("candidate_capacity")
@pytest.mark.parametrize(("dtype", "num_lines"), [(torch.float16, 8), (torch.float32, 3)])
def test_filtered_tokens_match_the_reference(dtype, num_lines):
    size, rng = 70, np.random.default_rng(2)
    logits = random_logits(3, num_lines, size).to(DEVICE, dtype)
    logits[:, 0] = 0.0
    params = params_of(
        num_lines, size, temperature=rng.choice([0.7, 2.0], num_lines),
        top_k=rng.choice([1, 7, 64, size], num_lines), top_p=rng.choice([0.3, 0.9, 1.0], num_lines),
        min_p=rng.choice([0.0, 0.05], num_lines), uniform=rng.random(num_lines),
    )  # fmt: skip
    params[0, 1], params[1:4, 2] = 0.0, torch.tensor([size, 1.0, 0.0])  # one greedy, one plain
    ids, _ = sample_lines(logits, params, draws=True, filters=True)
    assert ids.tolist() == reference(logits, params, SamplingKind.FILTERED)


def adversarial():
    """Lines of 66 logits: ties, +0 and -0, -inf, a single token, flat, steps, one token above ties,
    and all likely tokens in one lane."""
    ties = torch.arange(66).remainder(3).float()
    zeros = torch.where(torch.arange(66) % 2 == 0, -0.0, 0.0)
    holes = torch.where(torch.arange(66) % 5 == 0, torch.arange(66) / 9.0, -torch.inf)
    one_hot = torch.full((66,), -torch.inf).index_fill(0, torch.tensor([65]), -3.0)
    steps = -torch.arange(66).flip(0).float()
    above = torch.zeros(66).index_fill(0, torch.tensor([40]), 0.5)
    lane = torch.full((66,), -9.0).index_fill(0, torch.tensor([1, 65]), 2.0)
    return torch.stack([ties, zeros, holes, one_hot, torch.full((66,), -7.0), steps, above, lane])


@pytest.mark.usefixtures("candidate_capacity")
@pytest.mark.parametrize("filters", [{"top_k": 30, "top_p": 0.5}, {"top_p": 0.4}, {"min_p": 0.3}])
def test_the_last_token_that_filters_keep_matches_a_sort(filters):
    logits = adversarial()
    params = params_of(len(logits), 66, **filters, uniform=ALMOST_ONE)
    ids, valid = sample_lines(logits.half().to(DEVICE), params, draws=True, filters=True)
    largest = logits.amax(-1, keepdim=True)
    expected = draw_top_k(logits, largest, DrawParams(params.cpu()))
    assert ids.tolist() == expected.tolist()
    assert valid.all()


def test_greedy_selects_the_first_of_equal_tokens():
    logits = adversarial().to(DEVICE)
    ids, valid = sample_lines(logits, params_of(len(logits), 66), draws=False, filters=False)
    assert ids.tolist() == [2, 0, 65, 65, 0, 65, 40, 1]
    assert valid.all()


def passes(monkeypatch, temperature, **filters):
    """The number of passes of the kernel over a typical line of 2,000 logits, and of search calls.

    The logits fall from 20 with the logarithm of the rank, as word frequencies do, with noise. They
    are rounded to bfloat16 and searched as bfloat16.
    """
    read, searched, size = [], [], 2000
    monkeypatch.setattr(triton_sampling, "BLOCK", 256)
    monkeypatch.setattr(triton_sampling, "ZERO_BITS", {torch.float32: 16})
    for name, calls in (("load_tile", read), ("amount_from", searched)):
        plain = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, plain=plain, calls=calls: calls.append(1) or plain(*args)
        )
    generator = torch.Generator().manual_seed(0)
    logits = 20.0 - 1.5 * torch.arange(1, size + 1).log()
    logits += 0.3 * torch.randn(size, generator=generator)
    logits = logits[torch.randperm(size, generator=generator)].bfloat16().float()[None]
    params = params_of(1, size, temperature=temperature, **filters, uniform=0.4)
    ids, _ = sample_lines(logits.to(DEVICE), params, draws=True, filters=True)
    assert ids.tolist() == reference(logits, params, SamplingKind.FILTERED)
    return len(read) / triton.cdiv(size, 256), len(searched)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls of the interpreter")
@pytest.mark.parametrize(
    ("temperature", "filters", "max_reads", "searches", "max_calls"),
    [
        (0.6, {"top_k": 20, "top_p": 0.95}, 3, 0, 0),
        (1.0, {"top_k": 64}, 4, 0, 0),
        (0.6, {"top_p": 0.95}, 5, 2, 8),
        (1.0, {"top_p": 0.95}, None, 2, 10),
        (0.6, {"min_p": 0.05}, None, 1, 9),
        (1.0, {"min_p": 0.05}, 5, 0, 0),
        (1.0, {"top_k": 100}, None, 2, 9),
    ],
)
def test_the_number_of_passes_over_a_line(
    monkeypatch, temperature, filters, max_reads, searches, max_calls
):
    """Usually all tokens that pass the filters are candidates. The kernel then reads once for the
    best token per lane, again until no lane has further ones (twice with as few lanes as here), and
    without top_k once more for the sum. With too few candidates, a search costs half a pass per
    bit: about 8 of the 16 bits of bfloat16 over the keys of tokens with a weight."""
    if max_reads:
        read, searched = passes(monkeypatch, temperature, **filters)
        assert read <= max_reads and searched == 0
    if searches:
        set_capacity(monkeypatch, 2, 2)
        _, searched = passes(monkeypatch, temperature, **filters)
        assert 4 * searches < searched <= max_calls * searches


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_invalid_line_is_reported_and_other_lines_keep_their_tokens(bad):
    logits = random_logits(2, 3, 100).half().to(DEVICE)
    params = params_of(3, 100, uniform=[0.1, 0.5, 0.9], top_p=[1.0, 0.9, 1.0])
    alone = [sample_lines(logits[i : i + 1], params[:, i : i + 1], True, True)[0] for i in (0, 2)]
    if bad == bad and bad < 0:
        logits[1] = bad
    else:
        logits[1, 77] = bad
    ids, valid = sample_lines(logits, params, draws=True, filters=True)
    assert ids.tolist() == [alone[0].item(), 0, alone[1].item()]
    assert valid.tolist() == [True, False, True]
