"""Linear layers with group-wise quantized weights on a CPU: codes of 2 to 8 bits, int8 activations.

    x float32 ─ quantize each 32 inputs ─┐
                                         ├─ exact sums of groups ─ times both scales ─ + bias
    weight ─ panels of 16 outputs ───────┘   `groupwise_gemm.py`

A weight is one array of bytes that describes its own contents. Outputs that are stored in the same
format are a *part*. q, k and v are up to three parts, since a checkpoint may use more bits for one
of them.

    64 bytes          number of parts; panels; outputs; whether no panel is padded; inputs
    192 per part      first panel; panels; byte where they begin; bytes per panel; shift; bytes of a
                      header; rows of the largest tile; first output; outputs; bytes per unit of a
                      spread-out panel, 0: panels are not spread out; whether its inputs are paired;
                      addresses of the form's functions
    panels            of all parts, one after the other

The same panels are used for float activations (`linear_fp32`) and for row lookups
(`groupwise_rows`), with the exact values of `QuantizedWeight.dequantized`. `layers/quantized.py` is
the reference implementation; `layers/cpu_quantized.py` packs weights.

Legend: T rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import functools

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.cpu_linear import ROW_BLOCK as ROW_BLOCK_OF_FLOATS
from nanoengine.kernels.cpu_linear import run_tiles
from nanoengine.kernels.cpu_quantized import AHEAD, FASTMATH, ROW_BLOCK, quantize_groups
from nanoengine.kernels.gemm import LINE, PANEL, PANELS
from nanoengine.kernels.groupwise_gemm import (
    MAX_REGISTER_ROWS,
    PAIRED_UNIT_BYTES,
    PANELS_AT_ONCE,
    UNITS,
    Form,
    matmul_groupwise,
    matmul_groupwise_fp32,
    pair_inputs,
    store_addresses,
    unpack_panel,
)
from nanoengine.kernels.int8_gemm import GROUP_INTS, UNIT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

HEAD, RECORD = 8, 24  # 64-bit words, see above
PARTS, ALL_PANELS, OUTPUTS, IS_UNPADDED, INPUTS = range(5)
BEFORE, NUM_PANELS, DATA_START, PANEL_BYTES, SHIFT, HEADER = range(6)
ROWS, FIRST, COUNT, SPREAD_UNIT_BYTES, USES_PAIRS, ROW_FUNCTIONS = range(6, 12)
FUNCTIONS = ROW_FUNCTIONS + 2  # the first dequantizes blocks, the tiles of 1, 2, ... rows follow
MIN_SPREAD_TILES = 4  # a panel is spread out for at least so many tiles of rows
UNITS_AT_ONCE = 32  # dequantized at a time: with two panels 128 KiB, which stay in the L2 cache
TILE = max(PANELS_AT_ONCE, PANELS)  # panels per work item; single panels take longer
PAIRED_ROWS = 64  # rows per panel before the next panel; fewer, because paired rows are larger


@compiled(fastmath=FASTMATH)
def addresses(form, out):
    """out = the addresses of a form's functions; see `store_addresses`."""
    store_addresses(form, out)


@functools.cache
def functions(form: Form) -> np.ndarray:
    """The addresses of a form's functions, compiled if necessary."""
    out = np.zeros(RECORD - ROW_FUNCTIONS, np.int64)
    addresses(tuple((0,) * value for value in form), out)
    return out


