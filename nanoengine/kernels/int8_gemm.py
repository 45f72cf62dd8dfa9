"""Integer tiles: rows of int8 inputs times panels of int8 weights, exactly.

    a line of 64 bytes    16 outputs, for each
    int8                  4 inputs
    int16                 4 inputs in two pairs, one after the other, for inputs of 16 bits

The instruction that multiplies bytes and adds adjacent products depends on the CPU (`isa.py`):

    vpdpbusd     four unsigned by signed bytes, added to 32 bits. int8 weights + 128 are unsigned;
                 128 times the row's sum is subtracted before
    vpmaddubsw   two, added in 16 bits: |w| times x with w's sign, at most 2 * 128 * 127, which
                 fits. Several such sums fit if codes have fewer bits (`groupwise_gemm.py`)
    generic      the even and the odd bytes of 16-bit words, each multiplied as such

All sums are exact, so **results have the same bits under each of them**.

Source: `vpsignb` to feed `vpmaddubsw` with signed bytes, ggml's AVX2 dot products.
"""

from __future__ import annotations

import functools
import math

from llvmlite import ir

from nanoengine.kernels.code_tables import GROUP, ROTATED
from nanoengine.kernels.emit import I32, Emit, emit_intrinsic
from nanoengine.kernels.gemm import FLOAT, I8, I16, I64, LINE, PANEL, tile_call, tile_function
from nanoengine.kernels.isa import CURRENT, ISA

UNIT = 32  # inputs: K of group-wise weights and the size of a group are multiples of it
INFINITY = I32(0x7F800000)  # its bits; the bits of a NaN are larger
SMALLEST = FLOAT(2e-36)  # below it 127 / largest could overflow
GROUP_INTS = 4  # integers per group of `quantize_groups`


