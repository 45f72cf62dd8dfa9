"""The sampling kernel on a real GPU gives the tokens of its reference, with a real vocabulary."""

import numpy as np
import pytest
import torch

from nanoengine.runner.sampling import draw
from nanoengine.runner.sampling.draw import DrawParams, SamplingKind, sample_on_device
from tests.support.attention_cases import DEVICE
from tests.support.logits import uniforms_of

LINES, SIZE = 200, 151936
KINDS = list(SamplingKind)


def lines(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(LINES, SIZE, generator=generator)
    logits[::5] *= 0.1  # flat
    logits[1::5, : SIZE // 2] = -torch.inf
    return logits.to(DEVICE, dtype)


def params(kind):
    rng, drawn, filters = (
        np.random.default_rng(1),
        kind is not SamplingKind.GREEDY,
        kind is SamplingKind.FILTERED,
    )
    columns = [
        rng.choice([0.0, 0.7, 1.0, 2.0], LINES) * drawn,
        rng.choice([20, 100, 5000, SIZE], LINES) if filters else np.full(LINES, SIZE),
        rng.choice([0.5, 0.95, 1.0], LINES) if filters else np.ones(LINES),
        rng.choice([0.0, 0.01], LINES) if filters else np.zeros(LINES),
        uniforms_of(np.arange(LINES), np.full(LINES, 5)),
    ]
    return DrawParams(torch.from_numpy(np.stack(columns).astype(np.float64)).to(DEVICE))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_match_the_reference_implementation(dtype, kind, monkeypatch):
    logits, packed = lines(dtype), params(kind)
    ids, valid = sample_on_device(logits, packed, kind)
    monkeypatch.setattr(draw, "has_kernel", lambda *rest: False)
    expected, _ = sample_on_device(logits, packed, kind)
    assert valid.all()
    # Why one: the last bit of an exponential may change which token top_p keeps last.
    assert (ids != expected).sum() <= (0 if kind is SamplingKind.GREEDY else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_draws_the_same_token_with_any_others_and_in_every_run(kind):
    logits, packed = lines(torch.bfloat16), params(kind)
    ids, _ = sample_on_device(logits, packed, kind)
    for _ in range(20):
        assert torch.equal(sample_on_device(logits, packed, kind)[0], ids)
    for some in (slice(7, 8), slice(30, 63)):
        assert torch.equal(sample_on_device(logits[some], packed[some], kind)[0], ids[some])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed, _ = sample_on_device(logits, packed, kind)
    graph.replay()
    assert torch.equal(replayed, ids)
