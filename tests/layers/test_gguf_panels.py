"""Rows packed directly from a GGUF file's bytes, against rows that are decoded first."""

from __future__ import annotations

import pytest
import torch

from nanoengine.checkpoint.gguf import TYPES
from nanoengine.errors import WeightLoadError
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.gguf_blocks import LAYOUTS, read_blocks
from nanoengine.layers.placement import LARGE_BYTES, place_buffers
from nanoengine.layers.preallocate import WeightArena
from tests.layers.test_gguf_blocks import blocks, with_scale

CPU, ROWS = torch.device("cpu"), 48


def empty_layer(outputs: int, inputs: int) -> CPUQuantizedLinear:
    method = CPUQuantizedLinear("layer", bits=8, group_size=None, activations="int8")
    method.create((outputs, inputs), torch.float32, CPU)
    return method


@pytest.mark.parametrize("count", [ROWS, ROWS - 5])
@pytest.mark.parametrize("type", LAYOUTS)
def test_packed_bytes_have_the_panels_of_decoded_rows(type, count):
    rows = blocks(type, ROWS, num_blocks=3)
    rows = (with_scale(rows, 0.0123) if type == "NVFP4" else torch.from_numpy(rows))[:count]
    read, packed = (empty_layer(count, 3 * TYPES[type].inputs) for _ in range(2))
    read.allocate = packed.allocate = lambda size: torch.zeros(size, dtype=torch.uint8)
    read.load_quantized(read_blocks(type, rows))
    assert packed.load_blocks(type, rows[32:], 32)
    assert packed.load_blocks(type, rows[:32], 0)
    ids = torch.arange(count)
    read.activations = packed.activations = "float"
    assert torch.equal(read.rows(ids), packed.rows(ids))
    if type != "MXFP4":  # its scales are too far apart for float16
        assert torch.equal(packed.rows(ids), read_blocks(type, rows).dequantized())
    if type not in ("MXFP4", "NVFP4"):  # they have two codes for 0
        assert torch.equal(read.values, packed.values)


def test_rows_that_share_a_panel_must_be_decoded():
    rows = torch.from_numpy(blocks("Q4_0", 24, num_blocks=2))
    method = empty_layer(40, 64)
    assert not method.load_blocks("Q4_0", rows, 0)
    assert not method.load_blocks("Q4_0", rows[:16], 24)
    assert method.load_blocks("Q4_0", rows[:8], 32)


def test_a_nan_scale_raises():
    rows = torch.from_numpy(blocks("Q4_K", 16, num_blocks=2))
    rows[3, 1] = 0x7E
    with pytest.raises(WeightLoadError, match="of its Q4_K blocks is NaN or infinite"):
        empty_layer(16, 512).load_blocks("Q4_K", rows, 0)


def test_preallocated_weights_are_not_moved():
    arena, rows = WeightArena(), torch.from_numpy(blocks("Q4_0", 32, num_blocks=2))
    first, second = (empty_layer(32, 64) for _ in range(2))
    for method in (first, second):
        method.allocate = arena.allocate
        assert method.load_blocks("Q4_0", rows, 0)
    addresses = [method.values.data_ptr() for method in (first, second)]
    assert 0 < addresses[1] - addresses[0] < 2 * first.values.nbytes
    model = torch.nn.ModuleList([first, second])
    expected = first.rows(torch.arange(32))
    place_buffers(model)
    assert [method.values.data_ptr() for method in (first, second)] == addresses
    assert torch.equal(second.rows(torch.arange(32)), expected)
    assert arena.allocate(LARGE_BYTES).data_ptr() > addresses[1]
