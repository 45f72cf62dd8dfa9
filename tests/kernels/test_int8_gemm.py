"""Integer tiles are exact under every instruction set that this CPU supports."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.int8_gemm import GROUP_INTS, shapes8, shapes16, tile8, tile16
from nanoengine.kernels.isa import ISAS
from tests.support.tile_functions import Compiled, runnable

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*gemm.py",
    "nanoengine/kernels/emit.py",
    "nanoengine/kernels/isa.py",
    "tests/support/tile_functions.py",
)

INPUTS, ROWS, PANELS = 192, 8, 4
GROUPS = INPUTS // GROUP
RANDOM = np.random.default_rng(2)
X = RANDOM.integers(-127, 128, (ROWS, INPUTS)).astype(np.int8)
X[0], X[1] = 127, np.where(np.arange(INPUTS) % 2, -127, 127)  # the largest possible sums
X_SCALES, BIAS = (RANDOM.random(n).astype(np.float32) for n in ((ROWS, GROUPS), 64))
W_SCALES = RANDOM.integers(0x3800, 0x3F80, (GROUPS, 64)).astype(np.int16)  # bits of bfloat16
# Integer tiles depend on these four properties only.
DISTINCT = {(isa.byte_dots, isa.byte_bits, isa.registers, isa.has_fp16): isa.name for isa in ISAS}


def scaled(exact: np.ndarray, rows: int, panels: int) -> np.ndarray:
    """The expected tile output for group sums [GROUPS, ROWS, PANELS * 16].

    The product with the weight scale is rounded once, and each addition (in float64) once.
    """
    count = panels * PANEL
    scales = (W_SCALES.astype(np.uint32) << 16).view(np.float32)
    total = np.tile(BIAS[:count], (rows, 1))
    for group in range(GROUPS):
        sums = exact[group, :rows, :count].astype(np.float32) * scales[group, :count]
        product = sums.astype(np.float64) * X_SCALES[:rows, group, None]
        total = (total + product).astype(np.float32)
    return total


def by_panel(weight: np.ndarray, per_line: int) -> np.ndarray:
    """[outputs, inputs] -> [panels, lines, 16 outputs, inputs per line]."""
    return weight.reshape(PANELS, PANEL, -1, per_line).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("name", DISTINCT.values())
def test_int8_tiles_are_exact(name):
    isa = runnable(name)
    weight = RANDOM.integers(-128, 128, (PANELS * PANEL, INPUTS)).astype(np.int8)
    weight[0], weight[1] = -128, 127
    grouped, weights = X.reshape(ROWS, GROUPS, -1), weight.reshape(len(weight), GROUPS, -1)
    exact = np.einsum("rgk,ngk->grn", grouped.astype(np.int64), weights.astype(np.int64))
    w = np.ascontiguousarray(by_panel(weight, 4))
    numbers = np.zeros((ROWS, GROUPS, GROUP_INTS), np.int32)
    numbers[:, :, 0], numbers[:, :, -1] = -8 * grouped.sum(2, np.int32), X_SCALES.view(np.int32)
    w_scales = np.ascontiguousarray(W_SCALES.reshape(GROUPS, PANELS, PANEL).swapaxes(0, 1))
    for rows, panels in shapes8(isa):
        out = np.zeros((rows, panels * PANEL), np.float32)
        tile = Compiled(lambda module, r=rows, p=panels: tile8(module, isa, r, p))
        tile(X, numbers, w, w_scales, GROUPS, BIAS, out, panels * PANEL, 0, 0)
        np.testing.assert_array_equal(out, scaled(exact, rows, panels))


@pytest.mark.parametrize("name", DISTINCT.values())
def test_int16_tiles_are_exact(name):
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
