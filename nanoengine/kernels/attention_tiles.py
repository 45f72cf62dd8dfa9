"""The register tiles of `cpu_attention`: both products, the softmax between them, and the forms of
a cache.

Both products are the same tile (`_tile`): numbers of a row, each broadcast, times lines of the
cache. So the cache holds keys and values as these lines, and nothing is packed or transposed when
it is read (`cpu_attention.store_head`):

    one head of a block    keys    tiles of L = min(P, KV_TILE) tokens, in each tile [D, L]
                           values  [P, D]
    in bfloat16            words of two numbers that follow each other in a sum, the first in the
                           high half: keys [D / 2, L] words, values [P / 2, D] words

Each sum is one chain in a fixed order, however wide vectors are and whatever rows are beside it.

Legend: D head dim, P block size.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from nanoengine.kernels.cpu_linear import rounded
from nanoengine.kernels.emit import I32, BFloat, Emit
from nanoengine.kernels.exp import COEFFICIENTS_2, LOWEST_2, SHIFT_2
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled

KV_TILE = 64  # tokens between two updates of the running maximum

# Rows and vectors of the largest register tile: sums, the cache's line and a number of a row.
ROWS, VECTORS = 4, (4 if CURRENT.registers == 32 else 2)
HAS_DOTS = CURRENT.bf16_dots == "vdpbf16ps"
VECTOR_BYTES = CURRENT.vector_bits // 8

# Why: no "nnan" and "ninf": a NaN in one sequence must come out as NaN, there and only there. No
# "arcp": it lets LLVM divide in one variant of a loop and multiply by the reciprocal in another,
# and with it equal inputs gave unequal last bits in some of 100 runs. No "reassoc": with it sums
# had another order, and results other bits, for vectors of another width.
FASTMATH = ("contract", "nsz")


class CacheTile(Emit):
    """Writes what tiles do with lines of the cache: floats, or words of two bfloat16 numbers."""

    def line(self, pointer, *, paired, dots, mask):
        """The vectors that a row's numbers are multiplied with, one after the other."""
        if not paired:
            return [self.load(pointer)]
        pairs = self.get(self.words, pointer)
        if mask is not None:
            pairs = self.builder.and_(pairs, self.every(mask))
        return [pairs] if dots and HAS_DOTS else self.halves(pairs)

    def numbers(self, pointer, turn, *, paired, dots):
        """A row's numbers of a turn, each in all lanes."""
        if dots:
            word = self.builder.load(self.at(pointer, turn))
            pairs = self.splat(word, self.words)
            return [pairs] if HAS_DOTS else self.halves(pairs)
        count = 2 if paired else 1
        first = self.builder.mul(turn, turn.type(count))
        return [self.broadcast(self.at(pointer, first, turn.type(j))) for j in range(count)]

    def exp2(self, x):
        """2 ** x for x <= 0, exactly 0 where it is far below normal numbers; NaN stays NaN."""
        build, kind = self.builder, self.vector
        if self.scalar == ir.DoubleType():
            name = f"llvm.exp2.{self.suffix}"
            return self.call(name, kind, x)
        lowest, shift = self.constant(LOWEST_2), self.constant(SHIFT_2)
        x = build.select(build.fcmp_ordered("<", x, lowest), lowest, x)
        # A sum as large as this has no room for fractions, and its last bits are an exponent.
        shifted = build.fadd(x, shift)
        fraction = build.fsub(x, build.fsub(shifted, shift))
        value = self.constant(COEFFICIENTS_2[0])
        for coefficient in COEFFICIENTS_2[1:]:
            value = self.fma(value, fraction, self.constant(coefficient))
        power = build.shl(build.bitcast(shifted, self.words), self.every(23))
        return build.fmul(value, build.bitcast(power, kind))

    def across_rows(self, rows, combine):
        """A vector of a number a row: of each row's lanes the first half with the second, until one
        is left. Two rows share the work from the first step on."""
        lanes = self.width
        while len(rows) > 1 or lanes > 1:
            half, joined = lanes // 2, []
            for a, b in zip(rows[::2], rows[1::2] or [None], strict=True):
                count = a.type.count * (1 if b is None else 2)
                first = [i for i in range(count) if i % lanes < half or not half]
                both = self.shuffle(a, a if b is None else b, first)
                if half:
                    second = self.shuffle(a, a if b is None else b, [i + half for i in first])
                    both = combine(both, second)
                joined.append(both)
            rows, lanes = joined, max(1, half)
        return rows[0]

    def pairs(self, floats):
        """Words of a vector's numbers two by two, rounded to bfloat16; of a NaN anything."""
        build = self.builder
        half = ir.VectorType(I32, self.width // 2)
        if HAS_DOTS:
            bits = build.fptrunc(floats, ir.VectorType(BFloat(), self.width))
            swapped = build.bitcast(bits, half)
            by = ir.Constant(half, [16] * half.count)
            return build.or_(build.shl(swapped, by), build.lshr(swapped, by))
        bits = build.bitcast(floats, self.words)
        last = build.and_(build.lshr(bits, self.every(16)), self.every(1))
        bits = build.add(build.add(bits, self.every(0x7FFF)), last)
        first = self.shuffle(bits, bits, [*range(0, self.width, 2)])
        second = self.shuffle(bits, bits, [*range(1, self.width, 2)])
        high = build.and_(first, ir.Constant(half, [0xFFFF0000] * half.count))
        return build.or_(high, build.lshr(second, ir.Constant(half, [16] * half.count)))


def numbers_a_word(array):
    """2 of an array of pairs of bfloat16 numbers, 1 of floats."""
    raise TypeError("numbers_a_word is for compiled code")


@overload(numbers_a_word)
def _numbers_a_word(array):
    count = 2 if array.dtype in (types.uint16, types.uint32) else 1
    return lambda array: count


def words_of(cache):
    """A flat cache as `_tile` reads it: bfloat16 numbers two by two, floats as they are."""
    raise TypeError("words_of is for compiled code")


@overload(words_of)
def _words_of(cache):
    if cache.dtype == types.uint16:
        return lambda cache: cache.view(np.uint32)
    return lambda cache: cache


def stored(x, cache):
    """A number as a cache holds it: rounded to bfloat16, half to even, or as it is."""
    raise TypeError("stored is for compiled code")


@overload(stored)
def _stored(x, cache):
    if cache.dtype != types.uint16:
        return lambda x, cache: x
    return lambda x, cache: np.uint16(bfloat16(x))


@compiled(fastmath=(), part=True)
def bfloat16(x):
    """The bits of a float32 rounded to bfloat16."""
    return rounded(np.float32(x).view(np.uint32))


@intrinsic(prefer_literal=True)
def _tile(typing, a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride,
          factors, factors_at, asked, asked_stride, rows, vectors):  # fmt: skip
    """c[r, lanes] = c[r, lanes] * factors[r] + sum over i < depth of a[r, i] * b[i, lanes].

    For `rows` rows and `vectors` vectors of lanes, or half a vector if that is 0, in registers.
    With 0 as factors c is not read. b may hold pairs of bfloat16 numbers i and i + 1, which become
    float32 in registers; if a holds such pairs as well, one instruction adds both products.
    With each line of b it prefetches as many from `asked` on, `asked_stride` further each time.
    """
    num_rows, num_vectors = rows.literal_value, vectors.literal_value
    signature = types.void(a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride,
                           factors, factors_at, asked, asked_stride, rows, vectors)  # fmt: skip
    paired, dots = b.dtype == types.uint32, a.dtype == types.uint32
    fresh = not isinstance(factors, types.Array)

    def codegen(context, builder, sig, args):
        bits = CURRENT.vector_bits
        emit = CacheTile(context, builder, c, bits if num_vectors else bits // 2)
        word = args[6].type
        lanes = [word(i * emit.width) for i in range(num_vectors or 1)]

        a_rows = emit.rows(emit.pointer(a, *args[:2]), args[2], num_rows)
        c_rows = emit.rows(emit.pointer(c, *args[7:9]), args[9], num_rows)
        b_lines, ahead = (emit.pointer(b, args[3], at) for at in (args[4], args[12]))
        cells = []
        for r, line in enumerate(c_rows):
            starts = [emit.constant(0.0) for _ in lanes]
            if not fresh:
                place = builder.add(args[11], word(r))
                factor = emit.broadcast(emit.pointer(factors, args[10], place))
                starts = [builder.fmul(factor, emit.load(emit.at(line, lane))) for lane in lanes]
            cells.append([emit.variable(start) for start in starts])

        def step(i, mask=None):
            line, asks = (
                emit.at(pointer, builder.mul(i, stride))
                for pointer, stride in ((b_lines, args[5]), (ahead, args[13]))
            )
            of_lanes = [
                emit.line(emit.at(line, lane), paired=paired, dots=dots, mask=mask)
                for lane in lanes
            ]
            for lane in lanes:
                emit.prefetch(emit.at(asks, lane))
            for row, sums in zip(a_rows, cells, strict=True):
                for j, number in enumerate(emit.numbers(row, i, paired=paired, dots=dots)):
                    for numbers, cell in zip(of_lanes, sums, strict=True):
                        total = emit.add_product(builder.load(cell), number, numbers[j])
                        builder.store(total, cell)

        turns = builder.lshr(args[6], word(1)) if paired else args[6]
        emit.loop(turns, step)
        if paired:
            # Why masked: what lies behind the last number may be anything, and 0 * NaN is not 0.
            odd = builder.trunc(args[6], ir.IntType(1))
            with builder.if_then(odd):
                step(turns, 0xFFFF0000)
        for line, sums in zip(c_rows, cells, strict=True):
            for cell, lane in zip(sums, lanes, strict=True):
                emit.store(builder.load(cell), emit.at(line, lane))
        return context.get_dummy_value()

    return signature, codegen


@compiled(fastmath=FASTMATH, part=True)
def few_rows(a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride,
              factors, factors_at, asked, asks, rows, lanes, room):  # fmt: skip
    """`_tile` for up to ROWS rows and all `lanes`, by whole vectors of the `room` there is.

    Rows are taken by twos or fours: a, c and factors go on behind the last.
    """
    width = VECTOR_BYTES // c.itemsize
    ahead = depth // numbers_a_word(b)
    at = 0
    while at < lanes:
        ask = asked + at * ahead
        if lanes - at > (VECTORS - 1) * width and room - at >= VECTORS * width:
            step = asks * VECTORS * width
            if rows > 2:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, ROWS, VECTORS)  # fmt: skip
            else:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, 2, VECTORS)  # fmt: skip
            at += VECTORS * width
        elif room - at >= width:
            step = asks * width
            if rows > 2:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, ROWS, 1)  # fmt: skip
            else:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, 2, 1)  # fmt: skip
            at += width
        else:
            step = asks * width // 2
            if rows > 2:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, ROWS, 0)  # fmt: skip
            else:
                _tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, 2, 0)  # fmt: skip
            at += width // 2


