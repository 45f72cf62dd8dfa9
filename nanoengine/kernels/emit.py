"""Emit: vector instructions for the register tiles of kernels compiled by numba.

The compiler's loop vectorizer may or may not vectorize a loop. A tile with explicit instructions
does not depend on it, and the sum of one row never depends on the other rows. The CPU kernels of
attention and of linear layers use it.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.isa import CURRENT

I32 = ir.IntType(32)
FLOATS = types.Array(types.float32, 1, "C")


def emit_intrinsic(result=types.void, *, literals=False):
    """A decorator that makes an intrinsic: where compiled code calls it, the decorated function
    `write(emit, *values)` writes the instructions. It gets an `Emit`, whose `kinds` maps argument
    names to types, and LLVM values.

    `result` is the type of its return value; with `literals` the types of constants contain their
    values.
    """

    def decorate(write):
        return _make(write, [*inspect.signature(write).parameters][1:], write, result, literals)

    return decorate


def declare_intrinsic(write):
    """Like `emit_intrinsic()`, but `write` writes the instructions, and the decorated function only
    gives the name and the arguments."""
    return lambda stub: _make(stub, [*inspect.signature(stub).parameters], write)


def _make(stub, parameters, write, result=types.void, literals=False):
    def codegen(context, builder, signature, args):
        emit = Emit(context, builder)
        emit.kinds = SimpleNamespace(**dict(zip(parameters, signature.args, strict=True)))
        value = write(emit, *args)
        return context.get_dummy_value() if value is None else value

    def call(typing, *arg_types):
        return result(*arg_types), codegen

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["typing", *parameters]
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    call.__name__, call.__doc__ = stub.__name__, stub.__doc__
    return intrinsic(prefer_literal=literals)(call)


def call_named(builder, name, result, *arguments):
    """Calls an LLVM intrinsic, or a function registered under this name."""
    function_type = ir.FunctionType(result, [a.type for a in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, arguments)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Emit:
    """Writes the vector instructions of one register tile, `bits` per vector.

    Attributes:
        kinds: maps argument names to types, in an `emit_intrinsic`.
    """

    kinds = SimpleNamespace()

    def __init__(self, context, builder, array_type=FLOATS, bits=CURRENT.vector_bits, isa=CURRENT):
        self.context, self.builder, self.isa = context, builder, isa
        scalar = ir.FloatType() if array_type.dtype == types.float32 else ir.DoubleType()
        self.vector = ir.VectorType(scalar, bits // array_type.dtype.bitwidth)
        self.scalar, self.width = self.vector.element, self.vector.count
        self.words = ir.VectorType(I32, self.width)
        self.suffix = f"v{self.width}f{array_type.dtype.bitwidth}"
        self.align = array_type.dtype.bitwidth // 8

    def pointer(self, array_type, array, offset):
        data = self.context.make_array(array_type)(self.context, self.builder, array).data
        return self.builder.gep(data, [offset])

    def operands(self, *arguments):
        """Replaces each array and the index after it by a pointer; keeps other arguments. They are
        the first arguments of the function."""
        kinds, arguments, operands = iter(vars(self.kinds).values()), iter(arguments), []
        for argument in arguments:
            if isinstance(kind := next(kinds), types.Array):
                next(kinds)
                argument = self.pointer(kind, argument, next(arguments))
            operands.append(argument)
        return operands

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

    def read(self, kind, pointer, offset=0):
        """A vector of this type, `offset` elements of the pointer's type after the pointer."""
        pointer = self.at(pointer, ir.IntType(64)(offset))
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=1)

    def rows(self, pointer, stride, count):
        """Pointers to `count` rows, `stride` elements apart."""
        pointers = [pointer]
        while len(pointers) < count:
            pointers.append(self.at(pointers[-1], stride))
        return pointers

    def call(self, name, result, *arguments):
        return call_named(self.builder, name, result, *arguments)

    def loop(self, count, body, unroll=1):
        """Writes a loop over `body(i)` for i < count, unrolled `unroll` times. LLVM must not unroll
        it further, because it would ignore the number of registers."""
        builder, word = self.builder, count.type
        iterations = builder.udiv(count, word(unroll))

        def unrolled(index):
            first = builder.mul(index, word(unroll))
            for i in range(unroll):
                body(builder.add(first, word(i)))

        self._plain_loop(word(0), iterations, unrolled)
        if unroll > 1:
            self._plain_loop(builder.mul(iterations, word(unroll)), count, body)

    def _plain_loop(self, start, stop, body):
        builder, entry = self.builder, self.builder.block
        body_block, done = builder.append_basic_block(), builder.append_basic_block()
        builder.cbranch(builder.icmp_unsigned("<", start, stop), body_block, done)
        builder.position_at_end(body_block)
        index = builder.phi(start.type)
        index.add_incoming(start, entry)
        body(index)
        next_index = builder.add(index, start.type(1))
        index.add_incoming(next_index, builder.block)
        branch = builder.cbranch(builder.icmp_unsigned("<", next_index, stop), body_block, done)
        branch.set_metadata("llvm.loop", self._no_unroll_hint())
        builder.position_at_end(done)

    def _no_unroll_hint(self):
        """Metadata that disables LLVM's unrolling: a node that refers to itself, then the hint."""
        module = self.builder.module
        node = ir.MDValue(module, [], name=str(len(module.metadata)))
        node.operands = (node, module.add_metadata(["llvm.loop.unroll.disable"]))
        return node

    def prefetch(self, pointer, *, level=1, write=False):
        """Prefetches the cache line at an address to the L1 or L2 cache; an invalid address is
        ignored. Level 0: the line is read only once, and need not stay in any cache."""
        byte = self.builder.bitcast(pointer, ir.IntType(8).as_pointer())
        access, keep, data = I32(int(write)), I32(4 - level if level else 0), I32(1)
        self.call("llvm.prefetch.p0", ir.VoidType(), byte, access, keep, data)

    def variable(self, value):
        """A mutable vector, scalar or pointer; LLVM keeps it in a register."""
        cell = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, cell)
        return cell

    def advance(self, cell, step):
        """Returns the pointer in a cell, then advances the cell by `step` elements."""
        pointer = self.builder.load(cell)
        self.builder.store(self.at(pointer, step), cell)
        return pointer

    def broadcast(self, pointer):
        return self.splat(self.builder.load(pointer))

    def fma(self, a, b, c):
        return self.call(f"llvm.fmuladd.{self.suffix}", self.vector, a, b, c)

    def add_product(self, total, a, b):
        """total + a * b, rounded once for floats, and once per product for bfloat16 pairs."""
        if a.type == self.vector:
            return self.fma(a, b, total)
        kind = ir.VectorType(BFloat(), 2 * self.width)
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.width}"
        return self.call(name, self.vector, total, *(self.builder.bitcast(x, kind) for x in (a, b)))

    def unpack_bf16(self, pairs):
        """The first (high) and the second (low) bfloat16 of each word, as floats."""
        first = self.builder.and_(pairs, self.ints(0xFFFF0000))
        second = self.builder.shl(pairs, self.ints(16))
        return [self.builder.bitcast(bits, self.vector) for bits in (first, second)]

    def fp16_to_fp32(self, bits):
        """Converts a vector with the bits of float16 to float32."""
        if self.isa.has_fp16:
            halves = ir.VectorType(ir.HalfType(), bits.type.count)
            return self.builder.fpext(self.builder.bitcast(bits, halves), self.vector)
        # Why by hand: without an instruction LLVM would call a function per element.
        build, wide, ints = self.builder, self.words, self.ints
        word = build.zext(bits, wide)
        magnitude = build.shl(build.and_(word, ints(0x7FFF)), ints(13))
        # 2 ** 112 moves the exponent's bias from 15 to 127, and makes subnormals normal.
        scale = build.bitcast(ints(0x77800000), self.vector)
        finite = build.bitcast(build.fmul(build.bitcast(magnitude, self.vector), scale), wide)
        is_inf_or_nan = build.icmp_unsigned(">=", magnitude, ints(0x7C00 << 13))
        magnitude = build.select(is_inf_or_nan, build.or_(magnitude, ints(0x7F800000)), finite)
        sign = build.shl(build.and_(word, ints(0x8000)), ints(16))
        return build.bitcast(build.or_(magnitude, sign), self.vector)

    def constant(self, value):
        return ir.Constant(self.vector, [value] * self.width)

    def ints(self, number, kind=None):
        """An integer in all lanes; of 32 bits and the tile's width if no type is given."""
        kind = kind or self.words
        return ir.Constant(kind, [number] * kind.count)

    def splat(self, scalar, kind=None):
        """The scalar in all lanes of a vector; floats of the tile's width if no type is given."""
        undefined = ir.Constant(kind or self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, I32(0))
        return self.shuffle(first, first, [0] * first.type.count)

    def maximum(self, a, b):
        """The larger value of each lane; either value if one of them is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def reduce_vectors(self, vectors, combine):
        """Reduces several vectors to one: combines the first half with the second until one is
        left."""
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [combine(a, b) for a, b in zip(vectors[:half], vectors[half:], strict=True)]
        return vectors[0]

    def reduce_lanes(self, vectors, combine):
        """Reduces all lanes of all vectors to one scalar: combines the first half with the second
        until one lane is left. The order of combination does not depend on the vector width."""
        vector, half = self.reduce_vectors(vectors, combine), self.width // 2
        while half:
            lanes = [(i + half) % self.width for i in range(self.width)]
            vector = combine(vector, self.shuffle(vector, vector, lanes))
            half //= 2
        return self.builder.extract_element(vector, I32(0))

    def shuffle(self, a, b, lanes):
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
        return self.builder.shuffle_vector(a, b, mask)
