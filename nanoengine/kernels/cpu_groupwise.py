"""Linear layers with group-wise quantized weights on a CPU: codes of 2 to 8 bits, int8 activations.

    x float32 ─ quantize each 32 inputs ─┐
                                         ├─ exact sums of groups ─ times both scales ─ + bias
    weight ─ panels of 16 outputs ───────┘   `groupwise_gemm.py`

A weight is one array of bytes that describes its own contents. Outputs that are stored in the same
format are a *part*. q, k and v are up to three parts, since a checkpoint may use more bits for one
of them.

    64 bytes          number of parts; panels; outputs; whether no panel is padded; inputs
    192 per part      first panel; panels; byte where they begin; bytes of a panel; shift; header;
                      rows of the largest tile; first output; outputs; bytes of a unit that is
                      spread out, 0: none is; whether inputs are paired for them; addresses of the
                      form's functions
    panels            of all parts, one after the other

The same panels are used for float activations (`linear_floats`) and for look-ups of rows
(`grouped_rows`), with the exact values of `QuantizedWeight.dequantized`. `layers/quantized.py` is
the reference implementation; `layers/cpu_quantized.py` packs weights.

Legend: T rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import functools

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.cpu_linear import ROW_BLOCK as ROW_BLOCK_OF_FLOATS
from nanoengine.kernels.cpu_linear import rows_of_panels
from nanoengine.kernels.cpu_quantized import AHEAD, FASTMATH, ROW_BLOCK, quantize_groups
from nanoengine.kernels.gemm import LINE, PANEL, PANELS
from nanoengine.kernels.groupwise_gemm import (
    AT_ONCE,
    FEW_WIDENED,
    PAIRED,
    UNITS,
    Form,
    keep_addresses,
    multiply_floats,
    multiply_grouped,
    pair_inputs,
    panel_made,
)
from nanoengine.kernels.int8_gemm import OF_GROUP, UNIT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

HEAD, RECORD = 8, 24  # 64-bit words, see above
PARTS, ALL_PANELS, OUTPUTS, IS_WHOLE, INPUTS = range(5)
BEFORE, OF_PART, START, STEP, SHIFT, HEADER = range(6)
ROWS, FIRST, COUNT, SPREAD, PAIRS, OF_A_ROW = range(6, 12)
FUNCTIONS = OF_A_ROW + 2  # the first dequantizes a panel, the row tiles follow
TILES_OF_SPREAD = 4  # row tiles; with at least this many a panel is spread out
WIDENED = 32  # units dequantized at a time: with two panels 128 KiB, which stay in the L2 cache
TILE = max(AT_ONCE, PANELS)  # panels: work items are whole tiles, since single panels take longer
PAIRED_ROWS = 64  # rows multiplied with a panel before the next: paired rows are larger


@compiled(fastmath=FASTMATH)
def addresses(form, out):
    """out = the addresses of a form's functions; see `keep_addresses`."""
    keep_addresses(form, out)


@functools.cache
def functions(form: Form) -> np.ndarray:
    """The addresses of a form's functions, compiled if necessary."""
    out = np.zeros(RECORD - OF_A_ROW, np.int64)
    addresses(tuple((0,) * number for number in form), out)
    return out


