"""The Triton kernels of linear-attention layers match their reference implementations."""

from __future__ import annotations

import pytest
import torch

from nanoengine.attention.batch import ScanStep, SegmentChunks, SequenceSegment
from nanoengine.layers.causal_conv import CausalConv
from nanoengine.layers.triton_linear_attention import (
    TritonConv,
    TritonDelta,
    delta_gates,
    gated_rms_norm,
)
from nanoengine.models.linear_attention import GatedRMSNorm
from nanoengine.runner.recurrent_states import chunk_segments
from tests.support.attention_cases import DEVICE
from tests.support.model_helpers import make_context
from tests.support.recurrent_states import delta_layer, delta_plan

pytestmark = pytest.mark.guards(
    "nanoengine/*/triton*.py",
    "nanoengine/layers/causal_conv.py",
    "nanoengine/layers/delta_rule.py",
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize(("channels", "bias"), [(6, True), (700, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_convolution_step_has_the_bits_of_the_reference(channels, bias, dtype):
    """One sequence updates its state in place."""
    conv, states = random_conv(channels, bias, dtype, kernel=3)
    states_copy = states.clone()
    x = torch.randn(3, channels).to(DEVICE, dtype)
    reads, writes = (torch.tensor(slots).to(DEVICE) for slots in ([1, 0, 4], [2, 3, 4]))
    expected = conv.step(x, reads, writes)
    conv.bind(states_copy[:, : 2 * channels])
    assert torch.equal(TritonConv(conv).step(x, reads, writes), expected)
    assert torch.equal(states_copy, states)


def random_conv(channels, bias, dtype, kernel):
    """A convolution and a buffer of states whose rows also contain other data."""
    rank_channels = channels, torch.arange(channels)
    conv = CausalConv(
        kernel, channels, bias=bias, rank_channels=rank_channels, context=make_context(dtype)
    )
    torch.manual_seed(0)
    conv.weight.copy_(torch.randn(kernel, channels))
    if bias:
        conv.bias.copy_(torch.randn(channels))
    states = torch.randn(9, (kernel - 1) * channels + 7).to(DEVICE)
    conv.to(DEVICE).bind(states[:, : (kernel - 1) * channels])
    return conv, states


@pytest.mark.parametrize(("heads", "sizes"), [((2, 4), {}), ((1, 1), {"key_dim": 12})])
def test_decodes_match_the_reference(heads, sizes):
    plan = delta_plan(*heads, **sizes)
    torch.manual_seed(1)
    states = torch.randn(6, plan.size, device=DEVICE)
    layer = delta_layer(plan, torch.float32, states).to(DEVICE)
    qkv = torch.randn(3, plan.channels, device=DEVICE)
    decay, beta = -torch.rand(3, heads[1], device=DEVICE), torch.rand(3, heads[1], device=DEVICE)
    reads, writes = (torch.tensor(slots).to(DEVICE) for slots in ([1, 0, 4], [2, 3, 4]))
    states_copy = states.clone()
    tokens = qkv, decay, beta, reads, writes
    expected = layer.decode(*tokens)
    layer.bind(states_copy)
    torch.testing.assert_close(TritonDelta(layer).step(*tokens), expected, **CLOSE)
    torch.testing.assert_close(states_copy, states, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_and_norms_match_torch(dtype):
    """Strided rows; one decay keeps everything and one forgets everything."""
    plan = delta_plan(1, 3, value_dim=40)
    layer = delta_layer(plan, torch.float32, torch.zeros(2, plan.size)).to(DEVICE)
    torch.manual_seed(4)
    layer.decay.a_log.copy_(torch.randn(3))
    layer.decay.dt_bias.copy_(torch.tensor([-30.0, 0.5, 90.0]))
    norm = GatedRMSNorm(40, make_context(dtype)).to(DEVICE)
    norm.weight.copy_(torch.randn(40))
    wide = torch.randn(5, 200).to(DEVICE, dtype)
    decays = layer.decay.a_log, layer.decay.dt_bias
    found = delta_gates(*decays, wide[:, 7:13])
    torch.testing.assert_close(found, layer.gates(wide[:, 7:13]), **CLOSE)
    x, gate = torch.randn(5, 3, 40, device=DEVICE), wide[:, 30:150].view(5, 3, 40)
    found, expected = gated_rms_norm(norm.weight, x, gate, 1e-5), norm(x, gate, 1e-5)
    assert found.dtype == dtype
    close = CLOSE if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(found, expected, **close)


SPANS = (
    SequenceSegment(1, 6, 0, 0, ((5, 1),)),  # starts from the zero state
    SequenceSegment(
        6, 80, 62, 2, ((1, 2), (2, 4), (74, 3))
    ),  # crosses a chunk boundary and two snapshots
    SequenceSegment(80, 82, 5, 5, ((1, 5), (2, 6))),  # its first snapshot is its initial state
    SequenceSegment(
        83, 85, 128, 7, ((2, 7),)
    ),  # shorter than the kernel size, updates its state in place
)


def wave_of(spans: tuple[SequenceSegment, ...]) -> ScanStep:
    none = torch.empty(0, dtype=torch.int64)
    pieces = SegmentChunks(*(torch.from_numpy(part).to(DEVICE) for part in chunk_segments(spans)))
    return ScanStep(tokens=none, reads=none, writes=none, spans=spans, pieces=pieces)


def test_spans_are_split_at_chunk_ends_and_written_states():
    cuts, firsts = chunk_segments(SPANS[1:3])
    ends = [(6, 7, 2), (7, 8, 4), (8, 72, 0), (72, 80, 3), (80, 81, 5), (81, 82, 6)]
    assert [(start, end, slot) for start, end, _, _, slot in cuts.tolist()] == ends
    assert cuts[:, 2:4].tolist() == [[6, 2]] * 4 + [[80, 5]] * 2
    assert firsts.tolist() == [0, 4, 6]


@pytest.mark.parametrize("heads", [(2, 4), (1, 1)])
def test_prefills_match_the_reference(heads):
    """Several sequences at once, with sizes that fill no tile."""
    plan = delta_plan(*heads, key_dim=12, value_dim=40)
    torch.manual_seed(2)
    states = torch.randn(9, plan.size).to(DEVICE)
    layer = delta_layer(plan, torch.float32, states).to(DEVICE)
    qkv = torch.randn(86, plan.channels, device=DEVICE)
    decay, beta = -torch.rand(86, heads[1], device=DEVICE), torch.rand(86, heads[1], device=DEVICE)
    states_copy, shape = states.clone(), (86, heads[1], 40)
    expected, found = (torch.full(shape, 7.0, device=DEVICE) for _ in range(2))
    spans = qkv, decay, beta, wave_of(SPANS)
    layer.prefill(*spans, expected)
    layer.bind(states_copy)
    TritonDelta(layer).scan(*spans, found)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(states_copy, states, **CLOSE)


def test_nearly_equal_keys_match_the_reference():
    """The inverse of the triangular system of nearly equal tokens is small; its powers are not."""
    plan = delta_plan(1, 1, key_dim=16, value_dim=16)
    states = torch.zeros(2, plan.size, device=DEVICE)
    layer = delta_layer(plan, torch.float32, states).to(DEVICE)
    torch.manual_seed(3)
    qkv = torch.randn(1, plan.channels).expand(128, -1).to(DEVICE)
    qkv = qkv + 1e-4 * torch.randn(128, plan.channels).to(DEVICE)
    decay, beta = torch.full((128, 1), -1e-3).to(DEVICE), torch.full((128, 1), 0.99).to(DEVICE)
    states_copy = states.clone()
    expected, found = (torch.zeros(128, 1, 16, device=DEVICE) for _ in range(2))
    spans = qkv, decay, beta, wave_of((SequenceSegment(0, 128, 0, 0, ((128, 1),)),))
    layer.prefill(*spans, expected)
    layer.bind(states_copy)
    TritonDelta(layer).scan(*spans, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states_copy, states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "bias"), [(6, True), (70, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_convolution_of_spans_has_the_bits_of_the_reference(channels, bias, dtype):
    conv, states = random_conv(channels, bias, dtype, kernel=4)
    x, states_copy = torch.randn(86, channels).to(DEVICE, dtype), states.clone()
    expected, found = torch.zeros_like(x), torch.zeros_like(x)
    for span in SPANS:
        expected[span.start : span.end] = conv.scan(x[span.start : span.end], span)
    conv.bind(states_copy[:, : 3 * channels])
    TritonConv(conv).scan(x, wave_of(SPANS), found)
    assert torch.equal(found, expected)
    assert torch.equal(states_copy, states)


def test_padding_writes_nothing():
    """Slot 0 has the zero state from which sequences start."""
    plan = delta_plan(1, 2)
    states = torch.zeros(2, plan.size, device=DEVICE)
    layer = delta_layer(plan, torch.float32, states).to(DEVICE)
    tokens = [torch.rand(2, size, device=DEVICE) for size in (plan.channels, 2, 2)]
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    TritonDelta(layer).step(*tokens, slots, slots)
    assert not states.any()
