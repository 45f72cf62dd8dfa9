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
docs/experiments.md.

Legend: T rows of x, N outputs, K inputs, a multiple of 32, G groups of inputs.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import Emit

PANEL = 16  # outputs side by side: two vectors
UNIT = 32  # inputs: K is padded to a multiple, and a group holds a multiple
MAX_ROWS = 4  # of a tile: 8 sums, weights, signs and temporaries fill the 16 registers
ROW_BLOCK = 128  # rows that take turns on one panel
FEW = 8  # rows quantized by the calling thread

# Why no "nnan" and "ninf": a row with NaN or infinity must come out as NaN, there and only there.
JIT = {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}

I8, I16, I32, HALF = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType()
BYTES, PAIRS = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
SUMS, HALVES = ir.VectorType(I32, 8), ir.VectorType(HALF, 8)
FLOATS = ir.VectorType(ir.FloatType(), 8)


class _Integers(Emit):
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

    def add(self, cell, value):
        self.builder.store(self.builder.add(self.builder.load(cell), value), cell)


def _lines(emit, array_type, array, at, stride, count):
    pointers = [emit.pointer(array_type, array, at)]
    for _ in range(count - 1):
        pointers.append(emit.at(pointers[-1], stride))
    return pointers


@intrinsic(prefer_literal=True)
def _tile8(typing, x, x_at, x_stride, w, w_at, w_stride, steps, sums, rows, panels):
    """sums[r, p * 16 + j] = dot product of row r and output j of panel p, over 4 * steps inputs."""
    num_rows, num_panels = rows.literal_value, panels.literal_value
    signature = types.void(x, x_at, x_stride, w, w_at, w_stride, steps, sums, rows, panels)

    def codegen(context, builder, sig, args):
        emit = _Integers(context, builder)
        word = args[1].type
        inputs = _lines(emit, x, args[0], args[1], args[2], num_rows)
        weights = _lines(emit, w, args[3], args[4], args[5], num_panels)
        count = 2 * num_panels
        cells = [[emit.cell(SUMS) for _ in range(count)] for _ in inputs]
        sign, magnitude = "llvm.x86.avx2.psign.b", "llvm.abs.v32i8"
        with cgutils.for_range(builder, args[6]) as loop:
            at = builder.mul(loop.index, word(64))
            values = [emit.four(emit.at(row, builder.mul(loop.index, word(4)))) for row in inputs]
            for v in range(count):
                line = emit.at(weights[v // 2], at, word(32 * (v % 2)))
                if v % 2 == 0:
                    emit.prefetch(emit.at(line, word(4096)))
                weight = emit.get(BYTES, line)
                positive = emit.call(magnitude, BYTES, weight, ir.IntType(1)(0))
                for value, of_row in zip(values, cells, strict=True):
                    signed = emit.call(sign, BYTES, value, weight)
                    emit.add(of_row[v], emit.widen(emit.dot(positive, signed)))
        out = emit.pointer(sums, args[7], word(0))
        for r, of_row in enumerate(cells):
            for v, cell in enumerate(of_row):
                emit.put(builder.load(cell), emit.at(out, word((r * count + v) * 8)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def _tile4(typing, x, x_at, x_stride, totals, totals_at, totals_stride, w, w_at, scales, zeros,
           scales_at, units, units_a_group, sums, rows, has_zeros):  # fmt: skip
    """sums[r, j] = sum over groups of scale[j] * (x . (w + 8) - (8 + zero[j]) * total of x).

    `totals` holds the sum of each unit of 32 inputs of x, as floats. All whole numbers here are
    below 2^24, so exact as floats.
    """
    num_rows, zeroed = rows.literal_value, has_zeros.literal_value
    signature = types.void(
        x, x_at, x_stride, totals, totals_at, totals_stride, w, w_at, scales, zeros, scales_at,
        units, units_a_group, sums, rows, has_zeros,
    )  # fmt: skip

    def codegen(context, builder, sig, args):
        emit = _Integers(context, builder)
        word = args[1].type
        inputs = _lines(emit, x, args[0], args[1], args[2], num_rows)
        of_inputs = _lines(emit, totals, args[3], args[4], args[5], num_rows)
        weights = emit.pointer(w, args[6], args[7])
        scale_line = emit.pointer(scales, args[8], args[10])
        zero_line = emit.pointer(zeros, args[9], args[10])
        results = [[emit.cell(FLOATS) for _ in range(2)] for _ in inputs]
        low = ir.Constant(BYTES, [15] * 32)
        fours = ir.Constant(PAIRS, [4] * 16)

        def fma(a, b, c):
            return emit.call("llvm.fma.v8f32", FLOATS, a, b, c)

        with cgutils.for_range(builder, args[11]) as loop:
            unit = loop.index
            x_line = builder.mul(unit, word(UNIT))
            w_line = emit.at(weights, builder.mul(unit, word(PANEL * UNIT // 2)))
            emit.prefetch(emit.at(w_line, word(4096)))
            pairs = [[None, None] for _ in inputs]
            for eight in range(4):
                at = [emit.at(row, x_line, word(8 * eight)) for row in inputs]
                firsts = [emit.four(pointer) for pointer in at]
                seconds = [emit.four(emit.at(pointer, word(4))) for pointer in at]
                for v in range(2):
                    both = emit.get(BYTES, emit.at(w_line, word(64 * eight + 32 * v)))
                    shifted = builder.lshr(builder.bitcast(both, PAIRS), fours)
                    first = builder.and_(both, low)
                    second = builder.and_(builder.bitcast(shifted, BYTES), low)
                    for r in range(num_rows):
                        for weight, value in ((first, firsts[r]), (second, seconds[r])):
                            product = emit.dot(weight, value)
                            known = pairs[r][v]
                            pairs[r][v] = product if known is None else builder.add(known, product)
            group = builder.mul(builder.udiv(unit, args[12]), word(PANEL))
            for v in range(2):
                at = builder.add(group, word(8 * v))
                scale = builder.fpext(emit.get(HALVES, emit.at(scale_line, at)), FLOATS)
                offset = ir.Constant(FLOATS, [-8.0] * 8)
                if zeroed:
                    zero = builder.fpext(emit.get(HALVES, emit.at(zero_line, at)), FLOATS)
                    offset = builder.fsub(offset, zero)
                for r in range(num_rows):
                    dots = builder.sitofp(emit.widen(pairs[r][v]), FLOATS)
                    total = emit.splat(builder.load(emit.at(of_inputs[r], unit)), 8)
                    cell = results[r][v]
                    exact = fma(total, offset, dots)
                    builder.store(fma(exact, scale, builder.load(cell)), cell)
        out = emit.pointer(sums, args[13], word(0))
        for r in range(num_rows):
            for v in range(2):
                emit.put(builder.load(results[r][v]), emit.at(out, word(r * PANEL + 8 * v)))
        return context.get_dummy_value()

    return signature, codegen


@njit(**{**JIT, "fastmath": {"contract", "nsz", "reassoc"}})
def _largest(x):
    """max |x|; NaN where x holds NaN or infinity."""
    most, check = np.float32(0), np.float32(0)
    for i in range(len(x)):
        most = max(most, abs(x[i]))
        check += x[i] * np.float32(0)
    return most + check


@njit(**JIT)
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


@njit(**JIT)
def _quantize_rows(x, values, scales, totals, lo, hi):
    for t in range(lo, hi):
        scales[t] = _quantize_row(x[t], values[t], totals[t])


@njit(parallel=True, **JIT)
def _quantize_rows_parallel(x, values, scales, totals, num_workers):
    for worker in prange(num_workers):
        lo, hi = len(x) * worker // num_workers, len(x) * (worker + 1) // num_workers
        _quantize_rows(x, values, scales, totals, lo, hi)


@njit(**JIT)
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


@njit(**JIT)
def _finish8(sums, rows, panels, x_scales, row, w_scales, bias, out, column):
    """out = sums * scale of the row * scale of the output + bias, for outputs that exist."""
    width = min(panels * PANEL, out.shape[1] - column)
    for r in range(rows):
        target, factor = out[row + r, column : column + width], x_scales[row + r]
        of_row = sums[r * panels * PANEL : r * panels * PANEL + width]
        scales, shift = w_scales[column : column + width], bias[column : column + width]
        for j in range(width):
            target[j] = np.float32(of_row[j]) * (factor * scales[j]) + shift[j]


@njit(**JIT)
def _panel8(rows, row, p, x, x_scales, w, w_scales, bias, out, sums):
    """One int8 panel for `rows` rows from `row`, in tiles as equal as can be."""
    size = x.shape[1]
    flat, at, steps = x.reshape(-1), p * PANEL * size, size // 4
    tiles = -(-rows // MAX_ROWS)
    for t in range(tiles):
        first, m = row + rows * t // tiles, rows * (t + 1) // tiles - rows * t // tiles
        if m == 4:
            _tile8(flat, first * size, size, w, at, 0, steps, sums, 4, 1)
        elif m == 3:
            _tile8(flat, first * size, size, w, at, 0, steps, sums, 3, 1)
        elif m == 2:
            _tile8(flat, first * size, size, w, at, 0, steps, sums, 2, 1)
        else:
            _tile8(flat, first * size, size, w, at, 0, steps, sums, 1, 1)
        _finish8(sums, m, 1, x_scales, first, w_scales, bias, out, p * PANEL)


@njit(parallel=True, **JIT)
def _multiply8(x, x_scales, w, w_scales, bias, out, num_workers):
    num_rows, size = x.shape
    num_panels = -(-out.shape[1] // PANEL)
    for worker in prange(num_workers):
        sums = np.empty(MAX_ROWS * PANEL, np.int32)
        lo, hi = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        if num_rows == 1:
            p, step, flat = lo, PANEL * size, x.reshape(-1)
            while hi - p >= 4:  # four panels at once keep the units busy
                _tile8(flat, 0, size, w, p * step, step, size // 4, sums, 1, 4)
                _finish8(sums, 1, 4, x_scales, 0, w_scales, bias, out, p * PANEL)
                p += 4
            lo = p
        for row in range(0, num_rows, ROW_BLOCK):
            for p in range(lo, hi):
                rows = min(ROW_BLOCK, num_rows - row)
                _panel8(rows, row, p, x, x_scales, w, w_scales, bias, out, sums)


@njit(**JIT)
def linear8(x, w, w_scales, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias; packed int8 w, its scales [N]."""
    values, x_scales, _ = quantize_rows(x, num_workers)
    _multiply8(values, x_scales, w, w_scales, bias, out, num_workers)


@njit(**JIT)
def _finish4(sums, rows, x_scales, row, w_scales, bias, out, column):
    width = min(PANEL, out.shape[1] - column)
    for r in range(rows):
        target, factor = out[row + r, column : column + width], x_scales[row + r]
        of_row, shift = sums[r * PANEL : r * PANEL + width], bias[column : column + width]
        scales = w_scales[column : column + width]
        for j in range(width):
            target[j] = of_row[j] * (factor * scales[j]) + shift[j]


@njit(**JIT)
def _tile4_of(m, x, a, size, totals, b, units, w, at, scales, zeros, s, group, sums, zeroed):
    """`_tile4` for m rows."""
    if zeroed:
        if m == 4:
            _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 4, 1)
        elif m == 3:
            _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 3, 1)
        elif m == 2:
            _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 2, 1)
        else:
            _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 1, 1)
    elif m == 4:
        _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 4, 0)
    elif m == 3:
        _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 3, 0)
    elif m == 2:
        _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 2, 0)
    else:
        _tile4(x, a, size, totals, b, units, w, at, scales, zeros, s, units, group, sums, 1, 0)


@njit(parallel=True, **JIT)
def _multiply4(
    x, x_scales, totals, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers
):
    num_rows, size = x.shape
    units = size // UNIT
    groups = -(-units // units_a_group)
    num_panels = -(-out.shape[1] // PANEL)
    flat, sums_of, zeroed = x.reshape(-1), totals.reshape(-1), len(zeros) > 0
    for worker in prange(num_workers):
        sums = np.empty(MAX_ROWS * PANEL, np.float32)
        lo, hi = num_panels * worker // num_workers, num_panels * (worker + 1) // num_workers
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            tiles = -(-rows // MAX_ROWS)
            for p in range(lo, hi):
                for t in range(tiles):
                    first = row + rows * t // tiles
                    m = rows * (t + 1) // tiles - rows * t // tiles
                    _tile4_of(
                        m, flat, first * size, size, sums_of, first * units, units,
                        w, p * PANEL * size // 2, scales, zeros, p * groups * PANEL,
                        units_a_group, sums, zeroed,
                    )  # fmt: skip
                    _finish4(sums, m, x_scales, first, w_scales, bias, out, p * PANEL)


@njit(**JIT)
def linear4(x, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers):
    """out[T, N] = quantized x[T, K] @ w^T * scales + bias; packed int4 w, its scales [N].

    What each group adds to its output's scale: scales and zeros, flat uint16, the bits of float16
    [panels, groups, 16]; no zeros: an empty array.
    """
    values, x_scales, totals = quantize_rows(x, num_workers)
    _multiply4(
        values, x_scales, totals, w, w_scales, scales, zeros, units_a_group, bias, out, num_workers
    )
