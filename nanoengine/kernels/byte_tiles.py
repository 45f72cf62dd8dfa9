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
import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoengine.kernels.emit import I32, Emit
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.tiles import FLOAT, I8, I16, I64, LINE, PANEL, tile_call, tile_function

INFINITY = I32(0x7F800000)  # its bits; those of a NaN are larger
SMALLEST = FLOAT(2e-36)  # below it 127 / largest could overflow
UNIT = 32  # inputs: K is padded to a multiple, and a group holds a multiple


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


@tile_function(
    "byte* x, x_stride, int* starts, float* x_scales, byte* w, w_stride, turns, float* w_scales,"
    " float* bias, float* out, out_stride, ahead, ahead_stride"
)
def tile8(builder, isa: ISA, of, rows: int, panels: int):
    """A tile of int8 weights: out[r, j] = (starts[r] + x[r] . w[j]) * x_scales[r] * w_scales[j] +
    bias[j], over 4 * turns inputs.

    Strides are bytes, out's floats; each turn prefetches the byte `ahead` + turn * `ahead_stride`
    after a panel's first.
    """
    tile = ByteTile(builder, isa)
    inputs, outputs = tile.rows(of.x, of.x_stride, rows), tile.rows(of.out, of.out_stride, rows)
    for line in outputs:
        tile.prefetch(line, write=True)
    place, asked = tile.variable(of.w), tile.variable(tile.at(of.w, of.ahead))
    # Why: one row of one panel would wait for its own sums.
    chains = max(1, 4 // (rows * panels * tile.vectors))
    zero = tile.every(0)
    cells = [
        [
            [tile.variable(first if c == 0 else zero) for c in range(chains)]
            for first in [tile.splat(builder.load(start), tile.words)] * (tile.vectors * panels)
        ]
        for start in tile.rows(of.starts, I64(1), rows)
    ]

    def turn(index):
        at = builder.mul(index, I64(4 * chains))
        for c in range(chains):
            for line in tile.rows(tile.moved(asked, of.ahead_stride), of.w_stride, panels):
                tile.prefetch(line, level=1 if rows > 1 else 0)
            lines = tile.rows(tile.moved(place, I64(LINE)), of.w_stride, panels)
            weights = [
                tile.prepared(tile.get(tile.bytes, line, v * tile.bytes.count))
                for line in lines
                for v in range(tile.vectors)
            ]
            for row, of_row in zip(inputs, cells, strict=True):
                value = tile.four(tile.at(row, at), 4 * c)
                for weight, cell in zip(weights, of_row, strict=True):
                    builder.store(tile.add8(builder.load(cell[c]), weight, value), cell[c])

    unroll = 2 if rows * panels * tile.vectors * chains <= 8 else 1
    tile.loop(builder.udiv(of.turns, I64(chains)), turn, unroll)
    totals = [
        [
            builder.sitofp(functools.reduce(builder.add, map(builder.load, cell)), tile.vector)
            for cell in of_row
        ]
        for of_row in cells
    ]
    tile.finish(totals, of, outputs)


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
def quantize_unit(typing, x, at, values, values_at, groups, groups_at):
    """Quantizes 32 inputs as `quantize_groups` says. Why written out: numba's loops over so few
    numbers take ten times as long."""

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, bits=32 * UNIT)
        source, target, group = emit.operands(sig.args, args)
        inputs = emit.load(source)
        sizes = builder.and_(builder.bitcast(inputs, emit.words), emit.every(0x7FFFFFFF))
        # As integers: the bits of floats without a sign are in the order of the floats.
        most = emit.call(f"llvm.vector.reduce.smax.v{UNIT}i32", I32, sizes)
        is_finite = builder.icmp_signed("<", most, INFINITY)
        largest, zero = builder.bitcast(most, FLOAT), FLOAT(0)
        fits = builder.and_(builder.fcmp_ordered(">=", largest, SMALLEST), is_finite)
        scale = builder.fdiv(largest, FLOAT(127))
        factor = builder.select(fits, builder.fdiv(FLOAT(1), scale), zero)
        scale = builder.select(fits, scale, builder.select(is_finite, zero, FLOAT(math.nan)))
        finite = builder.select(fits, inputs, emit.constant(0.0))
        scaled = builder.fmul(finite, emit.splat(factor))
        rounded = emit.call(f"llvm.rint.{emit.suffix}", emit.vector, scaled)
        whole = builder.fptosi(rounded, emit.words)
        emit.store(builder.trunc(whole, ir.VectorType(I8, UNIT)), target)
        sums = []
        for first in (0, UNIT // 2):
            half = emit.shuffle(whole, whole, [*range(first, first + UNIT // 2)])
            sums.append(emit.call(f"llvm.vector.reduce.add.v{UNIT // 2}i32", I32, half))
        numbers = [builder.mul(total, I32(-8)) for total in (builder.add(*sums), *sums)]
        for i, number in enumerate([*numbers, builder.bitcast(scale, I32)]):
            builder.store(number, emit.at(group, I64(i)))
        return context.get_dummy_value()

    return types.void(x, at, values, values_at, groups, groups_at), codegen


@tile_call(shapes8, lambda module, kinds, rows, panels: tile8(module, CURRENT, rows, panels))
def multiply8(x, x_at, x_stride, starts, row, x_scales, same_row, w, w_at, w_stride, turns,
              w_scales, column, bias, same_column, out, out_at, out_stride, ahead, ahead_stride,
              rows, panels):  # fmt: skip
    """`tile8` for rows from `row` and outputs from `column`."""


@tile_call(shapes16, lambda module, kinds, rows, _: tile16(module, CURRENT, rows))
def multiply16(x, x_at, x_stride, w, w_at, turns, out, out_at, out_stride, ahead, ahead_stride,
               rows, one):  # fmt: skip
    """`tile16` for one panel."""