def header_bytes(form: Form, shift: int) -> int:
    """Bytes of a block's header: scales and offsets, in whole lines."""
    if form.levels == 1:
        lines = 2 if form.offset else 1
        return -(-(UNITS >> shift) * lines * 2 * PANEL // LINE) * LINE
    return LINE * (3 + form.halves if form.offset else 1 + 2 * form.halves)


def panel_bytes(form: Form, shift: int, num_inputs: int) -> int:
    """Bytes of a panel of 16 outputs."""
    units = -(-num_inputs // UNIT)
    return LINE + -(-units // UNITS) * header_bytes(form, shift) + units * form.bits * LINE


@compiled(fastmath=FASTMATH, part=True)
def _spread_panels(values, groups, data, part, row, rows, lo, hi, bias, out, skipped):
    """`grouped_panels` of some rows for panels lo ... hi - 1 of a part, each of them spread out."""
    size, num_outputs, most = values.shape[1], out.shape[1], part[ROWS]
    units, tiles, functions = size // UNIT, -(-rows // most), part[FUNCTIONS:]
    x, of_unit, first_x = values.reshape(-1), UNIT, row * size
    if part[PAIRS]:
        paired = empty((rows * units * PAIRED,), np.int8)
        for unit in range(rows * units):
            pair_inputs(x, first_x + unit * UNIT, paired, unit * PAIRED)
        x, of_unit, first_x = paired, PAIRED, 0
    room, flat = empty((LINE + units * part[SPREAD],), np.uint8), out.reshape(-1)
    share, following = -(-LINE // tiles), data.ctypes.data - room.ctypes.data + part[STEP]
    for p in range(lo, hi):
        n, at = p * PANEL, part[START] + (p - part[BEFORE]) * part[STEP]
        panel_made(functions[most + 1], data, at, 0, units, part[SHIFT], part[HEADER], room, 0)
        for t in range(tiles):
            first, last = rows * t // tiles, rows * (t + 1) // tiles
            multiply_grouped(
                functions[last - first + 3], x, first_x + first * units * of_unit, units * of_unit,
                groups, (row + first) * units * OF_GROUP, units * OF_GROUP, room, 0, units, 0, 0,
                bias, n, flat, (row + first) * num_outputs + n - skipped, num_outputs,
                following + at + t * share * (part[STEP] // LINE), share,
            )  # fmt: skip


@compiled(fastmath=FASTMATH)
def grouped_panels(values, groups_of_rows, data, bias, out, origin, lo, hi):
    """`linear_grouped` of quantized rows for the outputs of panels lo ... hi - 1: one worker's
    share. `out` begins at panel `origin`. Tiles are as in `linear8_panels`."""
    (num_rows, size), num_outputs, skipped = values.shape, out.shape[1], origin * PANEL
    units, words = size // UNIT, data.view(np.int64)
    x, groups, flat = values.reshape(-1), groups_of_rows.reshape(-1), out.reshape(-1)
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        before, step, most = part[BEFORE], part[STEP], part[ROWS]
        start, stop = max(lo, before), min(hi, before + part[OF_PART])
        ahead, lines = AHEAD if num_rows <= most else step, step // LINE - 1
        block = PAIRED_ROWS if part[SPREAD] and part[PAIRS] else ROW_BLOCK
        for row in range(0, num_rows, block):
            rows = min(block, num_rows - row)
            tiles = -(-rows // most)
            if part[SPREAD] and tiles >= TILES_OF_SPREAD:
                _spread_panels(values, groups, data, part, row, rows, start, stop, bias, out,
                               skipped)  # fmt: skip
                continue
            share = -(-LINE // tiles)  # bytes per line
            for p in range(start, stop):
                for t in range(tiles):
                    first, last = row + rows * t // tiles, row + rows * (t + 1) // tiles
                    n = p * PANEL
                    multiply_grouped(
                        part[FUNCTIONS + last - first], x, first * size, size, groups,
                        first * units * OF_GROUP, units * OF_GROUP, data,
                        part[START] + (p - before) * step, units, part[SHIFT], part[HEADER],
                        bias, n, flat, first * num_outputs + n - skipped, num_outputs,
                        ahead + t * share * lines, share,
                    )  # fmt: skip


@compiled(fastmath=FASTMATH)
def _keep_parts(words, room, out):
    """Copies to out [T, N] what was computed in a buffer of whole panels."""
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        first, at = part[FIRST], part[BEFORE] * PANEL
        for t in range(len(out)):
            for n in range(part[COUNT]):
                out[t, first + n] = room[t, at + n]


@compiled(fastmath=FASTMATH)
def linear_grouped(x, data, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T + bias; the bias is padded like the panels."""
    values, groups = quantize_groups(x, UNIT, num_workers)
    words = data.view(np.int64)
    panels, whole = words[ALL_PANELS], words[IS_WHOLE] != 0
    room = out if whole else empty((len(out), panels * PANEL), np.float32)
    parallel_for(grouped_panels, panels, num_workers, (values, groups, data, bias, room, 0))
    if not whole:
        _keep_parts(words, room, out)


@compiled(fastmath=FASTMATH, part=True)
def _few_rows(x, data, part, bias, out, skipped, lo, hi):
    """`grouped_float_panels` of a part for few rows: each row dequantizes in registers."""
    (num_rows, size), num_outputs, p, step = x.shape, out.shape[1], lo, part[STEP]
    inputs, outputs = x.reshape(-1), out.reshape(-1)
    while p < hi:
        panels, n = AT_ONCE if p + AT_ONCE <= hi else 1, p * PANEL
        for row in range(num_rows):
            multiply_floats(
                part[OF_A_ROW + (panels > 1)], inputs, row * size, data,
                part[START] + (p - part[BEFORE]) * step, step, size // UNIT, part[SHIFT],
                part[HEADER], bias, n, outputs, row * num_outputs + n - skipped, panels * step,
                LINE,
            )  # fmt: skip
        p += panels


@compiled(fastmath=FASTMATH)
def grouped_float_panels(x, data, bias, out, origin, lo, hi):
    """`linear_floats` for the outputs of panels lo ... hi - 1: one worker's share. `out` begins at
    panel `origin`."""
    (num_rows, size), num_outputs, words = x.shape, out.shape[1], data.view(np.int64)
    skipped = origin * PANEL
    inputs, outputs, units = x.reshape(-1), out.reshape(-1), -(-size // UNIT)
    step = min(units, WIDENED) * UNIT * PANEL
    few = num_rows <= FEW_WIDENED and size % UNIT == 0
    floats = empty((0 if few else PANELS * step,), np.float32)
    for i in range(words[PARTS]):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD]
        before = part[BEFORE]
        p, stop = max(lo, before), min(hi, before + part[OF_PART])
        if few:
            _few_rows(x, data, part, bias, out, skipped, p, stop)
            continue
        header = part[HEADER]
        of_unit = (part[STEP] - LINE - -(-units // UNITS) * header) // units
        while p < stop:
            panels, n = PANELS if p + PANELS <= stop else 1, p * PANEL
            for unit in range(0, units, WIDENED):
                first, count = unit * UNIT, min(WIDENED, units - unit)
                for k in range(panels):
                    at = part[START] + (p + k - before) * part[STEP]
                    panel_made(part[FUNCTIONS], data, at, unit // UNITS * header + unit * of_unit,
                               count, part[SHIFT], header, floats, k * step)  # fmt: skip
                for row in range(0, num_rows, ROW_BLOCK_OF_FLOATS):
                    a, o = row * size + first, row * num_outputs + n - skipped
                    start, start_at, s_step = (outputs, o, num_outputs) if unit else (bias, n, 0)
                    rows_of_panels(min(ROW_BLOCK_OF_FLOATS, num_rows - row), panels, inputs, a,
                                   size, floats, 0, step, min(count * UNIT, size - first), start,
                                   start_at, s_step, outputs, o, num_outputs, 0)  # fmt: skip
            p += panels


@compiled(fastmath=FASTMATH)
def _float_tiles(x, data, bias, out, lo, hi):
    stop = min(hi * TILE, out.shape[1] // PANEL)
    grouped_float_panels(x, data, bias, out, 0, lo * TILE, stop)


@compiled(fastmath=FASTMATH)
def linear_floats(x, data, bias, out, num_workers):
    """out[T, N] = x[T, K] @ w^T + bias. Each panel is dequantized when it is read, once for all
    rows if there are more than a few. The bits are the same either way."""
    if len(x) == 0:
        return  # or each panel would be dequantized for no row
    words = data.view(np.int64)
    panels, whole = words[ALL_PANELS], words[IS_WHOLE] != 0
    room = out if whole else empty((len(out), panels * PANEL), np.float32)
    parallel_for(_float_tiles, -(-panels // TILE), num_workers, (x, data, bias, room))
    if not whole:
        _keep_parts(words, room, out)


@compiled(fastmath=FASTMATH)
def _grouped_rows(data, ids, out, lo, hi):
    words, units = data.view(np.int64), -(-out.shape[1] // UNIT)
    panel = empty((units * UNIT * PANEL,), np.float32)
    for i in range(lo, hi):
        part = words[HEAD : HEAD + RECORD]
        for number in range(1, words[PARTS]):
            if words[HEAD + number * RECORD + FIRST] <= ids[i]:
                part = words[HEAD + number * RECORD : HEAD + (number + 1) * RECORD]
        place, row = ids[i] - part[FIRST], out[i]
        at = part[START] + place // PANEL * part[STEP]
        panel_made(part[FUNCTIONS], data, at, 0, units, part[SHIFT], part[HEADER], panel, 0)
        for k in range(len(row)):
            row[k] = panel[k * PANEL + place % PANEL]


@compiled(fastmath=FASTMATH)
def grouped_rows(data, ids, out, num_workers):
    """out[i] = row ids[i] of the weight [N, K].

    Why a whole panel for each: its elements are adjacent, and 16 at a time take a few microseconds.
    """
    parallel_for(_grouped_rows, len(ids), num_workers, (data, ids, out))
