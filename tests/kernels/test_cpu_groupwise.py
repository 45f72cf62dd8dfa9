"""Group-wise quantized linear layers equal the plain layer: all formats, rows and partitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.kernels.cpu_groupwise import PARTS
from nanoengine.kernels.cpu_quantized import quantize_groups
from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear, CPUWeightOnlyLinear, linear_factory
from nanoengine.layers.groupwise_panels import layout_of
from nanoengine.layers.quantized import QuantizedLinear, quantize_activations
from nanoengine.layers.quantized_weight import QuantizedWeight, quantize
from tests.support.groupwise_weights import FORMS, make_weight

CPU = torch.device("cpu")


def loaded(kind, weights: list[QuantizedWeight], activations: str = "int8", order=None):
    """A layer that loads these rows in this order; with -1, the last row first."""
    outputs = sum(len(weight.values) for weight in weights)
    method = kind(
        "layer", bits=weights[0].bits, group_size=weights[0].group_size, activations=activations
    )
    method.create((outputs, weights[0].values.shape[1]), torch.float32, CPU)
    first, rows = 0, []
    for weight in weights:
        rows.append((weight, first))
        first += len(weight.values)
    for weight, first in rows[::order]:
        method.load_quantized(weight, first)
    return method


def parts_of(method: CPUQuantizedLinear) -> int:
    assert method.form == "grouped"
    return int(method.values.view(torch.int64)[PARTS])


def inputs_of(rows: int, size: int) -> torch.Tensor:
    """Inputs that include the largest sums of a 16-bit lane and a row of zeros."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(4))
    x[0], x[1] = 1.0, torch.where(torch.arange(size) % 2 == 0, -1.0, 1.0)
    x[2] = 0
    return x


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares each output by itself, since some outputs have much larger scales."""
    size = expected.abs().amax(0)
    assert ((found - expected).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("name", FORMS)
def test_each_form_gives_what_the_plain_layer_gives(name):
    inputs = 288 if name == "groups of 96" else 512
    weight = make_weight(name, 50, inputs)
    plain, fast = (loaded(kind, [weight]) for kind in (QuantizedLinear, CPUQuantizedLinear))
    x, bias = inputs_of(140, inputs), torch.randn(50)
    whole = fast.apply(x, bias)
    assert parts_of(fast) == 1
    assert_close(whole, plain.apply(x, bias))
    for rows in (0, 1, 2, 3, 5, 8, 9, 33, 130):
        assert torch.equal(fast.apply(x[:rows], bias), whole[:rows]), "other bits in a batch"
    exact = loaded(CPUQuantizedLinear, [weight], "float")
    ids = torch.tensor([49, 0, 16, 0])
    assert torch.equal(exact.rows(ids), weight.dequantized()[ids])
    assert torch.equal(plain.rows(ids), weight.dequantized()[ids])
    assert_close(exact.apply(x, bias), F.linear(x, weight.dequantized(), bias))
    assert torch.equal(exact.apply(x[3:4], bias), exact.apply(x, bias)[3:4])


def test_inputs_are_quantized_as_the_plain_layer_does():
    x = inputs_of(7, 80)
    x[3, 32:64], x[4], x[5, 70], x[6, 40] = 1e-37, 1e30 * x[4], torch.nan, -torch.inf
    found, groups = quantize_groups(x.numpy(), UNIT, 1)
    values, scales = quantize_activations(x, 32)
    parts = found.reshape(7, 3, 2, 16).sum(3, dtype=int)
    kept = groups.reshape(7, 3, 4)
    np.testing.assert_array_equal(kept[:, :, 1:3], -8 * parts)
    np.testing.assert_array_equal(kept[:, :, 0], -8 * parts.sum(2))
    found_scales = kept[:, :, 3].copy().view(np.float32)
    np.testing.assert_array_equal(found_scales[:5], scales[:5].numpy())
    assert np.isfinite(found_scales).tolist() == torch.isfinite(scales).tolist()
    assert not found[:, 80:].any()
    # Ties may round either way, because the kernel multiplies by 1 / scale.
    assert np.abs(found[:, :80] - values.numpy().astype(int)).max() <= 1
    assert (found[:, :80] != values.numpy()).mean() < 0.01


@pytest.mark.parametrize("kind", [QuantizedLinear, CPUQuantizedLinear])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "MXFP4", "GPTQ 4"])
def test_an_outlier_costs_the_other_inputs_no_precision(kind, name):
    weight, x = make_weight(name, 64, 512), inputs_of(24, 512)[3:]
    x[:, 7] *= 30
    exact = x.double() @ weight.dequantized().double().T
    error = loaded(kind, [weight]).apply(x, None) - exact
    # One output may be 0. One scale per token gives 0.047 to 0.053 here.
    assert (error.norm(dim=0) / exact.norm(dim=0)).nanmedian() < 0.012


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("Q8_0", 96), ("Q4_0", 896), ("Q4_0", 32), ("Q8_0", 16), ("NVFP4", 336)],
)
def test_the_last_block_may_be_partial(name, inputs):
    size = min(inputs, FORMS[name].get("size", 32))
    weight = make_weight(name, 32, inputs, size=size)
    plain, fast = (loaded(kind, [weight]) for kind in (QuantizedLinear, CPUQuantizedLinear))
    x = inputs_of(9, inputs)
    assert_close(fast.apply(x, None), plain.apply(x, None))


@pytest.mark.parametrize(("name", "inputs"), [("Q8_0", 2144), ("Q6_K", 2304), ("Q5_1", 1056)])
def test_long_rows_are_dequantized_in_pieces(name, inputs):
    weight = make_weight(name, 50, inputs)
    exact, x = loaded(CPUQuantizedLinear, [weight], "float"), inputs_of(9, inputs)
    whole = exact.apply(x, torch.ones(50))
    assert_close(whole, F.linear(x, weight.dequantized(), torch.ones(50)))
    assert torch.equal(exact.apply(x[3:4], torch.ones(50)), whole[3:4])


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("inputs", [64, 512, 576, 896])
def test_weights_quantized_at_load_are_packed_exactly(inputs, bits):
    old, new = torch.randn(2, 50, inputs, generator=torch.Generator().manual_seed(2))
    weight, ids = quantize(old * 1e-7, bits, 32), torch.arange(50)  # scales too small for float16
    fast = loaded(CPUQuantizedLinear, [weight], "float")
    assert parts_of(fast) == 1
    assert torch.equal(fast.rows(ids), weight.dequantized())
    x = inputs_of(9, inputs)
    assert_close(fast.apply(x, None), F.linear(x, weight.dequantized()))
    by_int8, plain = (loaded(kind, [weight]) for kind in (CPUQuantizedLinear, QuantizedLinear))
    assert_close(by_int8.apply(x, None), plain.apply(x, None))
    expected = weight.dequantized()
    for first, last in ((3, 5), (10, 40), (16, 32), (40, 50), (48, 50)):
        rows = quantize(new[first:last], bits, 32)
        fast.replace(rows, first)
        expected[first:last] = rows.dequantized()
        assert torch.equal(fast.rows(ids), expected), "adjacent rows changed"


def test_4_bit_weights_quantized_at_load_use_groupwise_panels():
    kind = linear_factory(Quantization(bits=4, activations="float"))
    classes = {
        bits: type(kind("layer", bits=bits, group_size=32, activations="float")) for bits in (4, 8)
    }
    assert classes == {4: CPUQuantizedLinear, 8: CPUWeightOnlyLinear}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize(
    ("rows", "names", "parts"),
    [
        ((64, 32, 32), ("Q4_K", "Q4_K", "Q6_K"), 2),
        ((64, 32, 32), ("Q4_K", "Q5_K", "Q6_K"), 3),
        ((64, 32, 32), ("Q4_K", "Q6_K", "Q4_K"), 3),
        ((64, 32, 16), ("Q8_0", "Q8_0", "Q8_0"), 1),
        ((24, 8, 8), ("Q4_K", "Q6_K", "Q4_K"), 3),
        ((24, 8, 8), ("Q4_K", "Q4_K", "Q6_K"), 2),
        ((24, 8, 8), ("Q4_K", "Q4_K", "Q4_K"), 2),
        ((24, 8, 2), ("Q4_K", "Q4_K", "Q4_K"), 2),
        ((8, 8, 8), ("Q4_K", "Q4_K", "Q4_K"), 2),
        ((8, 4, 8), ("Q4_K", "Q4_K", "Q4_K"), 1),
        ((48, 16, 5), ("Q5_0", "Q4_0", "Q4_0"), 2),
    ],
)
def test_rows_may_differ_in_form(rows, names, parts, activations, order):
    weights = [
        make_weight(n, r, 256, seed=i) for i, (n, r) in enumerate(zip(names, rows, strict=True))
    ]
    plain, fast = (
        loaded(kind, weights, activations, order) for kind in (QuantizedLinear, CPUQuantizedLinear)
    )
    assert parts_of(fast) == parts
    x, bias = inputs_of(9, 256), torch.randn(sum(rows))
    assert_close(fast.apply(x, bias), plain.apply(x, bias))
    assert torch.equal(fast.apply(x[4:5], bias), fast.apply(x, bias)[4:5])
    ids = torch.arange(sum(rows)).flip(0)
    expected = torch.cat([weight.dequantized() for weight in weights])[ids]
    assert torch.equal(fast.rows(ids), expected)


def test_weights_without_a_kernel_form_are_computed_in_plain_torch():
    weight = make_weight("Q4_0", 32, 64, size=8)
    assert layout_of(weight) is None
    fast, plain = loaded(CPUQuantizedLinear, [weight]), loaded(QuantizedLinear, [weight])
    assert not fast.has_kernel
    x = inputs_of(4, 64)
    assert torch.equal(fast.apply(x, None), plain.apply(x, None))
