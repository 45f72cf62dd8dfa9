"""Layers that keep states as compiled calls: what plain torch gives, however prompts are cut, and
in whole layers what their parts give."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from nanoengine import LLM
from nanoengine.attention.batch import Span, StateWave
from nanoengine.layers.cpu_decoder import FusedLayers
from nanoengine.layers.cpu_states import CPUDelta
from nanoengine.models.states import GatedDeltaNet
from nanoengine.outputs import Logprob
from tests.layers.test_cpu_decoder import outputs
from tests.support.engines import checkpoint
from tests.support.model_helpers import prefill_batch
from tests.support.states import delta_layer, delta_plan

LENGTH = 150
PLANS = {
    "several value heads, half a strip": delta_plan(2, 4, key_dim=16),
    "strips and a part, three taps": delta_plan(3, 3, kernel=3, key_dim=8, value_dim=72),
}


def layer_of(plan, dtype: torch.dtype, num_states: int = 8) -> tuple[GatedDeltaNet, torch.Tensor]:
    """The same layer and the same states in any dtype."""
    layer = delta_layer(plan, dtype, torch.empty(0, plan.size))
    torch.manual_seed(1)
    states = torch.randn(num_states, plan.size).to(dtype)
    layer.bind(states)
    layer.conv1d.weight.copy_(torch.randn(plan.kernel, plan.channels))
    for tensor in (layer.norm.weight, layer.decay.a_log, layer.decay.dt_bias):
        tensor.copy_(torch.randn(tensor.shape))
    return layer, states


def projected(plan, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    inner = plan.num_value_heads * plan.value_dim
    return torch.randn(count, plan.channels + inner), torch.randn(count, 2 * plan.num_value_heads)


def batch_of(*waves: StateWave):
    batch = prefill_batch([[1]])
    batch.state_waves = waves
    return batch


def wave_of(*spans: Span, singles: tuple[tuple[int, int], ...] = ()) -> StateWave:
    """Single tokens first, each of a (slot read, slot written)."""
    reads, writes = torch.tensor(singles, dtype=torch.int64).view(-1, 2).T
    return StateWave(tokens=slice(len(reads)), reads=reads, writes=writes, spans=spans)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_kernel_gives_what_plain_torch_gives(plan):
    """Decodes, one in place; a prompt that leaves snapshots, one of them where it began; and one
    that begins, in a later wave, where another has ended."""
    first = Span(2, 100, 5, 4, ((1, 4), (70, 5), (98, 6)))
    waves = (
        wave_of(first, Span(100, 140, 0, 0, ((40, 7),)), singles=((1, 1), (2, 3))),
        wave_of(Span(140, LENGTH, 40, 7, ((10, 7),))),
    )
    (layer, states), (plain, expected) = (
        layer_of(plan, it) for it in (torch.float32, torch.float64)
    )
    qkvz, ba = projected(plan, LENGTH)
    rows = torch.tensor([0, 72, 99, LENGTH - 1])  # the second is the first behind a snapshot
    found = CPUDelta(layer)(qkvz, ba, batch_of(*waves), rows)
    wanted = plain.mix(qkvz.double(), ba.double(), batch_of(*waves), rows)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 90], [64, 128], [63], [*range(1, LENGTH)]])
def test_a_token_has_the_same_bits_however_a_prompt_is_cut(cuts):
    plan = PLANS["strips and a part, three taps"]
    layer, states = layer_of(plan, torch.float32)
    kernel, inputs, start = CPUDelta(layer), projected(plan, LENGTH), states.clone()
    whole = wave_of(Span(0, LENGTH, 0, 1, ((LENGTH, 2),)))
    expected, last = kernel(*inputs, batch_of(whole), None), states[2].clone()
    states.copy_(start)
    found = []
    for begin, end in pairwise([0, *cuts, LENGTH]):
        part = [tensor[begin:end] for tensor in inputs]
        one = wave_of(singles=((1, 1),))
        wave = (
            one
            if end == begin + 1
            else wave_of(Span(0, end - begin, begin, 1, ((end - begin, 1),)))
        )
        found.append(kernel(*part, batch_of(wave), None))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(states[1], last)


def test_a_nan_stays_in_its_sequence():
    plan = PLANS["several value heads, half a strip"]
    layer, states = layer_of(plan, torch.float32)
    inputs = projected(plan, 40)
    inputs[0][3] = torch.nan
    wave = wave_of(Span(0, 20, 0, 1, ((20, 2),)), Span(20, 40, 0, 1, ((20, 3),)))
    out = CPUDelta(layer)(*inputs, batch_of(wave), None)
    assert out[:3].isfinite().all() and out[3:20].isnan().all() and out[20:].isfinite().all()
    assert states[3].isfinite().all()


@pytest.mark.parametrize(
    ("family", "quantization", "tolerance"),
    [
        ("lfm2", None, 0),
        ("lfm2_moe", None, 0),
        ("lfm3", None, 1e-5),
        # Torch's sigmoid of attention's gates has other last bits.
        ("qwen3_5", None, 1e-5),
        ("qwen3_5", "int8", 0.02),
        ("qwen3_next", None, 1e-5),
        ("bamba", "int8", 0),
        ("granite_hybrid", None, 0),
    ],
)
def test_whole_layers_give_what_their_parts_give(family, quantization, tolerance):
    """Tokens and log-probabilities of prompts, chunks and decodes. In one call, or few."""
    options = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 512}
    with LLM(
        checkpoint(family), dtype="float32", device="cpu", skip_tokenizer_init=True,
        num_kv_blocks=64, quantization=quantization, **options,
    ) as llm:  # fmt: skip
        decoder = llm.engine.executor.model.model
        assert all(isinstance(layers, FusedLayers) for layers in decoder.stack)
        rotations = 2 if family == "lfm3" else 1  # each call has one
        assert len(decoder.stack) == rotations
        found = outputs(llm)
        decoder.stack = list(decoder.layers)
        expected = outputs(llm)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in expected]
    assert numbers(found) == pytest.approx(numbers(expected), abs=tolerance, rel=0)


def numbers(found: object) -> list[float]:
    """All log-probabilities."""
    if isinstance(found, Logprob):
        return [found.logprob]
    parts = found.values() if isinstance(found, dict) else found
    return [x for part in parts or () if not isinstance(part, int) for x in numbers(part)]
