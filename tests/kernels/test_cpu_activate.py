"""A gated activation that is fused with its product gives the bits of two separate steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoengine.kernels.cpu_decoder import GATED_PANELS, activate, matmul
from nanoengine.kernels.cpu_layers import GATES, gate
from nanoengine.kernels.cpu_linear import BF16_DOTS, ROW_BLOCK, round_to_bf16, row_parts
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import PIECES
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear
from nanoengine.layers.packed import PackedLinear

INPUTS = 96
MANY = ROW_BLOCK * PIECES * 2 + 13  # two workers split these by rows instead of panels


@compiled(fastmath=())
def fused(x, weight, activation, out, workers):
    activate(x, weight, activation, out, workers)


@compiled(fastmath=())
def separate(x, weight, activation, both, out, workers):
    matmul(x, weight, both, workers)
    gate(both, activation, out, workers)


def operands(kind: str, weight: torch.Tensor) -> tuple[np.ndarray, ...]:
    """A weight packed for the kernels, as a layer packs it."""
    method: PackedLinear | CPUQuantizedLinear
    if kind == "int8":
        method = CPUQuantizedLinear("layer", bits=8, group_size=None, activations="int8")
        dtype = torch.float32
    else:
        method = PackedLinear("layer", rounds_inputs=kind == "rounded")
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
    method.create(tuple(weight.shape), dtype, torch.device("cpu"))
    method.load(weight.to(dtype))
    return method.operands(None)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "rounded", "int8"])
@pytest.mark.parametrize(
    ("inner", "activation"), [(16, 0), (144, 0), (336, 1), (40, 2), ((GATED_PANELS + 5) * PANEL, 0)]
)
def test_a_fused_gate_gives_the_bits_of_a_separate_gate(kind, inner, activation):
    """The bits do not depend on how rows are divided among workers, which happens if there are few
    tiles or many rows. The last case has more gates than one pass handles."""
    assert activation in GATES.values()
    draw = torch.Generator().manual_seed(inner)
    weight = operands(kind, torch.randn(2 * inner, INPUTS, generator=draw))
    for rows in (1, 2, 7, 96, 131, 300, MANY):
        x = torch.randn(rows, INPUTS, generator=draw).numpy()
        both, expected, *found = (
            np.full((rows, size), np.nan, np.float32) for size in (2 * inner, *[inner] * 5)
        )
        for block in (slice(first, first + ROW_BLOCK) for first in range(0, rows, ROW_BLOCK)):
            separate(x[block], weight, activation, both[block], expected[block], 1)
        assert np.isfinite(expected).all()
        separate(x, weight, activation, both, found[0], 64)
        separate(x, weight, activation, both, found[1], 2)
        fused(x, weight, activation, found[2], 64)
        fused(x, weight, activation, found[3], 2)
        assert all(np.array_equal(out, expected) for out in found)


def test_rows_are_divided_if_there_are_too_few_tiles():
    parts = row_parts.py_func
    assert [parts(rows, 20, 2) for rows in (1, 300, 4096)] == [1, 1, 1]
    assert [parts(rows, 20, 16) for rows in (1, 63, 64, 96, 128, 4096)] == [1, 1, 2, 3, 4, 4]
    assert parts(4096, 3, 64) == 86


@pytest.mark.skipif(not BF16_DOTS, reason="pairs need bfloat16 dot products, which this CPU lacks")
@pytest.mark.parametrize(("inner", "activation"), [(16, 0), (144, 1)])
def test_a_fused_gate_rounds_its_output_for_the_next_product(inner, activation):
    draw = torch.Generator().manual_seed(inner)
    weight = operands("rounded", torch.randn(2 * inner, INPUTS, generator=draw))
    for rows in (1, 7, 131):
        x = torch.randn(rows, INPUTS, generator=draw).numpy()
        x[0, 3] = np.nan
        both, activated = (np.empty((rows, size), np.float32) for size in (2 * inner, inner))
        out = np.zeros((rows, inner // 2), np.uint32)
        separate(x, weight, activation, both, activated, 3)
        fused(x, weight, activation, out, 3)
        expected = round_to_bf16(activated, 3)
        assert np.array_equal(out[1:], expected[1:])
        halves = torch.from_numpy(out[:1].view(np.int16)).view(torch.bfloat16)
        assert halves.isnan().all(), "NaN is lost"
