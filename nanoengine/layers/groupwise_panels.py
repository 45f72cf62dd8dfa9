"""GroupedPanels: packs rows of group-wise quantized weights into the array that `cpu_groupwise.py`
reads.

Rows are packed as they are loaded, so no whole matrix is kept unpacked. Rows with the same format
are a part; a matrix whose rows differ, as a checkpoint's q, k and v may, has several parts. Used by
`CPUQuantizedLinear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoengine.errors import WeightLoadError
from nanoengine.kernels import cpu_groupwise as kernels
from nanoengine.kernels.cpu_groupwise import HEAD, RECORD
from nanoengine.kernels.gemm import LINE, PANEL
from nanoengine.kernels.groupwise_gemm import (
    MINS,
    NONE,
    TABLES,
    UNITS,
    ZEROS,
    Form,
    has_spread,
    max_groupwise_rows,
    unit_bytes,
)
from nanoengine.kernels.int8_gemm import UNIT
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.pack_groupwise import pack_codes, pack_lines
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.gguf_blocks import StoredCodes, pack_group_scales
from nanoengine.layers.placement import empty_bytes
from nanoengine.layers.quantized_weight import BLOCK, QuantizedWeight, codes_of, row_factors

assert BLOCK == UNIT * UNITS


class PanelLayout(NamedTuple):
    """How a part is packed: its form, and the log2 of the number of units that share a scale."""

    form: Form
    shift: int


def layout_of(weight: QuantizedWeight) -> PanelLayout | None:
    """Returns how this weight is packed; None: the kernels do not support its form."""
    bits, size, inputs = weight.bits, weight.group_size, weight.values.shape[1]
    lowest = -(1 << bits - 1) if weight.lowest is None else weight.lowest
    two_levels, centered = weight.has_two_levels, int(lowest < 0)
    if weight.factors is not None and two_levels:
        is_supported = size in (16, 32) and -(-inputs // BLOCK) == weight.factors.shape[1]
        is_supported &= weight.zeros is None
        shift = 0
    else:
        is_supported = size in (UNIT // 2, inputs) or size % UNIT == 0
        shift = math.gcd(size // UNIT, UNITS).bit_length() - 1 if size > UNIT // 2 else 0
        shift = 3 if size == inputs else shift
    is_supported &= weight.table in TABLES and bits in (2, 3, 4, 5, 6, 8)
    is_supported &= bool(weight.table) or lowest == -centered << bits - 1
    is_supported &= (bits, centered) != (8, 0) and (weight.zeros is None or weight.mins is None)
    if not is_supported:
        return None
    offset = ZEROS if weight.zeros is not None else NONE if weight.mins is None else MINS
    table, halves = TABLES.index(weight.table), 2 if size == UNIT // 2 < inputs else 1
    centered = 0 if table else centered
    return PanelLayout(Form(bits, centered, table, halves, 1 + two_levels, offset), shift)


Allocator = Callable[[int], torch.Tensor]
"""Allocates a number of bytes, uint8, aligned to a cache line."""


class PackedRows(NamedTuple):
    """Packed rows: `count` rows from `first` on; their panels begin at `panel` of `data`."""

    first: int
    count: int
    layout: PanelLayout
    panel: int
    data: torch.Tensor


class GroupedPanels:
    """Packs the rows of a matrix part by part, and returns the packed whole.

    Args:
        allocate: allocates the memory of the whole.
        one_form: all rows are expected to have the same form, so they are packed in place.
            Otherwise they are packed into another buffer first.
    """

    def __init__(
        self, outputs: int, inputs: int, allocate: Allocator = empty_bytes, *, one_form: bool = True
    ) -> None:
        self.outputs, self.inputs = outputs, inputs
        self._allocate, self._allocate_first = allocate, allocate if one_form else empty_bytes
        self.rows_left = outputs
        self._packed: list[PackedRows] = []
        self._partial: list[tuple[int, QuantizedWeight]] = []
        self._buffers: dict[PanelLayout, torch.Tensor] = {}

    def add(self, weight: QuantizedWeight, first: int, codes: StoredCodes | None = None) -> None:
        """Adds rows from `first` on. With `codes` (see `pack`) they must fill whole panels.

        Raises:
            WeightLoadError: no kernel supports these rows, although one supports earlier rows.
        """
        count = len(weight.values)
        self.rows_left -= count
        layout = layout_of(weight)
        if layout is None:
            raise WeightLoadError(
                f"rows {first} to {first + count} of a matrix have groups of {weight.group_size}"
                f" inputs, unlike earlier rows: quantize all rows in groups of a multiple of {UNIT}"
            )
        if not self.fills_panels(first, count):
            assert codes is None
            self._partial.append((first, weight))
            return
        # Why each form has a buffer for all rows: most matrices have one form, which then needs no
        # copy. Pages that are never written take no memory.
        step = self._step(layout)
        if layout not in self._buffers:
            size = self._start(1) + -(-self.outputs // PANEL) * step
            self._buffers[layout] = self._allocate_first(size)
        data = self._buffers[layout]
        pack(weight, layout, data, self._start(1) + first // PANEL * step, codes)
        self._packed.append(PackedRows(first, count, layout, first // PANEL, data))

    def fills_panels(self, first: int, count: int) -> bool:
        """Whether these rows share no panel with others."""
        return not (first % PANEL or (count % PANEL and first + count < self.outputs))

    def _step(self, layout: PanelLayout) -> int:
        """Bytes per panel."""
        return kernels.panel_bytes(*layout, self.inputs)

    @staticmethod
    def _start(parts: int) -> int:
        return 8 * (HEAD + parts * RECORD)

    def _pack_partial_panels(self) -> None:
        """Packs rows that do not fill whole panels, together with adjacent rows."""
        by_row = sorted(self._partial, key=lambda it: it[0])
        for layout, group in groupby(by_row, lambda it: layout_of(it[1])):
            assert layout is not None
            for adjacent in _adjacent(list(group)):
                whole = QuantizedWeight.stacked([weight for _, weight in adjacent], "one matrix")
                count = len(whole.values)
                data = empty_bytes(self._start(1) + -(-count // PANEL) * self._step(layout))
                pack(whole, layout, data, self._start(1))
                self._packed.append(PackedRows(adjacent[0][0], count, layout, 0, data))

    def finish(self) -> torch.Tensor:
        """Returns all rows, [bytes] uint8."""
        self._pack_partial_panels()
        parts: list[list[PackedRows]] = []
        for run in sorted(self._packed):
            last = parts[-1][-1] if parts else None
            same_buffer = last is not None and last.data is run.data and last.layout == run.layout
            if same_buffer and last.panel + last.count // PANEL == run.panel:
                parts[-1].append(run)
            else:
                parts.append([run])
        sizes = [-(-sum(run.count for run in runs) // PANEL) for runs in parts]
        if len(parts) == 1:
            data = parts[0][0].data
        else:
            steps = [self._step(runs[0].layout) for runs in parts]
            data = self._allocate(self._start(len(parts)) + sum(map(int.__mul__, sizes, steps)))
        words, start, panel = data.view(torch.int64), self._start(len(parts)), 0
        words[: HEAD + len(parts) * RECORD] = 0
        for i, (runs, panels) in enumerate(zip(parts, sizes, strict=True)):
            (first, _, layout, first_panel, source), step = runs[0], self._step(runs[0].layout)
            if len(parts) > 1:
                at = self._start(1) + first_panel * step
                data[start : start + panels * step] = source[at : at + panels * step]
            count = sum(run.count for run in runs)
            record = [
                panel, panels, start, step, layout.shift, kernels.header_bytes(*layout),
                max_groupwise_rows(CURRENT), first, count,
                unit_bytes(layout.form) if has_spread(CURRENT) else 0, layout.form.is_signed,
                *kernels.functions(layout.form),
            ]  # fmt: skip
            at = HEAD + i * RECORD
            words[at : at + RECORD] = torch.tensor(record, dtype=torch.int64)
            panel, start = panel + panels, start + panels * step
        whole = int(panel * PANEL == self.outputs)
        words[:5] = torch.tensor([len(parts), panel, self.outputs, whole, self.inputs])
        return data


Rows = list[tuple[int, QuantizedWeight]]
"""Pairs of a row index and the weight's rows from there on."""


