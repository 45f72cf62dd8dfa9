"""tile: rows of inputs times panels of weights, all sums in registers; the core of `cpu_linear`.

    panel, line after line of 64 bytes      16 adjacent outputs
    float32            input k                   line k
    float16            inputs 2 k, 2 k + 1       half a line each
    bfloat16, pairs    inputs 2 k, 2 k + 1       high and low half of 32 bits per output

A tile of `rows` x `panels` reads one line of each panel per iteration. It adds the products of the
line with one or two inputs of each row. **Each sum is one chain of fused multiply-adds over the
inputs in order**, whatever the shape of the tile and the width of its vectors, so a row has the
same bits in any tile.

16-bit weights are converted to float32 in registers, exactly. `pairs` are bfloat16 weights for
bfloat16 inputs, both in 32-bit words. `vdpbf16ps` adds the product of the high halves to a sum,
then the product of the low halves, each with one rounding, so the layout gives the order of the
chain. The sums equal those with `bfloat16` weights and the same inputs as float32, except that
values below 1e-38 count as zeros.

The registers determine the rows and panels of a tile: `ROWS` and `PANELS`. Each tile is a separate
function, so that its loop has all registers and it is compiled once for all callers.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from llvmlite import ir
from numba import types

from nanoengine.kernels.emit import I32, Emit, declare_intrinsic, emit_intrinsic
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.jit import specialize

PANEL = 16  # adjacent outputs
LINE = 64  # bytes of a panel that a tile reads per iteration

I8, I16, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.FloatType()


def tile_rows(isa: ISA) -> int:
    """Rows of the largest tile: sums, the weights of an iteration and an input fill the
    registers."""
    vectors = PANEL * 32 // isa.vector_bits * tile_panels(isa)
    # Why 8: more rows of 512 bits are no faster.
    return min(8, (isa.registers - vectors - 1) // vectors)


def tile_panels(isa: ISA) -> int:
    """Panels of a tile of many rows. At 512 bits a register holds a whole line, so with one panel
    there would be one load per multiplication."""
    return 2 if isa.vector_bits == 8 * LINE else 1


def few_row_panels(isa: ISA) -> dict[int, int]:
    """Panels per tile by its number of rows, for so few rows that with one panel the FMA units
    would wait for their own sums."""
    if tile_panels(isa) == 2:
        return {1: 2}
    vectors, limit = PANEL * 32 // isa.vector_bits, isa.registers // 4 * 3  # sums in registers
    return {r: 4 if 4 * r * vectors < limit else 2 for r in (1, 2) if 2 * r * vectors <= limit}


def tile_shapes(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of every tile."""
    shapes = {(r, p) for r in range(1, tile_rows(isa) + 1) for p in (1, tile_panels(isa))}
    return sorted(shapes | set(few_row_panels(isa).items()))


ROWS, PANELS = tile_rows(CURRENT), tile_panels(CURRENT)
FEW = few_row_panels(CURRENT)


def form_of(array_type) -> str:
    """The format of the elements of a packed weight.

    numba has no 16-bit floats on a CPU, so their bits are stored as integers: int16 is float16,
    uint16 bfloat16, uint32 pairs of bfloat16.
    """
    names = {types.float32: "float32", types.int16: "float16", types.uint16: "bfloat16"}
    return names.get(array_type.dtype, "pairs")


class FloatTile(Emit):
    """Writes the loop body of a tile: reads a line of weights, and an input."""

    def __init__(self, builder, isa: ISA, kind: str):
        super().__init__(None, builder, bits=isa.vector_bits, isa=isa)
        self.kind = kind
        self.inputs = 1 if kind in ("float32", "pairs") else 2  # of a row, per iteration

    def weights(self, line, k: int) -> list:
        """The vectors of one line for input k of an iteration. Why not for both inputs: if sums
        fill the registers, only the vectors of one fit."""
        vectors = PANEL // self.width
        if self.kind == "float16":
            halves = ir.VectorType(I16, self.width)
            return [
                self.fp16_to_fp32(self.read(halves, line, (k * vectors + v) * self.width * 2))
                for v in range(vectors)
            ]
        if self.kind == "float32":
            return [self.read(self.vector, line, v * self.width * 4) for v in range(vectors)]
        pairs = [self.read(self.words, line, v * self.width * 4) for v in range(vectors)]
        return pairs if self.kind == "pairs" else [self.unpack_bf16(pair)[k] for pair in pairs]

    def value(self, row, iteration, k: int):
        """Input k of a row for an iteration, in all lanes."""
        if self.kind == "pairs":
            return self.splat(self.read(I32, self.at(row, iteration)), self.words)
        return self.broadcast(self.at(row, self.builder.mul(iteration, I64(self.inputs)), I64(k)))


