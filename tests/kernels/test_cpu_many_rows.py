"""Products of many rows, which are cut by rows: each row has the bits that it has among few."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoengine.kernels.cpu_decoder import GATED, finish_layer
from nanoengine.kernels.cpu_linear import DOTS, ROW_BLOCK
from nanoengine.kernels.pool import PIECES
from nanoengine.kernels.tiles import PANEL
from nanoengine.layers.cpu_quantized import CPUQuantizedLinear

HIDDEN, INNER = 52, (GATED + 5) * PANEL  # a panel of 4 outputs; gates in two turns
WORKERS = 2
ROWS = ROW_BLOCK * PIECES * WORKERS + 13
NONE = np.empty(0, np.int64)


@pytest.mark.parametrize("kind", ["float32", "pairs", "int8"])
def test_the_rest_of_a_layer_gives_each_row_its_own_bits(kind):
    draw = np.random.default_rng(0)

    def linear(outputs: int, inputs: int) -> tuple[np.ndarray, ...]:
        numbers = draw.standard_normal(outputs * inputs, np.float32) / np.float32(inputs**0.5)
        if kind == "pairs":
            numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
        if kind == "int8":
            method = CPUQuantizedLinear("", bits=8, group_size=None, activations="int8")
            method.create((outputs, inputs), torch.float32, torch.device("cpu"))
            method.load(torch.from_numpy(numbers.reshape(outputs, inputs)))
            return method.operands(None)
        return numbers, draw.standard_normal(outputs, np.float32)

    norm, real = np.ones(HIDDEN, np.float32), np.float32
    operand = np.empty(0, np.uint32 if kind == "pairs" and DOTS else np.float32)
    mlp = linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER), norm, operand, INNER, 0
    second = (linear(HIDDEN, HIDDEN), norm, norm), mlp, (real(1e-6), False, real(1))
    attended, residual = draw.standard_normal((2, ROWS, HIDDEN), np.float32)

    def run(rows: slice, workers: int) -> np.ndarray:
        found, added = np.empty_like(attended[rows]), residual[rows].copy()
        finish_layer(attended[rows], added, True, True, NONE, found, added, second, workers)
        return found

    whole = run(slice(ROWS), WORKERS)
    assert np.isfinite(whole).all()
    assert whole.std() > 0.1
    for first in range(0, ROWS, 96):
        few = slice(first, min(first + 96, ROWS))
        np.testing.assert_array_equal(run(few, 1), whole[few])
