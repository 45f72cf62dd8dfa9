"""The register tiles of `cpu_attention`: both products, the softmax between them, and the layouts
of the cache.

Both products are the same tile (`line_tile`): elements of a row, each broadcast, times lines of the
cache. So the cache stores keys and values as these lines, and nothing is packed or transposed when
it is read (`cpu_attention.store_head`):

    one head of a block    keys    tiles of L = min(P, KV_TILE) tokens, in each tile [D, L]
                           values  [P, D]
    in bfloat16            words of two values that are adjacent in a sum, the first in the
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
from nanoengine.kernels.cpu_linear import BF16_DOTS, to_bf16
from nanoengine.kernels.emit import FLOATS, I32, BFloat, Emit, emit_intrinsic
from nanoengine.kernels.exp import COEFFICIENTS_2, LOWEST_2, SHIFT_2
from nanoengine.kernels.gemm import I8, I16, I64, LINE
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled, specialize

KV_TILE = 64  # tokens between two updates of the running maximum

# Rows and vectors of the largest register tile: sums, the cache's line and an element of a row.
ROWS, VECTORS = 4, (4 if CURRENT.registers == 32 else 2)
HALF = VECTORS // 2
WIDE = 4  # vectors of a tile of two rows: fewer sums would wait for each other

VECTOR_BYTES = CURRENT.vector_bits // 8

# Why: no "nnan" and "ninf": a NaN in one sequence must come out as NaN, there and only there. No
# "arcp": it lets LLVM divide in one variant of a loop and multiply by the reciprocal in another,
# and equal inputs then gave unequal last bits in some of 100 runs. No "reassoc": with it the order
# of sums, and so the bits of results, depended on the vector width.
FASTMATH = ("contract", "nsz")


class CacheTile(Emit):
    """Writes how tiles read lines of the cache: floats, int8, or words of two bfloat16 values."""

    def line(self, pointer, *, paired, dots, mask, below=None):
        """The vectors by which a row's elements are multiplied, one after the other.

        If rows hold pairs and lines are int8, two lines are read; the second is `below` elements
        after the first.
        """
        if below is not None:
            pairs = self.join_bf16(self.load_int8(pointer), self.load_int8(self.at(pointer, below)))
        elif pointer.type.pointee == I8:
            return [self.load_int8(pointer)]
        elif paired:
            pairs = self.read(self.words, pointer)
        else:
            return [self.load(pointer)]
        if mask is not None:
            pairs = self.builder.and_(pairs, self.ints(mask))
        return [pairs] if dots and BF16_DOTS else self.unpack_bf16(pairs)

    def load_int8(self, pointer):
        """Converts a vector of int8 to the tile's floats."""
        return self.builder.sitofp(self.read(ir.VectorType(I8, self.width), pointer), self.vector)

    def join_bf16(self, high, low):
        """Words of pairs from two float32 vectors whose values are bfloat16."""
        high, low = (self.builder.bitcast(each, self.words) for each in (high, low))
        return self.builder.or_(high, self.builder.lshr(low, self.ints(16)))

    def load_fp32(self, pointer):
        """Converts a vector of float32 to the tile's floats."""
        values = self.read(ir.VectorType(ir.FloatType(), self.width), pointer)
        return values if values.type == self.vector else self.builder.fpext(values, self.vector)

    def load_elements(self, pointer, iteration, *, paired, dots, mask, below=None):
        """A row's elements for an iteration, each in all lanes."""
        if dots:
            word = self.builder.load(self.at(pointer, iteration))
            if mask is not None:
                word = self.builder.and_(word, word.type(mask))
            pairs = self.splat(word, self.words)
            return [pairs] if BF16_DOTS else self.unpack_bf16(pairs)
        count = 2 if paired else 1
        first = self.builder.mul(iteration, iteration.type(count))
        return [self.broadcast(self.at(pointer, first, iteration.type(j))) for j in range(count)]

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
        power = build.shl(build.bitcast(shifted, self.words), self.ints(23))
        return build.fmul(value, build.bitcast(power, kind))

    def reduce_rows(self, rows, combine):
        """A vector with one value per row: combines the first half of each row's lanes with the
        second half until one lane is left. Two rows share each vector from the first step on."""
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

    def round_to_bf16(self, floats):
        """The bits of a vector's values rounded to bfloat16, one per word; a NaN stays NaN."""
        build = self.builder
        if BF16_DOTS:
            bits = build.fptrunc(floats, ir.VectorType(BFloat(), self.width))
            return build.zext(build.bitcast(bits, ir.VectorType(I16, self.width)), self.words)
        bits = build.bitcast(floats, self.words)
        last = build.and_(build.lshr(bits, self.ints(16)), self.ints(1))
        bits = build.lshr(build.add(build.add(bits, self.ints(0x7FFF)), last), self.ints(16))
        is_nan = build.fcmp_unordered("uno", floats, floats)
        return build.select(is_nan, self.ints(0x7FC0), bits)

    def round_to_pairs(self, floats):
        """Words with pairs of a vector's values, rounded to bfloat16."""
        build = self.builder
        half = ir.VectorType(I32, self.width // 2)
        shift = ir.Constant(half, [16] * half.count)
        if BF16_DOTS:
            bits = build.fptrunc(floats, ir.VectorType(BFloat(), self.width))
            swapped = build.bitcast(bits, half)
            return build.or_(build.shl(swapped, shift), build.lshr(swapped, shift))
        bits = self.round_to_bf16(floats)
        first, second = (self.shuffle(bits, bits, [*range(i, self.width, 2)]) for i in range(2))
        return build.or_(build.shl(first, shift), second)


def loop_vectors(emit, kind, count, body):
    """Writes loops over `body(tile, i)` for the vectors of `count` elements, a multiple of 4; a
    vector begins at index i. Whole vectors first, then vectors of 4 for the rest."""
    builder, start, word = emit.builder, count.type(0), count.type
    for bits in (CURRENT.vector_bits, 4 * kind.dtype.bitwidth):
        tile = CacheTile(emit.context, builder, kind, bits)
        width, vectors = word(tile.width), builder.udiv(builder.sub(count, start), word(tile.width))

        def strip(i, tile=tile, start=start, width=width):
            body(tile, builder.add(start, builder.mul(i, width)))

        tile.loop(vectors, strip)
        start = builder.add(start, builder.mul(vectors, width))


@emit_intrinsic()
def scale_row(emit, x, at, factor, out, out_at, count):
    """out = `count` elements of x times a factor of the same type, both from these indices on;
    rounded if out holds pairs of bfloat16."""
    builder, kinds = emit.builder, emit.kinds
    source, factor, target, count = emit.operands(x, at, factor, out, out_at, count)

    def body(tile, i):
        scaled = builder.fmul(tile.load(tile.at(source, i)), tile.splat(factor))
        if kinds.out.dtype == types.uint32:
            scaled, i = tile.round_to_pairs(scaled), builder.lshr(i, i.type(1))
        tile.store(scaled, tile.at(target, i))

    loop_vectors(emit, kinds.x, count, body)


@emit_intrinsic()
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

    def body(tile, i):
        key_part, line = (tile.load(tile.at(source, i)) for source in sources)
        if in_pairs:
            key_part, line = tile.round_to_pairs(key_part), tile.round_to_bf16(line)
            halves = ir.VectorType(I16, 2 * tile.width)
            target = tile.at(values, builder.mul(i, word(2)))
            # Why masked: another thread may write the other halves, of the next token.
            mask = ir.Constant(ir.VectorType(ir.IntType(1), halves.count), [1, 0] * tile.width)
            tile.call(
                f"llvm.masked.store.v{halves.count}i16.p0", ir.VoidType(),
                builder.bitcast(line, halves),
                builder.bitcast(target, halves.as_pointer()), I32(2), mask,
            )  # fmt: skip
            i = builder.lshr(i, word(1))
        else:
            tile.store(line, tile.at(values, i))
        for j in range(key_part.type.count):
            target = tile.at(keys, builder.mul(builder.add(i, word(j)), lanes))
            builder.store(builder.extract_element(key_part, I32(j)), target)

    size = emit.context.make_array(kinds.key)(emit.context, builder, key).nitems
    loop_vectors(emit, kinds.key, size, body)


@specialize()
def elements_per_word(array):
    """2 for an array of pairs of bfloat16 values, 1 for floats."""
    count = 2 if array.dtype in (types.uint16, types.uint32) else 1
    return lambda array: count


@specialize()
def scale_elements(array):
    """Elements of a cache that hold the scale of a token's head, in addition to the head's own."""
    count = 4 if array.dtype == types.int8 else 0
    return lambda array: count


@compiled(fastmath=FASTMATH, inline=True)
def line_indices(cache, slot, head, lanes, sizes):
    """Indices of the key and the value of one head of a token in the flat caches."""
    _, num_kv_heads, head_dim, block_size = sizes
    offset, per_word = slot % block_size, elements_per_word(cache)
    block = (slot // block_size * num_kv_heads + head) * block_size
    first = block * (head_dim + scale_elements(cache)) + per_word - 1
    k_at = first + offset // lanes * lanes * head_dim + offset % lanes * per_word
    return k_at, first + offset // per_word * per_word * head_dim - offset % per_word


@specialize()
def as_words(cache):
    """A flat cache as `line_tile` reads it: bfloat16 in pairs, floats unchanged."""
    if cache.dtype == types.uint16:
        return lambda cache: cache.view(np.uint32)
    return lambda cache: cache


@specialize()
def to_cache_dtype(x, cache):
    """A value as it is stored in a cache: rounded to bfloat16, half to even, or unchanged."""
    if cache.dtype != types.uint16:
        return lambda x, cache: x
    return lambda x, cache: np.uint16(to_bf16(np.float32(x).view(np.uint32)))


@emit_intrinsic(literals=True)
def prefetch_element(emit, array, at, to_write):
    """Prefetches the cache line of an element of a flat array, for a read (0) or a write (1)."""
    write = emit.kinds.to_write.literal_value
    emit.prefetch(emit.pointer(emit.kinds.array, array, at), write=write)


@specialize()
def buffer_for_few(cache, buffer):
    """The argument `buffer` of `read_run` for few rows: the cache itself, so that nothing is
    converted, unless rows are pairs that must be split."""
    if buffer.dtype == types.uint32 and not BF16_DOTS:
        return lambda cache, buffer: buffer
    return lambda cache, buffer: cache


@emit_intrinsic(literals=True)
def _convert_lines(emit, cache, at, width, buffer, buffer_at, ahead_at, lanes):
    """Converts two lines of `width` elements from `at` on to floats or pairs, `lanes` at once.
    Prefetches as many elements from `ahead_at` on."""
    builder, kinds = emit.builder, emit.kinds
    is_bytes, in_pairs = kinds.cache.dtype == types.int8, kinds.buffer.dtype == types.uint32
    bits = kinds.buffer.dtype.bitwidth * kinds.lanes.literal_value
    tile = CacheTile(emit.context, builder, FLOATS if in_pairs else kinds.buffer, bits)
    source, ahead = (tile.pointer(kinds.cache, cache, first) for first in (at, ahead_at))
    target, word = tile.pointer(kinds.buffer, buffer, buffer_at), width.type

    def body(iteration):
        lane = builder.mul(iteration, word(tile.width))
        tile.prefetch(tile.at(ahead, lane, lane) if is_bytes else tile.at(ahead, lane))
        vectors = []
        for line in (word(0), width)[: 1 + is_bytes]:
            begin = tile.at(source, lane, line)
            vectors += tile.line(begin, paired=not is_bytes, dots=False, mask=None)
        if in_pairs:
            tile.store(tile.join_bf16(*vectors), tile.at(target, lane))
        else:
            tile.store(vectors[0], tile.at(target, lane))
            tile.store(vectors[1], tile.at(target, lane, width))

    tile.loop(builder.udiv(width, word(tile.width)), body, unroll=4)


@specialize()
def read_run(cache, at, count, width, next_at, buffer):
    """A run's `count` lines of `width` as `few_rows` reads them, their index, and the index to
    prefetch: the cache itself, or a copy in `buffer` if that has another dtype."""
    if cache.dtype == buffer.dtype:
        return lambda cache, at, count, width, next_at, buffer: (cache, at, next_at)
    from_step, to_step = (1 if array.dtype == types.uint32 else 2 for array in (cache, buffer))

    def converted(cache, at, count, width, next_at, buffer):
        for i in range(count // 2):
            line, target = i * width * from_step, i * width * to_step
            if width % 16 == 0:
                _convert_lines(cache, at + line, width, buffer, target, next_at + line, 16)
            else:
                _convert_lines(cache, at + line, width, buffer, target, next_at + line, 8)
        return buffer, 0, 0

    return converted


def _scales_pointer(emit, scales, index=None):
    """A pointer to scales from an index on; None if there are none."""
    kind = emit.kinds.scales
    return emit.pointer(kind, scales, index or I64(0)) if isinstance(kind, types.Array) else None


class Sums:
    """Writes the sums of a register tile: c[r, lanes], by rows and vectors of lanes.

    Args:
        factors: a pointer to factors by which rows of c are multiplied first; None: sums begin
            with 0.
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

    def add_line(self, a_rows, i, line, mask=None):
        """Adds element i of each row, or pair i, times a line of the cache."""
        emit, kind = self.emit, self.kind | {"mask": mask}
        vectors = [emit.line(emit.at(line, lane), **kind) for lane in self.lanes]
        for row, cells in zip(a_rows, self.cells, strict=True):
            for j, element in enumerate(emit.load_elements(row, i, **kind)):
                for values, cell in zip(vectors, cells, strict=True):
                    total = emit.add_product(emit.builder.load(cell), element, values[j])
                    emit.builder.store(total, cell)

    def store(self, scales=None):
        """Writes the sums to c, times one scale per lane, if there are any."""
        emit = self.emit
        lane_scales = [scales and emit.load_fp32(emit.at(scales, lane)) for lane in self.lanes]
        for line, cells in zip(self.c_rows, self.cells, strict=True):
            for cell, lane, scale in zip(cells, self.lanes, lane_scales, strict=True):
                total = emit.builder.load(cell)
                total = emit.builder.fmul(total, scale) if scale else total
                emit.store(total, emit.at(line, lane))


@emit_intrinsic(literals=True)
def line_tile(emit, a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride, factors,
              factors_at, ahead_at, ahead_stride, rows, vectors, scales, scales_at):  # fmt: skip
    """c[r, lanes] = c[r, lanes] * factors[r] + sum over i < depth of a[r, i] * b[i, lanes].

    For `rows` rows and `vectors` vectors of lanes, or half a vector if that is 0, in registers. If
    factors is 0, c is not read; if `scales` is an array, c[r, lanes] is multiplied by it at the
    end. b may hold pairs of bfloat16 values i and i + 1, which become float32 in registers; if a
    holds such pairs as well, one instruction adds both products. With such an a, two lines of int8
    are combined into one of pairs. With each line of b it prefetches as many elements from
    `ahead_at` on, `ahead_stride` later each time.
    """
    builder, kinds = emit.builder, emit.kinds
    num_rows, num_vectors = kinds.rows.literal_value, kinds.vectors.literal_value
    dots = kinds.a.dtype == types.uint32
    paired, joins = dots or kinds.b.dtype == types.uint32, dots and kinds.b.dtype == types.int8
    is_fresh, size = not isinstance(kinds.factors, types.Array), kinds.b.dtype.bitwidth // 8
    bits, word = CURRENT.vector_bits, depth.type
    tile = CacheTile(emit.context, builder, kinds.c, bits if num_vectors else bits // 2)
    lanes = [word(i * tile.width) for i in range(num_vectors or 1)]

    a_rows = tile.rows(tile.pointer(kinds.a, a, a_at), a_stride, num_rows)
    c_rows = tile.rows(tile.pointer(kinds.c, c, c_at), c_stride, num_rows)
    b_lines, ahead = (tile.pointer(kinds.b, b, at) for at in (b_at, ahead_at))
    row_factors = None if is_fresh else tile.pointer(kinds.factors, factors, factors_at)
    below = b_stride if joins else None
    sums = Sums(tile, c_rows, lanes, row_factors, paired=paired, dots=dots, below=below)

    def step(i, mask=None):
        first = builder.mul(i, i.type(2)) if joins else i
        line = tile.at(b_lines, builder.mul(first, b_stride))
        for nth in range(1 + joins):
            line_index = builder.add(first, i.type(nth))
            prefetch_line = tile.at(ahead, builder.mul(line_index, ahead_stride))
            for lane in lanes:
                if lane.constant * size % LINE == 0:
                    tile.prefetch(tile.at(prefetch_line, lane))
        sums.add_line(a_rows, i, line, mask)

    iterations = builder.lshr(depth, word(1)) if paired else depth
    tile.loop(iterations, step)
    if paired:
        # Why masked: the data after the last element may be anything, and 0 * NaN is not 0.
        odd = builder.trunc(depth, ir.IntType(1))
        with builder.if_then(odd):
            step(iterations, 0xFFFF0000)
    sums.store(_scales_pointer(emit, scales, scales_at))


@compiled(fastmath=FASTMATH, inline=True)
def few_rows(a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride, factors,
              factors_at, ahead, fetch, rows, lanes, space, scales, scales_at):  # fmt: skip
    """`line_tile` for up to ROWS rows and all `lanes`, in whole vectors; memory has `space` lanes.

    Rows are processed in twos or fours, so a, c and factors must have rows after the last. If
    `fetch` is 1, it prefetches from `ahead` on as many lines as it reads of b.
    """
    width = VECTOR_BYTES // c.itemsize
    wide = (VECTORS if rows > 2 else WIDE) * width
    enough = wide // 2 if rows > 2 else wide - width
    at, step = 0, fetch * b_stride
    while at < lanes:
        p_at, s_at = ahead + at, scales_at + at
        # Why few vectors of four rows at once: the sums of one would wait for each other.
        if lanes - at > enough and space - at >= wide:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, ROWS, VECTORS, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, 2, WIDE, scales, s_at)  # fmt: skip
            at += wide
        elif rows > 2 and lanes - at > width and 2 * (space - at) >= wide:
            line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                      factors, factors_at, p_at, step, ROWS, HALF, scales, s_at)  # fmt: skip
            at += wide // 2
        elif space - at >= width:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, ROWS, 1, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, 2, 1, scales, s_at)  # fmt: skip
            at += width
        else:
            if rows > 2:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, ROWS, 0, scales, s_at)  # fmt: skip
            else:
                line_tile(a, a_at, a_stride, b, b_at + at, b_stride, depth, c, c_at + at, c_stride,
                          factors, factors_at, p_at, step, 2, 0, scales, s_at)  # fmt: skip
            at += width // 2


@emit_intrinsic(literals=True)
def _raise_maxima(emit, scores, maximum, factors, row, rows):
    """maximum[r] = the maximum of itself and KV_TILE scores, for each of `rows` rows from `row` on.

    factors[r] rescales sums that were computed with the previous maximum. If a score is NaN, the
    maximum is undefined.
    """
    builder, kinds, word = emit.builder, emit.kinds, row.type
    count = kinds.rows.literal_value
    tile = CacheTile(emit.context, builder, kinds.scores)
    stats = CacheTile(emit.context, builder, kinds.scores, count * kinds.scores.dtype.bitwidth)
    first = tile.pointer(kinds.scores, scores, builder.mul(row, word(KV_TILE)))
    highest_at = tile.pointer(kinds.maximum, maximum, row)
    row_maxima = []
    for line in tile.rows(first, word(KV_TILE), count):
        values = [tile.load(tile.at(line, word(i))) for i in range(0, KV_TILE, tile.width)]
        row_maxima.append(tile.reduce_vectors(values, tile.maximum))
    old = stats.load(highest_at)
    new = stats.maximum(tile.reduce_rows(row_maxima, tile.maximum), old)
    stats.store(stats.exp2(builder.fsub(old, new)), tile.pointer(kinds.factors, factors, row))
    stats.store(new, highest_at)


class Weights:
    """Writes the conversion of the scores of `rows` rows to weights; arguments as in
    `_softmax_weights`.

    Args:
        scales: a pointer to factors on weights that are multiplied by values; the sum of the
            weights does not include them.
    """

    def __init__(self, outer, scores, weights, maximum, total, factors, row, scales, rows=ROWS):
        builder, kinds = outer.builder, outer.kinds
        self.emit = emit = CacheTile(outer.context, builder, kinds.scores)
        bits = rows * kinds.scores.dtype.bitwidth
        self.stats = CacheTile(outer.context, builder, kinds.scores, bits)
        self.row, self.word = row, row.type
        self.paired = kinds.weights.dtype == types.uint32
        first = builder.mul(row, self.word(KV_TILE))
        weights_at = builder.lshr(first, self.word(1)) if self.paired else first
        self.scores = emit.pointer(kinds.scores, scores, first)
        self.weights = emit.pointer(kinds.weights, weights, weights_at)
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
            weight = build.fmul(power, emit.load_fp32(emit.at(self.scales, column)))
        if self.paired:
            pairs = build.mul(i, word(emit.width // 2))
            emit.store(emit.round_to_pairs(weight), emit.at(self.weights, pairs))
        else:
            emit.store(weight, emit.at(self.weights, build.mul(i, word(emit.width))))
        return power

    def keep(self, i):
        """`write`; also stores the weights without scales, for `kept`."""
        power = self.write(i)
        if self.paired or self.scales is not None:
            to = self.emit.builder.mul(i, self.word(self.emit.width))
            self.emit.store(power, self.emit.at(self.scores, to))

    def kept(self, i):
        """Vector i of the weights without scales."""
        return self.emit.load(self.emit.at(self.scores, self.word(i * self.emit.width)))

    def add(self, power):
        """total = total * factors + the sums of each row's weights; `power(i)` is vector i."""
        emit, stats, build = self.emit, self.stats, self.emit.builder
        sums = []
        for i in range(0, self.vectors, self.a_row):
            sums.append(emit.reduce_vectors([*map(power, range(i, i + self.a_row))], build.fadd))
        added = emit.reduce_rows(sums, build.fadd)
        stats.store(stats.fma(stats.load(self.total), stats.load(self.factors), added), self.total)


@emit_intrinsic(literals=True)
def _softmax_weights(emit, scores, weights, maximum, total, factors, row, rows, scales):
    """Converts KV_TILE scores of each of `rows` rows from `row` on to weights, after
    `_raise_maxima`.

    Weights are 2 ** (score - maximum[r]). They are written to `weights`, which may be the scores,
    in the form in which they are multiplied: as pairs of bfloat16 or not, and times `scales` if
    that is an array. total[r] becomes total[r] * factors[r] + the sum of the weights; NaN if a
    score is NaN.
    """
    conversion = Weights(
        emit, scores, weights, maximum, total, factors, row, _scales_pointer(emit, scales),
        emit.kinds.rows.literal_value,
    )  # fmt: skip
    conversion.add(lambda i: conversion.write(conversion.word(i)))


@compiled(fastmath=FASTMATH)
def softmax_step(scores, first_row, rows, maximum, total, factors, weights, scales):
    """Converts the scores of each row to `weights`, an array from `make_weights`; factors[r]
    rescales the row's previous sums."""
    lines, flat = scores.reshape(-1), weights.reshape(-1)
    for r in range(first_row, rows, ROWS):
        if rows - r > 2:
            _raise_maxima(lines, maximum, factors, r, ROWS)
            _softmax_weights(lines, flat, maximum, total, factors, r, ROWS, scales)
        else:
            _raise_maxima(lines, maximum, factors, r, 2)
            _softmax_weights(lines, flat, maximum, total, factors, r, 2, scales)


@emit_intrinsic()
def _add_and_softmax(
    emit, scores, weights, maximum, total, factors, row, b, b_at, sums, size, scales
):  # fmt: skip
    """Adds values of KV_TILE tokens, weighted for ROWS rows, to their `sums` [rows, size], for the
    first VECTORS vectors of lanes. Interleaved with this, it computes `_softmax_weights` for the
    next ROWS rows.

    Why interleaved: products keep two units of the CPU busy, and powers mostly use other units. Why
    not in `line_tile`: here all tokens exist, so the ratio of products to powers is fixed.
    """
    builder, kinds, word = emit.builder, emit.kinds, row.type
    paired, dots = kinds.b.dtype == types.uint32, kinds.weights.dtype == types.uint32
    next_row = builder.add(row, word(ROWS))
    next_weights = Weights(
        emit, scores, weights, maximum, total, factors, next_row, _scales_pointer(emit, scales)
    )  # fmt: skip
    tile, stride = next_weights.emit, word(KV_TILE // 2 if dots else KV_TILE)
    a_rows, c_rows = (
        tile.rows(tile.pointer(kind, array, builder.mul(row, step)), step, ROWS)
        for kind, array, step in ((kinds.weights, weights, stride), (kinds.sums, sums, size))
    )
    lanes = [word(i * tile.width) for i in range(VECTORS)]
    row_factors = tile.pointer(kinds.factors, factors, row)
    products = Sums(tile, c_rows, lanes, row_factors, paired=paired, dots=dots)
    line = tile.variable(tile.pointer(kinds.b, b, b_at))
    iterations = KV_TILE // (2 if paired else 1) // next_weights.vectors

    def step(i):
        for j in range(iterations):
            line_index = builder.add(builder.mul(i, word(iterations)), word(j))
            products.add_line(a_rows, line_index, tile.advance(line, size))
        next_weights.keep(i)

    tile.loop(word(next_weights.vectors), step)
    products.store()
    next_weights.add(next_weights.kept)


@specialize()
def can_interleave(scores, weights, cache, buffer):
    """Whether `_add_and_softmax` supports these arrays: the registers must hold the operands of its
    two computations, and a power must take few steps. `buffer`: as for `read_run`."""
    splits = buffer.dtype == types.uint32 and not (BF16_DOTS and weights.dtype == types.uint32)
    reads_int8 = buffer.dtype == cache.dtype == types.int8
    fits = CURRENT.vector_bits == 512 and scores.dtype == types.float32
    fits = fits and not splits and not reads_int8
    return lambda scores, weights, cache, buffer: fits


@compiled(fastmath=FASTMATH)
def softmax_and_add(scores, rows, maximum, total, factors, weights, scales, b, b_at, sums, size):
    """`softmax_step`, then the values of KV_TILE whole tokens from `b_at` on: sums [rows, size] =
    sums * factors + weights x scales x values. For more than ROWS rows."""
    lanes, stride = VECTORS * VECTOR_BYTES // scores.itemsize, weights.shape[1]
    lines, flat, target = scores.reshape(-1), weights.reshape(-1), sums.reshape(-1)
    for r in range(0, rows, ROWS):
        _raise_maxima(lines, maximum, factors, r, ROWS)
    _softmax_weights(lines, flat, maximum, total, factors, 0, ROWS, scales)
    for r in range(0, rows, ROWS):
        done = 0
        if r + ROWS < rows:
            _add_and_softmax(lines, flat, maximum, total, factors, r, b, b_at, target, size, scales)
            done = lanes
        if done < size:
            few_rows(
                flat, r * stride, stride, b, b_at + done, size, KV_TILE, target, r * size + done,
                size, factors, r, b_at, 0, rows - r, size - done, size - done, 0, 0,
            )  # fmt: skip


@specialize()
def make_weights(scores, operand, cache):
    """An array for the weights that are multiplied by values, with the dtype of `operand`. With
    scales these differ from the weights that are summed, which replace the scores."""
    if operand.dtype == types.uint32:
        return lambda scores, operand, cache: zeros((len(scores), KV_TILE // 2), np.uint32)
    if cache.dtype == types.int8:
        return lambda scores, operand, cache: zeros((len(scores), KV_TILE), scores.dtype)
    return lambda scores, operand, cache: scores