@intrinsic
def _weigh(typing, scores, at, weights, weights_at, weights_stride, maximum, total, factors, row):
    """Turns KV_TILE scores of each of ROWS rows from `at` into weights.

    maximum[r] grows to the row's largest score, and weights are 2 ** (score - maximum[r]): floats,
    maybe in the scores' own place, or pairs of bfloat16. By factors[r] what was summed with the
    maximum before shrinks: total[r] becomes total[r] * factors[r] + the sum of the weights. With a
    NaN among the scores, the total is NaN, and the maximum anything.
    """
    signature = types.void(scores, at, weights, weights_at, weights_stride, maximum, total, factors,
                           row)  # fmt: skip
    paired = weights.dtype == types.uint32

    def codegen(context, builder, sig, args):
        emit = CacheTile(context, builder, scores)
        few = CacheTile(context, builder, scores, ROWS * scores.dtype.bitwidth)
        word = args[1].type
        lines = emit.rows(emit.pointer(scores, *args[:2]), word(KV_TILE), ROWS)
        targets = emit.rows(emit.pointer(weights, *args[2:4]), args[4], ROWS)
        highest_at, total_at, factors_at = (
            emit.pointer(maximum, array, args[8]) for array in args[5:8]
        )
        starts = range(0, KV_TILE, emit.width)
        values = [[emit.load(emit.at(line, word(i))) for i in starts] for line in lines]
        old = few.load(highest_at)
        peaks = [emit.halved(of_row, emit.maximum) for of_row in values]
        new = few.maximum(emit.across_rows(peaks, emit.maximum), old)
        sums = []
        for r, (of_row, target) in enumerate(zip(values, targets, strict=True)):
            lowered = emit.shuffle(new, new, [r] * emit.width)
            powers = [emit.exp2(builder.fsub(value, lowered)) for value in of_row]
            for i, power in zip(starts, powers, strict=True):
                if paired:
                    emit.store(emit.pairs(power), emit.at(target, word(i // 2)))
                else:
                    emit.store(power, emit.at(target, word(i)))
            sums.append(emit.halved(powers, builder.fadd))
        added = emit.across_rows(sums, builder.fadd)
        factor = few.exp2(builder.fsub(old, new))
        few.store(few.fma(few.load(total_at), factor, added), total_at)
        few.store(factor, factors_at)
        few.store(new, highest_at)
        return context.get_dummy_value()

    return signature, codegen


@compiled(fastmath=FASTMATH)
def softmax_step(scores, first_row, rows, maximum, total, factors, weights):
    """Turns the scores of each row into weights; by factors[r] the row's sums so far shrink."""
    lines, flat, stride = scores.reshape(-1), weights.reshape(-1), weights.shape[1]
    for r in range(first_row, rows, ROWS):
        _weigh(lines, r * KV_TILE, flat, r * stride, stride, maximum, total, factors, r)
