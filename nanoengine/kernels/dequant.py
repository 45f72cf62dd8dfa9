"""widen: converts quantized elements of a panel to floats, 16 at a time, for `cpu_weight_only.py`.

Many rows multiply floats that were written to memory once. One row multiplies them in registers
(`multiply_widened`), with the same bits.

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

AHEAD = 4096  # bytes of a panel, prefetched before they are needed
LOOKS_UP = CURRENT.vector_bits == 512 and CURRENT.byte_dots != "generic"  # codes in a table of 16
AT_ONCE = 4 if CURRENT.vector_bits == 512 else 2  # panels of one row, which waits for its own sums
E2M1, E4M3 = 2, 3  # small float formats; integer formats are their bits, 4 or 8
ZEROS = 16  # added to a form that has zero points
SHORTS, HALVES = ir.VectorType(I16, PANEL), ir.VectorType(ir.HalfType(), PANEL)
BYTES = ir.VectorType(I8, PANEL)
WORDS, FLOATS = ir.VectorType(I32, PANEL), ir.VectorType(ir.FloatType(), PANEL)


def _every(number, kind=WORDS):
    return ir.Constant(kind, [number] * PANEL)


def _half(build, line, i: int):
    """The lower or the upper 4 bits of each byte."""
    return build.lshr(line, _every(4, BYTES)) if i else build.and_(line, _every(15, BYTES))


def _floats(build, line):
    return build.sitofp(build.sext(line, WORDS), FLOATS)


def _whole(build, line, i):
    return _floats(build, line)


def _of_table(build, line, i, table):
    """The float value of each 4-bit code, if the CPU `LOOKS_UP`."""
    words = build.sext(line, WORDS)  # their lowest 4 bits are the index
    words = build.ashr(words, _every(4)) if i else words
    table = ir.Constant(FLOATS, [*map(float, table)])
    return call_named(build, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, words)


def _less_eight(build, line, i):
    if LOOKS_UP:
        return _of_table(build, line, i, range(-8, 8))
    return _floats(build, build.sub(_half(build, line, i), _every(8, BYTES)))


def _e4m3(build, line, i):
    """Moves the sign and the 7 other bits to their place in a float32, 20 bits higher. The result
    is too small by the difference of the exponent biases; scaling also normalizes subnormals."""
    kind, bits, shift, scale = WORDS, 32, 20, 2.0**120
    if CURRENT.halves:  # Through float16, whose subnormals are not slower than other numbers.
        kind, bits, shift, scale = SHORTS, 16, 7, 2.0**8
    words = build.sext(line, kind)
    sign = build.and_(build.shl(words, _every(bits - 8, kind)), _every(1 << bits - 1, kind))
    others = build.shl(build.and_(words, _every(127, kind)), _every(shift, kind))
    both = build.or_(sign, others)
    if CURRENT.halves:
        wide = build.fpext(build.bitcast(both, HALVES), FLOATS)
    else:
        wide = build.bitcast(both, FLOATS)
    return build.fmul(wide, _every(scale, FLOATS))


def _e2m1(build, line, i):
    """Twice the numbers."""
    if LOOKS_UP:
        return _of_table(build, line, i, TABLES[2])
    codes, table = _half(build, line, i), TABLES[2]
    if CURRENT.byte_dots != "generic":
        known = ir.Constant(BYTES, [*table])
        return _floats(build, call_named(build, "llvm.x86.ssse3.pshuf.b.128", BYTES, known, codes))
    size, found = build.and_(codes, _every(7, BYTES)), _every(0, BYTES)
    for code in range(1, 8):
        is_it = build.icmp_unsigned("==", size, _every(code, BYTES))
        found = build.select(is_it, _every(table[code], BYTES), found)
    is_less = build.icmp_unsigned(">", codes, _every(7, BYTES))
    return _floats(build, build.select(is_less, build.neg(found), found))


FORMS = {8: (_whole, 1), 4: (_less_eight, 2), E4M3: (_e4m3, 1), E2M1: (_e2m1, 2)}
"""For each form: the function that converts it to floats, and the inputs per byte."""


@tile_function("byte* w, float* zeros, float* scales, float* out, count")
def widened_lines(builder, isa: ISA, of, form: int):
    """out[k, j] = (value j of input k - zeros[j]) * scales[j] for k < count. Values are integers
    (4-bit ones are stored plus 8) or small floats, none of them NaN. 4-bit inputs 2 i and 2 i + 1
    are the halves of a byte."""
    emit, (convert, inputs) = Emit(None, builder, isa=isa), FORMS[form]
    less, times = (emit.get(FLOATS, each) for each in (of.zeros, of.scales))

    def line(turn):
        at = emit.at(of.w, builder.mul(turn, I64(PANEL)))
        emit.prefetch(emit.at(at, I64(AHEAD)), level=0)
        numbers = emit.get(BYTES, at)
        for i in range(inputs):
            values = builder.fsub(convert(builder, numbers, i), less)
            to = emit.at(of.out, builder.mul(turn, I64(PANEL * inputs)), I64(PANEL * i))
            emit.store(builder.fmul(values, times), to)

    emit.loop(builder.udiv(of.count, I64(inputs)), line, unroll=4 // inputs)


@tile_call(
    lambda isa: [(form, 1) for form in FORMS],
    lambda module, kinds, form, _: widened_lines(module, CURRENT, form),
)
def widen(w, at, zeros, zeros_at, scales, scales_at, out, out_at, count, form, one):
    """`widened_lines` of a form."""


@tile_function(
    "float* x, byte* w, w_step, float* zeros, float* scales, step, size, group, float* start,"
    " float* out"
)
def widened_tile(builder, isa: ISA, of, form: int, panels: int):
    """out[16 p + j] = start[16 p + j] + the sum over inputs k of x[k] * (value[p, k, j] - zero[j])
    * scale[j], in the steps of `widened_lines` and `float_tile`; a form + `ZEROS` has zero points.

    Panels are `w_step` bytes apart, their scales and zero points `step` elements. Each `group` of
    the `size` inputs has its own. Panels prefetch what they read `AHEAD` bytes later; near their
    end, data of the panels after this tile.
    """
    emit, (convert, inputs) = Emit(None, builder, isa=isa), FORMS[form % ZEROS]
    sums = [emit.variable(emit.get(FLOATS, at)) for at in emit.rows(of.start, I64(PANEL), panels)]
    place, x, last = emit.variable(of.w), emit.variable(of.x), emit.at(of.w, of.w_step)
    beyond = builder.mul(of.w_step, I64(panels - 1))
    is_small = builder.icmp_signed("<", of.w_step, I64(AHEAD))
    asked = emit.variable(emit.at(of.w, builder.select(is_small, of.w_step, I64(AHEAD))))

    def of_group(array, index):
        rows = emit.rows(emit.at(array, builder.mul(index, I64(PANEL))), of.step, panels)
        for row in rows:
            emit.prefetch(emit.at(row, builder.mul(of.step, I64(panels))), level=0)
        return [emit.get(FLOATS, row) for row in rows]

    def group(index):
        scales = of_group(of.scales, index)
        zeros = of_group(of.zeros, index) if form >= ZEROS else scales

        def line(_):
            lines = emit.rows(emit.moved(place, I64(PANEL)), of.w_step, panels)
            values, ask = emit.moved(x, I64(inputs)), emit.moved(asked, I64(PANEL))
            inside = builder.icmp_unsigned("<", ask, last)
            ask = emit.at(ask, builder.select(inside, I64(0), beyond))
            for each in emit.rows(ask, of.w_step, panels):
                emit.prefetch(each, level=0)
            lines = [emit.get(BYTES, at) for at in lines]
            for i in range(inputs):
                value = emit.splat(builder.load(emit.at(values, I64(i))), FLOATS)
                for numbers, zero, scale, total in zip(lines, zeros, scales, sums, strict=True):
                    number = convert(builder, numbers, i)
                    number = builder.fsub(number, zero) if form >= ZEROS else number
                    given = builder.fmul(number, scale), value, builder.load(total)
                    builder.store(emit.call(f"llvm.fmuladd.v{PANEL}f32", FLOATS, *given), total)

        emit.loop(builder.udiv(of.group, I64(inputs)), line, unroll=2)

    emit.loop(builder.udiv(of.size, of.group), group)
    for total, at in zip(sums, emit.rows(of.out, I64(PANEL), panels), strict=True):
        emit.store(builder.load(total), at)


@tile_call(
    lambda isa: [
        (form + z, panels) for form in FORMS for z in (0, ZEROS) for panels in {1, AT_ONCE}
    ],
    lambda module, kinds, form, panels: widened_tile(module, CURRENT, form, panels),
)
def multiply_widened(x, x_at, w, w_at, w_step, zeros, zeros_at, scales, scales_at, step, size,
                     group, start, start_at, out, out_at, form, panels):  # fmt: skip
    """`widened_tile` for one row and some panels, 1 or `AT_ONCE`."""
