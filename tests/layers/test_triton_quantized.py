"""Weights of 4 and 8 bits by the Triton product, beside the floats that they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanoengine.layers.quantized_weight import QuantizedWeight, quantize
from nanoengine.layers.triton_quantized import TritonQuantizedLinear
from tests.support.attention_cases import DEVICE


def drawn(form: str, outputs: int, inputs: int, group: int, zeros: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(3)
    floats = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    if form == "e4m3":
        codes = torch.arange(outputs * inputs).view(outputs, inputs) * 37 % 254
        codes = (codes + (codes >= 127).int()).to(torch.uint8).view(torch.int8)
        scales = torch.rand(outputs, inputs // group, generator=generator) * 1e-3
        return QuantizedWeight(values=codes, scales=scales, zeros=None, bits=8, group_size=group,
                               floats=True)  # fmt: skip
    weight = quantize(floats, int(form[3]), group)
    points = torch.randint(-4, 4, weight.scales.shape, generator=generator).float()
    return replace(weight, zeros=points if zeros else None)


def layer(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> TritonQuantizedLinear:
    method = TritonQuantizedLinear(
        "layer", bits=weight.bits, group_size=weight.group_size, activations="float"
    )
    method.create(tuple(weight.values.shape), dtype, DEVICE)
    method.load_quantized(weight)
    return method


FORMS = [
    ("int4", 32, False), ("int4", 128, True), ("int8", 256, False), ("int8", 64, True),
    ("e4m3", 128, False), ("e4m3", 16, False),
]  # fmt: skip


@pytest.mark.parametrize(("form", "group", "zeros"), FORMS)
def test_products_are_those_by_the_floats(form: str, group: int, zeros: bool) -> None:
    weight = drawn(form, 70, 256, group, zeros)
    method, floats = layer(weight), weight.dequantized().to(DEVICE)
    assert method.weight.element_size() == 1 and method.tile
    for num_rows in (1, 19):
        x = torch.randn(num_rows, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        bias = torch.linspace(-1, 1, 70).to(DEVICE)
        for added in (None, bias):
            expected = F.linear(x.double(), floats.double(), added if added is None else added.double())
            error = (method.apply(x, added).double() - expected).abs().max()
            assert error < 2e-6 * expected.abs().max()


def test_every_stored_byte_is_widened_to_its_number() -> None:
    codes = [code for code in range(256) if code & 127 != 127]
    values = torch.tensor([*codes, 0, 0], dtype=torch.uint8).view(torch.int8).view(16, 16)
    weight = QuantizedWeight(
        values=values, scales=torch.ones(16, 1), zeros=None, bits=8, group_size=16, floats=True
    )
    found = layer(weight).apply(torch.eye(16, device=DEVICE), None).T
    assert torch.equal(found.cpu(), values.view(torch.float8_e4m3fn).float())


def test_inputs_in_another_order_and_groups_without_a_tile() -> None:
    generator = torch.Generator().manual_seed(4)
    for size, group in ((128, 32), (120, 24)):
        order = torch.randperm(size, generator=generator)
        weight = replace(drawn("int4", 20, size, group, True), order=order)
        method = layer(weight)
        assert bool(method.tile) == (group == 32)
        x = torch.randn(3, size, generator=generator).to(DEVICE)
        expected = F.linear(x, weight.dequantized().to(DEVICE))
        torch.testing.assert_close(method.apply(x, None), expected, rtol=0, atol=2e-5)
