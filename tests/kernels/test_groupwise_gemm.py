"""Tiles of group-wise quantized weights have equal bits under every instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from nanoengine.kernels.cpu_groupwise import header_bytes, panel_bytes
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.groupwise_gemm import (
    PAIRED_UNIT_BYTES,
    Form,
    dequantize_blocks,
    float_row_tile,
    groupwise_tile,
    has_spread,
    max_groupwise_rows,
    pair_inputs,
    spread_panel,
    spread_rows,
    unit_bytes,
)
from nanoengine.kernels.isa import ISA, ISAS
from nanoengine.layers.groupwise_panels import layout_of, pack
from nanoengine.layers.quantized_weight import scales_as_floats
from tests.support.groupwise_weights import make_weight
from tests.support.tile_functions import Compiled, runnable

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*gemm.py",
    "nanoengine/kernels/emit.py",
    "nanoengine/kernels/isa.py",
    "nanoengine/kernels/cpu_groupwise.py",
    "nanoengine/layers/groupwise_panels.py",
    "tests/support/groupwise_weights.py",
    "tests/support/tile_functions.py",
)

INPUTS, ROWS = 512, 8
RANDOM = np.random.default_rng(2)
X = RANDOM.integers(-127, 128, (ROWS, INPUTS)).astype(np.int8)
X[0], X[1] = 127, np.where(np.arange(INPUTS) % 2, -127, 127)  # the largest possible sums
X_SCALES, BIAS = (RANDOM.random(n).astype(np.float32) for n in ((ROWS, INPUTS // 32), PANEL))
HALVES = -8 * X.reshape(ROWS, -1, 2, 16).sum(3, dtype=np.int32)
# The layout that `quantize_groups` writes.
GROUPS = np.concatenate((HALVES.sum(2, keepdims=True), HALVES, X_SCALES.view("i4")[..., None]), 2)
GROUPS = GROUPS.astype(np.int32).reshape(ROWS, -1)
DISTINCT = {(isa.byte_dots, isa.byte_bits, isa.registers, isa.has_fp16): isa.name for isa in ISAS}
# One format per number of bits, levels, halves and offsets, and tables: tiles differ in these.
NAMES = ["Q8_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_S", "NVFP4", "GPTQ 4",
         "GPTQ 8", "GPTQ groups of 16"]  # fmt: skip


def paired() -> np.ndarray:
    """What `pair_inputs` returns for X: even inputs, odd inputs, negated sums of their products."""
    even, odd = (X.reshape(ROWS, -1, 32)[:, :, i::2].astype(np.int32) for i in range(2))
    products = -(even * odd).reshape(ROWS, -1, 2, 8).sum(3)
    negated = np.stack(
        (products.sum(2), products[:, :, 0], products[:, :, 1], 0 * products[:, :, 0])
    )
    words = np.concatenate((even, odd), 2).astype(np.int16).view(np.int32)
    whole = np.concatenate((words, negated.transpose(1, 2, 0)), 2).astype(np.int32)
    return whole.reshape(ROWS, -1).view(np.int8)


def spread_results(isa: ISA, form: Form, rows: int, data: np.ndarray, layout: tuple[int, int, int]):
    """The output of the tile with this many rows, from the unpacked panel."""
    panel = np.zeros(64 + layout[0] * unit_bytes(form), np.uint8)
    Compiled(lambda module: spread_panel(module, isa, *form))(data, 0, *layout, panel)
    inputs = paired() if form.is_signed else X
    out, units = np.zeros((rows, PANEL), np.float32), layout[0]
    tile = Compiled(lambda module: groupwise_tile(module, isa, *form, rows, 1))
    tile(inputs, inputs.shape[1], GROUPS, 4 * units, panel, units, 0, 0, BIAS, out, PANEL, 0, 0)
    return out


def test_inputs_are_paired_as_tiles_of_spread_panels_read_them():
    @njit
    def pair(values, out):
        for unit in range(len(values) // 32):
            pair_inputs(values, 32 * unit, out, PAIRED_UNIT_BYTES * unit)

    found = np.zeros((ROWS, INPUTS // 32 * PAIRED_UNIT_BYTES), np.int8)
    pair(X.reshape(-1), found.reshape(-1))
    used = (
        found.reshape(-1, PAIRED_UNIT_BYTES)[:, :76],
        paired().reshape(-1, PAIRED_UNIT_BYTES)[:, :76],
    )
    np.testing.assert_array_equal(*used)


@pytest.mark.parametrize("form", NAMES)
def test_every_instruction_set_gives_the_same_bits(form):
    weight = make_weight(form, PANEL, INPUTS)
    layout = layout_of(weight)
    assert layout is not None
    data = torch.empty(panel_bytes(*layout, INPUTS), dtype=torch.uint8)
    pack(weight, layout, data, 0)
    units, header = INPUTS // 32, header_bytes(*layout)
    sizes = units, layout.shift, header

    inputs = torch.from_numpy(X * X_SCALES.astype(np.float64).repeat(32, 1))
    grouped = inputs.unflatten(1, (-1, weight.group_size))
    values = weight.values.double().unflatten(1, (-1, weight.group_size))
    if weight.zeros is not None:
        values = values - weight.zeros.double().unsqueeze(2)
    sums = torch.einsum("rgi,ogi->rog", grouped, values)
    exact = (sums * scales_as_floats(weight.scales, weight.factors).double()).sum(2)
    if weight.mins is not None:
        mins = scales_as_floats(weight.mins, weight.min_factors).double()
        exact -= grouped.sum(2) @ mins.T
    exact = exact.numpy() + BIAS

    seen = None
    for name in DISTINCT.values():
        try:
            isa = runnable(name)
        except pytest.skip.Exception:
            continue
        floats = Compiled(lambda module, isa=isa: dequantize_blocks(module, isa, *layout.form))
        found = np.zeros((INPUTS, PANEL), np.float32)
        floats(data.numpy(), 0, *sizes, found)
        np.testing.assert_array_equal(found.T, weight.dequantized().numpy())
        for rows in {1, max_groupwise_rows(isa)}:
            tile = Compiled(
                lambda module, r=rows, isa=isa: groupwise_tile(module, isa, *layout.form, r, 0)
            )
            out = np.zeros((rows, PANEL), np.float32)
            tile(X, INPUTS, GROUPS, 4 * units, data.numpy(), *sizes, BIAS, out, PANEL, 0, 0)
            size = np.abs(exact).max(0)
            assert (np.abs(out - exact[:rows]) <= 1e-5 * size).all(), name
            if seen is None:
                seen = out
            np.testing.assert_array_equal(out[0], seen[0], name)
            shared = min(len(out), len(seen))
            np.testing.assert_array_equal(out[:shared], seen[:shared], name)
            seen = out if len(out) > len(seen) else seen
        for rows in spread_rows(isa):
            out = spread_results(isa, layout.form, rows, data.numpy(), sizes)
            np.testing.assert_array_equal(out, seen[:rows], name)
        assert has_spread(isa) == (len(spread_rows(isa)) > 0)
    assert seen is not None, "no set of them runs here"


@pytest.mark.parametrize("form", ["Q8_0", "Q4_K", "Q6_K", "GPTQ 4"])
def test_a_row_of_floats_has_the_same_bits_in_any_tile_and_instruction_set(form):
    weight, panels = make_weight(form, 2 * PANEL, INPUTS), 2
    layout = layout_of(weight)
    assert layout is not None
    step, seen = panel_bytes(*layout, INPUTS), None
    data = torch.empty(panels * step, dtype=torch.uint8)
    pack(weight, layout, data, 0)
    sizes = INPUTS // 32, layout.shift, header_bytes(*layout)
    x = RANDOM.standard_normal(INPUTS).astype(np.float32)
    bias = RANDOM.standard_normal(2 * PANEL).astype(np.float32)
    products = weight.dequantized().double().numpy() * x
    for name in DISTINCT.values():
        try:
            isa = runnable(name)
        except pytest.skip.Exception:
            continue
        for each in (1, panels):
            tile = Compiled(
                lambda module, n=each, isa=isa: float_row_tile(module, isa, *layout.form, n)
            )
            out = np.zeros(2 * PANEL, np.float32)
            for p in range(0, panels, each):
                tile(x, data.numpy()[p * step :], step, *sizes, bias[p * PANEL :],
                     out[p * PANEL :], each * step, 64)  # fmt: skip
            size = np.abs(products).sum(1) + np.abs(bias)
            assert (np.abs(out - (products.sum(1) + bias)) <= 1e-5 * size).all(), name
            seen = out if seen is None else seen
            np.testing.assert_array_equal(out, seen, name)
    assert seen is not None, "no set of them runs here"
