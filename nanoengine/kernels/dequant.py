"""dequantize: converts quantized elements of a panel to floats, 16 at a time, for
`cpu_weight_only.py`.

Many rows multiply floats that were written to memory once. Few rows dequantize in registers
(`matmul_dequantized`), with the same bits.

Why explicit instructions: for all the compiler knows, the arrays that are read and written may
overlap. It would check that before each line, which takes seven times as long. Vectors have 16
lanes, which LLVM splits to the CPU's width.
"""

from __future__ import annotations

from llvmlite import ir

from nanoengine.kernels.emit import I32, Emit, call_named
from nanoengine.kernels.gemm import I8, I16, I64, PANEL, tile_call, tile_function
from nanoengine.kernels.groupwise_gemm import TABLES
from nanoengine.kernels.isa import CURRENT, ISA

AHEAD = 4096  # bytes of a panel between the line that is read and the line that is prefetched
USES_TABLE = CURRENT.vector_bits == 512 and CURRENT.byte_dots != "generic"  # of 16 floats
PANELS_AT_ONCE = 4 if CURRENT.vector_bits == 512 else 2  # for one row: its sums have latency
E2M1, E4M3 = 2, 3  # small float formats; integer formats are their bits, 4 or 8
ZEROS = 16  # added to a form that has zero points
SHORTS, HALVES = ir.VectorType(I16, PANEL), ir.VectorType(ir.HalfType(), PANEL)
BYTES = ir.VectorType(I8, PANEL)
WORDS, FLOATS = ir.VectorType(I32, PANEL), ir.VectorType(ir.FloatType(), PANEL)


def _ints(number, kind=WORDS):
    return ir.Constant(kind, [number] * PANEL)


def _half_byte(build, line, i: int):
    """The lower or the upper 4 bits of each byte."""
    return build.lshr(line, _ints(4, BYTES)) if i else build.and_(line, _ints(15, BYTES))


def _floats(build, line, i=0):
    return build.sitofp(build.sext(line, WORDS), FLOATS)


def _look_up(build, line, i, table):
    """Looks the float values of 4-bit codes up in a table, if `USES_TABLE`."""
    words = build.sext(line, WORDS)  # their lowest 4 bits are the index
    words = build.ashr(words, _ints(4)) if i else words
    table = ir.Constant(FLOATS, [*map(float, table)])
    return call_named(build, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, words)


def _int4(build, line, i):
    if USES_TABLE:
        return _look_up(build, line, i, range(-8, 8))
    return _floats(build, build.sub(_half_byte(build, line, i), _ints(8, BYTES)))


def _e4m3(build, line, i):
    """Moves the sign and the 7 other bits to their positions in a float32, 20 bits higher. The
    result is too small by the difference of the exponent biases; the scale corrects this and also
    normalizes subnormals."""
    kind, bits, shift, scale = WORDS, 32, 20, 2.0**120
    if CURRENT.has_fp16:  # Why float16: its subnormals are not slow.
        kind, bits, shift, scale = SHORTS, 16, 7, 2.0**8
    words = build.sext(line, kind)
    sign = build.and_(build.shl(words, _ints(bits - 8, kind)), _ints(1 << bits - 1, kind))
    magnitude = build.shl(build.and_(words, _ints(127, kind)), _ints(shift, kind))
    float_bits = build.or_(sign, magnitude)
    if CURRENT.has_fp16:
        floats = build.fpext(build.bitcast(float_bits, HALVES), FLOATS)
    else:
        floats = build.bitcast(float_bits, FLOATS)
    return build.fmul(floats, _ints(scale, FLOATS))


def _e2m1(build, line, i):
    """Twice the values of e2m1 codes."""
    if USES_TABLE:
        return _look_up(build, line, i, TABLES[2])
    codes, table = _half_byte(build, line, i), TABLES[2]
    if CURRENT.byte_dots != "generic":
        lookup = ir.Constant(BYTES, [*table])
        return _floats(build, call_named(build, "llvm.x86.ssse3.pshuf.b.128", BYTES, lookup, codes))
    magnitude, value = build.and_(codes, _ints(7, BYTES)), _ints(0, BYTES)
    for code in range(1, 8):
        matches = build.icmp_unsigned("==", magnitude, _ints(code, BYTES))
        value = build.select(matches, _ints(table[code], BYTES), value)
    is_negative = build.icmp_unsigned(">", codes, _ints(7, BYTES))
    return _floats(build, build.select(is_negative, build.neg(value), value))


FORMS = {8: (_floats, 1), 4: (_int4, 2), E4M3: (_e4m3, 1), E2M1: (_e2m1, 2)}
"""For each form: the function that converts it to floats, and the inputs per byte."""


