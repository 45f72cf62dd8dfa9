"""Tiles of group-wise quantized weights: rows of int8 inputs times panels of codes of 2 to 8 bits.

    a panel, 16 outputs     64 bytes     float32: a factor per output
    a block, 256 inputs     a header     scales and offsets, per group and output
      8 units of 32         64 bytes per bit, in planes one after the other

    plane of     a line of 64 bytes holds 16 outputs for
    8 bits       4 inputs
    4            8 inputs: the low halves of its 4 bytes, then the high halves
    2            16 inputs: 4 at bits 0 and 1, 4 at bits 2 and 3, ...
    1            32 inputs

A 6-bit code is split into planes of 4 bits and, above them, 2 bits; 5-bit codes into 4 and 1; 3-bit
codes into 2 and 1. The last block of a panel has the remaining units.

    levels    header: lines of 16 values, one per output
    1         per group: scale (float16), zero point or minimum (float16), if there are any
    2         a line of factors (float32), then per group the scale (int8). With minima a line
              of factors and factors of minima (float16), then scales and minima in the bytes of
              the file: 12 for 8 groups, 16 for 16 (`gguf_blocks.packed_groups`)

A group's sums are exact integers, and groups are added in order. So **results have the same bits
for any number of rows and under each instruction set**. A `Form` says what a code means. Each form
has its own functions, which are called by address. Weights of different forms therefore have one
type, and a kernel that multiplies by them is compiled once.

Source: separate bit planes, as in ggml's Q5_0 and Q6_K.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

from llvmlite import ir

from nanoengine.kernels.code_tables import E2M1, IQ4
from nanoengine.kernels.emit import I32, writes, written_by
from nanoengine.kernels.gemm import FLOAT, I8, I16, I64, LINE, PANEL, tile_function
from nanoengine.kernels.int8_gemm import OF_GROUP, UNIT, ByteTile, most_rows
from nanoengine.kernels.isa import CURRENT, ISA

UNITS = 8  # per block
PAIRED = 80  # bytes of a unit of inputs from `pair_inputs`
NONE, ZEROS, MINS = range(3)
FEW_WIDENED = 2  # rows that each dequantize in registers
AT_ONCE = 4 if CURRENT.vector_bits == 512 else 1  # panels of one row, which waits for its own sums
TABLES: tuple[tuple[int, ...], ...] = ((), IQ4, E2M1)
"""Values of 4-bit codes; (): the codes themselves."""


class Form(NamedTuple):
    """The meaning of codes, scales and offsets.

    Attributes:
        bits: bits per code: 2, 3, 4, 5, 6 or 8.
        centered: codes count from -(2 ** (bits - 1)), else from 0; 8-bit codes are int8.
        table: index in `TABLES`.
        halves: groups per unit: 2 of 16 inputs, or 1, which may extend over the following units.
        levels: levels of scales: 1: float16; 2: integers times a block's float32.
        offset: NONE; ZEROS: zero points in units of values, subtracted before the scale; MINS:
            minima, subtracted after it.
    """

    bits: int
    centered: int
    table: int
    halves: int
    levels: int
    offset: int

    @property
    def planes(self) -> list[tuple[int, int, int]]:
        """(bits, lowest bit of the code, lines before it in a unit) of each plane."""
        of_code = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}[self.bits]
        return [(bits, sum(of_code[:i]), sum(of_code[:i])) for i, bits in enumerate(of_code)]

    @property
    def is_signed(self) -> bool:
        """Whether tiles multiply by signed byte values instead of codes."""
        return self.bits == 8 or self.table > 0

    @property
    def most_pairs(self) -> int:
        """How many sums of two products with codes fit in 16 bits."""
        return 32767 // (2 * 127 * ((1 << self.bits) - 1))


def most_grouped(isa: ISA) -> int:
    """Rows of the largest tile."""
    # Why fewer on these: more sums would be spilled (`tests/kernels/test_assembly.py`).
    return {"avx512": 3, "neon": 2}.get(isa.name, most_rows(isa))


class GroupedTile(ByteTile):
    """Writes how a unit's codes and a group's scales and offsets are read."""

    def __init__(self, builder, isa: ISA, form: Form):
        super().__init__(builder, isa)
        self.form = form
        self.lanes, self.input_bytes = range(0, PANEL, self.width), UNIT

    def codes(self, lines, four: int, vector: int):
        """The codes of four inputs of a unit for the outputs of one vector, four bytes per
        output."""
        build, code, at = self.builder, None, vector * self.bytes.count
        for bits, place, before in self.form.planes:
            fours = 8 // bits  # per line
            part = self.get(self.bytes, lines, LINE * (before + four // fours) + at)
            if bits < 8:
                shift, mask = place - bits * (four % fours), ((1 << bits) - 1) << place
                part = build.and_(self.shifted(part, shift), self.every(mask, self.bytes))
            code = part if code is None else build.or_(code, part)
        return code

    def values(self, lines, four: int, vector: int):
        """`codes`, or their values if these are signed."""
        codes = self.codes(lines, four, vector)
        return self.looked_up(codes) if self.form.table else codes

    def weights(self, lines, groups, four: int, vector: int):
        """Yields the weights of four inputs for the outputs of one vector: (w - zero) * scale -
        min, each step rounded. `groups` has the outputs' scales and offsets."""
        build, form, centered = self.builder, self.form, self.form.centered and self.form.bits < 8
        scales, offsets = groups[four // 4 if form.halves == 2 else 0]
        low = 1 << form.bits - 1 if centered else 0
        in_table = form.bits <= 4 and self.width == PANEL and self.isa.byte_dots != "generic"
        if in_table:
            words = build.bitcast(self.codes(lines, four, vector), self.words)
            known = TABLES[form.table] or range(-low, (1 << form.bits) - low)
            table = ir.Constant(self.vector, [*map(float, known)] * (16 // len(known)))
        else:
            values = self.values(lines, four, vector)
            values = build.sub(values, self.every(low, self.bytes)) if low else values
            words = build.bitcast(values, self.words)
        for k in range(4):
            if in_table:  # The lowest 4 bits of each word are the index.
                word = build.lshr(words, self.every(8 * k)) if k else words
                value = self.call("llvm.x86.avx512.permvar.sf.512", self.vector, table, word)
            else:
                word = build.shl(words, self.every(24 - 8 * k)) if k < 3 else words
                value = build.sitofp(build.ashr(word, self.every(24)), self.vector)
            if form.offset == ZEROS:
                value = build.fsub(value, offsets[vector])
            value = build.fmul(value, scales[vector])
            yield build.fsub(value, offsets[vector]) if form.offset == MINS else value

    def shifted(self, numbers, left: int):
        """Shifts 16-bit words, which mixes adjacent bytes."""
        if not left:
            return numbers
        words, count = self.builder.bitcast(numbers, self.pairs), self.every(abs(left), self.pairs)
        moved = self.builder.shl(words, count) if left > 0 else self.builder.lshr(words, count)
        return self.builder.bitcast(moved, self.bytes)

    def looked_up(self, codes):
        """The table's values for 4-bit codes."""
        table = TABLES[self.form.table]
        names = {128: "ssse3.pshuf.b.128", 256: "avx2.pshuf.b", 512: "avx512.pshuf.b.512"}
        if self.isa.byte_dots == "generic":
            values = [self.every(value, self.bytes) for value in table]
            for bit in range(4):
                mask = self.builder.and_(codes, self.every(1 << bit, self.bytes))
                is_set = self.builder.icmp_unsigned("!=", mask, self.every(0, self.bytes))
                pairs = zip(values[::2], values[1::2], strict=True)
                values = [self.builder.select(is_set, odd, even) for even, odd in pairs]
            return values[0]
        numbers = ir.Constant(self.bytes, [*table] * (self.bytes.count // 16))
        name = f"llvm.x86.{names[self.isa.byte_bits]}"
        return self.call(name, self.bytes, numbers, codes)

    def starts(self, offsets):
        """Initial values of the sums of each row's inputs times a group's values."""
        form, exact = self.form, self.isa.byte_dots == "vpdpbusd"
        if not (exact if form.is_signed else form.centered):
            return [self.every(0)] * len(offsets)
        # An offset is -8 times the sum of inputs, and codes count from -(2 ** (bits - 1)).
        left = 4 if form.is_signed else form.bits - 4
        starts = [self.splat(self.builder.load(offset), self.words) for offset in offsets]
        move = self.builder.shl if left > 0 else self.builder.ashr
        return [move(start, self.every(abs(left))) for start in starts] if left else starts

    def sums(self, lines, fours: range, inputs, offsets):
        """Integers [row][vector]: dot products of a group's inputs with its values."""
        form, most = self.form, self.form.most_pairs
        exact = self.isa.byte_dots == "vpdpbusd"
        totals = [[start] * self.vectors for start in self.starts(offsets)]
        waiting = [[None] * self.vectors for _ in inputs]
        for count, four in enumerate(fours, 1):
            codes = [self.values(lines, four, vector) for vector in range(self.vectors)]
            if form.is_signed:
                codes = [self.prepared(code) for code in codes]
            for row, value in enumerate(self.four(each, 4 * four) for each in inputs):
                for i, code in enumerate(codes):
                    if form.is_signed or exact:
                        add = self.add8 if form.is_signed else self.dot
                        totals[row][i] = add(totals[row][i], code, value)
                        continue
                    more, before = self.pairs_of(code, value), waiting[row][i]
                    more = more if before is None else self.builder.add(before, more)
                    if count % most and four != fours[-1]:
                        waiting[row][i] = more
                        continue
                    totals[row][i] = self.builder.add(totals[row][i], self.widen(more))
                    waiting[row][i] = None
            if exact and len(inputs) > 1 and count % 2 == 0 and four != fours[-1]:
                together = iter(self.together([*itertools.chain(*totals)]))
                totals = [[next(together) for _ in row] for row in totals]
        return totals

    def together(self, vectors):
        """The same vectors, all computed before they are used. Why: LLVM would order instructions
        row by row, and each row waits for its own sums."""
        kind = ir.LiteralStructType([vector.type for vector in vectors])
        operands = ",".join(["=v"] * len(vectors) + [*map(str, range(len(vectors)))])
        of = ir.FunctionType(kind, kind.elements)
        found = self.builder.asm(of, "", operands, vectors, False)
        return [self.builder.extract_value(found, i) for i in range(len(vectors))]

    def header(self, head):
        """A block's factors, its factors of minima, and a pointer to the groups' scales."""
        if self.form.levels == 1:
            return None, None, self.builder.bitcast(head, I16.as_pointer())
        numbers = self.at(head, I64(LINE))
        if not self.form.offset:
            return [self.get(self.vector, head, 4 * lane) for lane in self.lanes], None, numbers
        halves = self.builder.bitcast(head, I16.as_pointer())
        factors = (self.of_group(self.at(halves, I64(at))) for at in (0, PANEL))
        return *factors, self.in_bytes(numbers)

    def in_bytes(self, packed):
        """Unpacks a block's scales, then its minima, to one byte each, once for all of its units;
        see `gguf_blocks.packed_groups`."""
        size = UNITS * self.form.halves * PANEL
        kind = ir.ArrayType(self.bytes, 2 * size // self.bytes.count)
        room = self.variable(ir.Constant(kind, ir.Undefined))
        room = self.builder.bitcast(room, I8.as_pointer())

        def bits(line, left, mask):
            return self.builder.and_(self.shifted(line, left), self.every(mask, self.bytes))

        for at in range(0, LINE, self.bytes.count):
            lines = [self.get(self.bytes, packed, LINE * i + at) for i in range(4)]
            if self.form.halves == 2:
                numbers = [bits(line, left, 15) for left in (0, -4) for line in lines]
            else:
                first, mins, last, _ = lines
                numbers = []
                for line, left in ((first, 0), (mins, -4)):
                    above = self.builder.or_(bits(last, left, 15), bits(line, -2, 48))
                    numbers += [bits(line, 0, 63), above]
            for i, number in enumerate(numbers):
                self.store(number, self.at(room, I64(LINE * i + at)))
        return room

    def of_groups(self, header, unit, shift):
        """The scales and offsets of each group of a unit, as vectors of float32."""
        form, found, (factors, of_mins, place) = self.form, [], header
        if form.levels == 1:
            lines = 2 if form.offset else 1
            at = self.builder.mul(self.builder.lshr(unit, shift), I64(PANEL * lines))
            group = self.at(place, at)
            numbers = [self.of_group(self.at(group, I64(PANEL * i))) for i in range(lines)]
            return [(numbers[0], numbers[1] if form.offset else None)]
        place = self.at(place, self.builder.mul(unit, I64(form.halves * PANEL)))
        for half in range(form.halves):
            scales = self.whole(self.at(place, I64(half * PANEL)), factors)
            mins = None
            if form.offset:
                beside = self.at(place, I64((UNITS * form.halves + half) * PANEL))
                mins = self.whole(beside, of_mins)
            found.append((scales, mins))
        return found

    def eighths(self, offsets):
        """The offsets / 8, since they are multiplied by sums of inputs times -8."""
        return [self.builder.fmul(offset, self.constant(0.125)) for offset in offsets]

    def whole(self, pointer, factors):
        """A group's integers times the factors of its block."""
        narrow, found = ir.VectorType(I8, self.width), []
        for lane, factor in zip(self.lanes, factors, strict=True):
            words = self.builder.sext(self.get(narrow, pointer, lane), self.words)
            found.append(self.builder.fmul(self.builder.sitofp(words, self.vector), factor))
        return found

    def of_outputs(self, factors, groups):
        """The scales and offsets of each group, multiplied by the factors of the outputs."""

        def times(vectors):
            return [self.builder.fmul(v, f) for v, f in zip(vectors, factors, strict=True)]

        is_min = self.form.offset == MINS
        return [(times(scales), times(taken) if is_min else taken) for scales, taken in groups]

    def factors(self, panel):
        """The factors of a panel's outputs."""
        return [self.get(self.vector, panel, 4 * lane) for lane in self.lanes]

    def blocks(self, of, write, panels: int = 1):
        """Writes `write(lines, groups, unit)` for each unit; lines and groups have an entry per
        panel."""
        build = self.builder
        place = self.variable(self.at(of.w, I64(LINE)))
        asked = self.variable(self.at(of.w, of.ahead)) if hasattr(of, "ahead") else None

        def ask(_):
            if asked is not None:
                for line in of_panels(self.moved(asked, of.ahead_stride)):
                    self.prefetch(line, level=of.level)

        def of_panels(place):
            return self.rows(place, of.w_step if panels > 1 else None, panels)

        def block(index):
            heads = of_panels(self.moved(place, of.header))
            self.loop(build.udiv(of.header, I64(LINE)), ask)
            headers, first = [*map(self.header, heads)], build.mul(index, I64(UNITS))
            left = build.sub(of.units, first)
            units = build.select(build.icmp_signed("<", left, I64(UNITS)), left, I64(UNITS))

            def unit(index):
                for _ in range(self.form.bits):
                    ask(None)
                lines = of_panels(self.moved(place, I64(LINE * self.form.bits)))
                groups = [self.of_groups(header, index, of.shift) for header in headers]
                write(lines, groups, build.add(first, index))

            self.loop(units, unit)

        self.loop(build.udiv(build.add(of.units, I64(UNITS - 1)), I64(UNITS)), block)


class SpreadTile(GroupedTile):
    """Reads the output of `spread_panel`, and for byte values the inputs of `pair_inputs`.

    Two products of byte values take one multiplication, because the terms that depend only on
    inputs or only on values are known. Everything is exact:

        x0 * w0 + x1 * w1 = (x0 + w1) * (x1 + w0) - x0 * x1 - w0 * w1

    Source: S. Winograd, "A New Algorithm for Inner Product" (1968).
    """

    def __init__(self, builder, isa: ISA, form: Form):
        super().__init__(builder, isa, form)
        self.input_bytes = PAIRED if form.is_signed else UNIT

    def sums(self, lines, fours: range, inputs, offsets):
        """As `GroupedTile.sums`. Why a loop: LLVM would add unrolled products in pairs, and spill
        the sums meanwhile."""
        build, signed, place = self.builder, self.form.is_signed, fours[0]
        fits = not signed and self.form.most_pairs >= len(fours)
        first = self.at(lines, I64(2 * LINE * place if signed else LINE * place))
        if signed:
            half = 0 if len(fours) == UNIT // 4 else 1 + place // 4
            at = LINE * (UNIT // 2 + max(0, half - 1))
            starts = self.known(self.at(lines, I64(at)), inputs, 2 * UNIT + 4 * half)
        else:
            starts = [[start] * self.vectors for start in self.starts(offsets)]
        zero = self.every(0, self.pairs)
        cells = [[self.variable(zero if fits else start) for start in row] for row in starts]

        def paired(index):
            line = self.at(first, build.mul(index, I64(2 * LINE)))
            odd, even = (
                [self.get(self.pairs, line, LINE * i + 4 * lane) for lane in self.lanes]
                for i in range(2)
            )
            for row, of_row in zip(inputs, cells, strict=True):
                at = self.at(row, I64(4 * place), build.mul(index, I64(4)))
                x_even, x_odd = (build.bitcast(self.four(at, i), self.pairs) for i in (0, UNIT))
                for i, cell in enumerate(of_row):
                    pair = build.add(x_even, odd[i]), build.add(x_odd, even[i])
                    build.store(self.add16(build.load(cell), *pair), cell)

        def two(index):
            line = self.at(first, build.mul(index, I64(2 * LINE)))
            codes = [
                [self.get(self.bytes, line, LINE * k + 4 * lane) for k in range(2)]
                for lane in self.lanes
            ]
            for row, of_row in zip(inputs, cells, strict=True):
                at = self.at(row, I64(4 * place), build.mul(index, I64(8)))
                values = [self.four(at, 4 * k) for k in range(2)]
                for of_vector, cell in zip(codes, of_row, strict=True):
                    more = build.add(*map(self.pairs_of, of_vector, values))
                    more = more if fits else self.widen(more)
                    build.store(build.add(build.load(cell), more), cell)

        self.loop(I64(len(fours) // (1 if signed else 2)), paired if signed else two)
        totals = [[build.load(cell) for cell in row] for row in cells]
        if not fits:
            return totals
        return [
            [build.add(start, self.widen(total)) for start, total in zip(*rows, strict=True)]
            for rows in zip(starts, totals, strict=True)
        ]

    def known(self, of_values, inputs, at: int):
        """Initial values of sums of pairs [row][vector]: minus the products of values and of
        inputs."""
        numbers = [self.get(self.words, of_values, 4 * lane) for lane in self.lanes]
        of_rows = [self.splat(self.get(I32, row, at), self.words) for row in inputs]
        return [[self.builder.add(of_row, number) for number in numbers] for of_row in of_rows]

    def blocks(self, of, write):
        """As `GroupedTile.blocks`."""
        place, size = self.variable(self.at(of.w, I64(LINE))), unit_bytes(self.form)
        kinds, asked = 2 if self.form.offset else 1, self.variable(self.at(of.w, of.ahead))

        def unit(index):
            for _ in range(self.form.bits + 1):  # lines of the panel as it is stored
                self.prefetch(self.moved(asked, of.ahead_stride), level=of.level)
            start, groups = self.moved(place, I64(size)), []
            for _ in range(self.form.halves):
                floats = []
                for _ in range(kinds):
                    floats.append([self.get(self.vector, start, 4 * lane) for lane in self.lanes])
                    start = self.at(start, I64(LINE))
                groups.append((floats[0], floats[1] if self.form.offset else None))
            write([start], [groups], index)

        self.loop(of.units, unit)


def has_spread(isa: ISA) -> bool:
    """Whether panels are spread out for many rows. Why not on other CPUs: dot products of four
    bytes need so few instructions that nothing is gained."""
    return isa.byte_dots == "vpmaddubsw"


def unit_bytes(form: Form) -> int:
    """Bytes of a unit of a panel that is spread out."""
    lines = UNIT // 2 + form.halves if form.is_signed else UNIT // 4
    return LINE * (form.halves * (2 if form.offset else 1) + lines)


@tile_function(
    "byte* x, x_stride, int* groups, groups_stride, byte* w, units, shift, header, float* bias,"
    " float* out, out_stride, ahead, ahead_stride"
)
def grouped_tile(builder, isa: ISA, of, *numbers: int):
    """A tile of a panel: out[r, j] = factor[j] * sum over units of (x_scale[r] * sum over its
    groups of (scale[j] * (x . w - zero[j] * sum of x) - min[j] * sum of x)) + bias[j].

    `numbers` are the form's fields, the number of rows, and whether the panel is spread out.
    `groups` come from `quantize_groups`. With one level, groups of weights of 1 << `shift` units
    share scales; `header`: bytes of a block's header. For each line that is read, it prefetches a
    line, `ahead_stride` bytes after the previous one, from `ahead` after the panel's start.
    """
    *of_form, rows, is_spread = numbers
    form = Form(*of_form)
    tile = (SpreadTile if is_spread else GroupedTile)(builder, isa, form)
    inputs, outputs = tile.rows(of.x, of.x_stride, rows), tile.rows(of.out, of.out_stride, rows)
    of_groups = tile.rows(of.groups, of.groups_stride, rows)
    for line in outputs:
        tile.prefetch(line, write=True)
    results = [[tile.at(line, I64(lane)) for lane in tile.lanes] for line in outputs]
    # Why not if registers are few: LLVM would spill sums, which are updated often.
    if 2 * (rows + (form.offset > 0)) * tile.vectors + 11 <= isa.registers:
        results = [[tile.variable(tile.constant(0.0)) for _ in tile.lanes] for _ in outputs]
    for cell in itertools.chain(*results):
        tile.store(tile.constant(0.0), cell)

    def write(panels, groups_of_panels, unit):
        (lines,), (groups,) = panels, groups_of_panels
        of_unit = [tile.at(row, builder.mul(unit, I64(tile.input_bytes))) for row in inputs]
        starts = [tile.at(row, builder.mul(unit, I64(OF_GROUP))) for row in of_groups]
        terms = [[None] * tile.vectors for _ in inputs]
        for half, (scales, offsets) in enumerate(groups):
            fours = range(8) if form.halves == 1 else range(4 * half, 4 * half + 4)
            of_half = starts if form.halves == 1 else [tile.at(s, I64(1 + half)) for s in starts]
            sums = tile.sums(lines, fours, of_unit, of_half)
            if offsets and not is_spread:
                offsets = tile.eighths(offsets)
            for start, of_sums, of_row in zip(of_half, sums, terms, strict=True):
                for i, total in enumerate(of_sums):
                    total = builder.sitofp(total, tile.vector)
                    if offsets:
                        negative = builder.sitofp(tile.start(start), tile.vector)
                    if form.offset == ZEROS:
                        total = tile.fma(negative, offsets[i], total)
                    if half:
                        of_row[i] = tile.fma(total, scales[i], of_row[i])
                    else:
                        of_row[i] = builder.fmul(total, scales[i])
                    if form.offset == MINS:
                        of_row[i] = tile.fma(negative, offsets[i], of_row[i])
        for start, of_row, cells in zip(starts, terms, results, strict=True):
            bits = tile.at(start, I64(OF_GROUP - 1))
            scale = tile.broadcast(builder.bitcast(bits, FLOAT.as_pointer()))
            for term, cell in zip(of_row, cells, strict=True):
                tile.store(tile.fma(term, scale, tile.load(cell)), cell)

    given = SimpleNamespace(**vars(of), level=1 if rows > 1 else 0)
    tile.blocks(given, write)
    factors = tile.factors(of.w)
    for cells, line in zip(results, outputs, strict=True):
        for cell, factor, lane in zip(cells, factors, tile.lanes, strict=True):
            result = tile.fma(tile.load(cell), factor, tile.get(tile.vector, of.bias, lane))
            tile.store(result, tile.at(line, I64(lane)))


def of_floats(builder, isa: ISA, numbers) -> GroupedTile:
    """The tile that converts codes to floats. It has no byte products, so it uses the vector width
    of floats."""
    return GroupedTile(builder, replace(isa, byte_bits=isa.vector_bits), Form(*numbers))


@tile_function("byte* w, before, units, shift, header, float* out")
def grouped_floats(builder, isa: ISA, of, *numbers: int):
    """The weights of some blocks of a panel, from `before` bytes after the panel's first block on:
    out[k, j] = (w[k, j] - zero[j]) * scale[j] - min[j], each step rounded. The factor of the output
    is included in the scale and the minimum."""
    tile = of_floats(builder, isa, numbers)
    factors = tile.factors(of.w)
    of.w = tile.at(of.w, of.before)

    def write(panels, groups, unit):
        its_groups = tile.of_outputs(factors, groups[0])
        for four in range(UNIT // 4):
            for vector, lane in enumerate(tile.lanes):
                for k, weight in enumerate(tile.weights(panels[0], its_groups, four, vector)):
                    at = builder.add(builder.mul(unit, I64(UNIT)), I64(4 * four + k))
                    at = builder.add(builder.mul(at, I64(PANEL)), I64(lane))
                    tile.store(weight, tile.at(of.out, at))

    tile.blocks(of, write)


@tile_function(
    "float* x, byte* w, w_step, units, shift, header, float* start, float* out, ahead, ahead_stride"
)
def float_row_tile(builder, isa: ISA, of, *numbers: int):
    """A row of floats times panels `w_step` bytes apart: out[16 p + j] = start[16 p + j] + the sum
    over inputs k of x[k] * weight[p, k, j], in the steps of `grouped_floats` and of `float_tile`.

    `numbers` are the form's fields and the number of panels. Each panel is prefetched as in
    `grouped_tile`.
    """
    *of_form, panels = numbers
    tile = of_floats(builder, isa, of_form)
    places = [I64(i) for i in range(0, PANEL * panels, tile.width)]
    sums = [tile.variable(tile.load(tile.at(of.start, place))) for place in places]
    factors = [tile.factors(panel) for panel in tile.rows(of.w, of.w_step, panels)]

    def write(lines, groups, unit):
        its_groups = [*map(tile.of_outputs, factors, groups)]
        x = tile.at(of.x, builder.mul(unit, I64(UNIT)))
        for four in range(UNIT // 4):
            weights = [
                tile.weights(line, its, four, vector)
                for line, its in zip(lines, its_groups, strict=True)
                for vector in range(tile.vectors)
            ]
            for k in range(4):
                value = tile.broadcast(tile.at(x, I64(4 * four + k)))
                for weight, cell in zip(weights, sums, strict=True):
                    tile.store(tile.fma(next(weight), value, tile.load(cell)), cell)

    tile.blocks(SimpleNamespace(**vars(of), level=2), write, panels)
    for cell, place in zip(sums, places, strict=True):
        tile.store(tile.load(cell), tile.at(of.out, place))


@tile_function("byte* w, none_before, units, shift, header, byte* out")
def spread_panel(builder, isa: ISA, of, *numbers: int):
    """Spreads a panel out for tiles of many rows, which would otherwise each unpack codes and
    scales.

    A line with the outputs' factors, followed by the units. A unit has, per group, a line of scales
    and a line of offsets / 8, if there are any, float32; then a line of codes per four inputs. Byte
    values have two lines per four inputs, as 16-bit words: first the second and fourth input, then
    the others; after them, per group, minus the products of these.
    """
    form = Form(*numbers)
    tile, size = GroupedTile(builder, isa, form), unit_bytes(form)

    def keep(place, vectors):
        start = tile.moved(place, I64(LINE))
        for lane, vector in zip(tile.lanes, vectors, strict=True):
            tile.store(vector, tile.at(start, I64(4 * lane)))

    keep(tile.variable(of.out), tile.factors(of.w))

    def write(panels, groups_of_panels, unit):
        (lines,), (groups,) = panels, groups_of_panels
        place = tile.variable(tile.at(of.out, I64(LINE), builder.mul(unit, I64(size))))
        for scales, offsets in groups:
            keep(place, scales)
            if offsets:
                keep(place, tile.eighths(offsets))
        products = []
        for four in range(UNIT // 4):
            values = [tile.values(lines, four, vector) for vector in range(tile.vectors)]
            if not form.is_signed:
                keep(place, values)
                continue
            odd, even = zip(*map(tile.odd_and_even, values), strict=True)
            keep(place, odd)
            keep(place, even)
            if four % (UNIT // 4 // form.halves) == 0:
                products.append([tile.every(0)] * tile.vectors)
            products[-1] = [*map(tile.add16, products[-1], odd, even)]
        for totals in products:
            keep(place, [builder.neg(total) for total in totals])

    tile.blocks(of, write)


@writes()
def pair_inputs(emit, values, at, out, out_at):
    """A unit of inputs for `SpreadTile`: the first and third of each four as 16-bit words, then the
    second and fourth, then minus the sums of their products: for the unit and for its halves."""
    builder = emit.builder
    tile = ByteTile(builder, replace(CURRENT, byte_bits=8 * UNIT))
    source, target = emit.operands(values, at, out, out_at)
    odd, even = tile.odd_and_even(tile.get(tile.bytes, source))
    tile.store(even, target)
    tile.store(odd, tile.at(target, I64(UNIT)))
    products = builder.neg(tile.add16(tile.every(0), odd, even))
    for place, lanes in ((0, range(8)), (1, range(4)), (2, range(4, 8))):
        part = tile.shuffle(products, products, [*lanes])
        total = tile.call(f"llvm.vector.reduce.add.v{len(lanes)}i32", I32, part)
        tile.store(total, tile.at(target, I64(2 * UNIT + 4 * place)))


def rows_of_spread(isa: ISA) -> range:
    """Numbers of rows for tiles whose panel is spread out: at least three tiles divide the rows
    equally."""
    most = most_grouped(isa)
    return range(most - 1, most + 1) if has_spread(isa) else range(0)


def functions_of(module, isa: ISA, form: Form) -> list[ir.Function]:
    """`float_row_tile` of a form for one panel and for `AT_ONCE`, `grouped_floats`, the tiles of 1,
    2, ... rows, `spread_panel` and tiles of `rows_of_spread`, if there are any."""
    rows = range(1, most_grouped(isa) + 1)
    found = [float_row_tile(module, isa, *form, panels) for panels in (1, AT_ONCE)]
    found.append(grouped_floats(module, isa, *form))
    found += [grouped_tile(module, isa, *form, count, 0) for count in rows]
    if has_spread(isa):
        found.append(spread_panel(module, isa, *form))
    return found + [grouped_tile(module, isa, *form, count, 1) for count in rows_of_spread(isa)]


@writes()
def keep_addresses(emit, form, out):
    """out[i] = the address of each of `functions_of` a form. The form is a tuple of tuples whose
    lengths are the form's fields, so that its type determines the form."""
    builder, numbers = emit.builder, Form(*(len(part) for part in emit.kinds.form))
    place = emit.pointer(emit.kinds.out, out, I64(0))
    for i, function in enumerate(functions_of(builder.module, CURRENT, numbers)):
        builder.store(builder.ptrtoint(function, I64), emit.at(place, I64(i)))


def _at_address(tile):
    """A decorator for a function that compiled code calls: it calls a function of this tile at an
    address, the first argument."""

    def write(emit, address, *values):
        builder = emit.builder
        _, *operands = emit.operands(address, *values)
        operands = [builder.bitcast(a, k) for a, k in zip(operands, tile.kinds, strict=True)]
        of = ir.FunctionType(ir.VoidType(), tile.kinds)
        builder.call(builder.inttoptr(address, of.as_pointer()), operands)

    return written_by(write)


@_at_address(grouped_tile)
def multiply_grouped(
    address, x, x_at, x_stride, groups, groups_at, groups_stride, w, w_at, units, shift, header,
    bias, column, out, out_at, out_stride, ahead, ahead_stride,
):  # fmt: skip
    """Calls a `grouped_tile`, for the outputs from `column` on."""


@_at_address(float_row_tile)
def multiply_floats(address, x, x_at, w, w_at, w_step, units, shift, header, start, start_at,
                    out, out_at, ahead, ahead_stride):  # fmt: skip
    """Calls a `float_row_tile`."""


@_at_address(grouped_floats)
def panel_made(address, w, w_at, before, units, shift, header, out, out_at):
    """Calls a `grouped_floats` or `spread_panel`."""