def header_bytes(form: Form, shift: int) -> int:
    """Bytes of a block's header: scales and offsets, in whole lines."""
    if form.levels == 1:
        lines = form.halves * (2 if form.offset else 1)
        return -(-(UNITS >> shift) * lines * 2 * PANEL // LINE) * LINE
    return LINE * (3 + form.halves if form.offset else 1 + 2 * form.halves)


def panel_bytes(form: Form, shift: int, num_inputs: int) -> int:
    """Bytes of a panel of 16 outputs."""
    units = -(-num_inputs // UNIT)
    return LINE + -(-units // UNITS) * header_bytes(form, shift) + units * form.bits * LINE


@compiled(fastmath=FASTMATH, inline=True)
def _spread_panels(values, groups, data, part, row, rows, lo, hi, bias, out, skipped):
    """`groupwise_panels` of some rows, for panels lo ... hi - 1 of a part, which are spread
    out."""
    size, num_outputs, limit = values.shape[1], out.shape[1], part[ROWS]
    units, tiles, functions = size // UNIT, -(-rows // limit), part[FUNCTIONS:]
    x, unit_bytes, first_x = values.reshape(-1), UNIT, row * size
    if part[USES_PAIRS]:
        paired = empty((rows * units * PAIRED_UNIT_BYTES,), np.int8)
        for unit in range(rows * units):
            pair_inputs(x, first_x + unit * UNIT, paired, unit * PAIRED_UNIT_BYTES)
        x, unit_bytes, first_x = paired, PAIRED_UNIT_BYTES, 0
    panel, flat = empty((LINE + units * part[SPREAD_UNIT_BYTES],), np.uint8), out.reshape(-1)
    share, next_panel = -(-LINE // tiles), data.ctypes.data - panel.ctypes.data + part[PANEL_BYTES]
    for p in range(lo, hi):
        n, at = p * PANEL, part[DATA_START] + (p - part[BEFORE]) * part[PANEL_BYTES]
        unpack_panel(functions[limit + 1], data, at, 0, units, part[SHIFT], part[HEADER], panel, 0)
        for t in range(tiles):
            first, last = rows * t // tiles, rows * (t + 1) // tiles
            matmul_groupwise(
                functions[last - first + 3], x, first_x + first * units * unit_bytes,
                units * unit_bytes, groups, (row + first) * units * GROUP_INTS, units * GROUP_INTS,
                panel, 0, units, 0, 0, bias, n, flat, (row + first) * num_outputs + n - skipped,
                num_outputs, next_panel + at + t * share * (part[PANEL_BYTES] // LINE), share,
            )  # fmt: skip


@compiled(fastmath=FASTMATH)
def groupwise_panels(values, groups_of_rows, data, bias, out, origin, lo, hi):
    """`linear_groupwise` of quantized rows for the outputs of panels lo ... hi - 1: one worker's
    share. `out` begins at panel `origin`. Tiles are as in `linear8_panels`."""
    (num_rows, size), num_outputs, skipped = values.shape, out.shape[1], origin * PANEL
    units, words = size // UNIT, data.view(np.int64)
    x, groups, flat = values.reshape(-1), groups_of_rows.reshape(-1), out.reshape(-1)
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        first_panel, step, max_rows = part[BEFORE], part[PANEL_BYTES], part[ROWS]
        start, stop = max(lo, first_panel), min(hi, first_panel + part[NUM_PANELS])
        ahead, lines = AHEAD if num_rows <= max_rows else step, step // LINE - 1
        block = PAIRED_ROWS if part[SPREAD_UNIT_BYTES] and part[USES_PAIRS] else ROW_BLOCK
        for row in range(0, num_rows, block):
            rows = min(block, num_rows - row)
            tiles = -(-rows // max_rows)
            if part[SPREAD_UNIT_BYTES] and tiles >= MIN_SPREAD_TILES:
                _spread_panels(values, groups, data, part, row, rows, start, stop, bias, out,
                               skipped)  # fmt: skip
                continue
            share = -(-LINE // tiles)  # bytes per line
            for p in range(start, stop):
                for t in range(tiles):
                    first, last = row + rows * t // tiles, row + rows * (t + 1) // tiles
                    n = p * PANEL
                    matmul_groupwise(
                        part[FUNCTIONS + last - first], x, first * size, size, groups,
                        first * units * GROUP_INTS, units * GROUP_INTS, data,
                        part[DATA_START] + (p - first_panel) * step, units, part[SHIFT],
                        part[HEADER], bias, n, flat, first * num_outputs + n - skipped, num_outputs,
                        ahead + t * share * lines, share,
                    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def _copy_parts(words, padded, out):
    """Copies the outputs of each part from a buffer with padded panels to out [T, N]."""
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        first, at = part[FIRST], part[BEFORE] * PANEL
        for t in range(len(out)):
            for n in range(part[COUNT]):
                out[t, first + n] = padded[t, at + n]


@compiled(fastmath=FASTMATH)
def linear_groupwise(x, data, bias, out, num_workers):
    """out[T, N] = x[T, K], quantized to int8, @ w^T + bias; the bias is padded like the panels."""
    values, groups = quantize_groups(x, UNIT, num_workers)
    words = data.view(np.int64)
    panels, is_unpadded = words[ALL_PANELS], words[IS_UNPADDED] != 0
    padded = out if is_unpadded else empty((len(out), panels * PANEL), np.float32)
    parallel_for(groupwise_panels, panels, num_workers, (values, groups, data, bias, padded, 0))
    if not is_unpadded:
        _copy_parts(words, padded, out)


@compiled(fastmath=FASTMATH, inline=True)
def _few_rows(x, data, part, bias, out, skipped, lo, hi):
    """`groupwise_fp32_panels` of a part for few rows: each row dequantizes in registers."""
    (num_rows, size), num_outputs, p, step = x.shape, out.shape[1], lo, part[PANEL_BYTES]
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    while p < hi:
        panels, n = PANELS_AT_ONCE if p + PANELS_AT_ONCE <= hi else 1, p * PANEL
        for row in range(num_rows):
            matmul_groupwise_fp32(
                part[ROW_FUNCTIONS + (panels > 1)], inputs, row * size, data,
                part[DATA_START] + (p - part[BEFORE]) * step, step, size // UNIT, part[SHIFT],
                part[HEADER], bias, n, outputs, row * num_outputs + n - skipped, panels * step,
                LINE,
            )  # fmt: skip
        p += panels


@compiled(fastmath=FASTMATH)
def groupwise_fp32_panels(x, data, bias, out, origin, lo, hi):
    """`linear_fp32` for the outputs of panels lo ... hi - 1: one worker's share. `out` begins at
    panel `origin`."""
    (num_rows, size), num_outputs, words = x.shape, out.shape[1], data.view(np.int64)
    skipped = origin * PANEL
    inputs, outputs, units = x.reshape(-1), out.reshape(-1), -(-size // UNIT)
    step = min(units, UNITS_AT_ONCE) * UNIT * PANEL
    few = num_rows <= MAX_REGISTER_ROWS and size % UNIT == 0
    floats = empty((0 if few else PANELS * step,), np.float32)
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        first_panel = part[BEFORE]
        p, stop = max(lo, first_panel), min(hi, first_panel + part[NUM_PANELS])
        if few:
            _few_rows(x, data, part, bias, out, skipped, p, stop)
            continue
        header = part[HEADER]
        unit_bytes = (part[PANEL_BYTES] - LINE - -(-units // UNITS) * header) // units
        while p < stop:
            panels, n = PANELS if p + PANELS <= stop else 1, p * PANEL
            for unit in range(0, units, UNITS_AT_ONCE):
                first, count = unit * UNIT, min(UNITS_AT_ONCE, units - unit)
                for k in range(panels):
                    at = part[DATA_START] + (p + k - first_panel) * part[PANEL_BYTES]
                    unpack_panel(part[FUNCTIONS], data, at, unit // UNITS * header + unit *
                                 unit_bytes, count, part[SHIFT], header, floats,
                                 k * step)  # fmt: skip
                for row in range(0, num_rows, ROW_BLOCK_OF_FLOATS):
                    x_at, o_at = row * size + first, row * num_outputs + n - skipped
                    start, start_at, stride = (outputs, o_at, num_outputs) if unit else (bias, n, 0)
                    run_tiles(min(ROW_BLOCK_OF_FLOATS, num_rows - row), panels, inputs, x_at,
                                   size, floats, 0, step, min(count * UNIT, size - first), start,
                                   start_at, stride, outputs, o_at, num_outputs, 0)  # fmt: skip
            p += panels


@compiled(fastmath=FASTMATH)
def _float_tiles(x, data, bias, out, lo, hi):
    stop = min(hi * TILE, out.shape[1] // PANEL)
    groupwise_fp32_panels(x, data, bias, out, 0, lo * TILE, stop)


@compiled(fastmath=FASTMATH)
def linear_fp32(x, data, bias, out, num_workers):
    """out[T, N] = x[T, K] @ w^T + bias. Each panel is dequantized when it is read, once for all
    rows if there are more than a few. The bits are the same either way."""
    if len(x) == 0:
        return  # Why: each panel would be dequantized for no row.
    words = data.view(np.int64)
    panels, is_unpadded = words[ALL_PANELS], words[IS_UNPADDED] != 0
    padded = out if is_unpadded else empty((len(out), panels * PANEL), np.float32)
    parallel_for(_float_tiles, -(-panels // TILE), num_workers, (x, data, bias, padded))
    if not is_unpadded:
        _copy_parts(words, padded, out)


@compiled(fastmath=FASTMATH)
def _groupwise_rows(data, ids, out, lo, hi):
    words, units = data.view(np.int64), -(-out.shape[1] // UNIT)
    panel = empty((units * UNIT * PANEL,), np.float32)
    for i in range(lo, hi):
        part = words[HEAD : HEAD + RECORD]
        for number in range(1, words[PARTS]):
            if words[HEAD + number * RECORD + FIRST] <= ids[i]:
                part = words[HEAD + number * RECORD : HEAD + (number + 1) * RECORD]
        row_in_part, row = ids[i] - part[FIRST], out[i]
        at = part[DATA_START] + row_in_part // PANEL * part[PANEL_BYTES]
        unpack_panel(part[FUNCTIONS], data, at, 0, units, part[SHIFT], part[HEADER], panel, 0)
        for k in range(len(row)):
            row[k] = panel[k * PANEL + row_in_part % PANEL]


@compiled(fastmath=FASTMATH)
def groupwise_rows(data, ids, out, num_workers):
    """out[i] = row ids[i] of the weight [N, K].

    Why a whole panel for each row: dequantizing 16 adjacent outputs takes only a few microseconds.
    """
    parallel_for(_groupwise_rows, len(ids), num_workers, (data, ids, out))
