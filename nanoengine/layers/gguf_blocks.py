"""Reads blocks of a GGUF file's quantized types as a `QuantizedWeight`, in plain torch. Kernels
that unpack blocks themselves get the positions of the codes.

`quantized_formats.GGUF` calls this with rows of bytes. A row consists of blocks of 32, 64 or 256
inputs, each with its own scales. The bits of a value are in one or two planes:

    Q6_K   low [128], 4 bits per value | high [64], 2 bits | scales [16] int8 | d, float16
                value = (low + 16 * high - 32) * scale * d

Blocks of IQ1, IQ2 and IQ3 have indices into a grid, whose entries are 4 or 8 values, and signs.
They are decoded to 4-bit codes of these values.

Source: the structs block_* of ggml-common.h and the functions dequantize_row_* of ggml-quants.c.

Legend: N rows, B blocks per row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.gguf import TYPES
from nanoengine.errors import WeightLoadError
from nanoengine.kernels.code_tables import E2M1, IQ2, IQ3_S, IQ3_XXS, IQ4
from nanoengine.layers.quantized_weight import QuantizedWeight

Planes = tuple[int, int]
"""Bits per value, and bytes per run. In each run, the lowest bits of all bytes are the first
values, the next higher bits the next values, and so on."""

Field = tuple[str, str, int, int, int]
"""A part, the dtype of its words, and what each word has: the first bit, and the number of bits, of
the first value; the number of values, which are adjacent."""

Scales = tuple[torch.Tensor, torch.Tensor | None]
"""Scales, and mins or None."""


class Layout(NamedTuple):
    """The bytes of a block.

    Attributes:
        parts: name -> number of bytes, in the order of the block: "d", the scale of the block; "m",
            its minimum, or "dm", the scale of its mins; "low" and "high" bits of values; "scales"
            of groups.
        low, high: how these two parts store the bits of values.
        groups: unpacks the part "scales" to integer scales per group, and mins, which are
            subtracted; for NVFP4, to float16 scales.
        group_size: inputs that share a scale.
        table: see `QuantizedWeight`.
        unit: the values are those of the table, times `unit`.
        grid: the grid's indices, their bits from bit 8 on, and signs, if there is a grid. Signs
            have 8 bits, or 7 if the number of negative values is even.
    """

    parts: dict[str, int]
    low: Planes
    high: Planes | None = None
    groups: Callable[[torch.Tensor], Scales] | None = None
    group_size: int = 32
    table: tuple[int, ...] = ()
    unit: float = 1.0
    grid: tuple[Field, Field | None, Field | None] | None = None


def unpack_planes(packed: torch.Tensor, form: Planes) -> torch.Tensor:
    """Unpacks the values of packed bytes, [N, B, bytes] -> [N, B, values] uint8."""
    bits, run = form
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).unsqueeze(1)
    runs = packed.unflatten(2, (-1, 1, run))
    return (runs >> shifts).bitwise_and_((1 << bits) - 1).flatten(2)


def _q2_k_scales(scales: torch.Tensor) -> Scales:
    """A byte has a scale in its low half and a min in its high half."""
    return (scales & 15).view(torch.int8), scales >> 4


def _q4_k_scales(scales: torch.Tensor) -> Scales:
    """Also Q5_K: 12 bytes have 8 scales and 8 mins of 6 bits. The first four of each are the low 6
    bits of 8 bytes, whose upper 2 bits belong to the last four."""
    first, first_mins, last = scales.unflatten(2, (3, 4)).unbind(2)
    return (
        torch.cat((first & 63, (last & 15) | (first >> 6 << 4)), 2).view(torch.int8),
        torch.cat((first_mins & 63, (last >> 4) | (first_mins >> 6 << 4)), 2),
    )


def pack_group_scales(scales: torch.Tensor, mins: torch.Tensor, groups: int) -> torch.Tensor:
    """Packs scales and mins [N, G] of blocks of 8 or 16 groups as in Q4_K and Q2_K: [N, B, 12 or
    16] uint8."""
    filled = (F.pad(n.view(torch.uint8), (0, -n.shape[1] % groups)) for n in (scales, mins))
    scales, mins = (n.unflatten(1, (-1, groups)) for n in filled)
    if groups == 16:
        return scales | (mins << 4)
    (first, last), (first_mins, last_mins) = (n.split(4, 2) for n in (scales, mins))
    firsts = first | (last >> 4 << 6), first_mins | (last_mins >> 4 << 6)
    return torch.cat((*firsts, (last & 15) | (last_mins << 4)), 2)


def _q3_k_scales(scales: torch.Tensor) -> Scales:
    """12 bytes have 16 scales of 6 bits: the low 4 in the first 8 bytes, the high 2 in the rest."""
    low, high = unpack_planes(scales[:, :, :8], (4, 8)), unpack_planes(scales[:, :, 8:], (2, 4))
    return ((low | (high << 4)) - 32).view(torch.int8), None


def _iq4_xs_scales(scales: torch.Tensor) -> Scales:
    """6 bytes have 8 scales of 6 bits: the high 2 in the first 2 bytes, the low 4 in the rest."""
    high, low = unpack_planes(scales[:, :, :2], (2, 1)), unpack_planes(scales[:, :, 2:], (4, 1))
    return ((low | (high << 4)) - 32).view(torch.int8), None


def _unpack(stored: torch.Tensor, dtype: str, first: int, bits: int, count: int) -> np.ndarray:
    """Unpacks a `Field`, [N, B, bytes] -> [N, B, words * count]."""
    words = stored.numpy().view(dtype)
    values = words[..., None] >> np.arange(first, first + bits * count, bits, dtype=dtype)
    return (values & ((1 << bits) - 1)).reshape(*words.shape[:2], -1)


def _odd(*field: Any) -> Callable[[torch.Tensor], Scales]:
    """Scales of IQ1, IQ2 and IQ3: n means 1 + 2 n."""
    return lambda n: (torch.from_numpy((_unpack(n, *field) * 2 + 1).astype("i1")), None)


def _nvfp4_scales(scales: torch.Tensor) -> Scales:
    """A byte is an e4m3 float without a sign. Why halved: `E2M1` has doubled values."""
    return torch.from_numpy(HALF_E4M3[scales.numpy()]), None


def _q6_k_scales(scales: torch.Tensor) -> Scales:
    """A byte is a scale."""
    return torch.from_numpy(scales.numpy().copy()).view(torch.int8), None


def _q8_k_scales(sums: torch.Tensor) -> Scales:
    """The block has one float32 scale, which may not fit into the float16 scale of a group, so all
    groups get the scale 1."""
    return torch.ones_like(sums[:, :, ::4]).view(torch.int8), None


HALF_E4M3 = ((torch.arange(256) & 127).byte().view(torch.float8_e4m3fn).half() / 2).numpy()
INDEX, SIGNS = ("low", "u1", 0, 8, 1), ("signs", "u1", 0, 8, 1)
LAYOUTS = {
    "Q4_0": Layout({"d": 2, "low": 16}, (4, 16)),
    "Q4_1": Layout({"d": 2, "m": 2, "low": 16}, (4, 16)),
    "Q5_0": Layout({"d": 2, "high": 4, "low": 16}, (4, 16), (1, 1)),
    "Q5_1": Layout({"d": 2, "m": 2, "high": 4, "low": 16}, (4, 16), (1, 1)),
    "Q8_0": Layout({"d": 2, "low": 32}, (8, 32)),
    "Q2_K": Layout({"scales": 16, "low": 64, "d": 2, "dm": 2}, (2, 32), None, _q2_k_scales, 16),
    "Q3_K": Layout(
        {"high": 32, "low": 64, "scales": 12, "d": 2}, (2, 32), (1, 32), _q3_k_scales, 16
    ),
    "Q4_K": Layout({"d": 2, "dm": 2, "scales": 12, "low": 128}, (4, 32), None, _q4_k_scales),
    "Q5_K": Layout(
        {"d": 2, "dm": 2, "scales": 12, "high": 32, "low": 128}, (4, 32), (1, 32), _q4_k_scales
    ),
    "Q6_K": Layout(
        {"low": 128, "high": 64, "scales": 16, "d": 2}, (4, 64), (2, 32), _q6_k_scales, 16
    ),
    "Q8_K": Layout({"d": 4, "low": 256, "scales": 32}, (8, 256), None, _q8_k_scales),
    "IQ4_NL": Layout({"d": 2, "low": 16}, (4, 16), table=IQ4),
    "IQ4_XS": Layout({"d": 2, "scales": 6, "low": 128}, (4, 16), None, _iq4_xs_scales, table=IQ4),
    "MXFP4": Layout({"d": 1, "low": 16}, (4, 16), table=E2M1),
    "NVFP4": Layout({"scales": 4, "low": 32}, (4, 8), None, _nvfp4_scales, 16, E2M1),
    "IQ2_XXS": Layout({"d": 2, "scales": 64}, (4, 1), None, _odd("u8", 60, 4, 1), 32, IQ2, 1 / 8,
                      (("scales", "u8", 0, 8, 4), None, ("scales", "u8", 32, 7, 4))),
    "IQ2_XS": Layout({"d": 2, "low": 64, "scales": 8}, (4, 1), None, _odd("u1", 0, 4, 2), 16, IQ2,
                     1 / 8, (("low", "u2", 0, 9, 1), None, ("low", "u2", 9, 7, 1))),
    "IQ2_S": Layout({"d": 2, "low": 32, "signs": 32, "high": 8, "scales": 8}, (4, 1), None,
                    _odd("u1", 0, 4, 2), 16, IQ2, 1 / 8, (INDEX, ("high", "u1", 0, 2, 4), SIGNS)),
    "IQ3_XXS": Layout({"d": 2, "low": 64, "scales": 32}, (4, 1), None, _odd("u4", 28, 4, 1), 32,
                      IQ3_XXS, 1 / 4, (INDEX, None, ("scales", "u4", 0, 7, 4))),
    "IQ3_S": Layout({"d": 2, "low": 64, "high": 8, "signs": 32, "scales": 4}, (4, 1), None,
                    _odd("u1", 0, 4, 2), 32, IQ3_S, 1, (INDEX, ("high", "u1", 0, 1, 8), SIGNS)),
    "IQ1_S": Layout({"d": 2, "low": 32, "scales": 16}, (4, 1), None, _odd("u2", 12, 3, 1), 32,
                    IQ3_S, 1 / 8, (INDEX, ("scales", "u2", 0, 3, 4), None)),
    "IQ1_M": Layout({"low": 32, "high": 16, "scales": 8}, (4, 1), None, _odd("u2", 0, 3, 4), 16,
                    IQ3_S, 1 / 8, (INDEX, ("high", "u1", 0, 4, 2), None)),
}  # fmt: skip
"""The layout of each quantized type of `TYPES`."""


def read_blocks(type: str, rows: torch.Tensor) -> QuantizedWeight:
    """Reads rows of a quantized type as a weight.

    Args:
        type: a key of `LAYOUTS`.
        rows: [N, bytes] uint8. Rows of NVFP4 may end with a float32 factor.

    Raises:
        WeightLoadError: a scale or a min is NaN or infinite, so the file is damaged.
    """
    layout, parts = LAYOUTS[type], _parts(type, rows)
    codes = _grid_codes(type, parts) if layout.grid else unpack_planes(parts["low"], layout.low)
    if layout.high is not None:
        codes |= unpack_planes(parts["high"], layout.high) << layout.low[0]
    weight = read_scales(type, rows)
    if layout.table:
        table = torch.tensor(layout.table, dtype=torch.int8)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
    elif weight.mins is not None or weight.bits == 8:
        values = codes.view(torch.int8)
    else:
        values = codes.sub_(1 << weight.bits - 1).view(torch.int8)
    scales, mins = weight.scales, weight.mins
    if not weight.has_two_levels:
        scales, mins = scales.float(), None if mins is None else mins.float()
    elif layout.groups is not None and mins is not None:
        scales, mins = (n.flatten(1) for n in layout.groups(parts["scales"]))
    return replace(weight, values=values.flatten(1), scales=scales, mins=mins)


def read_scales(type: str, rows: torch.Tensor) -> QuantizedWeight:
    """As `read_blocks` without the values and the integer scales and mins, which `StoredCodes` has:
    their tensors have the right shape but no memory. Scales of one level stay float16 if the file
    stores float16.

    Why NumPy here: torch splits such small operations between threads, which then spin.
    """
    layout, parts = LAYOUTS[type], _parts(type, rows)
    factors = block_floats(parts["d"])
    scales, mins, min_factors = factors, None, None
    if "dm" in parts:
        shape = *factors.shape[:2], TYPES[type].inputs // layout.group_size
        scales, mins = (torch.zeros((), dtype=d).expand(shape) for d in (torch.int8, torch.uint8))
        min_factors = block_floats(parts["dm"]).float()
    elif layout.groups is not None:
        scales, mins = layout.groups(parts["scales"])
    elif "m" in parts:
        mins = torch.from_numpy(-block_floats(parts["m"]).numpy())
    for values in (factors, scales, mins, min_factors):
        if values is not None and not np.isfinite(values.numpy()).all():
            raise WeightLoadError(f"a scale or a min of its {type} blocks is NaN or infinite")
    count = rows.shape[1] // TYPES[type].bytes * TYPES[type].inputs
    return QuantizedWeight(
        values=torch.zeros((), dtype=torch.int8).expand(len(rows), count),
        scales=scales.flatten(1),
        bits=layout.low[0] + (layout.high or (0, 0))[0],
        group_size=layout.group_size,
        lowest=None if mins is None else 0,
        table=layout.table,
        mins=None if mins is None else mins.flatten(1),
        factors=None if layout.groups is None else factors.float().flatten(1) * layout.unit,
        min_factors=None if min_factors is None else min_factors.flatten(1),
    )


def _parts(type: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Splits blocks into their parts: name -> [N, B, bytes] uint8."""
    end, sizes = rows.shape[1] // TYPES[type].bytes * TYPES[type].bytes, LAYOUTS[type].parts
    blocks = rows[:, :end].unflatten(1, (-1, TYPES[type].bytes))
    parts = dict(zip(sizes, blocks.split(list(sizes.values()), 2), strict=True))
    if type == "IQ1_M":  # Its 4 words have 4 bits each of "d".
        upper = parts["scales"][:, :, 1::2] >> 4
        parts["d"] = upper[:, :, ::2] | upper[:, :, 1::2] << 4
    elif type == "NVFP4":
        one = torch.ones(len(rows), 1).view(torch.uint8)
        parts["d"] = (rows[:, end:] if end < rows.shape[1] else one).unsqueeze(1)
    return parts


