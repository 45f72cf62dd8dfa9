"""widen: lines of 16 small numbers of a panel as floats; for `cpu_linear.linear_dequantized`.

Why written out: the arrays that are read and written may overlap for all that the compiler knows,
so it looks before each line whether they do, which takes seven times as long. Vectors have 16
lanes, which LLVM cuts to those of the CPU.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoengine.kernels.emit import I32, Emit
from nanoengine.kernels.tiles import I8, I64, PANEL

AHEAD = 4096  # bytes of a panel, asked for before they are needed
WORDS, FLOATS = ir.VectorType(I32, PANEL), ir.VectorType(ir.FloatType(), PANEL)


def _every(number, kind=WORDS):
    return ir.Constant(kind, [number] * PANEL)


def _whole(build, words):
    return build.sitofp(words, FLOATS)


def _less_eight(build, words):
    return build.sitofp(build.sub(build.and_(words, _every(15)), _every(8)), FLOATS)


def _small_floats(build, words, size, shift, scale):
    """Floats of a sign and `size` other bits, which go to where a float32 has its own, `shift` bits
    up. What comes out is too small by the exponents' middles, hence the `scale`; this also makes
    their smallest numbers normal ones."""
    sign = build.and_(build.shl(words, _every(31 - size)), _every(1 << 31))
    others = build.and_(build.shl(words, _every(shift)), _every((1 << size) - 1 << shift))
    bits = build.bitcast(build.or_(sign, others), FLOATS)
    return build.fmul(bits, _every(scale, FLOATS))


def _e4m3(build, words):
    return _small_floats(build, words, 7, 20, 2.0**120)


def _e2m1(build, words):
    """Twice the numbers."""
    return _small_floats(build, words, 3, 22, 2.0**127)


def _lines_of(convert, pairs):
    def lines(typing, w, at, zeros, zeros_at, scales, scales_at, out, out_at, first, count):
        def codegen(context, builder, sig, args):
            emit = Emit(context, builder)
            source, zeros, scales, target, first, count = emit.operands(sig.args, args)
            less, times = (emit.get(FLOATS, each) for each in (zeros, scales))

            def line(turn):
                k = builder.add(first, turn)
                place = builder.lshr(k, I64(1)) if pairs else k
                at = emit.at(source, builder.mul(place, I64(PANEL)))
                emit.prefetch(emit.at(at, I64(AHEAD)), level=0)
                words = builder.sext(emit.get(ir.VectorType(I8, PANEL), at), WORDS)
                if pairs:
                    shift = builder.shl(builder.and_(k, I64(1)), I64(2))
                    words = builder.ashr(words, emit.splat(builder.trunc(shift, I32), WORDS))
                values = builder.fmul(builder.fsub(convert(builder, words), less), times)
                emit.store(values, emit.at(target, builder.mul(turn, I64(PANEL))))

            emit.loop(count, line, unroll=4)
            return context.get_dummy_value()

        given = w, at, zeros, zeros_at, scales, scales_at, out, out_at, first, count
        return types.void(*given), codegen

    return intrinsic(lines)


widen_whole, widen_pairs = _lines_of(_whole, False), _lines_of(_less_eight, True)
widen_e4m3, widen_e2m1 = _lines_of(_e4m3, False), _lines_of(_e2m1, True)
"""out[i, j] = (value j of input first + i - zeros[j]) * scales[j] for i < count: whole numbers,
those of 4 bits plus 8, or small floats, none of them NaN. Each array is followed by a place in it,
that of w being where its panel begins. Inputs 2 i and 2 i + 1 of 4 bits are the halves of a byte.
"""