@tile_function("byte* w, float* zeros, float* scales, float* out, count")
def dequantize_lines(builder, isa: ISA, arg, form: int):
    """out[k, j] = (value j of input k - zeros[j]) * scales[j] for k < count. Values are integers
    (4-bit ones are stored plus 8) or small floats, none of them NaN. 4-bit inputs 2 i and 2 i + 1
    are the halves of a byte."""
    emit, (convert, inputs) = Emit(None, builder, isa=isa), FORMS[form]
    zeros, scales = (emit.read(FLOATS, pointer) for pointer in (arg.zeros, arg.scales))

    def line(iteration):
        at = emit.at(arg.w, builder.mul(iteration, I64(PANEL)))
        emit.prefetch(emit.at(at, I64(AHEAD)), level=0)
        codes = emit.read(BYTES, at)
        for i in range(inputs):
            values = builder.fsub(convert(builder, codes, i), zeros)
            target = emit.at(arg.out, builder.mul(iteration, I64(PANEL * inputs)), I64(PANEL * i))
            emit.store(builder.fmul(values, scales), target)

    emit.loop(builder.udiv(arg.count, I64(inputs)), line, unroll=4 // inputs)


@tile_call(
    lambda isa: [(form, 1) for form in FORMS],
    lambda module, kinds, form, _: dequantize_lines(module, CURRENT, form),
)
def dequantize(w, at, zeros, zeros_at, scales, scales_at, out, out_at, count, form, panels):
    """`dequantize_lines` for a form; `panels` is 1."""


@tile_function(
    "float* x, byte* w, w_step, float* zeros, float* scales, step, size, group, float* start,"
    " float* out"
)
def dequantized_row_tile(builder, isa: ISA, arg, form: int, panels: int):
    """out[16 p + j] = start[16 p + j] + the sum over inputs k of x[k] * (value[p, k, j] - zero[j])
    * scale[j], in the steps of `dequantize_lines` and `float_tile`; form + ZEROS: with zero points.

    Panels are `w_step` bytes apart, their scales and zero points `step` elements. Each `group` of
    the `size` inputs has its own scales. Each panel prefetches the line `AHEAD` bytes later; near
    its end, a line of the panels after this tile.
    """
    emit, (convert, inputs) = Emit(None, builder, isa=isa), FORMS[form % ZEROS]
    sums = [emit.variable(emit.read(FLOATS, at)) for at in emit.rows(arg.start, I64(PANEL), panels)]
    position, x, last = emit.variable(arg.w), emit.variable(arg.x), emit.at(arg.w, arg.w_step)
    other_panels = builder.mul(arg.w_step, I64(panels - 1))
    is_small = builder.icmp_signed("<", arg.w_step, I64(AHEAD))
    ahead = emit.variable(emit.at(arg.w, builder.select(is_small, arg.w_step, I64(AHEAD))))

    def load_group(array, index):
        rows = emit.rows(emit.at(array, builder.mul(index, I64(PANEL))), arg.step, panels)
        for row in rows:
            emit.prefetch(emit.at(row, builder.mul(arg.step, I64(panels))), level=0)
        return [emit.read(FLOATS, row) for row in rows]

    def group(index):
        scales = load_group(arg.scales, index)
        zeros = load_group(arg.zeros, index) if form >= ZEROS else scales

        def line(_):
            lines = emit.rows(emit.advance(position, I64(PANEL)), arg.w_step, panels)
            values, fetch = emit.advance(x, I64(inputs)), emit.advance(ahead, I64(PANEL))
            inside = builder.icmp_unsigned("<", fetch, last)
            fetch = emit.at(fetch, builder.select(inside, I64(0), other_panels))
            for pointer in emit.rows(fetch, arg.w_step, panels):
                emit.prefetch(pointer, level=0)
            lines = [emit.read(BYTES, at) for at in lines]
            for i in range(inputs):
                value = emit.splat(builder.load(emit.at(values, I64(i))), FLOATS)
                for codes, zero, scale, total in zip(lines, zeros, scales, sums, strict=True):
                    weight = convert(builder, codes, i)
                    weight = builder.fsub(weight, zero) if form >= ZEROS else weight
                    operands = builder.fmul(weight, scale), value, builder.load(total)
                    builder.store(emit.call(f"llvm.fmuladd.v{PANEL}f32", FLOATS, *operands), total)

        emit.loop(builder.udiv(arg.group, I64(inputs)), line, unroll=2)

    emit.loop(builder.udiv(arg.size, arg.group), group)
    for total, at in zip(sums, emit.rows(arg.out, I64(PANEL), panels), strict=True):
        emit.store(builder.load(total), at)


@tile_call(
    lambda isa: [
        (form + z, panels) for form in FORMS for z in (0, ZEROS) for panels in {1, PANELS_AT_ONCE}
    ],
    lambda module, kinds, form, panels: dequantized_row_tile(module, CURRENT, form, panels),
)
def matmul_dequantized(x, x_at, w, w_at, w_step, zeros, zeros_at, scales, scales_at, step, size,
                     group, start, start_at, out, out_at, form, panels):  # fmt: skip
    """`dequantized_row_tile` for one row and some panels, 1 or `PANELS_AT_ONCE`."""