def max_rows(isa: ISA) -> int:
    """Rows of the largest tile of one panel: its sums fill half of the registers, or all of them
    together with the results of groups."""
    return min(8, isa.registers * isa.byte_bits // 1024)


def shapes8(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of the tiles of int8 weights: two panels if a register holds a line, so that
    each loaded input is multiplied twice."""
    panels = 2 if isa.byte_bits == 8 * LINE else 1
    rows = 6 if isa.byte_dots == "vpdpbusd" and panels == 1 else max_rows(isa)
    return [(r, p) for r in range(1, rows + 1) for p in sorted({1, panels})]


def shapes16(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of the tiles that compute the estimates of `cpu_argmax.py`."""
    return [(rows, 1) for rows in range(1, max_rows(isa) + 1)]


class ByteTile(Emit):
    """Writes dot products of bytes, with the instructions of the CPU."""

    def __init__(self, builder, isa: ISA):
        super().__init__(None, builder, bits=isa.byte_bits, isa=isa)
        self.pairs = ir.VectorType(I16, 2 * self.width)
        self.bytes = ir.VectorType(I8, 4 * self.width)
        self.vectors = PANEL // self.width  # per panel

    def quad(self, pointer, offset=0):
        """Four adjacent bytes, repeated in all lanes."""
        word = self.read(I32, pointer, offset)
        return self.builder.bitcast(self.splat(word, self.words), self.bytes)

    def prepare_weight(self, weight):
        """Converts an int8 weight to the form that `add8` multiplies."""
        if self.isa.byte_dots == "vpdpbusd":
            return self.builder.xor(weight, self.ints(-128, self.bytes))
        if self.isa.byte_dots == "vpmaddubsw":
            name, wraps = f"llvm.abs.v{self.bytes.count}i8", ir.IntType(1)(0)
            return self.call(name, self.bytes, weight, wraps), weight
        return weight

    def add8(self, total, weight, value):
        """total + the dot products of four inputs and weights; with w + 128 for `vpdpbusd`."""
        if self.isa.byte_dots == "vpdpbusd":
            return self.dot(total, weight, value)
        if self.isa.byte_dots == "vpmaddubsw":
            positive, weight = weight
            signed = self.call("llvm.x86.avx2.psign.b", self.bytes, value, weight)
            return self.builder.add(total, self.add_adjacent(self.dot_pairs(positive, signed)))
        return self.builder.add(total, self.add_adjacent(self.dot_pairs(weight, value)))

    def dot(self, total, unsigned, signed):
        name = f"llvm.x86.avx512.vpdpbusd.{self.isa.byte_bits}"
        return self.call(name, self.words, total, unsigned, signed)

    def dot_pairs(self, first, second):
        """Sums of two adjacent products in 16 bits, which must suffice; `first` is not negative
        unless the dot products are generic."""
        if self.isa.byte_dots == "vpmaddubsw":
            return self.call("llvm.x86.avx2.pmadd.ub.sw", self.pairs, first, second)
        odd, even = zip(self.odd_and_even(first), self.odd_and_even(second), strict=True)
        return self.builder.add(self.builder.mul(*even), self.builder.mul(*odd))

    def odd_and_even(self, values, bits=8):
        """The odd and the even signed integers of 8 bits as words of 16 bits, or of 16 as 32."""
        kind = self.pairs if bits == 8 else self.words
        shift, words = self.ints(bits, kind), self.builder.bitcast(values, kind)
        even = self.builder.ashr(self.builder.shl(words, shift), shift)
        return self.builder.ashr(words, shift), even

    def add_adjacent(self, pairs):
        """Sums of two adjacent 16-bit integers in 32 bits."""
        if self.isa.byte_dots == "vpmaddubsw":
            ones = self.ints(1, self.pairs)
            return self.call("llvm.x86.avx2.pmadd.wd", self.words, pairs, ones)
        return self.builder.add(*self.odd_and_even(pairs, 16))

    def load_fp16(self, pointer):
        """Loads one float16 value per output of a panel, as vectors of float32."""
        halves = ir.VectorType(I16, self.width)
        vectors = [self.read(halves, pointer, i) for i in range(0, PANEL, self.width)]
        return [self.fp16_to_fp32(vector) for vector in vectors]

    def initial_sum(self, offset):
        """The initial value of the sums of a row and a unit, in all lanes."""
        return self.splat(self.builder.load(offset), self.words)

    def add16(self, total, weight, value):
        """total + the sums of two adjacent products of 16-bit integers."""
        if self.isa.byte_dots == "vpdpbusd":
            name = f"llvm.x86.avx512.vpdpwssd.{self.isa.byte_bits}"
            return self.call(name, self.words, total, weight, value)
        if self.isa.byte_dots == "vpmaddubsw":
            products = self.call("llvm.x86.avx2.pmadd.wd", self.words, weight, value)
        else:
            odd, even = zip(*(self.odd_and_even(x, 16) for x in (weight, value)), strict=True)
            products = self.builder.add(self.builder.mul(*even), self.builder.mul(*odd))
        return self.builder.add(total, products)

    def load_bf16(self, pointer):
        """Loads one bfloat16 value per output of a panel, as vectors of float32."""
        halves, vectors = ir.VectorType(I16, self.width), []
        for i in range(0, PANEL, self.width):
            words = self.builder.zext(self.read(halves, pointer, i), self.words)
            wide = self.builder.shl(words, self.ints(16))
            vectors.append(self.builder.bitcast(wide, self.vector))
        return vectors


@tile_function(
    "byte* x, int* x_groups, byte* w, short* w_scales, groups, float* bias, float* out, out_stride,"
    " ahead, ahead_stride"
)
def tile8(builder, isa: ISA, arg, rows: int, panels: int):
    """A tile of int8 weights: out[r, j] = bias[j] + the sum over all groups g, in order, of
    x[r, g] . w[j, g] * w_scales[j, g] * the scale of x[r, g].

    Each group has GROUP inputs; its integers in `x_groups` come from `quantize_groups`. Scales
    of weights are bfloat16. `out_stride` is in floats. Iteration i prefetches the byte
    `ahead` + i * `ahead_stride` after a panel's start.
    """
    tile = ByteTile(builder, isa)
    row_bytes, panel_bytes = (builder.mul(arg.groups, I64(n)) for n in (GROUP, GROUP * PANEL))
    inputs, outputs = tile.rows(arg.x, row_bytes, rows), tile.rows(arg.out, arg.out_stride, rows)
    lanes = range(0, panels * PANEL, tile.width)
    for line in outputs:
        tile.prefetch(line, write=True)
    results = [
        [tile.variable(tile.read(tile.vector, arg.bias, at)) for at in lanes] for _ in outputs
    ]
    w, ahead = tile.variable(arg.w), tile.variable(tile.at(arg.w, arg.ahead))
    # Why: one row of one panel would wait for its own sums.
    chains = max(1, 4 // (rows * len(lanes)))
    unroll = 2 if rows * len(lanes) * chains <= 8 else 1
    zero = tile.ints(0)

    def group(index):
        group_at = builder.mul(index, I64(GROUP_INTS))
        groups = tile.rows(
            tile.at(arg.x_groups, group_at), builder.mul(arg.groups, I64(GROUP_INTS)), rows
        )
        cells = []
        for numbers in groups:
            start = zero
            if isa.byte_dots == "vpdpbusd":  # Weights are stored plus 128, the sum times -8.
                start = builder.shl(tile.initial_sum(numbers), tile.ints(4))
            firsts = [start] + [zero] * (chains - 1)
            cells.append([[tile.variable(first) for first in firsts] for _ in lanes])
        first = builder.mul(index, I64(GROUP))

        def body(iteration):
            at = builder.add(first, builder.mul(iteration, I64(4 * chains)))
            for c in range(chains):
                for line in tile.rows(tile.advance(ahead, arg.ahead_stride), panel_bytes, panels):
                    tile.prefetch(line, level=1 if rows > 1 else 0)
                lines = tile.rows(tile.advance(w, I64(LINE)), panel_bytes, panels)
                weights = [
                    tile.prepare_weight(tile.read(tile.bytes, line, v * tile.bytes.count))
                    for line in lines
                    for v in range(tile.vectors)
                ]
                for row, row_cells in zip(inputs, cells, strict=True):
                    value = tile.quad(tile.at(row, at), 4 * c)
                    for weight, cell in zip(weights, row_cells, strict=True):
                        builder.store(tile.add8(builder.load(cell[c]), weight, value), cell[c])

        tile.loop(I64(GROUP // 4 // chains), body, unroll)
        numbers = tile.rows(arg.w_scales, builder.mul(arg.groups, I64(PANEL)), panels)
        line = builder.mul(index, I64(PANEL))
        scales = [scale for panel in numbers for scale in tile.load_bf16(tile.at(panel, line))]
        for row_cells, numbers, result in zip(cells, groups, results, strict=True):
            factor = tile.splat(tile.read(FLOAT, numbers, GROUP_INTS - 1))
            for cell, scale, at in zip(row_cells, scales, result, strict=True):
                total = functools.reduce(builder.add, map(builder.load, cell))
                value = builder.fmul(builder.sitofp(total, tile.vector), scale)
                builder.store(tile.fma(value, factor, builder.load(at)), at)

    tile.loop(arg.groups, group)
    for line, result in zip(outputs, results, strict=True):
        for at, cell in zip(lanes, result, strict=True):
            tile.store(builder.load(cell), tile.at(line, I64(at)))


@tile_function("short* x, x_stride, byte* w, steps, float* out, out_stride, ahead, ahead_stride")
def tile16(builder, isa: ISA, arg, rows: int):
    """A tile of one panel, for the estimates of `cpu_argmax.py`: out[r, j] = x[r] . w[j] as floats,
    over 4 * steps inputs; the other arguments are as in `tile8`."""
    tile = ByteTile(builder, isa)
    short = ir.VectorType(I8, tile.pairs.count)
    inputs = tile.rows(arg.x, arg.x_stride, rows)
    w, ahead = tile.variable(arg.w), tile.variable(tile.at(arg.w, arg.ahead))
    cells = [[tile.variable(tile.ints(0)) for _ in range(tile.vectors)] for _ in inputs]

    def body(index):
        tile.prefetch(tile.advance(ahead, arg.ahead_stride))
        line = tile.advance(w, I64(LINE))
        first = builder.mul(index, I64(4))
        for pair in range(2):
            values = []
            for row in inputs:
                pair_at = builder.bitcast(tile.at(row, first, I64(2 * pair)), I32.as_pointer())
                value = tile.splat(builder.load(pair_at, align=2), tile.words)
                values.append(builder.bitcast(value, tile.pairs))
            for i in range(tile.vectors):
                at = LINE // 2 * pair + i * short.count
                weight = builder.sext(tile.read(short, line, at), tile.pairs)
                for value, row_cells in zip(values, cells, strict=True):
                    total = tile.add16(builder.load(row_cells[i]), weight, value)
                    builder.store(total, row_cells[i])

    tile.loop(arg.steps, body, unroll=2)
    for row_cells, line in zip(cells, tile.rows(arg.out, arg.out_stride, rows), strict=True):
        for i, cell in enumerate(row_cells):
            total = builder.sitofp(builder.load(cell), tile.vector)
            tile.store(total, tile.at(line, I64(i * tile.width)))


def _quantizer(size: int, rotated: int):
    @emit_intrinsic()
    def quantize(outer, x, at, values, values_at, groups, groups_at):
        """Quantizes `size` inputs as in `quantize_groups`, after the rotation if there is one. Why
        explicit instructions: numba's loops over so few elements take several times as long."""
        builder, emit = outer.builder, Emit(outer.context, outer.builder, bits=32 * size)
        source, target, group = outer.operands(x, at, values, values_at, groups, groups_at)
        inputs, step = emit.load(source), 1
        while step < rotated:
            lanes = range(size)
            signs = ir.Constant(emit.vector, [-1.0 if i & step else 1.0 for i in lanes])
            inputs = emit.fma(
                inputs, signs, emit.shuffle(inputs, inputs, [i ^ step for i in lanes])
            )
            step *= 2
        sizes = builder.and_(builder.bitcast(inputs, emit.words), emit.ints(0x7FFFFFFF))
        # Why integers: the bits of floats without a sign are in the order of the floats.
        largest_bits = emit.call(f"llvm.vector.reduce.smax.v{size}i32", I32, sizes)
        is_finite = builder.icmp_signed("<", largest_bits, INFINITY)
        largest, zero = builder.bitcast(largest_bits, FLOAT), FLOAT(0)
        fits = builder.and_(builder.fcmp_ordered(">=", largest, SMALLEST), is_finite)
        scale = builder.fdiv(largest, FLOAT(127))
        factor = builder.select(fits, builder.fdiv(FLOAT(1), scale), zero)
        scale = builder.select(fits, scale, builder.select(is_finite, zero, FLOAT(math.nan)))
        finite = builder.select(fits, inputs, emit.constant(0.0))
        scaled = builder.fmul(finite, emit.splat(factor))
        rounded = emit.call(f"llvm.rint.{emit.suffix}", emit.vector, scaled)
        integers = builder.fptosi(rounded, emit.words)
        emit.store(builder.trunc(integers, ir.VectorType(I8, size)), target)
        sums = []
        for first in (0, size // 2):
            half = emit.shuffle(integers, integers, [*range(first, first + size // 2)])
            sums.append(emit.call(f"llvm.vector.reduce.add.v{size // 2}i32", I32, half))
        numbers = [builder.mul(total, I32(-8)) for total in (builder.add(*sums), *sums)]
        for i, number in enumerate([*numbers, builder.bitcast(scale, I32)]):
            builder.store(number, emit.at(group, I64(i)))

    return quantize


quantize_unit, quantize_rotated_group = _quantizer(UNIT, 1), _quantizer(GROUP, ROTATED)


@tile_call(shapes8, lambda module, kinds, rows, panels: tile8(module, CURRENT, rows, panels))
def multiply8(x, x_at, x_groups, groups_at, w, w_at, w_scales, scales_at, groups, bias, column,
              out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """`tile8`, for rows and outputs from these indices on."""


@tile_call(shapes16, lambda module, kinds, rows, _: tile16(module, CURRENT, rows))
def multiply16(x, x_at, x_stride, w, w_at, steps, out, out_at, out_stride, ahead, ahead_stride,
               rows, panels):  # fmt: skip
    """`tile16`; `panels` is 1."""
