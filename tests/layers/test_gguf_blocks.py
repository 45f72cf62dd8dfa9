"""Blocks of GGUF types against the reader of the `gguf` package, bit for bit."""

from __future__ import annotations

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nanoengine.checkpoint.gguf import FLOATS, TYPES
from nanoengine.errors import WeightLoadError
from nanoengine.layers.gguf_blocks import LAYOUTS, read_blocks
from nanoengine.layers.quantized_weight import codes_of
from tests.support.gguf_files import write_float16

FLOAT16 = {  # type -> offsets of the float16 values in a block
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (), "Q8_K": (), "IQ1_S": (0,), "IQ1_M": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,),
    "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "NVFP4": (),
}  # fmt: skip

SPECIAL = [0.0, -0.0, 6e-8, -6e-8, 3e-5, 6.1e-5, -1.0, 65504.0, -65504.0]
"""Zeros, subnormals and the largest values of float16."""


def blocks(type: str, num_rows: int, num_blocks: int) -> numpy.ndarray:
    """Rows of random blocks with finite float16 values of all magnitudes and signs."""
    random = numpy.random.default_rng(len(type) + TYPES[type].bytes)
    raw = random.integers(0, 256, (num_rows, num_blocks, TYPES[type].bytes), "u1")
    if type == "MXFP4":
        raw[:, :, 0] %= 255
        raw[0, :2, 0] = 0, 1  # subnormal
    if type == "NVFP4":
        raw[:, :, :4] &= numpy.where(raw[:, :, :4] & 127 == 127, 0xFE, 0xFF).astype("u1")
    if type == "Q8_K":
        raw[:, :, :4] = random.standard_normal((num_rows, num_blocks, 1), "f4").view("u1")
    for offset in FLOAT16[type]:
        exponents = random.uniform(-24, 15, raw.shape[:2])
        values = numpy.exp2(exponents) * random.choice([-1, 1], raw.shape[:2])
        values.flat[: len(SPECIAL)] = random.permutation(SPECIAL)
        write_float16(raw, type, offset, values)
    return raw.reshape(num_rows, -1)


def assert_same(found: torch.Tensor, expected: numpy.ndarray) -> None:
    """Equal bits, including the signs of zeros."""
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), torch.from_numpy(expected).view(torch.int32))


@pytest.mark.parametrize("type", sorted(FLOAT16.keys() - {"Q8_K"}))
def test_random_blocks_match_the_gguf_package(type):
    rows = blocks(type, num_rows=16, num_blocks=3)
    weight = read_blocks(type, torch.from_numpy(rows))
    assert_same(weight.dequantized(), dequantize(rows, GGMLQuantizationType[type]))


def test_every_type_has_a_layout():
    assert LAYOUTS.keys() == TYPES.keys() - FLOATS.keys()
    for type, layout in LAYOUTS.items():
        assert sum(layout.parts.values()) == TYPES[type].bytes


def test_q8_k_blocks_match_their_definition():
    # Why by hand: the package cannot read this type.
    rows = blocks("Q8_K", num_rows=4, num_blocks=2)
    raw = rows.reshape(4, 2, -1)
    expected = raw[:, :, :4].copy().view("f4") * raw[:, :, 4:260].view("i1")
    assert_same(read_blocks("Q8_K", torch.from_numpy(rows)).dequantized(), expected.reshape(4, -1))


FLOAT_POSITIONS = [(type, offset) for type, offsets in FLOAT16.items() for offset in offsets]


@pytest.mark.parametrize("value", [numpy.nan, numpy.inf, -numpy.inf])
@pytest.mark.parametrize(("type", "offset"), FLOAT_POSITIONS)
def test_nan_and_infinite_scales_raise(type, offset, value):
    rows = blocks(type, num_rows=2, num_blocks=3)
    write_float16(rows.reshape(2, 3, -1)[1, 2], type, offset, numpy.array(value))
    with pytest.raises(WeightLoadError, match=f"of its {type} blocks is NaN or infinite"):
        read_blocks(type, torch.from_numpy(rows))


@pytest.mark.parametrize(("type", "value"), [("MXFP4", 255), ("NVFP4", 127)])
def test_nan_scales_of_one_byte_raise(type, value):
    rows = blocks(type, num_rows=2, num_blocks=3)
    rows[1, TYPES[type].bytes] = value
    with pytest.raises(WeightLoadError, match=type):
        read_blocks(type, torch.from_numpy(rows))


def with_scale(rows: numpy.ndarray, scale: float) -> torch.Tensor:
    """Rows of NVFP4 with a scale of the matrix."""
    end = numpy.full((len(rows), 1), scale, "f4").view("u1")
    return torch.from_numpy(numpy.concatenate((rows, end), 1))


def test_a_scale_of_the_matrix_is_multiplied_in_float32():
    rows, scale = blocks("NVFP4", num_rows=16, num_blocks=3), numpy.float32(0.0123)
    exact = dequantize(rows, GGMLQuantizationType.NVFP4).astype("f8") * scale
    found = read_blocks("NVFP4", with_scale(rows, scale)).dequantized()
    numpy.testing.assert_allclose(found, exact, rtol=2 * 2.0**-24)
    weight = read_blocks("NVFP4", with_scale(rows, scale))
    part = weight.part(slice(None), slice(48, 96)).dequantized()
    assert torch.equal(part, weight.dequantized()[:, 48:96])
    with pytest.raises(WeightLoadError, match="groups of 16"):
        weight.part(slice(None), slice(40, 96))
    with pytest.raises(WeightLoadError, match="of its NVFP4 blocks is NaN or infinite"):
        read_blocks("NVFP4", with_scale(rows, numpy.inf))


@pytest.mark.parametrize("type", LAYOUTS)
def test_fields_have_the_shapes_and_dtypes_of_a_quantized_weight(type):
    weight = read_blocks(type, torch.from_numpy(blocks(type, num_rows=2, num_blocks=2)))
    num_inputs, two_levels = 2 * TYPES[type].inputs, TYPES[type].inputs == 256
    assert weight.values.shape == (2, num_inputs)
    assert weight.values.dtype == torch.int8
    assert weight.scales.shape == (2, num_inputs // weight.group_size)
    assert weight.scales.dtype == (torch.int8 if two_levels else torch.float32)
    assert (weight.factors is not None) == (two_levels or type == "NVFP4")
    assert (weight.min_factors is not None) == (type in ("Q2_K", "Q4_K", "Q5_K"))
    if weight.mins is not None:
        assert weight.lowest == 0
        assert weight.mins.shape == weight.scales.shape
        assert weight.mins.dtype == (torch.uint8 if two_levels else torch.float32)
    if weight.factors is not None:
        assert weight.factors.shape == (2, 2 if two_levels else 1)
    assert codes_of(weight).int().max() < 1 << weight.bits  # for any bytes
    assert torch.equal(weight.part(slice(1, 2)).dequantized(), weight.dequantized()[1:])