def _adjacent(rows: Rows) -> list[Rows]:
    """Groups rows that are adjacent in the matrix."""
    found: list[Rows] = []
    stop = -1
    for first, weight in rows:
        if first != stop:
            found.append([])
        found[-1].append((first, weight))
        stop = first + len(weight.values)
    return found


def pack(
    weight: QuantizedWeight,
    layout: PanelLayout,
    data: torch.Tensor,
    start: int,
    codes: StoredCodes | None = None,
    lane: int | None = None,
) -> None:
    """Writes a weight's panels into `data` from byte `start` on.

    Args:
        codes: the codes to pack; None: made from the weight's values.
        lane: the first output within the panel; other outputs keep their content. None: whole
            panels, padded with zeros.
    """
    form, shift = layout
    lanes, lane = PANEL if lane is None else min(len(weight.values), PANEL), lane or 0
    inputs, whole = weight.values.shape[1], data.numpy()
    step, header = kernels.panel_bytes(form, shift, inputs), kernels.header_bytes(form, shift)
    block, flip = header + UNITS * form.bits * LINE, 0
    if codes is None:
        values = codes_of(weight) if form.table else weight.values.view(torch.uint8)
        values = F.pad(values, (0, -inputs % UNIT)) if inputs % UNIT else values
        codes = StoredCodes(values.contiguous().numpy())
        flip = (1 << form.bits - 1) * 0x01010101 if form.centered and not form.is_signed else 0
    pack_codes(*codes[:4], whole, start + 4 * lane, step, header, form.bits, flip, num_workers())
    offsets = weight.zeros if form.offset == ZEROS else weight.mins
    factors, stride, place = torch.ones(len(weight.values), 1), PANEL, start + LINE
    if form.levels == 2:
        assert weight.factors is not None
        lines = [(weight.factors, 1), (weight.scales, UNITS * form.halves)]
        if offsets is not None:
            assert weight.min_factors is not None
            factors, halves = _float16_bits([weight.factors, weight.min_factors])
            packed = codes.group_scales
            if packed is None:
                packed = pack_group_scales(weight.scales, offsets, UNITS * form.halves)
            lines = [*((n, 1) for n in halves), (packed.flatten(1), packed.shape[2])]
    else:
        factors, halves = _float16_bits(
            [weight.scales] if form.offset != MINS else [weight.scales, offsets]
        )
        halves += [offsets.half().view(torch.int16)] if form.offset == ZEROS else []
        repeats = -(-weight.group_size // (UNIT << shift))  # a longer group covers several
        halves = [n if repeats == 1 else n.repeat_interleave(repeats, 1) for n in halves]
        groups, stride = (UNITS >> shift) * form.halves, 2 * PANEL * len(halves)
        lines = [(n, groups) for n in halves]
        factors = factors if weight.factors is None else factors * weight.factors
    for n, count in lines:
        at, each = place + lane * n.itemsize, max(stride, n.itemsize * PANEL)
        pack_lines(n.numpy(), whole, at, step, block, count, each, lanes, num_workers())
        place += PANEL * n.itemsize * (count if form.levels == 2 else 1)
    padded = F.pad(factors, (0, 0, 0, -len(factors) % lanes)).view(-1, lanes).view(torch.uint8)
    data[start + 4 * lane :].as_strided(padded.shape, (step, 1)).copy_(padded)


def _float16_bits(numbers: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Splits scales [N, G] into one factor per output and float16.

    Returns:
        Factors [N, 1], 1 where all scales are exact in float16; and for each input the scales
            divided by them, [N, G], as the bits of float16. Why bits: compiled code has no float16.
    """
    factors = torch.ones(len(numbers[0]), 1)
    if numbers[0].dtype != torch.float16:
        exact = torch.stack([(n.half().float() == n).all(1) for n in numbers]).all(0)
        factors = torch.where(exact, 1.0, row_factors(torch.cat(numbers, 1))).unsqueeze(1)
        numbers = [n / factors for n in numbers]
    return factors, [n.half().view(torch.int16) for n in numbers]


def replace_rows(data: torch.Tensor, weight: QuantizedWeight, first: int) -> None:
    """Overwrites rows from `first` on in the packed `data`; they must have the form of the old."""
    layout, stop = layout_of(weight), first + len(weight.values)
    assert layout is not None, weight.form
    words = data.view(torch.int64)
    for i in range(int(words[kernels.PARTS])):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD].tolist()
        begin, count = part[kernels.FIRST], part[kernels.COUNT]
        low, high = max(first, begin), min(stop, begin + count)
        if low >= high:
            continue
        start, end = low - begin, high - begin
        panels = -(-start // PANEL) * PANEL, end // PANEL * PANEL  # whole panels between these
        edges = sorted({start, end, *(edge for edge in panels if start < edge < end)})
        for here, there in pairwise(edges):
            rows = weight.part(slice(begin + here - first, begin + there - first))
            at = part[kernels.DATA_START] + here // PANEL * part[kernels.PANEL_BYTES]
            pack(rows, layout, data, at, lane=here % PANEL)


def pad_bias(data: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A bias, zeros if there is none, padded part by part like the panels."""
    words = data.view(torch.int64)
    padded = torch.zeros(PANEL * int(words[kernels.ALL_PANELS]))
    for i in range(int(words[kernels.PARTS]) if bias is not None else 0):
        part = words[HEAD + i * RECORD : HEAD + (i + 1) * RECORD].tolist()
        at, first, count = part[kernels.BEFORE] * PANEL, part[kernels.FIRST], part[kernels.COUNT]
        padded[at : at + count] = bias[first : first + count]
    return padded
