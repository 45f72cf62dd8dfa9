"""Tiles of whole numbers: rows of int8 inputs times panels of int8 weights, exactly.

    a line of 64 bytes    16 outputs, for each
    int8                  4 inputs
    int16                 4 inputs in two pairs, one after the other, for inputs of 16 bits

What multiplies bytes and adds neighbours differs from CPU to CPU (`isa.py`):

    vpdpbusd     four unsigned by signed bytes, added to 32 bits. int8 weights + 128 are unsigned;
                 128 times the row's sum is taken off before
    vpmaddubsw   two, added in 16 bits: |w| times x with w's sign, at most 2 * 128 * 127, which
                 fits. Several such sums fit where codes have fewer bits (`grouped_tiles.py`)
    generic      the even and the odd bytes of words of 16 bits, each multiplied as such

All sums are exact, so **results have the same bits under each of them**.

Source: `vpsignb` to feed `vpmaddubsw` with signed bytes, ggml's AVX2 dot products.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoengine.kernels.code_tables import GROUP, ROTATED
from nanoengine.kernels.emit import I32, Emit
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.tiles import FLOAT, I8, I16, I64, LINE, PANEL, tile_call, tile_function

UNIT = 32  # inputs: K is padded to a multiple, and a group holds a multiple
SCALED = 0x042A2425, 0x7F800000  # bits of 2e-36 and infinity: magnitudes that have a scale


def most_rows(isa: ISA) -> int:
    """Rows of the largest tile of one panel: its sums fill half of the registers, or all of them
    with the results of groups."""
    return min(8, isa.registers * isa.byte_bits // 1024)


def shapes8(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of the tiles of int8 weights: two panels where a register holds a line, so
    that an input that is loaded is multiplied twice."""
    panels = 2 if isa.byte_bits == 8 * LINE else 1
    rows = 6 if isa.byte_dots == "vpdpbusd" and panels == 1 else most_rows(isa)
    return [(r, p) for r in range(1, rows + 1) for p in sorted({1, panels})]