POINTERS = {f"{name}*": kind.as_pointer() for name, kind in {
    "byte": I8, "short": I16, "half": I16, "int": I32, "float": FLOAT
}.items()}  # fmt: skip


def tile_function(arguments: str):
    """A decorator for a function that writes a tile. It becomes `make(module, isa, *shape)`, which
    returns the tile's function in the module, and writes it if it does not exist. `arguments` with
    a type are pointers, the others 64-bit integers.

    Why a function: kernels that are compiled together share it, and its loop has all registers.
    """
    fields = [field.split() for field in arguments.split(",")]
    kinds = [POINTERS[field[0]] if len(field) == 2 else I64 for field in fields]

    def decorate(write):
        @functools.wraps(write)
        def make(module, isa, *shape, **named):
            shape = (*shape, *named.values())
            name = "_".join(map(str, ("nanoengine", write.__name__, *shape, isa.name)))
            if name not in module.globals:
                function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                builder = ir.IRBuilder(function.append_basic_block())
                values = {field[-1]: arg for field, arg in zip(fields, function.args, strict=True)}
                write(builder, isa, SimpleNamespace(**values), *shape)
                builder.ret_void()
            return module.globals[name]

        make.kinds = kinds
        return make

    return decorate


def tile_call(shapes, make):
    """A decorator for a function that compiled code calls: it calls the tile for its last two
    arguments, rows and panels, which are one of `shapes(isa)`; `make(module, kinds, rows, panels)`
    makes the tile. The other arguments are the tile's, with an array and an index for each
    pointer."""

    def write(emit, *values):
        builder, operands = emit.builder, emit.operands(*values[:-2])

        def call(rows, panels):
            function = make(builder.module, emit.kinds, rows, panels)
            kinds = [a.type for a in function.args]
            builder.call(function, [*map(builder.bitcast, operands, kinds)])

        emit_switch(builder, *values[-2:], shapes(CURRENT), call)

    return declare_intrinsic(write)


def emit_switch(builder, rows, panels, shapes, write):
    """Writes a switch with a case for each of `shapes`, selected by (rows, panels)."""
    unknown, done = builder.append_basic_block(), builder.append_basic_block()
    switch = builder.switch(builder.add(builder.mul(rows, I64(PANEL)), panels), unknown)
    for shape in shapes:
        block = builder.append_basic_block()
        switch.add_case(I64(shape[0] * PANEL + shape[1]), block)
        builder.position_at_end(block)
        write(*shape)
        builder.branch(done)
    builder.position_at_end(unknown)
    builder.unreachable()
    builder.position_at_end(done)


