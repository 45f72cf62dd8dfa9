"""Register tiles of linear layers give equal bits under every instruction set of this CPU.

Generic tiles run on any CPU, even with vectors wider than its own. Tiles that need an unsupported
instruction are skipped.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nanoengine.kernels.gemm import PANEL, float_tile, tile_rows, tile_shapes
from nanoengine.kernels.isa import ISAS
from tests.support.tile_functions import RUNNABLE, Compiled, runnable

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*gemm.py",
    "nanoengine/kernels/emit.py",
    "nanoengine/kernels/isa.py",
    "tests/support/tile_functions.py",
)

INPUTS = 70
ROWS = 8
RANDOM = np.random.default_rng(1)
X = RANDOM.standard_normal((ROWS, INPUTS)).astype(np.float32)
X[1] = np.where(np.arange(INPUTS) % 2, 3e38, -3e38)  # sums overflow
X[2, 3] = np.nan
X[3] *= 1e-30  # products are subnormal or zero
WEIGHT = RANDOM.standard_normal((4, INPUTS, PANEL)).astype(np.float32)  # four panels
WEIGHT[0, 5] = 1e-7  # subnormal in float16
BIAS = RANDOM.standard_normal(4 * PANEL).astype(np.float32)


def bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The values rounded to bfloat16, as float32."""
    return torch.from_numpy(numbers).bfloat16().float().numpy()


def stored(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The panels in one storage format, and their values as float32."""
    if kind == "float32":
        return WEIGHT, WEIGHT
    if kind == "float16":
        return WEIGHT.astype(np.float16), WEIGHT.astype(np.float16).astype(np.float32)
    bits = (bfloat16(WEIGHT).view(np.uint32) >> 16).reshape(4, INPUTS // 2, 2, PANEL)
    return bits[:, :, 0] << 16 | bits[:, :, 1], bfloat16(WEIGHT)


def product(isa, kind: str, rows: int, panels: int, x: np.ndarray = X) -> np.ndarray:
    """x times the panels plus a bias, by one tile; [rows, panels * 16]."""
    weight, _ = stored(kind)
    steps = INPUTS if kind == "float32" else INPUTS // 2
    out = np.zeros((rows, panels * PANEL), np.float32)
    function = Compiled(lambda module: float_tile(module, isa, kind, rows, panels))
    stride = x.itemsize // 4 * x.shape[1]
    function(x, stride, weight, weight[0].nbytes, steps, BIAS, 0, out, panels * PANEL, 0, 0)
    return out


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16"])
def expected(request):
    """(kind, products with four panels as chains of float32 fused multiply-adds)."""
    generic = next(isa for isa in RUNNABLE if isa.name == "generic")
    weight = stored(request.param)[1]
    whole = np.zeros((ROWS, 4 * PANEL), np.float32)
    function = Compiled(lambda module: float_tile(module, generic, "float32", 1, 1))
    for row in range(ROWS):
        for panel in range(4):
            at = panel * PANEL
            function(X[row], 0, weight[panel], 0, INPUTS, BIAS[at:], 0, whole[row, at:], 0, 0, 0)
    wide = X.astype(np.float64) @ weight.astype(np.float64).transpose(1, 0, 2).reshape(INPUTS, -1)
    close = np.abs(whole - (wide + BIAS))[[0, 4, 5, 6, 7]]
    assert close.max() < 1e-4
    return request.param, whole


# Why not all: float tiles depend on these properties only.
DISTINCT = {(isa.vector_bits, isa.registers, isa.has_fp16): isa.name for isa in ISAS}


@pytest.mark.parametrize("name", DISTINCT.values())
def test_a_row_has_the_same_bits_in_every_tile_of_every_instruction_set(name, expected):
    isa, (kind, whole) = runnable(name), expected
    for rows, panels in tile_shapes(isa):
        out = product(isa, kind, rows, panels)
        np.testing.assert_array_equal(
            out, whole[:rows, : panels * PANEL], err_msg=f"{rows, panels}"
        )


@pytest.mark.parametrize("name", [i.name for i in ISAS if i.bf16_dots == "vdpbf16ps"])
def test_products_of_pairs_equal_those_of_rounded_inputs(name):
    """Except for values that vdpbf16ps flushes to zero and float32 does not."""
    isa = runnable(name)
    x = X.copy()
    x[3] = 1.0
    rounded = bfloat16(x)
    bits = (rounded.view(np.uint32) >> 16).reshape(ROWS, INPUTS // 2, 2)
    pairs = np.ascontiguousarray(bits[:, :, 0] << 16 | bits[:, :, 1])
    for rows, panels in tile_shapes(isa):
        reference = product(isa, "bfloat16", rows, panels, rounded)
        np.testing.assert_array_equal(product(isa, "pairs", rows, panels, pairs), reference)


def test_the_largest_tile_leaves_registers_for_weights():
    for isa in ISAS:
        for rows, panels in tile_shapes(isa):
            sums = rows * panels * PANEL * 32 // isa.vector_bits
            assert sums < isa.registers, isa.name
        assert tile_rows(isa) >= 2
