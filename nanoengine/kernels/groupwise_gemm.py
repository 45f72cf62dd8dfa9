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

from nanoengine.kernels.code_tables import E2M1, IQ2, IQ3_S, IQ3_XXS, IQ4
from nanoengine.kernels.emit import I32, declare_intrinsic, emit_intrinsic
from nanoengine.kernels.gemm import FLOAT, I8, I16, I64, LINE, PANEL, tile_function
from nanoengine.kernels.int8_gemm import GROUP_INTS, UNIT, ByteTile, max_rows
from nanoengine.kernels.isa import CURRENT, ISA

UNITS = 8  # per block
PAIRED_UNIT_BYTES = 80  # of inputs from `pair_inputs`
NONE, ZEROS, MINS = range(3)
MAX_REGISTER_ROWS = 2  # for so few rows, each dequantizes in registers
PANELS_AT_ONCE = 4 if CURRENT.vector_bits == 512 else 1  # for one row: its sums have latency
TABLES: tuple[tuple[int, ...], ...] = ((), IQ4, E2M1, IQ2, IQ3_XXS, IQ3_S)
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
        widths = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}[self.bits]
        return [(bits, sum(widths[:i]), sum(widths[:i])) for i, bits in enumerate(widths)]

    @property
    def is_signed(self) -> bool:
        """Whether tiles multiply by signed byte values instead of codes."""
        return self.bits == 8 or self.table > 0

    @property
    def max_pairs(self) -> int:
        """How many sums of two products with codes fit into 16 bits."""
        return 32767 // (2 * 127 * ((1 << self.bits) - 1))


def max_groupwise_rows(isa: ISA) -> int:
    """Rows of the largest tile."""
    # Why fewer on these: more sums would be spilled (`tests/kernels/test_assembly.py`).
    return {"avx512": 3, "neon": 2}.get(isa.name, max_rows(isa))


