"""Emit: vector instructions for the register tiles of kernels compiled by numba.

A tile written out does not hang on the loop vectorizer, and the sum of one row never depends on the
rows beside it. Used by the CPU kernels of attention and of linear layers.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

from nanoengine.kernels.exp import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2_E, LOWEST
from nanoengine.kernels.isa import CURRENT


class Emit:
    """Writes the vector instructions of one register tile, `bits` a vector."""

    def __init__(self, context, builder, array_type, bits=CURRENT.vector_bits):
        self.context, self.builder = context, builder
        scalar = ir.FloatType() if array_type.dtype == types.float32 else ir.DoubleType()
        self.vector = ir.VectorType(scalar, bits // array_type.dtype.bitwidth)
        self.scalar, self.width = self.vector.element, self.vector.count
        self.suffix = f"v{self.width}f{array_type.dtype.bitwidth}"
        self.align = array_type.dtype.bitwidth // 8

    def pointer(self, array_type, array, offset):
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.gep(data, [offset])

    def at(self, pointer, *offsets):
        for offset in offsets:
            pointer = self.builder.gep(pointer, [offset])
        return pointer

    def load(self, pointer):
        pointer = self.builder.bitcast(pointer, self.vector.as_pointer())
        return self.builder.load(pointer, align=self.align)

    def store(self, value, pointer):
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        self.builder.store(value, pointer, align=self.align)

    def prefetch(self, pointer, *, level=1, write=False):
        """Asks for the cache line at an address, down to the L1 or L2 cache; harmless where there
        is no memory."""
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        access, keep, data = number(int(write)), number(4 - level), number(1)
        self.builder.call(function, [self.builder.bitcast(pointer, byte), access, keep, data])

    def variable(self, value):
        """A mutable vector; LLVM keeps it in a register."""
        cell = cgutils.alloca_once(self.builder, self.vector)
        self.builder.store(value, cell)
        return cell

    def broadcast(self, pointer):
        return self.splat(self.builder.load(pointer))

    def fma(self, a, b, c):
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fmuladd.{self.suffix}"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [a, b, c])

    def constant(self, value):
        return ir.Constant(self.vector, [value] * self.width)

    def splat(self, scalar):
        first = self.builder.insert_element(
            ir.Constant(self.vector, ir.Undefined), scalar, ir.IntType(32)(0)
        )
        return self.shuffle(first, first, [0] * self.width)

    def maximum(self, a, b):
        """The larger of each lane; of a NaN and a number, either."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp(self, x):
        """e ** x for x <= 0, as `kernels.exp.exp`; NaN stays NaN."""
        build = self.builder
        if self.scalar == ir.DoubleType():
            kind = ir.FunctionType(self.vector, [self.vector])
            name = f"llvm.exp.{self.suffix}"
            return build.call(cgutils.get_or_insert_function(build.module, kind, name), [x])
        numbers = ir.VectorType(ir.IntType(32), self.width)
        lowest = self.constant(LOWEST)
        too_low = build.fcmp_ordered("<", x, lowest)
        clamped = build.select(too_low, lowest, x)
        kind = ir.FunctionType(self.vector, [self.vector])
        floor = cgutils.get_or_insert_function(build.module, kind, f"llvm.floor.{self.suffix}")
        n = build.call(floor, [self.fma(clamped, self.constant(LOG2_E), self.constant(0.5))])
        r = self.fma(n, self.constant(-LN2_HIGH), clamped)
        r = self.fma(n, self.constant(-LN2_LOW), r)
        tail = self.constant(COEFFICIENTS[0])
        for coefficient in COEFFICIENTS[1:]:
            tail = self.fma(tail, r, self.constant(coefficient))
        value = build.fadd(self.fma(build.fmul(tail, r), r, r), self.constant(1.0))
        exponent = build.add(build.fptosi(n, numbers), ir.Constant(numbers, [127] * self.width))
        power = build.shl(exponent, ir.Constant(numbers, [23] * self.width))
        value = build.fmul(value, build.bitcast(power, self.vector))
        return build.select(too_low, self.constant(0.0), value)

    def across(self, vectors, combine):
        """One number of all lanes of all vectors: pairs of vectors first, then halves of lanes."""
        while len(vectors) > 1:
            vectors = [combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        (vector,) = vectors
        half = self.width // 2
        while half:
            lanes = [(i + half) % self.width for i in range(self.width)]
            vector = combine(vector, self.shuffle(vector, vector, lanes))
            half //= 2
        return self.builder.extract_element(vector, ir.IntType(32)(0))

    def shuffle(self, a, b, lanes):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, mask)

    def fold(self, a, b, lanes, step):
        """Adds the lanes `lanes` of (a, b) to those `step` further on."""
        other = self.shuffle(a, b, [lane + step for lane in lanes])
        return self.builder.fadd(self.shuffle(a, b, lanes), other)

    def sums_of_four(self, a, b, c, d):
        """[sum(a), sum(b), sum(c), sum(d)], as one tree for all: a third of the work of four."""
        width, half, quarter = self.width, self.width // 2, self.width // 4
        firsts = [*range(half), *range(width, width + half)]
        x, y = self.fold(a, b, firsts, half), self.fold(c, d, firsts, half)
        starts = (0, width, half, width + half)  # of the partial sums of a, c, b, d
        z = self.fold(x, y, [s + i for s in starts for i in range(quarter)], quarter)
        while quarter > 1:
            quarter //= 2
            z = self.fold(
                z, z, [2 * quarter * s + i for s in range(4) for i in range(quarter)], quarter
            )
        return self.shuffle(z, z, [0, 2, 1, 3])
