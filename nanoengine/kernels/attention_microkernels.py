"""The register tiles of `cpu_attention`: both products, the softmax between them, and the layouts
of the cache.

Both products are the same tile (`line_tile`): elements of a row, each broadcast, times lines of the
cache. So the cache stores keys and values as these lines, and nothing is packed or transposed when
it is read (`cpu_attention.store_head`):

    one head of a block    keys    tiles of L = min(P, KV_TILE) tokens, in each tile [D, L]
                           values  [P, D]
    in bfloat16            words of two numbers that are adjacent in a sum, the first in the
                           high half: keys [D / 2, L] words, values [P / 2, D] words
    in int8                the same lines as floats, followed by scales: `int8_cache.py`

Each sum is one chain in a fixed order, whatever the width of vectors and the other rows.

Legend: D head dim, P block size.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from nanoengine.kernels.arrays import zeros
from nanoengine.kernels.cpu_linear import rounded
from nanoengine.kernels.emit import FLOATS, I32, BFloat, Emit, writes
from nanoengine.kernels.exp import COEFFICIENTS_2, LOWEST_2, SHIFT_2
from nanoengine.kernels.gemm import I8, I16, I64, LINE
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled, specialize

KV_TILE = 64  # tokens between two updates of the running maximum

# Rows and vectors of the largest register tile: sums, the cache's line and an element of a row.
ROWS, VECTORS = 4, (4 if CURRENT.registers == 32 else 2)
HALF = VECTORS // 2
OF_TWO = 4  # vectors of a tile of two rows: fewer sums would wait for each other
HAS_DOTS = CURRENT.bf16_dots == "vdpbf16ps"
VECTOR_BYTES = CURRENT.vector_bits // 8

# Why: no "nnan" and "ninf": a NaN in one sequence must come out as NaN, there and only there. No
# "arcp": it lets LLVM divide in one variant of a loop and multiply by the reciprocal in another,
# and equal inputs then gave unequal last bits in some of 100 runs. No "reassoc": with it the order
# of sums, and so the bits of results, depended on the vector width.
FASTMATH = ("contract", "nsz")


class CacheTile(Emit):
    """Writes how tiles read lines of the cache: floats, int8, or words of two bfloat16 numbers."""

    def line(self, pointer, *, paired, dots, mask, below=None):
        """The vectors by which a row's elements are multiplied, one after the other.

        If rows hold pairs and lines are int8, two lines are read, the second `below` after the
        first.
        """
        if below is not None:
            pairs = self.joined(self.codes(pointer), self.codes(self.at(pointer, below)))
        elif pointer.type.pointee == I8:
            return [self.codes(pointer)]
        elif paired:
            pairs = self.get(self.words, pointer)
        else:
            return [self.load(pointer)]
        if mask is not None:
            pairs = self.builder.and_(pairs, self.every(mask))
        return [pairs] if dots and HAS_DOTS else self.halves(pairs)

    def codes(self, pointer):
        """Converts a vector of int8 to the tile's floats."""
        return self.builder.sitofp(self.get(ir.VectorType(I8, self.width), pointer), self.vector)

    def joined(self, high, low):
        """Words of pairs from two vectors of bfloat16 numbers in float32."""
        high, low = (self.builder.bitcast(each, self.words) for each in (high, low))
        return self.builder.or_(high, self.builder.lshr(low, self.every(16)))

    def floats(self, pointer):
        """Converts a vector of float32 to the tile's floats."""
        found = self.get(ir.VectorType(ir.FloatType(), self.width), pointer)
        return found if found.type == self.vector else self.builder.fpext(found, self.vector)

    def numbers(self, pointer, turn, *, paired, dots, mask, below=None):
        """A row's elements for an iteration, each in all lanes."""
        if dots:
            word = self.builder.load(self.at(pointer, turn))
            if mask is not None:
                word = self.builder.and_(word, word.type(mask))
            pairs = self.splat(word, self.words)
            return [pairs] if HAS_DOTS else self.halves(pairs)
        count = 2 if paired else 1
        first = self.builder.mul(turn, turn.type(count))
        return [self.broadcast(self.at(pointer, first, turn.type(j))) for j in range(count)]

    def exp2(self, x):
        """2 ** x for x <= 0, exactly 0 far below normal numbers; NaN stays NaN."""
        build, kind = self.builder, self.vector
        if self.scalar == ir.DoubleType():
            name = f"llvm.exp2.{self.suffix}"
            return self.call(name, kind, x)
        lowest, shift = self.constant(LOWEST_2), self.constant(SHIFT_2)
        x = build.select(build.fcmp_ordered("<", x, lowest), lowest, x)
        # The shift rounds fractions away, and the last bits of the sum are an exponent.
        shifted = build.fadd(x, shift)
        fraction = build.fsub(x, build.fsub(shifted, shift))
        value = self.constant(COEFFICIENTS_2[0])
        for coefficient in COEFFICIENTS_2[1:]:
            value = self.fma(value, fraction, self.constant(coefficient))
        power = build.shl(build.bitcast(shifted, self.words), self.every(23))
        return build.fmul(value, build.bitcast(power, kind))

    def across_rows(self, rows, combine):
        """A vector with one number per row: combines the first half of each row's lanes with the
        second until one is left. Two rows share the work from the first step on."""
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

    def rounded(self, floats):
        """The bits of a vector's numbers rounded to bfloat16, one word each; a NaN stays NaN."""
        build = self.builder
        if HAS_DOTS:
            bits = build.fptrunc(floats, ir.VectorType(BFloat(), self.width))
            return build.zext(build.bitcast(bits, ir.VectorType(I16, self.width)), self.words)
        bits = build.bitcast(floats, self.words)
        last = build.and_(build.lshr(bits, self.every(16)), self.every(1))
        bits = build.lshr(build.add(build.add(bits, self.every(0x7FFF)), last), self.every(16))
        is_nan = build.fcmp_unordered("uno", floats, floats)
        return build.select(is_nan, self.every(0x7FC0), bits)

    def pairs(self, floats):
        """Words with pairs of a vector's numbers, rounded to bfloat16."""
        build = self.builder
        half = ir.VectorType(I32, self.width // 2)
        by = ir.Constant(half, [16] * half.count)
        if HAS_DOTS:
            bits = build.fptrunc(floats, ir.VectorType(BFloat(), self.width))
            swapped = build.bitcast(bits, half)
            return build.or_(build.shl(swapped, by), build.lshr(swapped, by))
        bits = self.rounded(floats)
        first, second = (self.shuffle(bits, bits, [*range(i, self.width, 2)]) for i in range(2))
        return build.or_(build.shl(first, by), second)


def strips(emit, kind, count, turn):
    """Writes `turn(tile, i)` for each vector of `count` elements of an array, from index i on;
    count is a multiple of 4. Whole vectors first, then vectors of 4 for the rest."""
    builder, start, word = emit.builder, count.type(0), count.type
    for bits in (CURRENT.vector_bits, 4 * kind.dtype.bitwidth):
        tile = CacheTile(emit.context, builder, kind, bits)
        width, vectors = word(tile.width), builder.udiv(builder.sub(count, start), word(tile.width))

        def strip(i, tile=tile, start=start, width=width):
            turn(tile, builder.add(start, builder.mul(i, width)))

        tile.loop(vectors, strip)
        start = builder.add(start, builder.mul(vectors, width))


@writes()
def scale_row(emit, x, at, factor, out, out_at, count):
    """out = `count` elements of x times a factor of the same type, both from these indices on;
    rounded if out holds pairs of bfloat16."""
    builder, kinds = emit.builder, emit.kinds
    source, factor, target, count = emit.operands(x, at, factor, out, out_at, count)

    def turn(tile, i):
        scaled = builder.fmul(tile.load(tile.at(source, i)), tile.splat(factor))
        if kinds.out.dtype == types.uint32:
            scaled, i = tile.pairs(scaled), builder.lshr(i, i.type(1))
        tile.store(scaled, tile.at(target, i))

    strips(emit, kinds.x, count, turn)


@writes()
def store_lines(emit, key, value, k_cache, k_at, lanes, v_cache, v_at):
    """Writes a key, whose elements are `lanes` words apart in the cache, and a value, whose
    elements are contiguous; for pairs, each in the half of its token."""
    builder, kinds, word = emit.builder, emit.kinds, k_at.type
    sources = emit.pointer(kinds.key, key, word(0)), emit.pointer(kinds.value, value, word(0))
    keys = emit.pointer(kinds.k_cache, k_cache, k_at)
    values = emit.pointer(kinds.v_cache, v_cache, v_at)
    in_pairs = kinds.k_cache.dtype == types.uint16
    if in_pairs:
        keys = builder.bitcast(emit.at(keys, word(-1)), I32.as_pointer())

    def turn(tile, i):
        numbers, line = (tile.load(tile.at(of, i)) for of in sources)
        if in_pairs:
            numbers, line = tile.pairs(numbers), tile.rounded(line)
            halves = ir.VectorType(I16, 2 * tile.width)
            to = tile.at(values, builder.mul(i, word(2)))
            # Why masked: another thread may write the other halves, of the next token.
            own = ir.Constant(ir.VectorType(ir.IntType(1), halves.count), [1, 0] * tile.width)
            tile.call(
                f"llvm.masked.store.v{halves.count}i16.p0", ir.VoidType(),
                builder.bitcast(line, halves),
                builder.bitcast(to, halves.as_pointer()), I32(2), own,
            )  # fmt: skip
            i = builder.lshr(i, word(1))
        else:
            tile.store(line, tile.at(values, i))
        for j in range(numbers.type.count):
            to = tile.at(keys, builder.mul(builder.add(i, word(j)), lanes))
            builder.store(builder.extract_element(numbers, I32(j)), to)

    size = emit.context.make_array(kinds.key)(emit.context, builder, key).nitems
    strips(emit, kinds.key, size, turn)


@specialize()
def numbers_a_word(array):
    """2 for an array of pairs of bfloat16 numbers, 1 for floats."""
    count = 2 if array.dtype in (types.uint16, types.uint32) else 1
    return lambda array: count


@specialize()
def scale_numbers(array):
    """Elements of a cache that hold the scale of a token's head, in addition to the head's own."""
    count = 4 if array.dtype == types.int8 else 0
    return lambda array: count


@compiled(fastmath=FASTMATH, part=True)
def lines_of(cache, slot, head, lanes, sizes):
    """Indices of the key and the value of one head of a token in the flat caches."""
    _, num_kv_heads, head_dim, block_size = sizes
    offset, per = slot % block_size, numbers_a_word(cache)
    block = (slot // block_size * num_kv_heads + head) * block_size
    first = block * (head_dim + scale_numbers(cache)) + per - 1
    k_at = first + offset // lanes * lanes * head_dim + offset % lanes * per
    return k_at, first + offset // per * per * head_dim - offset % per


@specialize()
def words_of(cache):
    """A flat cache as `line_tile` reads it: bfloat16 in pairs, floats unchanged."""
    if cache.dtype == types.uint16:
        return lambda cache: cache.view(np.uint32)
    return lambda cache: cache


@specialize()
def stored(x, cache):
    """A number as stored in a cache: rounded to bfloat16, half to even, or unchanged."""
    if cache.dtype != types.uint16:
        return lambda x, cache: x
    return lambda x, cache: np.uint16(bfloat16(x))


@writes(literals=True)
def ask_for(emit, array, at, to_write):
    """Prefetches the cache line of an element of a flat array, for a read (0) or a write (1)."""
    write = emit.kinds.to_write.literal_value
    emit.prefetch(emit.pointer(emit.kinds.array, array, at), write=write)


@compiled(fastmath=(), part=True)
def bfloat16(x):
    """The bits of a float32 rounded to bfloat16."""
    return rounded(np.float32(x).view(np.uint32))


@specialize()
def room_of_few(cache, room):
    """The argument `room` of `run_of` for few rows: one that converts nothing, unless rows are
    pairs that must be split."""
    if room.dtype == types.uint32 and not HAS_DOTS:
        return lambda cache, room: room
    return lambda cache, room: cache


@writes(literals=True)
def _widen(emit, cache, at, width, room, place, asked, lanes):
    """Converts two lines of `width` elements from `at` on to floats or pairs, `lanes` at once.
    Prefetches as many from `asked` on."""
    builder, kinds = emit.builder, emit.kinds
    is_bytes, in_pairs = kinds.cache.dtype == types.int8, kinds.room.dtype == types.uint32
    bits = kinds.room.dtype.bitwidth * kinds.lanes.literal_value
    tile = CacheTile(emit.context, builder, FLOATS if in_pairs else kinds.room, bits)
    source, ahead = (tile.pointer(kinds.cache, cache, first) for first in (at, asked))
    target, word = tile.pointer(kinds.room, room, place), width.type

    def part(turn):
        lane = builder.mul(turn, word(tile.width))
        tile.prefetch(tile.at(ahead, lane, lane) if is_bytes else tile.at(ahead, lane))
        numbers = []
        for line in (word(0), width)[: 1 + is_bytes]:
            begin = tile.at(source, lane, line)
            numbers += tile.line(begin, paired=not is_bytes, dots=False, mask=None)
        if in_pairs:
            tile.store(tile.joined(*numbers), tile.at(target, lane))
        else:
            tile.store(numbers[0], tile.at(target, lane))
            tile.store(numbers[1], tile.at(target, lane, width))

    tile.loop(builder.udiv(width, word(tile.width)), part, unroll=4)


@specialize()
def run_of(cache, at, count, width, next_at, room):
    """A run's `count` lines of `width` as `few_rows` reads them, their index, and the index to
    prefetch: the cache itself, or a copy in `room` if that has another dtype."""
    if cache.dtype == room.dtype:
        return lambda cache, at, count, width, next_at, room: (cache, at, next_at)
    of_two, to_two = (1 if array.dtype == types.uint32 else 2 for array in (cache, room))

    def widened(cache, at, count, width, next_at, room):
        for i in range(count // 2):
            line, to = i * width * of_two, i * width * to_two
            if width % 16 == 0:
                _widen(cache, at + line, width, room, to, next_at + line, 16)
            else:
                _widen(cache, at + line, width, room, to, next_at + line, 8)
        return room, 0, 0

    return widened


def _scales(emit, scales, place=None):
    """A pointer to scales from an index on; None if there are none."""
    kind = emit.kinds.scales
    return emit.pointer(kind, scales, place or I64(0)) if isinstance(kind, types.Array) else None


class Sums:
    """The sums of a register tile: c[r, lanes], by rows and vectors of lanes.

    Args:
        factors: a pointer to factors by which rows of c are multiplied first; None: c is 0 before.
        paired: whether lines of the cache hold pairs of bfloat16; dots: whether rows do too.
        below: distance of two lines that are combined into one of pairs.
    """

    def __init__(self, emit, c_rows, lanes, factors, *, paired, dots, below=None):
        self.emit, self.c_rows, self.lanes = emit, c_rows, lanes
        self.kind = {"paired": paired, "dots": dots, "below": below}
        self.cells = []
        for r, line in enumerate(c_rows):
            starts = [emit.constant(0.0) for _ in lanes]
            if factors is not None:
                factor = emit.broadcast(emit.at(factors, ir.IntType(64)(r)))
                starts = [
                    emit.builder.fmul(factor, emit.load(emit.at(line, lane))) for lane in lanes
                ]
            self.cells.append([emit.variable(start) for start in starts])

    def turn(self, a_rows, i, line, mask=None):
        """Adds element i of each row, or pair i, times a line of the cache."""
        emit, kind = self.emit, self.kind | {"mask": mask}
        of_lanes = [emit.line(emit.at(line, lane), **kind) for lane in self.lanes]
        for row, cells in zip(a_rows, self.cells, strict=True):
            for j, number in enumerate(emit.numbers(row, i, **kind)):
                for numbers, cell in zip(of_lanes, cells, strict=True):
                    total = emit.add_product(emit.builder.load(cell), number, numbers[j])
                    emit.builder.store(total, cell)

    def keep(self, scales=None):
        """Writes the sums to c, times one scale per lane, if there are any."""
        emit = self.emit
        of_lanes = [scales and emit.floats(emit.at(scales, lane)) for lane in self.lanes]
        for line, cells in zip(self.c_rows, self.cells, strict=True):
            for cell, lane, scale in zip(cells, self.lanes, of_lanes, strict=True):
                total = emit.builder.load(cell)
                total = emit.builder.fmul(total, scale) if scale else total
                emit.store(total, emit.at(line, lane))


@writes(literals=True)
def line_tile(emit, a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride, factors,
              factors_at, asked, asked_stride, rows, vectors, scales, scales_at):  # fmt: skip
    """c[r, lanes] = c[r, lanes] * factors[r] + sum over i < depth of a[r, i] * b[i, lanes].

    For `rows` rows and `vectors` vectors of lanes, or half a vector if that is 0, in registers. If
    factors is 0, c is not read; if `scales` is an array, c[r, lanes] is multiplied by it at the
    end. b may hold pairs of bfloat16 numbers i and i + 1, which become float32 in registers; if a
    holds such pairs as well, one instruction adds both products. With such an a, two lines of int8
    are combined into one of pairs. With each line of b it prefetches as many elements from `asked`
    on, `asked_stride` later each time.
    """
    builder, kinds = emit.builder, emit.kinds
    num_rows, num_vectors = kinds.rows.literal_value, kinds.vectors.literal_value
    dots = kinds.a.dtype == types.uint32
    paired, in_two = dots or kinds.b.dtype == types.uint32, dots and kinds.b.dtype == types.int8
    fresh, size = not isinstance(kinds.factors, types.Array), kinds.b.dtype.bitwidth // 8
    bits, word = CURRENT.vector_bits, depth.type
    tile = CacheTile(emit.context, builder, kinds.c, bits if num_vectors else bits // 2)
    lanes = [word(i * tile.width) for i in range(num_vectors or 1)]

    a_rows = tile.rows(tile.pointer(kinds.a, a, a_at), a_stride, num_rows)
    c_rows = tile.rows(tile.pointer(kinds.c, c, c_at), c_stride, num_rows)
    b_lines, ahead = (tile.pointer(kinds.b, b, at) for at in (b_at, asked))
    shrink = None if fresh else tile.pointer(kinds.factors, factors, factors_at)
    below = b_stride if in_two else None
    sums = Sums(tile, c_rows, lanes, shrink, paired=paired, dots=dots, below=below)

    def step(i, mask=None):
        first = builder.mul(i, i.type(2)) if in_two else i
        line = tile.at(b_lines, builder.mul(first, b_stride))
        for number in range(1 + in_two):
            turn = builder.add(first, i.type(number))
            asks = tile.at(ahead, builder.mul(turn, asked_stride))
            for lane in lanes:
                if lane.constant * size % LINE == 0:
                    tile.prefetch(tile.at(asks, lane))
        sums.turn(a_rows, i, line, mask)

    turns = builder.lshr(depth, word(1)) if paired else depth
    tile.loop(turns, step)
    if paired:
        # Why masked: the data after the last number may be anything, and 0 * NaN is not 0.
        odd = builder.trunc(depth, ir.IntType(1))
        with builder.if_then(odd):
            step(turns, 0xFFFF0000)
    sums.keep(_scales(emit, scales, scales_at))


@compiled(fastmath=FASTMATH, part=True)
def few_rows(a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride,
              factors, factors_at, asked, asks, rows, lanes, room, scales, scales_at):  # fmt: skip
    """`line_tile` for up to ROWS rows and all `lanes`, in whole vectors of the `room` lanes that
    exist.

    Rows are processed in twos or fours: a, c and factors have rows after the last. If `asks` is 1,
    it prefetches from `asked` on the same lines that it reads of b from `b_at` on.
    """
    width = VECTOR_BYTES // c.itemsize
    wide = (VECTORS if rows > 2 else OF_TWO) * width
    enough = wide // 2 if rows > 2 else wide - width
    at, step = 0, asks * b_stride
    while at < lanes:
        ask, s_at = asked + at, scales_at + at
        # Why few vectors of four rows at once: the sums of one would wait for each other.
        if lanes - at > enough and room - at >= wide:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, ROWS, VECTORS, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, 2, OF_TWO, scales, s_at)  # fmt: skip
            at += wide
        elif rows > 2 and lanes - at > width and 2 * (room - at) >= wide:
            line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, ask, step, ROWS, HALF, scales, s_at)  # fmt: skip
            at += wide // 2
        elif room - at >= width:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, ROWS, 1, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, 2, 1, scales, s_at)  # fmt: skip
            at += width
        else:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, ROWS, 0, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, ask, step, 2, 0, scales, s_at)  # fmt: skip
            at += width // 2