class GroupwiseTile(ByteTile):
    """Writes how tiles read a unit's codes, and a group's scales and offsets."""

    def __init__(self, builder, isa: ISA, form: Form):
        super().__init__(builder, isa)
        self.form = form
        self.lanes, self.input_bytes = range(0, PANEL, self.width), UNIT

    def codes(self, lines, quad: int, vector: int):
        """The codes of four inputs of a unit for the outputs of one vector, four bytes per
        output."""
        build, code, at = self.builder, None, vector * self.bytes.count
        for bits, lowest_bit, lines_before in self.form.planes:
            quads = 8 // bits  # per line
            plane = self.read(self.bytes, lines, LINE * (lines_before + quad // quads) + at)
            if bits < 8:
                shift, mask = lowest_bit - bits * (quad % quads), ((1 << bits) - 1) << lowest_bit
                plane = build.and_(self.shift_bits(plane, shift), self.ints(mask, self.bytes))
            code = plane if code is None else build.or_(code, plane)
        return code

    def values(self, lines, quad: int, vector: int):
        """The `codes`, or the table's values for them if there is a table."""
        codes = self.codes(lines, quad, vector)
        return self.look_up_table(codes) if self.form.table else codes

    def weights(self, lines, groups, quad: int, vector: int):
        """Yields the weights of four inputs for the outputs of one vector: (w - zero) * scale -
        min, each step rounded. `groups` has the outputs' scales and offsets."""
        build, form, centered = self.builder, self.form, self.form.centered and self.form.bits < 8
        scales, offsets = groups[quad // 4 if form.halves == 2 else 0]
        low = 1 << form.bits - 1 if centered else 0
        uses_table = form.bits <= 4 and self.width == PANEL and self.isa.byte_dots != "generic"
        if uses_table:
            words = build.bitcast(self.codes(lines, quad, vector), self.words)
            entries = TABLES[form.table] or range(-low, (1 << form.bits) - low)
            table = ir.Constant(self.vector, [*map(float, entries)] * (16 // len(entries)))
        else:
            values = self.values(lines, quad, vector)
            values = build.sub(values, self.ints(low, self.bytes)) if low else values
            words = build.bitcast(values, self.words)
        for k in range(4):
            if uses_table:  # The lowest 4 bits of each word are the index.
                word = build.lshr(words, self.ints(8 * k)) if k else words
                value = self.call("llvm.x86.avx512.permvar.sf.512", self.vector, table, word)
            else:
                word = build.shl(words, self.ints(24 - 8 * k)) if k < 3 else words
                value = build.sitofp(build.ashr(word, self.ints(24)), self.vector)
            if form.offset == ZEROS:
                value = build.fsub(value, offsets[vector])
            value = build.fmul(value, scales[vector])
            yield build.fsub(value, offsets[vector]) if form.offset == MINS else value

    def shift_bits(self, vector, left: int):
        """Shifts 16-bit words, so bits move between adjacent bytes; `left` may be negative."""
        if not left:
            return vector
        words, count = self.builder.bitcast(vector, self.pairs), self.ints(abs(left), self.pairs)
        moved = self.builder.shl(words, count) if left > 0 else self.builder.lshr(words, count)
        return self.builder.bitcast(moved, self.bytes)

    def look_up_table(self, codes):
        """The table's values for 4-bit codes."""
        table = TABLES[self.form.table]
        names = {128: "ssse3.pshuf.b.128", 256: "avx2.pshuf.b", 512: "avx512.pshuf.b.512"}
        if self.isa.byte_dots == "generic":
            values = [self.ints(value, self.bytes) for value in table]
            for bit in range(4):
                mask = self.builder.and_(codes, self.ints(1 << bit, self.bytes))
                is_set = self.builder.icmp_unsigned("!=", mask, self.ints(0, self.bytes))
                pairs = zip(values[::2], values[1::2], strict=True)
                values = [self.builder.select(is_set, odd, even) for even, odd in pairs]
            return values[0]
        lookup = ir.Constant(self.bytes, [*table] * (self.bytes.count // 16))
        name = f"llvm.x86.{names[self.isa.byte_bits]}"
        return self.call(name, self.bytes, lookup, codes)

    def initial_sums(self, offsets):
        """Initial values of each row's sums of inputs times a group's values."""
        form, exact = self.form, self.isa.byte_dots == "vpdpbusd"
        if not (exact if form.is_signed else form.centered):
            return [self.ints(0)] * len(offsets)
        # An offset is -8 times the sum of inputs, and codes count from -(2 ** (bits - 1)).
        left = 4 if form.is_signed else form.bits - 4
        starts = [self.splat(self.builder.load(offset), self.words) for offset in offsets]
        shift = self.builder.shl if left > 0 else self.builder.ashr
        return [shift(start, self.ints(abs(left))) for start in starts] if left else starts

    def sums(self, lines, quads: range, inputs, offsets):
        """Integers [row][vector]: dot products of a group's inputs with its values."""
        form, max_pairs = self.form, self.form.max_pairs
        exact = self.isa.byte_dots == "vpdpbusd"
        totals = [[start] * self.vectors for start in self.initial_sums(offsets)]
        pending_sums = [[None] * self.vectors for _ in inputs]
        for count, quad in enumerate(quads, 1):
            codes = [self.values(lines, quad, vector) for vector in range(self.vectors)]
            if form.is_signed:
                codes = [self.prepare_weight(code) for code in codes]
            for row, value in enumerate(self.quad(x, 4 * quad) for x in inputs):
                for i, code in enumerate(codes):
                    if form.is_signed or exact:
                        add = self.add8 if form.is_signed else self.dot
                        totals[row][i] = add(totals[row][i], code, value)
                        continue
                    product, pending = self.dot_pairs(code, value), pending_sums[row][i]
                    product = product if pending is None else self.builder.add(pending, product)
                    if count % max_pairs and quad != quads[-1]:
                        pending_sums[row][i] = product
                        continue
                    totals[row][i] = self.builder.add(totals[row][i], self.add_adjacent(product))
                    pending_sums[row][i] = None
            if exact and len(inputs) > 1 and count % 2 == 0 and quad != quads[-1]:
                ordered = iter(self.materialize([*itertools.chain(*totals)]))
                totals = [[next(ordered) for _ in row] for row in totals]
        return totals

    def materialize(self, vectors):
        """Returns the same vectors; all are computed before any is used. Why: LLVM would order the
        instructions row by row, and each row would wait for its own sums."""
        kind = ir.LiteralStructType([vector.type for vector in vectors])
        operands = ",".join(["=v"] * len(vectors) + [*map(str, range(len(vectors)))])
        function_type = ir.FunctionType(kind, kind.elements)
        ordered = self.builder.asm(function_type, "", operands, vectors, False)
        return [self.builder.extract_value(ordered, i) for i in range(len(vectors))]

    def header(self, head):
        """A block's factors, its factors of minima, and a pointer to the groups' scales."""
        if self.form.levels == 1:
            return None, None, self.builder.bitcast(head, I16.as_pointer())
        scales = self.at(head, I64(LINE))
        if not self.form.offset:
            return [self.read(self.vector, head, 4 * lane) for lane in self.lanes], None, scales
        halves = self.builder.bitcast(head, I16.as_pointer())
        factors = (self.load_fp16(self.at(halves, I64(at))) for at in (0, PANEL))
        return *factors, self.unpack_scales(scales)

    def unpack_scales(self, packed):
        """Unpacks a block's scales, then its minima, to one byte each, once for all of the block's
        units; see `gguf_blocks.packed_groups`."""
        size = UNITS * self.form.halves * PANEL
        kind = ir.ArrayType(self.bytes, 2 * size // self.bytes.count)
        buffer = self.variable(ir.Constant(kind, ir.Undefined))
        buffer = self.builder.bitcast(buffer, I8.as_pointer())

        def bits(line, left, mask):
            return self.builder.and_(self.shift_bits(line, left), self.ints(mask, self.bytes))

        for at in range(0, LINE, self.bytes.count):
            lines = [self.read(self.bytes, packed, LINE * i + at) for i in range(4)]
            if self.form.halves == 2:
                values = [bits(line, left, 15) for left in (0, -4) for line in lines]
            else:
                first, mins, last, _ = lines
                values = []
                for line, left in ((first, 0), (mins, -4)):
                    above = self.builder.or_(bits(last, left, 15), bits(line, -2, 48))
                    values += [bits(line, 0, 63), above]
            for i, value in enumerate(values):
                self.store(value, self.at(buffer, I64(LINE * i + at)))
        return buffer

    def group_scales(self, header, unit, shift):
        """The scales and offsets of each group of a unit, as vectors of float32."""
        form, groups, (factors, of_mins, position) = self.form, [], header
        if form.levels == 1:
            kinds = 2 if form.offset else 1
            lines = kinds * form.halves
            at = self.builder.mul(self.builder.lshr(unit, shift), I64(PANEL * lines))
            group = self.at(position, at)
            values = [self.load_fp16(self.at(group, I64(PANEL * i))) for i in range(lines)]
            return [(values[i], values[i + 1] if form.offset else None)
                    for i in range(0, lines, kinds)]  # fmt: skip
        position = self.at(position, self.builder.mul(unit, I64(form.halves * PANEL)))
        for half in range(form.halves):
            scales = self.scale_integers(self.at(position, I64(half * PANEL)), factors)
            mins = None
            if form.offset:
                mins_at = self.at(position, I64((UNITS * form.halves + half) * PANEL))
                mins = self.scale_integers(mins_at, of_mins)
            groups.append((scales, mins))
        return groups

    def divide_by_8(self, offsets):
        """The offsets / 8, because they are multiplied by -8 times the sums of inputs."""
        return [self.builder.fmul(offset, self.constant(0.125)) for offset in offsets]

    def scale_integers(self, pointer, factors):
        """A group's integers times the factors of its block."""
        narrow, vectors = ir.VectorType(I8, self.width), []
        for lane, factor in zip(self.lanes, factors, strict=True):
            words = self.builder.sext(self.read(narrow, pointer, lane), self.words)
            vectors.append(self.builder.fmul(self.builder.sitofp(words, self.vector), factor))
        return vectors

    def apply_factors(self, factors, groups):
        """The scales and offsets of each group, multiplied by the factors of the outputs."""

        def times(vectors):
            return [self.builder.fmul(v, f) for v, f in zip(vectors, factors, strict=True)]

        is_min = self.form.offset == MINS
        return [(times(scale), times(offset) if is_min else offset) for scale, offset in groups]

    def factors(self, panel):
        """The factors of a panel's outputs."""
        return [self.read(self.vector, panel, 4 * lane) for lane in self.lanes]

    def loop_units(self, arg, write, panels: int = 1):
        """Writes a loop over units that calls `write(lines, groups, unit)`; lines and groups have
        an entry per panel."""
        build = self.builder
        position = self.variable(self.at(arg.w, I64(LINE)))
        ahead = self.variable(self.at(arg.w, arg.ahead)) if hasattr(arg, "ahead") else None

        def prefetch_lines(_):
            if ahead is not None:
                for line in panel_pointers(self.advance(ahead, arg.ahead_stride)):
                    self.prefetch(line, level=arg.level)

        def panel_pointers(position):
            return self.rows(position, arg.w_step if panels > 1 else None, panels)

        def block(index):
            heads = panel_pointers(self.advance(position, arg.header))
            self.loop(build.udiv(arg.header, I64(LINE)), prefetch_lines)
            headers, first = [*map(self.header, heads)], build.mul(index, I64(UNITS))
            rest = build.sub(arg.units, first)
            units = build.select(build.icmp_signed("<", rest, I64(UNITS)), rest, I64(UNITS))

            def unit(index):
                for _ in range(self.form.bits):
                    prefetch_lines(None)
                lines = panel_pointers(self.advance(position, I64(LINE * self.form.bits)))
                groups = [self.group_scales(header, index, arg.shift) for header in headers]
                write(lines, groups, build.add(first, index))

            self.loop(units, unit)

        self.loop(build.udiv(build.add(arg.units, I64(UNITS - 1)), I64(UNITS)), block)


class SpreadTile(GroupwiseTile):
    """Reads the output of `spread_panel`, and for byte values the inputs of `pair_inputs`.

    Two products of byte values take one multiplication, because the terms that depend only on
    inputs or only on values are known. Everything is exact:

        x0 * w0 + x1 * w1 = (x0 + w1) * (x1 + w0) - x0 * x1 - w0 * w1

    Source: S. Winograd, "A New Algorithm for Inner Product" (1968).
    """

    def __init__(self, builder, isa: ISA, form: Form):
        super().__init__(builder, isa, form)
        self.input_bytes = PAIRED_UNIT_BYTES if form.is_signed else UNIT

    def sums(self, lines, quads: range, inputs, offsets):
        """As `GroupwiseTile.sums`. Why a loop: LLVM would add unrolled products in pairs, and would
        spill the sums."""
        build, signed, first_quad = self.builder, self.form.is_signed, quads[0]
        fits = not signed and self.form.max_pairs >= len(quads)
        first = self.at(lines, I64(2 * LINE * first_quad if signed else LINE * first_quad))
        if signed:
            half = 0 if len(quads) == UNIT // 4 else 1 + first_quad // 4
            at = LINE * (UNIT // 2 + max(0, half - 1))
            starts = self.initial_pair_sums(self.at(lines, I64(at)), inputs, 2 * UNIT + 4 * half)
        else:
            starts = [[start] * self.vectors for start in self.initial_sums(offsets)]
        zero = self.ints(0, self.pairs)
        cells = [[self.variable(zero if fits else start) for start in row] for row in starts]

        def paired(index):
            line = self.at(first, build.mul(index, I64(2 * LINE)))
            odd, even = (
                [self.read(self.pairs, line, LINE * i + 4 * lane) for lane in self.lanes]
                for i in range(2)
            )
            for row, row_cells in zip(inputs, cells, strict=True):
                at = self.at(row, I64(4 * first_quad), build.mul(index, I64(4)))
                x_even, x_odd = (build.bitcast(self.quad(at, i), self.pairs) for i in (0, UNIT))
                for i, cell in enumerate(row_cells):
                    pair = build.add(x_even, odd[i]), build.add(x_odd, even[i])
                    build.store(self.add16(build.load(cell), *pair), cell)

        def unpaired(index):
            line = self.at(first, build.mul(index, I64(2 * LINE)))
            codes = [
                [self.read(self.bytes, line, LINE * k + 4 * lane) for k in range(2)]
                for lane in self.lanes
            ]
            for row, row_cells in zip(inputs, cells, strict=True):
                at = self.at(row, I64(4 * first_quad), build.mul(index, I64(8)))
                values = [self.quad(at, 4 * k) for k in range(2)]
                for vector_codes, cell in zip(codes, row_cells, strict=True):
                    product = build.add(*map(self.dot_pairs, vector_codes, values))
                    product = product if fits else self.add_adjacent(product)
                    build.store(build.add(build.load(cell), product), cell)

        self.loop(I64(len(quads) // (1 if signed else 2)), paired if signed else unpaired)
        totals = [[build.load(cell) for cell in row] for row in cells]
        if not fits:
            return totals
        return [
            [build.add(start, self.add_adjacent(total)) for start, total in zip(*rows, strict=True)]
            for rows in zip(starts, totals, strict=True)
        ]

    def initial_pair_sums(self, values_at, inputs, at: int):
        """Initial values [row][vector] for sums of pairs: minus the products that depend only on
        values or only on inputs."""
        by_value = [self.read(self.words, values_at, 4 * lane) for lane in self.lanes]
        by_row = [self.splat(self.read(I32, row, at), self.words) for row in inputs]
        return [[self.builder.add(x, w) for w in by_value] for x in by_row]

    def loop_units(self, arg, write):
        """As `GroupwiseTile.loop_units`."""
        position, size = self.variable(self.at(arg.w, I64(LINE))), unit_bytes(self.form)
        kinds, ahead = 2 if self.form.offset else 1, self.variable(self.at(arg.w, arg.ahead))

        def unit(index):
            for _ in range(self.form.bits + 1):  # lines of the panel as it is stored
                self.prefetch(self.advance(ahead, arg.ahead_stride), level=arg.level)
            start, groups = self.advance(position, I64(size)), []
            for _ in range(self.form.halves):
                floats = []
                for _ in range(kinds):
                    floats.append([self.read(self.vector, start, 4 * lane) for lane in self.lanes])
                    start = self.at(start, I64(LINE))
                groups.append((floats[0], floats[1] if self.form.offset else None))
            write([start], [groups], index)

        self.loop(arg.units, unit)


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
def groupwise_tile(builder, isa: ISA, arg, *fields: int):
    """A tile of a panel: out[r, j] = factor[j] * sum over units of (x_scale[r] * sum over its
    groups of (scale[j] * (x . w - zero[j] * sum of x) - min[j] * sum of x)) + bias[j].

    `fields` are the form's fields, the number of rows, and whether the panel is spread out.
    `groups` come from `quantize_groups`. With one level, groups of weights of 1 << `shift` units
    share scales; `header`: bytes of a block's header. For each line that is read, it prefetches a
    line, `ahead_stride` bytes after the previous one, from `ahead` after the panel's start.
    """
    *form_fields, rows, is_spread = fields
    form = Form(*form_fields)
    tile = (SpreadTile if is_spread else GroupwiseTile)(builder, isa, form)
    inputs, outputs = tile.rows(arg.x, arg.x_stride, rows), tile.rows(arg.out, arg.out_stride, rows)
    row_groups = tile.rows(arg.groups, arg.groups_stride, rows)
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
        unit_inputs = [tile.at(row, builder.mul(unit, I64(tile.input_bytes))) for row in inputs]
        starts = [tile.at(row, builder.mul(unit, I64(GROUP_INTS))) for row in row_groups]
        terms = [[None] * tile.vectors for _ in inputs]
        for half, (scales, offsets) in enumerate(groups):
            quads = range(8) if form.halves == 1 else range(4 * half, 4 * half + 4)
            halves = starts if form.halves == 1 else [tile.at(s, I64(1 + half)) for s in starts]
            sums = tile.sums(lines, quads, unit_inputs, halves)
            if offsets and not is_spread:
                offsets = tile.divide_by_8(offsets)
            for start, row_sums, row_terms in zip(halves, sums, terms, strict=True):
                for i, total in enumerate(row_sums):
                    total = builder.sitofp(total, tile.vector)
                    if offsets:
                        negative = builder.sitofp(tile.initial_sum(start), tile.vector)
                    if form.offset == ZEROS:
                        total = tile.fma(negative, offsets[i], total)
                    if half:
                        row_terms[i] = tile.fma(total, scales[i], row_terms[i])
                    else:
                        row_terms[i] = builder.fmul(total, scales[i])
                    if form.offset == MINS:
                        row_terms[i] = tile.fma(negative, offsets[i], row_terms[i])
        for start, row_terms, cells in zip(starts, terms, results, strict=True):
            bits = tile.at(start, I64(GROUP_INTS - 1))
            scale = tile.broadcast(builder.bitcast(bits, FLOAT.as_pointer()))
            for term, cell in zip(row_terms, cells, strict=True):
                tile.store(tile.fma(term, scale, tile.load(cell)), cell)

    unit_args = SimpleNamespace(**vars(arg), level=1 if rows > 1 else 0)
    tile.loop_units(unit_args, write)
    factors = tile.factors(arg.w)
    for cells, line in zip(results, outputs, strict=True):
        for cell, factor, lane in zip(cells, factors, tile.lanes, strict=True):
            result = tile.fma(tile.load(cell), factor, tile.read(tile.vector, arg.bias, lane))
            tile.store(result, tile.at(line, I64(lane)))


def dequantizing_tile(builder, isa: ISA, form_fields) -> GroupwiseTile:
    """A tile that converts codes to floats. It multiplies no bytes, so it uses the vector width of
    floats."""
    return GroupwiseTile(builder, replace(isa, byte_bits=isa.vector_bits), Form(*form_fields))


@tile_function("byte* w, offset, units, shift, header, float* out")
def dequantize_blocks(builder, isa: ISA, arg, *form_fields: int):
    """Dequantizes some blocks of a panel, from `offset` bytes after the panel's first block on:
    out[k, j] = (w[k, j] - zero[j]) * scale[j] - min[j], each step rounded. The factor of the output
    is included in the scale and the minimum."""
    tile = dequantizing_tile(builder, isa, form_fields)
    factors = tile.factors(arg.w)
    arg.w = tile.at(arg.w, arg.offset)

    def write(panels, groups, unit):
        scaled_groups = tile.apply_factors(factors, groups[0])
        for quad in range(UNIT // 4):
            for vector, lane in enumerate(tile.lanes):
                for k, weight in enumerate(tile.weights(panels[0], scaled_groups, quad, vector)):
                    at = builder.add(builder.mul(unit, I64(UNIT)), I64(4 * quad + k))
                    at = builder.add(builder.mul(at, I64(PANEL)), I64(lane))
                    tile.store(weight, tile.at(arg.out, at))

    tile.loop_units(arg, write)


@tile_function(
    "float* x, byte* w, w_step, units, shift, header, float* start, float* out, ahead, ahead_stride"
)
def float_row_tile(builder, isa: ISA, arg, *fields: int):
    """A row of floats times panels `w_step` bytes apart: out[16 p + j] = start[16 p + j] + the sum
    over inputs k of x[k] * weight[p, k, j], in the steps of `dequantize_blocks` and `float_tile`.

    `fields` are the form's fields and the number of panels. Each panel is prefetched as in
    `groupwise_tile`.
    """
    *form_fields, panels = fields
    tile = dequantizing_tile(builder, isa, form_fields)
    lanes = [I64(i) for i in range(0, PANEL * panels, tile.width)]
    sums = [tile.variable(tile.load(tile.at(arg.start, lane))) for lane in lanes]
    factors = [tile.factors(panel) for panel in tile.rows(arg.w, arg.w_step, panels)]

    def write(lines, groups, unit):
        panel_groups = [*map(tile.apply_factors, factors, groups)]
        x = tile.at(arg.x, builder.mul(unit, I64(UNIT)))
        for quad in range(UNIT // 4):
            weights = [
                tile.weights(line, panel_group, quad, vector)
                for line, panel_group in zip(lines, panel_groups, strict=True)
                for vector in range(tile.vectors)
            ]
            for k in range(4):
                value = tile.broadcast(tile.at(x, I64(4 * quad + k)))
                for weight, cell in zip(weights, sums, strict=True):
                    tile.store(tile.fma(next(weight), value, tile.load(cell)), cell)

    tile.loop_units(SimpleNamespace(**vars(arg), level=2), write, panels)
    for cell, lane in zip(sums, lanes, strict=True):
        tile.store(tile.load(cell), tile.at(arg.out, lane))


@tile_function("byte* w, unused_offset, units, shift, header, byte* out")
def spread_panel(builder, isa: ISA, arg, *form_fields: int):
    """Spreads a panel out for tiles of many rows, which would otherwise each unpack codes and
    scales.

    A line with the outputs' factors, followed by the units. A unit has, per group, a line of scales
    and a line of offsets / 8, if there are any, float32; then a line of codes per four inputs. Byte
    values have two lines per four inputs, as 16-bit words: first the second and the fourth input,
    then the first and the third; after them, per group, minus the products of the two lines.
    """
    form = Form(*form_fields)
    tile, size = GroupwiseTile(builder, isa, form), unit_bytes(form)

    def store_line(position, vectors):
        start = tile.advance(position, I64(LINE))
        for lane, vector in zip(tile.lanes, vectors, strict=True):
            tile.store(vector, tile.at(start, I64(4 * lane)))

    store_line(tile.variable(arg.out), tile.factors(arg.w))

    def write(panels, groups_of_panels, unit):
        (lines,), (groups,) = panels, groups_of_panels
        position = tile.variable(tile.at(arg.out, I64(LINE), builder.mul(unit, I64(size))))
        for scales, offsets in groups:
            store_line(position, scales)
            if offsets:
                store_line(position, tile.divide_by_8(offsets))
        products = []
        for quad in range(UNIT // 4):
            values = [tile.values(lines, quad, vector) for vector in range(tile.vectors)]
            if not form.is_signed:
                store_line(position, values)
                continue
            odd, even = zip(*map(tile.odd_and_even, values), strict=True)
            store_line(position, odd)
            store_line(position, even)
            if quad % (UNIT // 4 // form.halves) == 0:
                products.append([tile.ints(0)] * tile.vectors)
            products[-1] = [*map(tile.add16, products[-1], odd, even)]
        for totals in products:
            store_line(position, [builder.neg(total) for total in totals])

    tile.loop_units(arg, write)


@emit_intrinsic()
def pair_inputs(emit, values, at, out, out_at):
    """Writes a unit of inputs for `SpreadTile`: the first and the third of each four inputs as
    16-bit words, then the second and the fourth, then minus the sums of their products: for the
    unit and for each of its halves."""
    builder = emit.builder
    tile = ByteTile(builder, replace(CURRENT, byte_bits=8 * UNIT))
    source, target = emit.operands(values, at, out, out_at)
    odd, even = tile.odd_and_even(tile.read(tile.bytes, source))
    tile.store(even, target)
    tile.store(odd, tile.at(target, I64(UNIT)))
    products = builder.neg(tile.add16(tile.ints(0), odd, even))
    for offset, lanes in ((0, range(8)), (1, range(4)), (2, range(4, 8))):
        selected = tile.shuffle(products, products, [*lanes])
        total = tile.call(f"llvm.vector.reduce.add.v{len(lanes)}i32", I32, selected)
        tile.store(total, tile.at(target, I64(2 * UNIT + 4 * offset)))


def spread_rows(isa: ISA) -> range:
    """Numbers of rows of tiles whose panel is spread out. Why only the two largest: the rows are
    divided equally among at least three tiles."""
    limit = max_groupwise_rows(isa)
    return range(limit - 1, limit + 1) if has_spread(isa) else range(0)


def form_functions(module, isa: ISA, form: Form) -> list[ir.Function]:
    """The functions of a form: `float_row_tile` for one panel and for `PANELS_AT_ONCE`,
    `dequantize_blocks`, tiles of 1, 2, ... rows, `spread_panel` and tiles of `spread_rows`,
    if there are any."""
    rows = range(1, max_groupwise_rows(isa) + 1)
    tiles = [float_row_tile(module, isa, *form, panels) for panels in (1, PANELS_AT_ONCE)]
    tiles.append(dequantize_blocks(module, isa, *form))
    tiles += [groupwise_tile(module, isa, *form, count, 0) for count in rows]
    if has_spread(isa):
        tiles.append(spread_panel(module, isa, *form))
    return tiles + [groupwise_tile(module, isa, *form, count, 1) for count in spread_rows(isa)]


@emit_intrinsic()
def store_addresses(emit, form, out):
    """out[i] = the address of function i of `form_functions`. `form` is a tuple of tuples whose
    lengths are the fields of a `Form`, so that its type determines the form."""
    builder, fields = emit.builder, Form(*(len(part) for part in emit.kinds.form))
    address = emit.pointer(emit.kinds.out, out, I64(0))
    for i, function in enumerate(form_functions(builder.module, CURRENT, fields)):
        builder.store(builder.ptrtoint(function, I64), emit.at(address, I64(i)))


def _at_address(tile):
    """A decorator for a function that compiled code calls: it calls a tile's function at an
    address, its first argument."""

    def write(emit, address, *values):
        builder = emit.builder
        _, *operands = emit.operands(address, *values)
        operands = [builder.bitcast(a, k) for a, k in zip(operands, tile.kinds, strict=True)]
        function_type = ir.FunctionType(ir.VoidType(), tile.kinds)
        builder.call(builder.inttoptr(address, function_type.as_pointer()), operands)

    return declare_intrinsic(write)


@_at_address(groupwise_tile)
def matmul_groupwise(
    address, x, x_at, x_stride, groups, groups_at, groups_stride, w, w_at, units, shift, header,
    bias, column, out, out_at, out_stride, ahead, ahead_stride,
):  # fmt: skip
    """Calls a `groupwise_tile`, for the outputs from `column` on."""


@_at_address(float_row_tile)
def matmul_groupwise_fp32(address, x, x_at, w, w_at, w_step, units, shift, header, start, start_at,
                    out, out_at, ahead, ahead_stride):  # fmt: skip
    """Calls a `float_row_tile`."""


@_at_address(dequantize_blocks)
def unpack_panel(address, w, w_at, before, units, shift, header, out, out_at):
    """Calls a `dequantize_blocks` or `spread_panel`."""
