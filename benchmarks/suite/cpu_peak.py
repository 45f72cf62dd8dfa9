"""Peak rates of the CPU, with the instructions that the kernels use.

`peak.py` times these kernels. Each compute kernel keeps its sums in registers and reads no memory,
so it runs at the rate of the arithmetic units, with the width of `isa.CURRENT`; the read kernel
only reads. A library's matrix product is not a limit: it may use narrower instructions than the CPU
has.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanoengine.kernels.emit import Emit
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for, share_of


def chains(isa: ISA) -> int:
    """Sums per worker: enough to hide the latency of each, few enough for the registers."""
    return 3 * isa.registers // 4


CHAINS = chains(CURRENT)
ROOM = 64 * (CHAINS + 2) // 4
"""float32 values with which a worker of a compute kernel starts."""

LINE = 16  # int32 values per cache line
STREAMS = 4  # positions that a worker reads in parallel
TURN = 4  # lines per position before the next position
AHEAD = 64  # lines that are prefetched
PAGE = 1024 * STREAMS * LINE  # a worker's share is a multiple of this many int32 values


def operations(kind: str) -> int:
    """Multiplications and additions per iteration of a compute kernel."""
    bits, numbers = (CURRENT.byte_bits, 8) if kind == "int8" else (CURRENT.vector_bits, 0)
    numbers = numbers or {"float64": 64, "float32": 32, "bfloat16": 16}[kind]
    return 2 * CHAINS * bits // numbers


def write_products(builder, isa: ISA, kind: str, line, iterations) -> None:
    """Writes `iterations` iterations of the products of the first two vectors at `line`, each
    added to one of the following vectors.

    Args:
        kind: "float" (of the type that `line` points to), "bfloat16" or "int8".
    """
    bits = isa.byte_bits if kind == "int8" else isa.vector_bits
    floats = ir.VectorType(line.type.pointee, bits // (64 if "double" in str(line.type) else 32))
    words = ir.VectorType(ir.IntType(32), bits // 32)
    operand = floats if kind == "float" else words
    sums = words if kind == "int8" else floats

    def pointer(i: int, vector: ir.Type):
        pointer = builder.gep(line, [ir.IntType(64)(i * floats.count)])
        return builder.bitcast(pointer, vector.as_pointer())

    def call(name: str, result: ir.Type, *given):
        of = ir.FunctionType(result, [value.type for value in given])
        return builder.call(cgutils.get_or_insert_function(builder.module, of, name), given)

    def product(x, y, total):
        if kind == "float":
            suffix = f"v{floats.count}f{bits // floats.count}"
            return call(f"llvm.fma.{suffix}", floats, x, y, total)
        if kind == "bfloat16":
            return call(f"llvm.x86.avx512bf16.dpbf16ps.{bits}", sums, total, x, y)
        if isa.byte_dots == "vpdpbusd":
            return call(f"llvm.x86.avx512.vpdpbusd.{bits}", sums, total, x, y)
        # Why of the sum: the compiler would move a constant product out of the loop.
        of_bytes, pairs = (ir.VectorType(ir.IntType(n), bits // n) for n in (8, 16))
        both = [builder.bitcast(value, of_bytes) for value in (x, total)]
        added = call("llvm.x86.avx2.pmadd.ub.sw", pairs, *both)
        ones = ir.Constant(pairs, [1] * pairs.count)
        return builder.add(total, call("llvm.x86.avx2.pmadd.wd", sums, added, ones))

    x, y = (builder.load(pointer(i, operand), align=4) for i in range(2))
    pointers = [pointer(2 + i, sums) for i in range(chains(isa))]
    cells = [cgutils.alloca_once_value(builder, builder.load(at, align=4)) for at in pointers]
    with cgutils.for_range(builder, iterations):
        for cell in cells:
            builder.store(product(x, y, builder.load(cell)), cell)
    for cell, at in zip(cells, pointers, strict=True):
        builder.store(builder.load(cell), at, align=4)


@intrinsic(prefer_literal=True)
def _multiply(typing, data, iterations, kind):
    """`write_products` on the values of `data`."""
    signature, chosen = types.void(data, iterations, kind), kind.literal_value

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, data)
        line = emit.pointer(data, args[0], args[1].type(0))
        write_products(builder, CURRENT, chosen, line, args[1])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _read(typing, data, at, lines, apart):
    """The bitwise or of `lines` lines at each of STREAMS positions, `apart` values from each other:
    so no load can be omitted."""
    signature = types.int32(data, at, lines, apart)

    def codegen(context, builder, sig, args):
        emit, word = Emit(context, builder, data), args[1].type
        numbers = ir.VectorType(ir.IntType(32), emit.width)
        first = emit.pointer(data, args[0], args[1])
        starts = [emit.at(first, builder.mul(args[3], word(s))) for s in range(STREAMS)]
        zero = ir.Constant(numbers, None)
        cells = [cgutils.alloca_once_value(builder, zero) for _ in range(STREAMS * TURN)]
        with cgutils.for_range(builder, builder.sdiv(args[2], word(TURN))) as loop:
            at = builder.mul(loop.index, word(TURN * LINE))
            for s, start in enumerate(starts):
                for i in range(TURN):
                    line = emit.at(start, at, word(i * LINE))
                    emit.prefetch(emit.at(line, word(AHEAD * LINE)))
                    cell = cells[s * TURN + i]
                    for part in range(0, LINE, emit.width):
                        pointer = builder.bitcast(emit.at(line, word(part)), numbers.as_pointer())
                        got = builder.load(pointer, align=4)
                        builder.store(builder.or_(builder.load(cell), got), cell)
        return emit.reduce_lanes([builder.load(cell) for cell in cells], builder.or_)

    return signature, codegen


@compiled(fastmath=())
def _multiply_floats(data, iterations, lo, hi):
    for worker in range(lo, hi):
        _multiply(data[worker], iterations, "float")


@compiled(fastmath=())
def multiply_floats(data, iterations):
    """data[workers, ROOM]: sums of float32 or float64 products, each worker in its own row."""
    parallel_for(_multiply_floats, len(data), len(data), (data, iterations))


@compiled(fastmath=())
def _multiply_bfloat16(data, iterations, lo, hi):
    for worker in range(lo, hi):
        _multiply(data[worker], iterations, "bfloat16")


@compiled(fastmath=())
def multiply_bfloat16(data, iterations):
    """The same with pairs of bfloat16 values, added in float32."""
    parallel_for(_multiply_bfloat16, len(data), len(data), (data, iterations))


@compiled(fastmath=())
def _multiply_bytes(data, iterations, lo, hi):
    for worker in range(lo, hi):
        _multiply(data[worker], iterations, "int8")


@compiled(fastmath=())
def multiply_bytes(data, iterations):
    """The same with bytes, added in 32 bits."""
    parallel_for(_multiply_bytes, len(data), len(data), (data, iterations))


KERNELS = {"float32": multiply_floats, "float64": multiply_floats}
if CURRENT.bf16_dots == "vdpbf16ps":
    KERNELS["bfloat16"] = multiply_bfloat16
if CURRENT.byte_dots != "generic":
    KERNELS["int8"] = multiply_bytes


@compiled(fastmath=())
def _touch(data, num_workers, first, last):
    for worker in range(first, last):
        lo, hi = share_of(len(data) // PAGE, worker, num_workers)
        data[lo * PAGE : hi * PAGE] = 1


@compiled(fastmath=())
def touch(data, num_workers):
    """Writes all of data; each worker writes the share that `read` gives it. So on a machine with
    several sockets, the memory of each worker is local."""
    parallel_for(_touch, num_workers, num_workers, (data, num_workers))


@compiled(fastmath=())
def _read_shares(data, found, num_workers, first, last):
    for worker in range(first, last):
        lo, hi = share_of(len(data) // PAGE, worker, num_workers)
        lines = (hi - lo) * (PAGE // STREAMS // LINE)
        found[worker] = _read(data, lo * PAGE, lines, lines * LINE)


@compiled(fastmath=())
def read(data, found, num_workers):
    """Reads complete pages of the int32 values `data` once."""
    parallel_for(_read_shares, num_workers, num_workers, (data, found, num_workers))


def buffer(nbytes: int, num_workers: int) -> np.ndarray:
    """Memory to read, touched."""
    data = np.empty(max(1, nbytes // (4 * PAGE)) * PAGE, np.int32)
    touch(data, num_workers)
    return data
