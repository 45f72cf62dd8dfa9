"""Reads blocks of a GGUF file's quantized types as a `QuantizedWeight`, in plain torch. Kernels
that unpack blocks themselves get the positions of the codes.

`quantized_formats.GGUF` calls this with rows of bytes. A row consists of blocks of 32 or 256
inputs, each with its own scales. The bits of a value are in one or two planes:

    Q6_K   low [128], 4 bits per value | high [64], 2 bits | scales [16] int8 | d, float16
                value = (low + 16 * high - 32) * scale * d

Source: the structs block_* of ggml-common.h and the functions dequantize_row_* of ggml-quants.c.

Legend: N rows, B blocks per row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.gguf import TYPES
from nanoengine.errors import WeightLoadError
from nanoengine.kernels.code_tables import E2M1, IQ4
from nanoengine.layers.quantized_weight import QuantizedWeight

Planes = tuple[int, int]
"""Bits per value, and bytes per run. In each run, the lowest bits of all bytes are the first
values, the next higher bits the next values, and so on."""

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
            subtracted.
        group_size: inputs that share a scale.
        table: see `QuantizedWeight`.
    """

    parts: dict[str, int]
    low: Planes
    high: Planes | None = None
    groups: Callable[[torch.Tensor], Scales] | None = None
    group_size: int = 32
    table: tuple[int, ...] = ()


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


def _q6_k_scales(scales: torch.Tensor) -> Scales:
    """A byte is a scale."""
    return torch.from_numpy(scales.numpy().copy()).view(torch.int8), None


def _q8_k_scales(sums: torch.Tensor) -> Scales:
    """The block has one float32 scale, which may not fit into the float16 scale of a group, so all
    groups get the scale 1."""
    return torch.ones_like(sums[:, :, ::4]).view(torch.int8), None


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
}  # fmt: skip
"""The layout of each quantized type of `TYPES`."""


def read_blocks(type: str, rows: torch.Tensor) -> QuantizedWeight:
    """Reads rows of a quantized type as a weight.

    Args:
        type: a key of `LAYOUTS`.
        rows: [N, bytes] uint8.

    Raises:
        WeightLoadError: a scale or a min is NaN or infinite, so the file is damaged.
    """
    layout, parts = LAYOUTS[type], _parts(type, rows)
    codes, bits = unpack_planes(parts["low"], layout.low), layout.low[0]
    if layout.high is not None:
        codes |= unpack_planes(parts["high"], layout.high) << bits
    weight = read_scales(type, rows)
    if layout.table:
        table = torch.tensor(layout.table, dtype=torch.int8)
        values = table.index_select(0, codes.flatten().int()).view(codes.shape)
    elif weight.mins is not None or weight.bits == 8:
        values = codes.view(torch.int8)
    else:
        values = codes.sub_(1 << weight.bits - 1).view(torch.int8)
    scales, mins = weight.scales, weight.mins
    if weight.factors is None:
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
    for values in (factors, mins, min_factors):
        if values is not None and not np.isfinite(values.numpy()).all():
            raise WeightLoadError(f"a scale or a min of its {type} blocks is NaN or infinite")
    count = factors.shape[1] * TYPES[type].inputs
    return QuantizedWeight(
        values=torch.zeros((), dtype=torch.int8).expand(len(rows), count),
        scales=scales.flatten(1),
        bits=layout.low[0] + (layout.high or (0, 0))[0],
        group_size=layout.group_size,
        lowest=None if mins is None else 0,
        table=layout.table,
        mins=None if mins is None else mins.flatten(1),
        factors=None if layout.groups is None else factors.float().flatten(1),
        min_factors=None if min_factors is None else min_factors.flatten(1),
    )


def _parts(type: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Splits blocks into their parts: name -> [N, B, bytes] uint8."""
    blocks, sizes = rows.unflatten(1, (-1, TYPES[type].bytes)), LAYOUTS[type].parts
    return dict(zip(sizes, blocks.split(list(sizes.values()), 2), strict=True))


class StoredCodes(NamedTuple):
    """Packed codes in rows of bytes, for `kernels/pack_groupwise.py`.

    Attributes:
        rows: [N, bytes] uint8.
        size: bytes per block.
        positions: uint64 [C, 4]: byte and shift of the low bits of code 4 i, then of its high bits.
        widths: bits of the low part of a code, and of the high part.
        group_scales: as `pack_group_scales`; None: in the `QuantizedWeight`.
    """

    rows: np.ndarray
    size: int
    positions: np.ndarray
    widths: tuple[int, int]
    group_scales: torch.Tensor | None = None


def stored_codes(type: str, rows: torch.Tensor) -> StoredCodes:
    """Returns rows of a quantized type as `StoredCodes`, without unpacking them."""
    parts = _parts(type, rows)
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
    stored = {2: np.float16, 4: np.float32}[values.shape[2]]
    return torch.from_numpy(np.ascontiguousarray(values.numpy().view(stored)))