@writes(literals=True)
def _raise_maxima(emit, scores, maximum, factors, row, rows):
    """maximum[r] = the maximum of itself and KV_TILE scores, for each of `rows` rows from `row` on.

    factors[r] rescales sums that were made with the previous maximum. If a score is NaN, the
    maximum is undefined.
    """
    builder, kinds, word = emit.builder, emit.kinds, row.type
    count = kinds.rows.literal_value
    tile = CacheTile(emit.context, builder, kinds.scores)
    few = CacheTile(emit.context, builder, kinds.scores, count * kinds.scores.dtype.bitwidth)
    first = tile.pointer(kinds.scores, scores, builder.mul(row, word(KV_TILE)))
    highest_at = tile.pointer(kinds.maximum, maximum, row)
    peaks = []
    for line in tile.rows(first, word(KV_TILE), count):
        values = [tile.load(tile.at(line, word(i))) for i in range(0, KV_TILE, tile.width)]
        peaks.append(tile.halved(values, tile.maximum))
    old = few.load(highest_at)
    new = few.maximum(tile.across_rows(peaks, tile.maximum), old)
    few.store(few.exp2(builder.fsub(old, new)), tile.pointer(kinds.factors, factors, row))
    few.store(new, highest_at)


class Weights:
    """Writes the conversion of scores of `rows` rows to weights; see `_weigh` for the arguments.

    Args:
        scales: a pointer to factors on weights that are multiplied by values; the sum of the
            weights does not include them.
    """

    def __init__(self, plain, scores, weights, maximum, total, factors, row, scales, rows=ROWS):
        builder, kinds = plain.builder, plain.kinds
        self.emit = emit = CacheTile(plain.context, builder, kinds.scores)
        bits = rows * kinds.scores.dtype.bitwidth
        self.few = CacheTile(plain.context, builder, kinds.scores, bits)
        self.row, self.word = row, row.type
        self.paired = kinds.weights.dtype == types.uint32
        first = builder.mul(row, self.word(KV_TILE))
        in_words = builder.lshr(first, self.word(1)) if self.paired else first
        self.scores = emit.pointer(kinds.scores, scores, first)
        self.weights = emit.pointer(kinds.weights, weights, in_words)
        self.maximum = emit.pointer(kinds.maximum, maximum, row)
        self.total = emit.pointer(kinds.total, total, row)
        self.factors = emit.pointer(kinds.factors, factors, row)
        self.a_row, self.scales = KV_TILE // emit.width, scales
        self.vectors = rows * self.a_row

    def write(self, i):
        """Converts vector i of the scores to weights; returns these without scales."""
        emit, build, word = self.emit, self.emit.builder, self.word
        highest = emit.broadcast(emit.at(self.maximum, build.udiv(i, word(self.a_row))))
        line = emit.at(self.scores, build.mul(i, word(emit.width)))
        power = weight = emit.exp2(build.fsub(emit.load(line), highest))
        if self.scales is not None:
            column = build.mul(build.urem(i, word(self.a_row)), word(emit.width))
            weight = build.fmul(power, emit.floats(emit.at(self.scales, column)))
        if self.paired:
            pairs = build.mul(i, word(emit.width // 2))
            emit.store(emit.pairs(weight), emit.at(self.weights, pairs))
        else:
            emit.store(weight, emit.at(self.weights, build.mul(i, word(emit.width))))
        return power

    def keep(self, i):
        """`write`; stores the weights to be summed where `kept` finds them."""
        power = self.write(i)
        if self.paired or self.scales is not None:
            to = self.emit.builder.mul(i, self.word(self.emit.width))
            self.emit.store(power, self.emit.at(self.scores, to))

    def kept(self, i):
        """Vector i of the weights that are summed."""
        return self.emit.load(self.emit.at(self.scores, self.word(i * self.emit.width)))

    def add(self, power):
        """total = total * factors + the sums of each row's weights; `power(i)` is vector i."""
        emit, few, build = self.emit, self.few, self.emit.builder
        sums = []
        for i in range(0, self.vectors, self.a_row):
            sums.append(emit.halved([*map(power, range(i, i + self.a_row))], build.fadd))
        added = emit.across_rows(sums, build.fadd)
        few.store(few.fma(few.load(self.total), few.load(self.factors), added), self.total)


@writes(literals=True)
def _weigh(emit, scores, weights, maximum, total, factors, row, rows, scales):
    """Converts KV_TILE scores of each of `rows` rows from `row` on to weights, after
    `_raise_maxima`.

    Weights are 2 ** (score - maximum[r]). They are written to `weights`, which may be the scores,
    in the form in which they are multiplied: as pairs of bfloat16 or not, and times `scales` if
    that is an array. total[r] becomes total[r] * factors[r] + the sum of the weights; NaN if a
    score is NaN.
    """
    made = Weights(
        emit, scores, weights, maximum, total, factors, row, _scales(emit, scales),
        emit.kinds.rows.literal_value,
    )  # fmt: skip
    made.add(lambda i: made.write(made.word(i)))


@compiled(fastmath=FASTMATH)
def softmax_step(scores, first_row, rows, maximum, total, factors, weights, scales):
    """Converts the scores of each row to `weights`, an array made by `place_of_weights`; factors[r]
    rescales the row's previous sums."""
    lines, flat = scores.reshape(-1), weights.reshape(-1)
    for r in range(first_row, rows, ROWS):
        if rows - r > 2:
            _raise_maxima(lines, maximum, factors, r, ROWS)
            _weigh(lines, flat, maximum, total, factors, r, ROWS, scales)
        else:
            _raise_maxima(lines, maximum, factors, r, 2)
            _weigh(lines, flat, maximum, total, factors, r, 2, scales)


@writes()
def _add_and_weigh(
    emit, scores, weights, maximum, total, factors, row, b, b_at, sums, size, scales
):  # fmt: skip
    """Adds values of KV_TILE tokens, weighted for ROWS rows, to their `sums` [rows, size], for the
    first VECTORS vectors of lanes. Interleaved, it does `_weigh` for the next ROWS rows.

    Why interleaved: products keep two units of the CPU busy, and powers mostly use others. Why not
    in `line_tile`: here all tokens exist, so the ratio of products to powers is fixed.
    """
    builder, kinds, word = emit.builder, emit.kinds, row.type
    paired, dots = kinds.b.dtype == types.uint32, kinds.weights.dtype == types.uint32
    following = builder.add(row, word(ROWS))
    after = Weights(
        emit, scores, weights, maximum, total, factors, following, _scales(emit, scales)
    )  # fmt: skip
    tile, stride = after.emit, word(KV_TILE // 2 if dots else KV_TILE)
    a_rows, c_rows = (
        tile.rows(tile.pointer(kind, array, builder.mul(row, step)), step, ROWS)
        for kind, array, step in ((kinds.weights, weights, stride), (kinds.sums, sums, size))
    )
    lanes = [word(i * tile.width) for i in range(VECTORS)]
    shrink = tile.pointer(kinds.factors, factors, row)
    products = Sums(tile, c_rows, lanes, shrink, paired=paired, dots=dots)
    line = tile.variable(tile.pointer(kinds.b, b, b_at))
    turns = KV_TILE // (2 if paired else 1) // after.vectors

    def step(i):
        for j in range(turns):
            turn = builder.add(builder.mul(i, word(turns)), word(j))
            products.turn(a_rows, turn, tile.moved(line, size))
        after.keep(i)

    tile.loop(word(after.vectors), step)
    products.keep()
    after.add(after.kept)


@specialize()
def adds_beside(scores, weights, cache, room):
    """Whether `_add_and_weigh` supports these arrays: the registers must hold the operands of both
    its halves, and a power must take few steps. `room`: as for `run_of`."""
    in_halves = room.dtype == types.uint32 and not (HAS_DOTS and weights.dtype == types.uint32)
    is_few = room.dtype == cache.dtype == types.int8
    fits = CURRENT.vector_bits == 512 and scores.dtype == types.float32
    fits = fits and not in_halves and not is_few
    return lambda scores, weights, cache, room: fits


@compiled(fastmath=FASTMATH)
def weigh_and_add(scores, rows, maximum, total, factors, weights, scales, b, b_at, sums, size):
    """`softmax_step`, then the values of KV_TILE whole tokens from `b_at` on: sums [rows, size] =
    sums * factors + weights x scales x values. For more than ROWS rows."""
    lanes, stride = VECTORS * VECTOR_BYTES // scores.itemsize, weights.shape[1]
    lines, flat, to = scores.reshape(-1), weights.reshape(-1), sums.reshape(-1)
    for r in range(0, rows, ROWS):
        _raise_maxima(lines, maximum, factors, r, ROWS)
    _weigh(lines, flat, maximum, total, factors, 0, ROWS, scales)
    for r in range(0, rows, ROWS):
        done = 0
        if r + ROWS < rows:
            _add_and_weigh(lines, flat, maximum, total, factors, r, b, b_at, to, size, scales)
            done = lanes
        if done < size:
            few_rows(
                flat, r * stride, stride, b, b_at + done, size, KV_TILE, to, r * size + done, size,
                factors, r, b_at, 0, rows - r, size - done, size - done, 0, 0,
            )  # fmt: skip


@specialize()
def place_of_weights(scores, operand, cache):
    """An array for the weights that are multiplied, with the dtype of the array `operand`. With
    scales they differ from the weights that are summed."""
    if operand.dtype == types.uint32:
        return lambda scores, operand, cache: zeros((len(scores), KV_TILE // 2), np.uint32)
    if cache.dtype == types.int8:
        return lambda scores, operand, cache: zeros((len(scores), KV_TILE), scores.dtype)
    return lambda scores, operand, cache: scores
