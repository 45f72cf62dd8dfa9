"""Compiled rules of recurrent layers match plain torch for any split of the prompts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from nanoengine.attention.batch import Batch, ScanStep, SequenceSegment
from nanoengine.checkpoint.config import load_model_config
from nanoengine.layers.cpu_linear_attention import CPUDelta, CPURule
from nanoengine.layers.cpu_mamba import CPUMamba
from nanoengine.models.linear_attention import GatedDeltaNet
from nanoengine.models.mamba import MambaMixer
from tests.support.engines import checkpoint
from tests.support.model_helpers import make_context, prefill_batch
from tests.support.recurrent_states import delta_plan

LENGTH = 150
DELTA = {
    "several value heads, half a strip": delta_plan(2, 4, key_dim=16),
    "strips and a part, three taps": delta_plan(3, 3, kernel=3, key_dim=8, value_dim=72),
}
MAMBA: dict[str, dict[str, Any]] = {
    "parts of strips": {},
    "one group, whole strips, no bias": {
        "num_key_heads": 1, "key_dim": 16, "value_dim": 64, "conv_bias": False,
    },
    "strips and a part": {"value_dim": 72},
    "strips and a part, limits": {"value_dim": 72, "key_dim": 8, "time_step_limits": (0.3, 0.9)},
    "a norm before the gate, three taps": {"norm": "before_gate", "kernel": 3},
    "no norm": {"norm": None},
}  # fmt: skip
FORMS = [*(f"delta, {form}" for form in DELTA), *(f"Mamba-2, {form}" for form in MAMBA)]


def make(
    form: str, count: int, dtype: torch.dtype = torch.float32
) -> tuple[GatedDeltaNet | MambaMixer, torch.Tensor, list[torch.Tensor]]:
    """A layer, its 8 states, and projected inputs of `count` tokens; values are the same in any
    dtype."""
    rule, _, name = form.partition(", ")
    config = load_model_config(checkpoint("qwen3_5" if rule == "delta" else "bamba"))
    if rule == "delta":
        plan, kind = DELTA[name], GatedDeltaNet
    else:
        sizes = {"num_key_heads": 2, "num_value_heads": 6, "key_dim": 7, "value_dim": 20}
        plan, kind = replace(config.states, **(sizes | MAMBA[name])), MambaMixer
        keys = plan.num_key_heads * plan.key_dim
        plan = replace(plan, channels=plan.num_value_heads * plan.value_dim + 2 * keys)
    torch.manual_seed(1)
    layer = kind("layer", replace(config, states=plan), make_context(dtype))
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    states = torch.randn(8, layer.plan.size).to(dtype)
    layer.bind(states)
    wide, heads = layer.inner_size + plan.channels, plan.num_value_heads
    widths = (wide, 2 * heads) if rule == "delta" else (wide + heads,)
    return layer, states, [torch.randn(count, width).to(dtype) for width in widths]


def kernel(layer: GatedDeltaNet | MambaMixer) -> CPURule:
    return (CPUDelta if isinstance(layer, GatedDeltaNet) else CPUMamba)(layer)


def batch_of(*waves: ScanStep) -> Batch:
    batch = prefill_batch([[1]])
    batch.state_waves = waves
    return batch


def wave_of(*spans: SequenceSegment, singles: tuple[tuple[int, int], ...] = ()) -> ScanStep:
    """Single tokens come first; each has a (slot to read, slot to write)."""
    reads, writes = torch.tensor(singles, dtype=torch.int64).view(-1, 2).T
    return ScanStep(tokens=slice(len(reads)), reads=reads, writes=writes, spans=spans)


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_matches_plain_torch(form: str) -> None:
    """Decodes, one of them in place; a prompt that writes snapshots, one after its first token; and
    in a later wave a sequence that starts from the final state of another."""
    first = SequenceSegment(2, 100, 5, 4, ((1, 4), (70, 5), (98, 6)))
    waves = (
        wave_of(first, SequenceSegment(100, 140, 0, 0, ((40, 7),)), singles=((1, 1), (2, 3))),
        wave_of(SequenceSegment(140, LENGTH, 40, 7, ((10, 7),))),
    )
    layer, states, inputs = make(form, LENGTH)
    plain, expected, wide = make(form, LENGTH, torch.float64)
    rows = torch.tensor([0, 72, 99, LENGTH - 1])  # row 72 is the first after a snapshot
    found = kernel(layer)(*inputs, batch_of(*waves), rows)
    reference = plain.mix(*wide, batch_of(*waves), rows)
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(states.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4]])
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 90], [64, 128], [63], [*range(1, LENGTH)]])
def test_a_token_has_the_same_bits_for_any_split_of_the_prompt(form: str, cuts: list[int]) -> None:
    layer, states, inputs = make(form, LENGTH)
    start, whole = states.clone(), wave_of(SequenceSegment(0, LENGTH, 0, 1, ((LENGTH, 2),)))
    expected, last = kernel(layer)(*inputs, batch_of(whole), None), states[2].clone()
    states.copy_(start)
    found = []
    for begin, end in pairwise([0, *cuts, LENGTH]):
        wave = wave_of(SequenceSegment(0, end - begin, begin, 1, ((end - begin, 1),)))
        if end == begin + 1:
            wave = wave_of(singles=((1, 1),))
        part = [tensor[begin:end] for tensor in inputs]
        found.append(kernel(layer)(*part, batch_of(wave), None))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(states[1], last)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]])
def test_nan_stays_in_its_sequence(form: str) -> None:
    layer, states, inputs = make(form, 40)
    inputs[0][3] = torch.nan
    wave = wave_of(
        SequenceSegment(0, 20, 0, 1, ((20, 2),)), SequenceSegment(20, 40, 0, 1, ((20, 3),))
    )
    out = kernel(layer)(*inputs, batch_of(wave), None)
    assert out[:3].isfinite().all() and out[3:20].isnan().all() and out[20:].isfinite().all()
    assert states[3].isfinite().all()