@tile_function(
    "float* x, x_stride, byte* w, w_stride, steps, float* start, start_stride, float* out,"
    " out_stride, ahead, ahead_stride"
)
def float_tile(builder, isa: ISA, arg, kind: str, rows: int, panels: int):
    """out[r, 16 p + j] = start[r, 16 p + j] + sum over all inputs k of x[r, k] * w[p, k, j].

    x holds floats, or pairs. Strides of w and `ahead` are in bytes, the others in elements.
    Iteration i prefetches the byte `ahead` + i * `ahead_stride` after the start of each panel.
    """
    tile = FloatTile(builder, isa, kind)
    inputs = tile.rows(arg.x, arg.x_stride, rows)
    # Why moving pointers, and the second panel as an offset: pointers fill all other registers.
    w, ahead = tile.variable(arg.w), tile.variable(tile.at(arg.w, arg.ahead))
    outputs = tile.rows(arg.out, arg.out_stride, rows)
    lanes = [I64(i) for i in range(0, PANEL * panels, tile.width)]
    for line in outputs:
        tile.prefetch(line, write=True)
    sums = [
        [tile.variable(tile.load(tile.at(line, lane))) for lane in lanes]
        for line in tile.rows(arg.start, arg.start_stride, rows)
    ]

    pairs = kind == "bfloat16" and isa.vector_bits < 512

    def weights_of_inputs(lines):
        for k in range(tile.inputs):
            if k and pairs and rows > 1:
                # Why: so LLVM can't know that these are the same words. It would keep the words of
                # the first inputs in a register that is not available.
                identity = ir.FunctionType(lines[0].type, [lines[0].type])
                lines = [builder.asm(identity, "", "=r,0", [line], False) for line in lines]
            yield [vector for line in lines for vector in tile.weights(line, k)]

    def step(iteration):
        # Why not for one row: it reads in order at the speed of memory, and prefetching takes a
        # tenth of that. Halves converted to floats take two chain steps per line, which leaves time
        # to prefetch.
        if rows > 1 or tile.inputs == 2:
            for line in tile.rows(tile.advance(ahead, arg.ahead_stride), arg.w_stride, panels):
                tile.prefetch(line, level=2 if rows > 1 else 0)
        by_input = weights_of_inputs(tile.rows(tile.advance(w, I64(LINE)), arg.w_stride, panels))
        # Why: one row would wait for each vector; many rows have no registers for two inputs.
        for k, weights in enumerate(list(by_input) if pairs and rows == 1 else by_input):
            for row, cells in zip(inputs, sums, strict=True):
                value = tile.value(row, iteration, k)
                for weight, cell in zip(weights, cells, strict=True):
                    builder.store(tile.add_product(builder.load(cell), weight, value), cell)

    tile.loop(arg.steps, step, unroll=unroll_factor(isa, kind, rows, panels))
    for line, cells in zip(outputs, sums, strict=True):
        for cell, lane in zip(cells, lanes, strict=True):
            tile.store(builder.load(cell), tile.at(line, lane))


def unroll_factor(isa: ISA, kind: str, rows: int, panels: int) -> int:
    """How many iterations of a tile's loop are unrolled. Why few if sums fill the registers: LLVM
    would load the weights of all iterations first and spill the sums meanwhile, see
    `tests/kernels/test_assembly.py`."""
    full = rows * panels * (PANEL * 32 // isa.vector_bits) >= 3 * isa.registers // 8
    if kind == "float32" and isa.vector_bits < 512:
        return 2 if full and isa.registers == 32 else 4
    return 1 if full else 4 if kind in ("float32", "pairs") else 2


@tile_call(
    tile_shapes,
    lambda module, kinds, rows, panels: float_tile(module, CURRENT, form_of(kinds.w), rows, panels),
)
def tile(x, x_at, x_stride, w, w_at, w_stride, steps, start, start_at, start_stride,
         out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """`float_tile` for `rows` x `panels` * 16 results. `start` is the bias (stride 0), or `out`."""


@emit_intrinsic(types.float32)
def element(emit, array, at):
    """The element at an index, as float32; `array` holds weights in any form, or pairs of
    inputs."""
    builder, kind = emit.builder, form_of(emit.kinds.array)
    data = emit.pointer(emit.kinds.array, array, I64(0))
    if kind == "float32":
        return builder.load(emit.at(data, at))
    bits = builder.load(emit.at(builder.bitcast(data, I16.as_pointer()), at))
    if kind == "float16":
        zeros = ir.Constant(ir.VectorType(I16, emit.width), None)
        converted = emit.fp16_to_fp32(builder.insert_element(zeros, bits, I32(0)))
        return builder.extract_element(converted, I32(0))
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), FLOAT)


@specialize()
def offset(w, k, j, width):
    """Index of input k of output j in a panel of `width` outputs, in elements of 16 bits or
    more."""
    if form_of(w) in ("float32", "float16"):
        return lambda w, k, j, width: k * width + j
    return lambda w, k, j, width: (k // 2 * width + j) * 2 + 1 - k % 2


@specialize()
def inputs_in(x):
    """1 for floats, 2 for pairs of bfloat16."""
    count = 1 if x.dtype == types.float32 else 2
    return lambda x: count