def shapes16(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of the tiles of the screen's estimates."""
    return [(rows, 1) for rows in range(1, most_rows(isa) + 1)]


class ByteTile(Emit):
    """Writes dot products of bytes, in whatever way the CPU has."""

    def __init__(self, builder, isa: ISA):
        super().__init__(None, builder, bits=isa.byte_bits, isa=isa)
        self.pairs = ir.VectorType(I16, 2 * self.width)
        self.bytes = ir.VectorType(I8, 4 * self.width)
        self.vectors = PANEL // self.width  # of a panel

    def four(self, pointer, offset=0):
        """Four neighbouring bytes, for all lanes."""
        word = self.get(I32, pointer, offset)
        return self.builder.bitcast(self.splat(word, self.words), self.bytes)

    def prepared(self, weight):
        """An int8 weight as `add8` takes it."""
        if self.isa.byte_dots == "vpdpbusd":
            return self.builder.xor(weight, self.every(-128, self.bytes))
        if self.isa.byte_dots == "vpmaddubsw":
            name, wraps = f"llvm.abs.v{self.bytes.count}i8", ir.IntType(1)(0)
            return self.call(name, self.bytes, weight, wraps), weight
        return weight

    def add8(self, total, weight, value):
        """total + the dot products of fours; of w + 128 with `vpdpbusd`."""
        if self.isa.byte_dots == "vpdpbusd":
            return self.dot(total, weight, value)
        if self.isa.byte_dots == "vpmaddubsw":
            positive, weight = weight
            signed = self.call("llvm.x86.avx2.psign.b", self.bytes, value, weight)
            return self.builder.add(total, self.widen(self.pairs_of(positive, signed)))
        return self.builder.add(total, self.widen(self.pairs_of(weight, value)))

    def dot(self, total, unsigned, signed):
        name = f"llvm.x86.avx512.vpdpbusd.{self.isa.byte_bits}"
        return self.call(name, self.words, total, unsigned, signed)

    def pairs_of(self, first, second):
        """Neighbouring products added in 16 bits, which they fit; `first` is not below 0 unless the
        dot products are generic."""
        if self.isa.byte_dots == "vpmaddubsw":
            return self.call("llvm.x86.avx2.pmadd.ub.sw", self.pairs, first, second)
        build, eight = self.builder, self.every(8, self.pairs)
        first, second = (build.bitcast(value, self.pairs) for value in (first, second))
        odd = build.mul(build.ashr(first, eight), build.ashr(second, eight))
        first, second = (build.ashr(build.shl(value, eight), eight) for value in (first, second))
        return build.add(build.mul(first, second), odd)

    def odd_and_even(self, numbers):
        """Every second of signed bytes, as words of 16 bits, and the others."""
        eight, pairs = self.every(8, self.pairs), self.builder.bitcast(numbers, self.pairs)
        even = self.builder.ashr(self.builder.shl(pairs, eight), eight)
        return self.builder.ashr(pairs, eight), even

    def widen(self, pairs):
        """Neighbouring numbers of 16 bits added in 32."""
        if self.isa.byte_dots == "vpmaddubsw":
            ones = self.every(1, self.pairs)
            return self.call("llvm.x86.avx2.pmadd.wd", self.words, pairs, ones)
        build, half = self.builder, self.every(16)
        pairs = build.bitcast(pairs, self.words)
        return build.add(build.ashr(build.shl(pairs, half), half), build.ashr(pairs, half))

    def of_group(self, numbers):
        """The float16 numbers that a panel's outputs have of a group, as vectors of float32."""
        halves = ir.VectorType(I16, self.width)
        vectors = [self.get(halves, numbers, i) for i in range(0, PANEL, self.width)]
        return [self.widen_halves(vector) for vector in vectors]

    def start(self, offset):
        """What the sums of a row and a unit start from."""
        return self.splat(self.builder.load(offset), self.words)

    def add16(self, total, weight, value):
        """total + neighbouring products of 16-bit numbers."""
        if self.isa.byte_dots == "vpdpbusd":
            name = f"llvm.x86.avx512.vpdpwssd.{self.isa.byte_bits}"
            return self.call(name, self.words, total, weight, value)
        build, half = self.builder, self.every(16)
        if self.isa.byte_dots == "vpmaddubsw":
            return build.add(total, self.call("llvm.x86.avx2.pmadd.wd", self.words, weight, value))
        weight, value = (build.bitcast(number, self.words) for number in (weight, value))
        odd = build.mul(build.ashr(weight, half), build.ashr(value, half))
        weight, value = (build.ashr(build.shl(n, half), half) for n in (weight, value))
        return build.add(total, build.add(build.mul(weight, value), odd))

    def finish(self, totals, of, outputs):
        """outputs[r] = totals[r] * (scale of the row * scale of the output) + bias."""
        factors = self.rows(of.x_scales, I64(1), len(totals))
        for of_row, factor, line in zip(totals, factors, outputs, strict=True):
            factor = self.broadcast(factor)
            for i, total in enumerate(of_row):
                at = i * self.width
                scale = self.builder.fmul(factor, self.get(self.vector, of.w_scales, at))
                result = self.fma(total, scale, self.get(self.vector, of.bias, at))
                self.store(result, self.at(line, I64(at)))

    def of_brain(self, numbers):
        """bfloat16 numbers of a panel's outputs, as vectors of float32."""
        halves, found = ir.VectorType(I16, self.width), []
        for i in range(0, PANEL, self.width):
            words = self.builder.zext(self.get(halves, numbers, i), self.words)
            wide = self.builder.shl(words, self.every(16))
            found.append(self.builder.bitcast(wide, self.vector))
        return found


@tile_function(
    "byte* x, int* starts, float* x_scales, byte* w, short* w_scales, groups, float* bias,"
    " float* out, out_stride, ahead, ahead_stride"
)
def tile8(builder, isa: ISA, of, rows: int, panels: int):
    """A tile of int8 weights: out[r, j] = bias[j] + the sum over all groups g of
    (starts[r, g] + x[r, g] . w[j, g]) * w_scales[j, g] * x_scales[r, g], in order.

    Each group has GROUP inputs. Scales of weights are bfloat16. `out_stride` is in floats; each
    turn prefetches the byte `ahead` + turn * `ahead_stride` after a panel's first.
    """
    tile = ByteTile(builder, isa)
    row_bytes, panel_bytes = (builder.mul(of.groups, I64(n)) for n in (GROUP, GROUP * PANEL))
    inputs, outputs = tile.rows(of.x, row_bytes, rows), tile.rows(of.out, of.out_stride, rows)
    places = range(0, panels * PANEL, tile.width)
    for line in outputs:
        for at in places:
            tile.store(tile.get(tile.vector, of.bias, at), tile.at(line, I64(at)))
    place, asked = tile.variable(of.w), tile.variable(tile.at(of.w, of.ahead))
    # Why: one row of one panel would wait for its own sums.
    chains = max(1, 4 // (rows * len(places)))
    unroll = 2 if rows * len(places) * chains <= 8 else 1
    zero = tile.every(0)

    def group(index):
        starts = [
            tile.splat(builder.load(tile.at(start, index)), tile.words)
            for start in tile.rows(of.starts, of.groups, rows)
        ]
        cells = [
            [[tile.variable(zero if c else start) for c in range(chains)] for _ in places]
            for start in starts
        ]
        first = builder.mul(index, I64(GROUP))

        def turn(number):
            at = builder.add(first, builder.mul(number, I64(4 * chains)))
            for c in range(chains):
                for line in tile.rows(tile.moved(asked, of.ahead_stride), panel_bytes, panels):
                    tile.prefetch(line, level=1 if rows > 1 else 0)
                lines = tile.rows(tile.moved(place, I64(LINE)), panel_bytes, panels)
                weights = [
                    tile.prepared(tile.get(tile.bytes, line, v * tile.bytes.count))
                    for line in lines
                    for v in range(tile.vectors)
                ]
                for row, of_row in zip(inputs, cells, strict=True):
                    value = tile.four(tile.at(row, at), 4 * c)
                    for weight, cell in zip(weights, of_row, strict=True):
                        builder.store(tile.add8(builder.load(cell[c]), weight, value), cell[c])

        tile.loop(I64(GROUP // 4 // chains), turn, unroll)
        numbers = tile.rows(of.w_scales, builder.mul(of.groups, I64(PANEL)), panels)
        line = builder.mul(index, I64(PANEL))
        scales = [scale for panel in numbers for scale in tile.of_brain(tile.at(panel, line))]
        factors = tile.rows(of.x_scales, of.groups, rows)
        for of_row, factor, result in zip(cells, factors, outputs, strict=True):
            factor = tile.broadcast(tile.at(factor, index))
            for cell, scale, at in zip(of_row, scales, places, strict=True):
                total = functools.reduce(builder.add, map(builder.load, cell))
                value = builder.fmul(builder.sitofp(total, tile.vector), scale)
                before = tile.get(tile.vector, result, at)
                tile.store(tile.fma(value, factor, before), tile.at(result, I64(at)))

    tile.loop(of.groups, group)


@tile_function("short* x, x_stride, byte* w, turns, float* out, out_stride, ahead, ahead_stride")
def tile16(builder, isa: ISA, of, rows: int):
    """A tile of a panel of the screen's estimates: out[r, j] = x[r] . w[j] as floats over 4 * turns
    inputs; the rest as in `tile8`."""
    tile = ByteTile(builder, isa)
    short = ir.VectorType(I8, tile.pairs.count)
    inputs = tile.rows(of.x, of.x_stride, rows)
    place, asked = tile.variable(of.w), tile.variable(tile.at(of.w, of.ahead))
    cells = [[tile.variable(tile.every(0)) for _ in range(tile.vectors)] for _ in inputs]

    def turn(index):
        tile.prefetch(tile.moved(asked, of.ahead_stride))
        line = tile.moved(place, I64(LINE))
        first = builder.mul(index, I64(4))
        for pair in range(2):
            values = []
            for row in inputs:
                two = builder.bitcast(tile.at(row, first, I64(2 * pair)), I32.as_pointer())
                value = tile.splat(builder.load(two, align=2), tile.words)
                values.append(builder.bitcast(value, tile.pairs))
            for i in range(tile.vectors):
                at = LINE // 2 * pair + i * short.count
                weight = builder.sext(tile.get(short, line, at), tile.pairs)
                for value, of_row in zip(values, cells, strict=True):
                    total = tile.add16(builder.load(of_row[i]), weight, value)
                    builder.store(total, of_row[i])

    tile.loop(of.turns, turn, unroll=2)
    for of_row, line in zip(cells, tile.rows(of.out, of.out_stride, rows), strict=True):
        for i, cell in enumerate(of_row):
            total = builder.sitofp(builder.load(cell), tile.vector)
            tile.store(total, tile.at(line, I64(i * tile.width)))


@intrinsic
def half_sum(typing, values, at):
    """The sum of half a unit of bytes from a place. Why written out: LLVM would add them one by
    one."""

    def codegen(context, builder, sig, args):
        emit, count = Emit(context, builder), UNIT // 2
        numbers = emit.get(ir.VectorType(I8, count), emit.pointer(values, args[0], args[1]))
        wide = builder.sext(numbers, ir.VectorType(I32, count))
        return emit.call(f"llvm.vector.reduce.add.v{count}i32", I32, wide)

    return types.int32(values, at), codegen


@intrinsic
def quantize_group(typing, x, at, values, to):
    """(scale, sum of the values): writes GROUP inputs of x, rotated, as int8 values = x / scale;
    the largest of them is 127. The scale is NaN, and the values are 0, where one is not finite.

    Why written out: LLVM does not make vectors of the rotation, which moves numbers between lanes.
    """
    signature = types.Tuple((types.float32, types.int32))(x, at, values, to)

    def codegen(context, builder, sig, args):
        emit, kind = Emit(context, builder), ir.VectorType(FLOAT, ROTATED)
        words, place = ir.VectorType(I32, ROTATED), emit.pointer(x, args[0], args[1])
        target = emit.pointer(values, args[2], args[3])
        vectors = [_rotated(emit, emit.get(kind, place, i), kind) for i in range(0, GROUP, ROTATED)]
        # As integers: the bits of floats without a sign have their order, NaN above all.
        no_sign = emit.every(0x7FFFFFFF, words)
        sizes = [builder.and_(builder.bitcast(vector, words), no_sign) for vector in vectors]

        def larger(a, b):
            return emit.call(f"llvm.umax.v{ROTATED}i32", words, a, b)

        bits = emit.halved(sizes, larger)
        bits = emit.call(f"llvm.vector.reduce.umax.v{ROTATED}i32", I32, bits)
        largest, (low, high) = builder.bitcast(bits, FLOAT), SCALED
        finite = builder.icmp_unsigned("<", bits, I32(high))
        scaled = builder.and_(finite, builder.icmp_unsigned(">=", bits, I32(low)))
        scale = builder.select(scaled, builder.fdiv(largest, FLOAT(127)), FLOAT(0))
        inverse = builder.fdiv(FLOAT(1), builder.select(scaled, scale, FLOAT(1)))
        inverse = emit.splat(inverse, kind)
        is_scaled = emit.splat(scaled, ir.VectorType(ir.IntType(1), ROTATED))
        total = None
        for i, vector in enumerate(vectors):
            number = emit.call(f"llvm.rint.v{ROTATED}f32", kind, builder.fmul(vector, inverse))
            number = builder.select(is_scaled, builder.fptosi(number, words), words(None))
            narrow = builder.trunc(number, ir.VectorType(I8, ROTATED))
            to_bytes = builder.bitcast(emit.at(target, I64(ROTATED * i)), narrow.type.as_pointer())
            builder.store(narrow, to_bytes, align=1)
            total = number if total is None else builder.add(total, number)
        total = emit.call(f"llvm.vector.reduce.add.v{ROTATED}i32", I32, total)
        scale = builder.select(finite, scale, FLOAT(float("nan")))
        return context.make_tuple(builder, sig.return_type, (scale, total))

    return signature, codegen


def _rotated(emit, vector, kind):
    """A vector times the Hadamard matrix of its size: `layers.quantized_weight.rotate`."""
    step = 1
    while step < kind.count:
        lanes = range(kind.count)
        signs = ir.Constant(kind, [-1.0 if i & step else 1.0 for i in lanes])
        other = emit.shuffle(vector, vector, [i ^ step for i in lanes])
        vector = emit.call(f"llvm.fmuladd.v{kind.count}f32", kind, vector, signs, other)
        step *= 2
    return vector


@tile_call(shapes8, lambda module, kinds, rows, panels: tile8(module, CURRENT, rows, panels))
def multiply8(x, x_at, starts, row, x_scales, same_row, w, w_at, w_scales, column, groups,
              bias, first, out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """`tile8` for rows from `row` and outputs from `column`."""


@tile_call(shapes16, lambda module, kinds, rows, _: tile16(module, CURRENT, rows))
def multiply16(x, x_at, x_stride, w, w_at, turns, out, out_at, out_stride, ahead, ahead_stride,
               rows, one):  # fmt: skip
    """`tile16` for one panel."""
