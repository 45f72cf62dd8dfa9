"""widen: 16 small numbers of a panel's line as floats; for `cpu_linear.linear_dequantized`.

Why written out: the arrays that are read and written may overlap for all that the compiler knows,
so it looks before each line whether they do, which takes seven times as long. Vectors have 16
lanes, which LLVM cuts to those of the CPU.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanoengine.kernels.emit import I32, Emit
from nanoengine.kernels.tiles import I8, PANEL

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


def _line_of(convert):
    def line(typing, w, at, shift, zeros, zeros_at, scales, scales_at, out, out_at):
        def codegen(context, builder, sig, args):
            emit = Emit(context, builder)
            source, shift, zeros, scales, target = emit.operands(sig.args, args)
            words = builder.sext(emit.get(ir.VectorType(I8, PANEL), source), WORDS)
            shifts = emit.splat(builder.trunc(shift, I32), WORDS)
            values = convert(builder, builder.ashr(words, shifts))
            values = builder.fsub(values, emit.get(FLOATS, zeros))
            emit.store(builder.fmul(values, emit.get(FLOATS, scales)), target)
            return context.get_dummy_value()

        given = w, at, shift, zeros, zeros_at, scales, scales_at, out, out_at
        return types.void(*given), codegen

    return intrinsic(line)


widen_whole, widen_pairs = _line_of(_whole), _line_of(_less_eight)
widen_e4m3, widen_e2m1 = _line_of(_e4m3), _line_of(_e2m1)
"""out[j] = (value j - zeros[j]) * scales[j] for 16 bytes of w: whole numbers, those of 4 bits plus
8, or small floats, none of them NaN. Each array is followed by a place in it; `shift` is which bit
of a byte comes first."""
