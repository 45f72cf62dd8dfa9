"""Tiles of whole numbers under every instruction set that this CPU can run: exact, equal bits."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.kernels.byte_tiles import shapes8, shapes16, tile8, tile16
from nanoengine.kernels.isa import ISAS
from nanoengine.kernels.tiles import PANEL
from tests.support.tile_functions import Compiled, runnable

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*tiles.py",
    "nanoengine/kernels/emit.py",
    "nanoengine/kernels/isa.py",
    "tests/support/tile_functions.py",
)

INPUTS, ROWS, PANELS = 96, 8, 4
RANDOM = np.random.default_rng(2)
X = RANDOM.integers(-127, 128, (ROWS, INPUTS)).astype(np.int8)
X[0], X[1] = 127, np.where(np.arange(INPUTS) % 2, -127, 127)  # the largest sums there are
X_SCALES, W_SCALES, BIAS = (RANDOM.random(n).astype(np.float32) for n in (ROWS, 64, 64))
# Why: tiles of bytes depend on nothing else.
DISTINCT = {(isa.byte_dots, isa.byte_bits, isa.registers, isa.halves): isa.name for isa in ISAS}


def scaled(exact: np.ndarray, rows: int, panels: int) -> np.ndarray:
    """What a tile makes of its sums [ROWS, PANELS * 16]; its one rounding is that of float64."""
    count = panels * PANEL
    scales = (X_SCALES[:rows, None] * W_SCALES[:count]).astype(np.float64)
    return (exact[:rows, :count] * scales + BIAS[:count]).astype(np.float32)


def by_panel(weight: np.ndarray, of_line: int) -> np.ndarray:
    """[outputs, inputs] -> [panels, lines, 16 outputs, inputs of a line]."""
    return weight.reshape(PANELS, PANEL, -1, of_line).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("name", DISTINCT.values())
def test_int8(name):
    isa = runnable(name)
    weight = RANDOM.integers(-128, 128, (PANELS * PANEL, INPUTS)).astype(np.int8)
    weight[0], weight[1] = -128, 127
    exact = X.astype(np.int64) @ weight.astype(np.int64).T
    w = np.ascontiguousarray(by_panel(weight, 4))
    offset = -128 if isa.byte_dots == "vpdpbusd" else 0
    starts = (offset * X.astype(np.int32).sum(1)).astype(np.int32)
    for rows, panels in shapes8(isa):
        out = np.zeros((rows, panels * PANEL), np.float32)
        tile = Compiled(lambda module, r=rows, p=panels: tile8(module, isa, r, p))
        tile(X, INPUTS, starts, X_SCALES, w, w[0].nbytes, INPUTS // 4, W_SCALES, BIAS,
             out, panels * PANEL, 0, 0)  # fmt: skip
        np.testing.assert_array_equal(out, scaled(exact, rows, panels))


@pytest.mark.parametrize("name", DISTINCT.values())
def test_int16(name):
    isa = runnable(name)
    x = RANDOM.integers(-32000, 32001, (ROWS, INPUTS)).astype(np.int16)
    weight = RANDOM.integers(-127, 128, (PANELS * PANEL, INPUTS)).astype(np.int8)
    pairs = by_panel(weight, 4).reshape(PANELS, -1, PANEL, 2, 2).swapaxes(2, 3)
    w = np.ascontiguousarray(pairs)
    exact = (x.astype(np.int64) @ weight.astype(np.int64).T).astype(np.float32)
    for rows, _ in shapes16(isa):
        out = np.zeros((rows, PANEL), np.float32)
        tile = Compiled(lambda module, r=rows: tile16(module, isa, r))
        tile(x, INPUTS, w, INPUTS // 4, out, PANEL, 0, 0)
        np.testing.assert_array_equal(out, exact[:rows, :PANEL])
