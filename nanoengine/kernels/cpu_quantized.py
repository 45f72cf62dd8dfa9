"""Linear layers with int8 and int4 weights on a CPU with AVX2: whole numbers times whole numbers.

    x float32 ─ quantize each row to int8 ─┐
                                           ├─ exact int32 dot products ─ times scales ─ + bias
    weight ─ panels of 16 outputs ─────────┘

    int8   a vector holds 8 outputs x 4 inputs;  one scale an output
    int4   the same for 8 inputs: the low halves of its bytes are the first four, the high halves
           the other four; a scale, and a zero if the weights have them, an output and group

The unit of work is `vpmaddubsw`, which multiplies unsigned by signed bytes and adds neighbours in
16 bits. int8: |w| times x with w's sign, at most 2 * 128 * 127, which fits. int4: w + 8 lies in
0..15, so eight such sums fit as well, and the 8 is taken off once a group.

Sums of whole numbers are exact, and groups are added in order: a row's result has the same bits
alone and in any batch. `layers/quantized.py` is the readable form.

Source: `vpsignb` to feed `vpmaddubsw` with signed bytes, ggml's AVX2 dot products. Perf:
`benchmarks/cpu_kernels.py`; docs/experiments.md.

Legend: T rows of x, N outputs, K inputs, a multiple of 32, G groups of inputs.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import Emit
from nanoengine.kernels.jit import compiled

PANEL = 16  # outputs side by side: two vectors
UNIT = 32  # inputs: K is padded to a multiple, and a group holds a multiple
MAX_ROWS = 4  # of a tile: 8 sums, weights, signs and temporaries fill the 16 registers
ROW_BLOCK = 128  # rows that take turns on one panel
FEW = 8  # rows quantized by the calling thread
AHEAD = 4096  # bytes: one row prefetches weights so far ahead
LINE = 64  # bytes of weights that go with four inputs in int8, with eight in int4

# Why no "nnan" and "ninf": a row with NaN or infinity must come out as NaN, there and only there.
FASTMATH = ("contract", "nsz")

I8, I16, I32, HALF = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType()
BYTES, PAIRS = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
SUMS, HALVES = ir.VectorType(I32, 8), ir.VectorType(HALF, 8)
FLOATS = ir.VectorType(ir.FloatType(), 8)


class Integers(Emit):
    """Vector instructions on bytes."""

    def __init__(self, context, builder):
        self.context, self.builder = context, builder

    def get(self, kind, pointer):
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)

    def put(self, value, pointer):
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def cell(self, kind):
        cell = cgutils.alloca_once(self.builder, kind)
        self.builder.store(ir.Constant(kind, None), cell)
        return cell

    def splat(self, scalar, count):
        kind = ir.VectorType(scalar.type, count)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return self.shuffle(first, first, [0] * count)

    def four(self, pointer):
        """Four neighbouring bytes, eight times."""
        return self.builder.bitcast(self.splat(self.get(I32, pointer), 8), BYTES)

    def call(self, name, result, *arguments):
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def dot(self, unsigned, signed):
        """Neighbouring products added in 16 bits."""
        return self.call("llvm.x86.avx2.pmadd.ub.sw", PAIRS, unsigned, signed)

    def widen(self, pairs):
        """Neighbouring 16-bit sums added in 32 bits."""
        return self.call("llvm.x86.avx2.pmadd.wd", SUMS, pairs, ir.Constant(PAIRS, [1] * 16))

    def fused(self, a, b, c):
        return self.call("llvm.fma.v8f32", FLOATS, a, b, c)

    def counter(self, start):
        cell = cgutils.alloca_once(self.builder, start.type)
        self.builder.store(start, cell)
        return cell

    def add(self, cell, value):
        self.builder.store(self.builder.add(self.builder.load(cell), value), cell)


def lines(emit, array_type, array, at, stride, count):
    """Pointers to the rows of a tile: `count` of them from `at`, `stride` apart."""
    pointers = [emit.pointer(array_type, array, at)]
    for _ in range(count - 1):
        pointers.append(emit.at(pointers[-1], stride))
    return pointers


def _finish(emit, sums, x_scales, w_scales, bias, outputs):
    """outputs[r] = sums[r] * (scale of the row * scale of the output) + bias, vector by vector."""
    for of_row, factor, line in zip(sums, x_scales, outputs, strict=True):
        factor = emit.splat(emit.builder.load(factor), 8)
        for v, total in enumerate(of_row):
            at = ir.IntType(64)(8 * v)
            scale = emit.builder.fmul(factor, emit.get(FLOATS, emit.at(w_scales, at)))
            shift = emit.get(FLOATS, emit.at(bias, at))
            emit.put(emit.fused(total, scale, shift), emit.at(line, at))


@intrinsic(prefer_literal=True)
def _tile8(typing, x, x_at, x_stride, x_scales, row, w, w_at, w_stride, steps, w_scales, bias,
           column, out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """out[r, j] = (x[r] . w[j]) * scales + bias for `rows` x `panels` * 16 results, over 4 * steps
    inputs. Each step prefetches the byte `ahead` + step * `ahead_stride` after a panel's first."""
    num_rows, num_panels = rows.literal_value, panels.literal_value
    signature = types.void(
        x, x_at, x_stride, x_scales, row, w, w_at, w_stride, steps, w_scales, bias, column,
        out, out_at, out_stride, ahead, ahead_stride, rows, panels,
    )  # fmt: skip

    def codegen(context, builder, sig, args):
        emit = Integers(context, builder)
        word = args[1].type
        inputs = lines(emit, x, args[0], args[1], args[2], num_rows)
        factors = lines(emit, x_scales, args[3], args[4], word(1), num_rows)
        weights = lines(emit, w, args[5], args[6], args[7], num_panels)
        count = 2 * num_panels
        cells = [[emit.cell(SUMS) for _ in range(count)] for _ in inputs]
        sign, magnitude = "llvm.x86.avx2.psign.b", "llvm.abs.v32i8"
        outputs = lines(emit, out, args[12], args[13], args[14], num_rows)
        for line in outputs:
            emit.prefetch(line, write=True)
        with cgutils.for_range(builder, args[8]) as loop:
            at = builder.mul(loop.index, word(LINE))
            for panel in weights:
                emit.prefetch(emit.at(panel, args[15], builder.mul(loop.index, args[16])))
            values = [emit.four(emit.at(row, builder.mul(loop.index, word(4)))) for row in inputs]
            for v in range(count):
                line = emit.at(weights[v // 2], at, word(32 * (v % 2)))
                weight = emit.get(BYTES, line)
                positive = emit.call(magnitude, BYTES, weight, ir.IntType(1)(0))
                for value, of_row in zip(values, cells, strict=True):
                    signed = emit.call(sign, BYTES, value, weight)
                    emit.add(of_row[v], emit.widen(emit.dot(positive, signed)))
        _finish(
            emit,
            [[builder.sitofp(builder.load(cell), FLOATS) for cell in of_row] for of_row in cells],
            factors,
            emit.pointer(w_scales, args[9], args[11]),
            emit.pointer(bias, args[10], args[11]),
            outputs,
        )
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _tile4(typing, x, x_at, x_stride, totals, totals_at, totals_stride, x_scales, row, w, w_at,
           scales, zeros, scales_at, units, units_a_group, w_scales, bias, column,
           out, out_at, out_stride, ahead, ahead_stride, rows, has_zeros):  # fmt: skip
    """out[r, j] = scales * sum over groups of scale[j] * (x . (w + 8) - (8 + zero[j]) * total of x)
    + bias, for `rows` x 16 results.

    `totals` holds the sum of each unit of 32 inputs of x, as floats. All whole numbers here are
    below 2^24, so exact as floats. The i-th eight inputs prefetch the byte `ahead` + i *
    `ahead_stride` after the panel's first.
    """
    num_rows, zeroed = rows.literal_value, has_zeros.literal_value
    signature = types.void(
        x, x_at, x_stride, totals, totals_at, totals_stride, x_scales, row, w, w_at, scales, zeros,
        scales_at, units, units_a_group, w_scales, bias, column, out, out_at, out_stride, ahead,
        ahead_stride, rows, has_zeros,
    )  # fmt: skip

    def codegen(context, builder, sig, args):
        emit = Integers(context, builder)
        word = args[1].type
        inputs = lines(emit, x, args[0], args[1], args[2], num_rows)
        of_inputs = lines(emit, totals, args[3], args[4], args[5], num_rows)
        factors = lines(emit, x_scales, args[6], args[7], word(1), num_rows)
        weights = emit.pointer(w, args[8], args[9])
        scale_line = emit.pointer(scales, args[10], args[12])
        zero_line = emit.pointer(zeros, args[11], args[12])
        outputs = lines(emit, out, args[18], args[19], args[20], num_rows)
        for line in outputs:
            emit.prefetch(line, write=True)
        results = [[emit.cell(FLOATS) for _ in range(2)] for _ in inputs]
        low = ir.Constant(BYTES, [15] * 32)
        fours = ir.Constant(PAIRS, [4] * 16)
        # A group's number, and the units left in it: a division in this loop would cost as much as
        # half of its work.
        group, left = emit.counter(word(0)), emit.counter(args[14])
        with cgutils.for_range(builder, args[13]) as loop:
            unit = loop.index
            x_line = builder.mul(unit, word(UNIT))
            w_line = emit.at(weights, builder.mul(unit, word(4 * LINE)))
            asked = emit.at(weights, args[21], builder.mul(unit, builder.mul(args[22], word(4))))
            pairs = [[None, None] for _ in inputs]
            for eight in range(4):
                emit.prefetch(asked)
                asked = emit.at(asked, args[22])
                at = [emit.at(row, x_line, word(8 * eight)) for row in inputs]
                firsts = [emit.four(pointer) for pointer in at]
                seconds = [emit.four(emit.at(pointer, word(4))) for pointer in at]
                for v in range(2):
                    both = emit.get(BYTES, emit.at(w_line, word(LINE * eight + 32 * v)))
                    shifted = builder.lshr(builder.bitcast(both, PAIRS), fours)
                    first = builder.and_(both, low)
                    second = builder.and_(builder.bitcast(shifted, BYTES), low)
                    for r in range(num_rows):
                        for weight, value in ((first, firsts[r]), (second, seconds[r])):
                            product = emit.dot(weight, value)
                            known = pairs[r][v]
                            pairs[r][v] = product if known is None else builder.add(known, product)
            for v in range(2):
                at = builder.add(builder.mul(builder.load(group), word(PANEL)), word(8 * v))
                scale = builder.fpext(emit.get(HALVES, emit.at(scale_line, at)), FLOATS)
                offset = ir.Constant(FLOATS, [-8.0] * 8)
                if zeroed:
                    zero = builder.fpext(emit.get(HALVES, emit.at(zero_line, at)), FLOATS)
                    offset = builder.fsub(offset, zero)
                for r in range(num_rows):
                    dots = builder.sitofp(emit.widen(pairs[r][v]), FLOATS)
                    total = emit.splat(builder.load(emit.at(of_inputs[r], unit)), 8)
                    cell = results[r][v]
                    exact = emit.fused(total, offset, dots)
                    builder.store(emit.fused(exact, scale, builder.load(cell)), cell)
            remaining = builder.sub(builder.load(left), word(1))
            ended = builder.icmp_signed("==", remaining, word(0))
            builder.store(builder.select(ended, args[14], remaining), left)
            builder.store(
                builder.add(builder.load(group), builder.zext(ended, word(0).type)), group
            )
        _finish(
            emit,
            [[builder.load(cell) for cell in of_row] for of_row in results],
            factors,
            emit.pointer(w_scales, args[15], args[17]),
            emit.pointer(bias, args[16], args[17]),
            outputs,
        )
        return context.get_dummy_value()

    return signature, codegen


@compiled(fastmath=(*FASTMATH, "reassoc"))
def _largest(x):
    """max |x|; NaN where x holds NaN or infinity."""
    most, check = np.float32(0), np.float32(0)
    for i in range(len(x)):
        most = max(most, abs(x[i]))
        check += x[i] * np.float32(0)
    return most + check


@compiled(fastmath=FASTMATH)
def _quantize_row(x, values, totals):
    """values = x * 127 / max |x|, rounded half to even; totals of each unit; returns the scale."""
    most = _largest(x)
    scale = most / np.float32(127)
    values[:] = 0
    totals[:] = 0
    if not most > 0:  # zeros, or a row whose scale makes every result NaN
        return scale
    inverse = np.float32(1) / scale
    row = values[: len(x)]
    for i in range(len(x)):
        row[i] = np.int8(np.rint(x[i] * inverse))
    for unit in range(len(totals)):
        of_unit, total = values[unit * UNIT : unit * UNIT + UNIT], np.int32(0)
        for i in range(UNIT):
            total += np.int32(of_unit[i])
        totals[unit] = np.float32(total)
    return scale


@compiled(fastmath=FASTMATH)
def _quantize_rows(x, values, scales, totals, lo, hi):
    for t in range(lo, hi):
        scales[t] = _quantize_row(x[t], values[t], totals[t])


@compiled(parallel=True, fastmath=FASTMATH)
def _quantize_rows_parallel(x, values, scales, totals, num_workers):
    for worker in prange(num_workers):
        lo, hi = len(x) * worker // num_workers, len(x) * (worker + 1) // num_workers
        _quantize_rows(x, values, scales, totals, lo, hi)


@compiled(fastmath=FASTMATH)
def quantize_rows(x, num_workers):
    """Each row of x [T, K] on its own: values [T, K padded] int8, scales [T] float32, and totals
    [T, units] float32, the sums of each unit's values."""
    num_rows, padded = len(x), -(-x.shape[1] // UNIT) * UNIT
    values = np.empty((num_rows, padded), np.int8)
    scales = np.empty(num_rows, np.float32)
    totals = np.empty((num_rows, padded // UNIT), np.float32)
    if num_rows <= FEW:
        _quantize_rows(x, values, scales, totals, 0, num_rows)
    else:
        _quantize_rows_parallel(x, values, scales, totals, num_workers)
    return values, scales, totals


@compiled(fastmath=FASTMATH)
def _panel8(rows, row, x, size, x_scales, w, at, w_scales, bias, column, out, out_at, out_step):
    """One int8 panel for `rows` rows from `row`, in tiles as equal as can be.

    Each tile prefetches its share of the next panel, so that memory never rests.
    """
    tiles, n = -(-rows // MAX_ROWS), size // 4
    share = -(-LINE // tiles)  # bytes for each step
    for t in range(tiles):
        ahead = size * PANEL + t * share * n
        r = rows * t // tiles
        m, first = rows * (t + 1) // tiles - r, row + r
        a, o = first * size, out_at + r * out_step
        if m == 4:
            _tile8(x, a, size, x_scales, first, w, at, 0, n, w_scales, bias, column,
                   out, o, out_step, ahead, share, 4, 1)  # fmt: skip
        elif m == 3:
            _tile8(x, a, size, x_scales, first, w, at, 0, n, w_scales, bias, column,
                   out, o, out_step, ahead, share, 3, 1)  # fmt: skip
        elif m == 2:
            _tile8(x, a, size, x_scales, first, w, at, 0, n, w_scales, bias, column,
                   out, o, out_step, ahead, share, 2, 1)  # fmt: skip
        else:
            _tile8(x, a, size, x_scales, first, w, at, 0, n, w_scales, bias, column,
                   out, o, out_step, ahead, share, 1, 1)  # fmt: skip


@compiled(fastmath=FASTMATH)
def _keep(scratch, rows, width, out, out_at, out_step):
    """Copies the outputs that exist of a panel that was computed aside."""
    for r in range(rows):
        for j in range(width):
            out[out_at + r * out_step + j] = scratch[r * PANEL + j]


@compiled(parallel=True, fastmath=FASTMATH)
def _multiply8(values, x_scales, w, w_scales, bias, out, num_workers):
    num_rows, size = values.shape
    num_outputs = out.shape[1]
    num_panels, rest = -(-num_outputs // PANEL), num_outputs % PANEL
    x, flat, step = values.reshape(-1), out.reshape(-1), PANEL * size
    for worker in prange(num_workers):
        scratch = np.empty(ROW_BLOCK * PANEL, np.float32)
        lo, hi = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        whole = hi - 1 if rest and hi == num_panels else hi
        if num_rows == 1:
            while whole - lo >= 4:  # four panels at once keep the units busy
                _tile8(x, 0, size, x_scales, 0, w, lo * step, step, size // 4, w_scales, bias,
                       lo * PANEL, flat, lo * PANEL, num_outputs, AHEAD, LINE, 1, 4)  # fmt: skip
                lo += 4
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            for p in range(lo, whole):
                _panel8(rows, row, x, size, x_scales, w, p * step, w_scales, bias, p * PANEL,
                        flat, row * num_outputs + p * PANEL, num_outputs)  # fmt: skip
            if whole < hi:
                p = whole
                _panel8(rows, row, x, size, x_scales, w, p * step, w_scales, bias, p * PANEL,
                        scratch, 0, PANEL)  # fmt: skip
                _keep(scratch, rows, rest, flat, row * num_outputs + p * PANEL, num_outputs)


@compiled(fastmath=FASTMATH)
def linear8(x, w, w_scales, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias.

    w is packed int8; its scales and the bias are padded to whole panels.
    """
    values, x_scales, _ = quantize_rows(x, num_workers)
    _multiply8(values, x_scales, w, w_scales, bias, out, num_workers)


@compiled(fastmath=FASTMATH)
def _panel4(rows, row, x, size, totals, x_scales, w, at, scales, zeros, g, group, w_scales, bias,
            column, out, out_at, out_step):  # fmt: skip
    """One int4 panel for `rows` rows from `row`, in tiles as equal as can be; see `_panel8`."""
    tiles, units = -(-rows // MAX_ROWS), size // UNIT
    share = -(-LINE // tiles)  # bytes for each eight inputs
    for t in range(tiles):
        ahead = size * PANEL // 2 + t * share * units * 4
        r = rows * t // tiles
        m, first = rows * (t + 1) // tiles - r, row + r
        a, b, o = first * size, first * units, out_at + r * out_step
        if len(zeros) == 0:
            if m == 4:
                _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                       units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 4, 0)  # fmt: skip
            elif m == 3:
                _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                       units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 3, 0)  # fmt: skip
            elif m == 2:
                _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                       units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 2, 0)  # fmt: skip
            else:
                _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                       units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 1, 0)  # fmt: skip
        elif m == 4:
            _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                   units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 4, 1)  # fmt: skip
        elif m == 3:
            _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                   units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 3, 1)  # fmt: skip
        elif m == 2:
            _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                   units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 2, 1)  # fmt: skip
        else:
            _tile4(x, a, size, totals, b, units, x_scales, first, w, at, scales, zeros, g,
                   units, group, w_scales, bias, column, out, o, out_step,
                       ahead, share, 1, 1)  # fmt: skip


@compiled(parallel=True, fastmath=FASTMATH)
def _multiply4(
    values, x_scales, totals_of_rows, w, w_scales, scales, zeros, units_a_group, bias, out,
    num_workers,
):  # fmt: skip
    num_rows, size = values.shape
    num_outputs = out.shape[1]
    num_panels, rest = -(-num_outputs // PANEL), num_outputs % PANEL
    groups, step = -(-(size // UNIT) // units_a_group), PANEL * size // 2
    x, totals, flat = values.reshape(-1), totals_of_rows.reshape(-1), out.reshape(-1)
    for worker in prange(num_workers):
        scratch = np.empty(ROW_BLOCK * PANEL, np.float32)
        lo, hi = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            for p in range(lo, hi):
                at, g, column = p * step, p * groups * PANEL, p * PANEL
                if rest and p == num_panels - 1:
                    _panel4(rows, row, x, size, totals, x_scales, w, at, scales, zeros, g,
                            units_a_group, w_scales, bias, column, scratch, 0, PANEL)  # fmt: skip
                    _keep(scratch, rows, rest, flat, row * num_outputs + column, num_outputs)
                else:
                    _panel4(rows, row, x, size, totals, x_scales, w, at, scales, zeros, g,
                            units_a_group, w_scales, bias, column,
                            flat, row * num_outputs + column, num_outputs)  # fmt: skip


@compiled(fastmath=FASTMATH)
def linear4(x, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias.

    w is packed int4; w_scales and the bias are padded to whole panels. What each group adds to its
    output's scale: scales and zeros, flat uint16, the bits of float16 [panels, groups, 16]; no
    zeros: an empty array.
    """
    values, x_scales, totals = quantize_rows(x, num_workers)
    _multiply4(
        values, x_scales, totals, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers
    )