def _grid_codes(type: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Decodes blocks of a type with a grid: codes of the table's values, [N, B, 256] uint8.

    Perf: 2 ns per weight on one Zen 4 core.
    """
    grid, sign_codes = _grid(type)
    fields = LAYOUTS[type].grid
    low, high, signs = (field and _unpack(parts[field[0]], *field[1:]) for field in fields)
    index = low if high is None else low | high.astype("u2") << 8
    if type == "IQ1_S":
        index |= _unpack(parts["scales"], "u2", 15, 1, 1).repeat(4, 2) << 11
    codes = grid[index.ravel()].view("u8")
    codes |= 0 if signs is None else sign_codes[signs.ravel()]
    return torch.from_numpy(codes.view("u1")).view(*index.shape[:2], -1)


@functools.cache
def _grid(type: str) -> tuple[np.ndarray, np.ndarray]:
    """The codes of each entry of a type's grid, one per byte of an integer; bit 3 of 8 codes, for
    each value of the signs."""
    from gguf import quants  # Why here: few files need it.

    source, layout = getattr(quants, type), LAYOUTS[type]
    source.init_grid()
    values = source.grid[0, 0]
    if type.startswith("IQ1"):  # Bit 11 of an index selects an offset of 1/8 or -1/8.
        values = np.concatenate((8 * values + 1, 8 * values - 1))
    codes = np.vectorize(layout.table.index, otypes=["u1"])(values)
    stored = bytes(range(256)) if "signs" in layout.parts else quants.IQ2_XXS.ksigns
    signs = np.unpackbits(np.frombuffer(stored, "u1")[:, None], 1, bitorder="little") * 8
    return codes.view(f"u{codes.shape[1]}")[:, 0], signs.view("u8")[:, 0]


BYTES = np.array([[offset, 0, 0, 0] for offset in range(0, 32, 4)], np.uint64)
"""`StoredCodes.positions` of codes with one byte each."""


class StoredCodes(NamedTuple):
    """Packed codes in rows of bytes, for `kernels/pack_groupwise.py`; by default a code is a byte.

    Attributes:
        rows: [N, bytes] uint8.
        size: bytes per block.
        positions: uint64 [C, 4]: byte and shift of the low bits of code 4 i, then of its high bits.
        widths: bits of the low part of a code, and of the high part.
        group_scales: as `pack_group_scales`; None: in the `QuantizedWeight`.
    """

    rows: np.ndarray
    size: int = 32
    positions: np.ndarray = BYTES
    widths: tuple[int, int] = (8, 0)
    group_scales: torch.Tensor | None = None


def stored_codes(type: str, rows: torch.Tensor) -> StoredCodes:
    """Returns rows of a quantized type as `StoredCodes`. Only types with a grid are decoded."""
    parts = _parts(type, rows)
    if LAYOUTS[type].grid:
        return StoredCodes(_grid_codes(type, parts).flatten(1).numpy())
    scales = torch.from_numpy(parts["scales"].numpy().copy()) if "dm" in parts else None
    return StoredCodes(rows.numpy(), TYPES[type].bytes, *_code_positions(type), scales)


@functools.cache
def _code_positions(type: str) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns `StoredCodes.positions` and `widths` of a type."""
    layout, first = LAYOUTS[type], np.arange(0, TYPES[type].inputs, 4)
    positions, widths = np.zeros((len(first), 4), np.uint64), []
    starts = dict(zip(layout.parts, np.cumsum([0, *layout.parts.values()]), strict=False))
    for name, (bits, run), column in (("low", layout.low, 0), ("high", layout.high or (0, 4), 2)):
        widths.append(-bits if run == 1 else bits)
        if bits:
            each = run * 8 // bits
            positions[:, column] = starts[name] + first // each * run + first % run
            positions[:, column + 1] = first % each // run * bits
    return positions, (widths[0], widths[1])


def block_floats(values: torch.Tensor) -> torch.Tensor:
    """One float per block, [N, B, bytes] -> [N, B, 1], float16 or float32. For MXFP4 it is half the
    stored power of two, because `E2M1` has doubled values; the byte 255 is NaN."""
    if values.shape[2] == 1:
        return torch.tensor([*(2.0 ** (e - 128) for e in range(255)), math.nan])[values.int()]
    return torch.from_numpy(np.ascontiguousarray(values.numpy().view(f"f{values.shape[2]}")))
