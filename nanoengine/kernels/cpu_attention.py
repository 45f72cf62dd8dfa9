"""The compiled kernels of `CPUBackend`: paged attention for float32 and float64, by numba.

Called by `attention/cpu.py` and, in a fused layer, `cpu_decoder.py`. Kernels see flat arrays,
offsets and ints, never torch. The readable form is `attention/naive.py`.

A *task* is one KV head of one sequence, a tile of its queries and a range of its context. Its query
heads and queries together are the *rows* of the tile, so each key and value is loaded once for all
of them. A task walks the block table in steps of `KV_TILE` tokens with an online softmax:

    queries [rows, D] x keys of a run [D, n]   -> scores [rows, KV_TILE]    run: tokens in one block
    softmax of the scores against the running maximum of each row
    scores [rows, KV_TILE] x values of a run [n, D]  -> added to output [rows, D]

Both products are the same register tile (`_tile`): numbers of a row, each broadcast, times lines of
the cache. So the cache holds keys and values as these lines, and nothing is packed or transposed
when it is read (`store_head`):

    one head of a block    keys    tiles of L = min(P, KV_TILE) tokens, in each tile [D, L]
                           values  [P, D]
    in bfloat16            words of two numbers that follow each other in a sum, the first in the
                           high half: keys [D / 2, L] words, values [P / 2, D] words

Each sum is one chain in a fixed order, however wide vectors are and whatever rows are beside it: a
sequence's result has the same bits in any batch.

Source: online softmax and tiling from FlashAttention (Dao et al. 2022, section 3); splitting the
context of a decode from Flash-Decoding (Dao et al. 2023); block tables from PagedAttention (Kwon et
al. 2023, section 4).

Legend: T tokens, S sequences, H / K query / KV heads, R = H / K, D head dim, B blocks, P block
size.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload

from nanoengine.kernels.cpu_linear import rounded
from nanoengine.kernels.emit import Emit
from nanoengine.kernels.exp import COEFFICIENTS_2, LOWEST_2, SHIFT_2, exp
from nanoengine.kernels.isa import CURRENT
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.tiles import BFloat

KV_TILE = 64  # tokens between two updates of the running maximum
ROW_TILE = 32  # rows a task of few queries may hold: queries times query heads of one KV head
CHUNK_ROWS = 128  # the same of a prompt's chunk: each key and value comes from memory once for all
TASKS_A_WORKER = 16  # of a chunk, where its rows allow: what is uneven is one task at most
SPLIT = 256  # tokens of context a task of a lone query tile covers; fixed, so results are too
MASKED = -1e30  # a score that weighs nothing; finite, so that max - max is not NaN
LN2 = math.log(2)

# Rows and vectors of the largest register tile: sums, the cache's line and a number of a row.
ROWS, VECTORS = 4, (4 if CURRENT.registers == 32 else 2)
HAS_DOTS = CURRENT.bf16_dots == "vdpbf16ps"
VECTOR_BYTES = CURRENT.vector_bits // 8

# Why: no "nnan" and "ninf": a NaN in one sequence must come out as NaN, there and only there. No
# "arcp": it lets LLVM divide in one variant of a loop and multiply by the reciprocal in another,
# and with it equal inputs gave unequal last bits in some of 100 runs. No "reassoc": with it sums
# had another order, and results other bits, for vectors of another width.
FASTMATH = ("contract", "nsz")

# Columns of a task.
SEQ, HEAD, QUERY, NUM_QUERIES, POSITION, KV_START, KV_STOP, PARTIAL = range(8)
# Columns of a merge: its parts, and the tile that they are parts of.
FIRST, COUNT, OF_HEAD, OF_QUERY, OF_QUERIES = range(5)

I32 = ir.IntType(32)


class CacheTile(Emit):
    """Writes what tiles do with lines of the cache: floats, or words of two bfloat16 numbers."""

    def __init__(self, context, builder, real, bits=CURRENT.vector_bits):
        super().__init__(context, builder, real, bits)
        self.words = ir.VectorType(I32, self.width)

    def every(self, number):
        return ir.Constant(self.words, [number] * self.width)

    def line(self, pointer, *, paired, dots, mask):
        """The vectors that a row's numbers are multiplied with, one after the other."""
        if not paired:
            return [self.load(pointer)]
        pairs = self.get(self.words, pointer)
        if mask is not None:
            pairs = self.builder.and_(pairs, self.every(mask))
        return [pairs] if dots and HAS_DOTS else self.halves(pairs)

    def halves(self, pairs):
        """The first and the second number of each pair, as floats."""
        first = self.builder.and_(pairs, self.every(0xFFFF0000))
        second = self.builder.shl(pairs, self.every(16))
        return [self.builder.bitcast(bits, self.vector) for bits in (first, second)]

    def numbers(self, pointer, turn, *, paired, dots):
        """A row's numbers of a turn, each in all lanes."""
        if dots:
            word = self.builder.load(self.at(pointer, turn))
            pairs = self.splat(word, self.words)
            return [pairs] if HAS_DOTS else self.halves(pairs)
        count = 2 if paired else 1
        first = self.builder.mul(turn, turn.type(count))
        return [self.broadcast(self.at(pointer, first, turn.type(j))) for j in range(count)]

    def add_product(self, total, number, numbers):
        """total + number * numbers: of floats with one rounding, of pairs with one each."""
        if number.type == self.vector:
            return self.fma(number, numbers, total)
        kind = ir.VectorType(BFloat(), 2 * self.width)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.width}"
        pairs = [self.builder.bitcast(x, kind) for x in (number, numbers)]
        return self.call(name, self.vector, total, *pairs)

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

    def halved(self, vectors, combine):
        """One vector of several: the first half with the second, until one is left."""
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [combine(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
        return vectors[0]

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


@compiled(fastmath=())
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


@compiled(fastmath=FASTMATH)
def _few_rows(a, a_at, a_stride, b, b_at, b_stride, depth, c, c_at, c_stride,
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


@compiled(fastmath=FASTMATH)
def _mask(scores, first_row, rows, group_size, tile_start, position, window):
    """Sets the scores that a row may not see (its future, or before its window) to MASKED."""
    masked = scores.dtype.type(MASKED)
    for r in range(first_row, rows):
        p = position + r // group_size
        first, stop = max(0, p - window + 1 - tile_start), max(0, p + 1 - tile_start)
        scores[r, : min(first, KV_TILE)] = masked
        scores[r, stop:] = masked


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


@compiled(fastmath=FASTMATH)
def _softcap(scores, first_row, rows, softcap):
    """scores = softcap * tanh(scores / softcap) / ln 2, by way of exp of what is not positive."""
    one, two = scores.dtype.type(1), scores.dtype.type(2)
    cap = softcap / scores.dtype.type(LN2)
    for r in range(first_row, rows):
        row = scores[r]
        for t in range(KV_TILE):
            x = row[t] / softcap
            e = exp(-two * abs(x))
            row[t] = np.copysign(cap * (one - e) / (one + e), x)


def take_query(tile, r, q, at, scale):
    """tile[r] = the query from `at`, scaled; rounded, if the tile is of pairs."""
    raise TypeError("take_query is for compiled code")


@overload(take_query, jit_options={"fastmath": set(FASTMATH)})
def _take_query(tile, r, q, at, scale):
    def floats(tile, r, q, at, scale):
        line, query = tile[r], q[at : at + tile.shape[1]]  # indexed from 0, or LLVM gathers
        for d in range(len(line)):
            line[d] = query[d] * scale

    def pairs(tile, r, q, at, scale):
        line, query = tile[r], q[at : at + 2 * tile.shape[1]]
        for i in range(len(line)):
            first, second = query[2 * i] * scale, query[2 * i + 1] * scale
            line[i] = bfloat16(first) << np.uint32(16) | bfloat16(second)

    return pairs if tile.dtype == types.uint32 else floats


@compiled(fastmath=FASTMATH)
def _run_task(
    task, table, following, next_table, q, q_stride, k, v, sizes, scale, softcap, window,
    tile, scores, weights, out, maximum, total, factors,
):  # fmt: skip
    """Attends one task; leaves maximum, total and the unscaled sum [rows, D] in the scratch.

    Scores are in units of ln 2, so that weights are powers of 2. While it scores a run, it asks for
    the run's values; while it adds these up, for the next run's keys, maybe the `following` task's.
    """
    num_heads, num_kv_heads, head_dim, block_size = sizes
    group_size = num_heads // num_kv_heads
    rows, head, position = task[NUM_QUERIES] * group_size, task[HEAD], task[POSITION]
    if softcap == 0:
        scale = scale / q.dtype.type(LN2)
    for r in range(rows):
        token = task[QUERY] + r // group_size
        at = token * q_stride + (head * group_size + r % group_size) * head_dim
        take_query(tile, r, q, at, scale)
        maximum[r] = MASKED
        total[r] = 0
    out[: -(-rows // ROWS) * ROWS] = 0

    per, lanes = numbers_a_word(k), min(block_size, KV_TILE)
    per_weight = numbers_a_word(weights)
    of_head = block_size * head_dim // per
    of_block = num_kv_heads * of_head
    queries, lines, shares, sums = (
        tile.reshape(-1), scores.reshape(-1), weights.reshape(-1), out.reshape(-1)
    )  # fmt: skip
    start, stop = task[KV_START], task[KV_STOP]
    for tile_start in range(start // KV_TILE * KV_TILE, stop, KV_TILE):
        end = min(tile_start + KV_TILE, stop)
        first = max(tile_start, start // lanes * lanes)
        # Rows of queries before the tile see nothing of it.
        first_row = max(0, tile_start - position) * group_size // ROWS * ROWS
        for begin in range(first, end, lanes):
            at = table[begin // block_size] * of_block + head * of_head
            at += begin % block_size * head_dim // per
            for r in range(first_row, rows, ROWS):
                seen = position + 1 - begin + (r + ROWS - 1) // group_size
                _few_rows(
                    queries, r * tile.shape[1], tile.shape[1], k, at, lanes, head_dim,
                    lines, r * KV_TILE + begin - tile_start, KV_TILE, 0, 0,
                    at, int(r == 0), rows - r, min(seen, end - begin, lanes), lanes,
                )  # fmt: skip
        if softcap > 0:
            _softcap(scores, first_row, rows, softcap)
        last = position + task[NUM_QUERIES] - 1
        if tile_start + KV_TILE - 1 > position or tile_start + window <= last:
            _mask(scores, first_row, rows, group_size, tile_start, position, window)
        softmax_step(scores, first_row, rows, maximum, total, factors, weights)
        for begin in range(first, end, lanes):
            at = table[begin // block_size] * of_block + head * of_head
            at += begin % block_size * head_dim // per
            after = begin + lanes
            if after < stop:
                next_at = table[after // block_size] * of_block + head * of_head
            else:
                after = following[KV_START] // lanes * lanes
                next_at = next_table[after // block_size] * of_block + following[HEAD] * of_head
            next_at += after % block_size * head_dim // per
            for r in range(first_row, rows, ROWS):
                seen = position + 1 - begin + (r + ROWS - 1) // group_size
                _few_rows(
                    shares, r * weights.shape[1] + (begin - tile_start) // per_weight,
                    weights.shape[1], v, at, head_dim, max(0, min(seen, end - begin, lanes)),
                    sums, r * head_dim, head_dim, factors, r,
                    next_at, int(r == 0), rows - r, head_dim, head_dim,
                )  # fmt: skip
            if begin + lanes < end:  # sums shrink once a tile
                factors[:rows] = 1


@compiled(fastmath=FASTMATH)
def _inverse(highest, total, sinks, head):
    """1 / the softmax's sum, that of `total` and of the head's sink, which has no value.

    `highest` is in units of ln 2, the sink is not.
    """
    one = sinks.dtype.type(1)
    if len(sinks) == 0:
        return one / total
    above = sinks[head] - highest * sinks.dtype.type(LN2)
    if above <= 0:
        return one / (total + exp(above))
    shrink = exp(-above)
    return shrink / (total * shrink + one)


@compiled(parallel=True, fastmath=FASTMATH)
def attend(
    queries, k_cache, v_cache, tables, tasks, bounds, sizes, scale, softcap, window, operand, sinks,
    out_rows, partial_out, partial_stats,
):  # fmt: skip
    """Runs all tasks; whole ones write to `out_rows`, splits to the partial buffers.

    Worker w takes tasks bounds[w] ... bounds[w + 1] - 1. `operand` is an empty array of what
    queries and weights are made before they are multiplied: the queries' own floats, or uint32 for
    pairs of bfloat16 numbers, which need a cache of bfloat16. `sinks` are [H], or none.
    """
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    q, q_stride, result = queries.reshape(-1), num_heads * head_dim, out_rows.reshape(-1)
    k, v = words_of(k_cache.reshape(-1)), words_of(v_cache.reshape(-1))
    room = max(ROW_TILE, group_size)
    space = -(-max(CHUNK_ROWS, group_size) // ROWS) * ROWS
    per = numbers_a_word(operand)
    for worker in prange(len(bounds) - 1):
        tile = np.zeros((space, head_dim // per), operand.dtype)
        scores = np.zeros((space, KV_TILE), q.dtype)
        weights = np.zeros((space, KV_TILE // per), operand.dtype)
        out = np.empty((space, head_dim), q.dtype)
        maximum = np.empty(space, q.dtype)
        total = np.empty(space, q.dtype)
        factors = np.ones(space, q.dtype)
        for i in range(bounds[worker], bounds[worker + 1]):
            task, following = tasks[i], tasks[min(i + 1, len(tasks) - 1)]
            _run_task(
                task, tables[task[SEQ]], following, tables[following[SEQ]],
                q, q_stride, k, v, sizes, scale, softcap, window,
                tile, scores, weights, out, maximum, total, factors,
            )  # fmt: skip
            rows = task[NUM_QUERIES] * group_size
            if task[PARTIAL] < 0:
                for r in range(rows):
                    head = task[HEAD] * group_size + r % group_size
                    at = ((task[QUERY] + r // group_size) * num_heads + head) * head_dim
                    inverse, summed = _inverse(maximum[r], total[r], sinks, head), out[r]
                    line = result[at : at + head_dim]
                    for d in range(head_dim):
                        line[d] = summed[d] * inverse
            else:
                base = task[PARTIAL] * room
                for r in range(rows):
                    partial_stats[base + r, 0] = maximum[r]
                    partial_stats[base + r, 1] = total[r]
                    part, summed = partial_out[base + r], out[r]
                    for d in range(head_dim):
                        part[d] = summed[d]


@compiled(parallel=True, fastmath=FASTMATH)
def combine(merges, parts, sizes, sinks, out_rows, partial_out, partial_stats):
    """Joins the splits of each tile: result = sum of 2^(m_i - m) out_i / sum of 2^(m_i - m) l_i.

    merges, parts: as `plan_tasks` made them. A sink is added here, once for all splits.
    """
    num_heads, num_kv_heads, head_dim, _ = sizes
    group_size = num_heads // num_kv_heads
    result = out_rows.reshape(-1)
    ln2 = result.dtype.type(LN2)  # maxima are in units of it
    for i in prange(len(merges)):
        merge = merges[i]
        rows_of = parts[merge[FIRST] : merge[FIRST] + merge[COUNT]]
        for r in range(merge[OF_QUERIES] * group_size):
            highest = partial_stats[rows_of[0] + r, 0]
            for s in range(1, len(rows_of)):
                highest = max(highest, partial_stats[rows_of[s] + r, 0])
            head = merge[OF_HEAD] * group_size + r % group_size
            at = ((merge[OF_QUERY] + r // group_size) * num_heads + head) * head_dim
            total, line = result.dtype.type(0), result[at : at + head_dim]
            for d in range(head_dim):
                line[d] = 0
            for s in range(len(rows_of)):
                row = rows_of[s] + r
                weight = exp((partial_stats[row, 0] - highest) * ln2)
                part = partial_out[row]
                total += weight * partial_stats[row, 1]
                for d in range(head_dim):
                    line[d] += weight * part[d]
            inverse = _inverse(highest, total, sinks, head)
            for d in range(head_dim):
                line[d] *= inverse


@compiled(parallel=True, fastmath=FASTMATH)
def store(k, k_stride, v, v_stride, slots, k_blocks, v_blocks, sizes):
    """Copies the key and value of token t to k_blocks and v_blocks at slots[t]."""
    _, num_kv_heads, head_dim, _ = sizes
    k_cache, v_cache = k_blocks.reshape(-1), v_blocks.reshape(-1)
    for t in prange(len(slots)):
        for h in range(num_kv_heads):
            k_line = k[t * k_stride + h * head_dim : t * k_stride + (h + 1) * head_dim]
            v_line = v[t * v_stride + h * head_dim : t * v_stride + (h + 1) * head_dim]
            store_head(k_line, v_line, slots[t], h, k_cache, v_cache, sizes)


@compiled(fastmath=FASTMATH)
def store_head(key, value, slot, head, k_cache, v_cache, sizes):
    """Writes the key and value [D] of one head of the token at `slot`."""
    _, num_kv_heads, head_dim, block_size = sizes
    per, lanes, offset = numbers_a_word(k_cache), min(block_size, KV_TILE), slot % block_size
    first = (slot // block_size * num_kv_heads + head) * block_size * head_dim + per - 1
    k_at = first + offset // lanes * lanes * head_dim + offset % lanes * per
    v_at = first + offset // per * per * head_dim - offset % per
    for d in range(head_dim):
        k_cache[k_at + d // per * lanes * per - d % per] = stored(key[d], k_cache)
        v_cache[v_at + d * per] = stored(value[d], v_cache)


@compiled(fastmath=FASTMATH)
def _shared_splits(query_start, seq_lens, tables, block_size, window):
    """For each sequence the splits, from its first, whose blocks are those of the sequence before.

    Both decode, so that their queries lie side by side, and see all of these splits.
    """
    shared = np.zeros(len(seq_lens) + 1, np.int64)  # the last is a sentinel
    for s in range(1, len(seq_lens)):
        if query_start[s + 1] - query_start[s - 1] != 2 or window < seq_lens[s]:
            continue
        seen = min(seq_lens[s], seq_lens[s - 1])
        if seen <= SPLIT:
            continue  # one split: attended as a whole, never in parts
        blocks = 0
        while (blocks + 1) * block_size <= seen and tables[s, blocks] == tables[s - 1, blocks]:
            blocks += 1
        shared[s] = blocks * block_size // SPLIT
    return shared


@compiled(fastmath=FASTMATH)
def _chunk_rows(query_start, queries_per_tile, num_heads, num_workers):
    """Rows of a chunk's tasks: as many as pay, and few enough to share out evenly."""
    total = 0
    for s in range(len(query_start) - 1):
        n = query_start[s + 1] - query_start[s]
        if n > queries_per_tile:
            total += n * num_heads
    rows = CHUNK_ROWS
    while rows > ROW_TILE and total < TASKS_A_WORKER * rows * num_workers:
        rows //= 2
    return rows


@compiled(fastmath=FASTMATH)
def plan_tasks(
    query_start, seq_lens, tables, group_size, num_kv_heads, block_size, window, num_workers
):
    """Cuts a step into tasks of equal kind and shares them out by cost.

    Neighbouring decodes with the same first blocks attend those splits in one task, their queries
    as its rows: keys and values are read once for all of them. A split is the same tokens with and
    without company and rows don't touch each other, so this changes no bit.

    Source: Juravsky et al., Hydragen (arXiv 2402.05099), for attending a shared prefix at once.

    Returns:
        tasks [N, 8], bounds [num_workers + 1], merges [M, 5], parts [Q], number of partial results.
        A merge joins the rows of `parts[first : first + count]`, rows of the partial buffers.
    """
    queries_per_tile = max(1, ROW_TILE // group_size)
    room = max(ROW_TILE, group_size)
    of_chunks = _chunk_rows(query_start, queries_per_tile, group_size * num_kv_heads, num_workers)
    queries_of_chunks = max(1, of_chunks // group_size)
    shared = _shared_splits(query_start, seq_lens, tables, block_size, window)
    count, most_splits = 0, 1
    for s in range(len(seq_lens)):
        n = query_start[s + 1] - query_start[s]
        tiles = -(-n // queries_per_tile)
        count += num_kv_heads * max(tiles, seq_lens[s] // SPLIT + 2)
        most_splits = max(most_splits, seq_lens[s] // SPLIT + 2)
    tasks = np.empty((count, 8), np.int64)
    costs = np.empty(count + 1, np.int64)
    merges = np.empty((count, 5), np.int64)
    parts = np.empty(count, np.int64)
    leader = np.zeros(most_splits, np.int64)  # who began the task that is shared now
    begun = np.zeros((num_kv_heads, most_splits), np.int64)  # where its rows begin
    num_tasks, num_merges, num_parts, num_partials = 0, 0, 0, 0
    costs[0] = 0
    for s in range(len(seq_lens)):
        n = query_start[s + 1] - query_start[s]
        for head in range(num_kv_heads):
            most = queries_per_tile if n <= queries_per_tile else queries_of_chunks
            for query in range(0, n, most):
                num_queries = min(most, n - query)
                position = seq_lens[s] - n + query
                start, stop = max(0, position - window + 1), position + num_queries
                # Why: a lone tile is split over its context, so that one sequence keeps all cores
                # busy. Chunks of many tiles are not: their partial sums would fill the memory.
                split = SPLIT if n <= queries_per_tile else stop
                first_split = start // split
                num_splits = -(-stop // split) - first_split
                if num_splits > 1:
                    merge = merges[num_merges]
                    merge[FIRST], merge[COUNT], merge[OF_HEAD] = num_parts, num_splits, head
                    merge[OF_QUERY], merge[OF_QUERIES] = query_start[s] + query, num_queries
                    num_merges += 1
                for i in range(first_split, first_split + num_splits):
                    if i < shared[s] and s - leader[i] < queries_per_tile:
                        parts[num_parts] = begun[head, i] + (s - leader[i]) * group_size
                        num_parts += 1
                        continue
                    task = tasks[num_tasks]
                    task[SEQ], task[HEAD] = s, head
                    task[QUERY], task[NUM_QUERIES] = query_start[s] + query, num_queries
                    task[POSITION] = position
                    task[KV_START] = max(start, i * split)
                    task[KV_STOP] = min(stop, (i + 1) * split)
                    task[PARTIAL] = -1
                    if num_splits > 1:
                        task[PARTIAL] = num_partials
                        parts[num_parts] = num_partials * room
                        num_parts += 1
                        if n == 1:
                            begun[head, i] = num_partials * room
                            together = 1
                            while together < queries_per_tile and shared[s + together] > i:
                                together += 1
                            if together > 1:  # all of the split is before each of the queries
                                task[NUM_QUERIES], task[POSITION] = together, task[KV_STOP]
                        num_partials += 1
                    # Reading a key costs about as much as computing with it for 8 rows.
                    rows = task[NUM_QUERIES] * group_size
                    work = (task[KV_STOP] - task[KV_START] + 16) * (rows + 8)
                    costs[num_tasks + 1] = costs[num_tasks] + work
                    num_tasks += 1
        for i in range(most_splits):  # after all heads, which share one leader
            if i >= shared[s] or s - leader[i] >= queries_per_tile:
                leader[i] = s
    bounds = np.empty(num_workers + 1, np.int64)
    at = 0  # Why by hand: numba takes two seconds to compile `searchsorted`.
    for w in range(num_workers):
        while costs[at] < costs[num_tasks] * w // num_workers:
            at += 1
        bounds[w] = at
    bounds[num_workers] = num_tasks
    return tasks[:num_tasks], bounds, merges[:num_merges], parts[:num_parts], num_partials
