"""tile: rows of inputs times panels of weights, all sums in registers; the core of `cpu_linear`.

    panel, line after line of 64 bytes      16 outputs side by side
    float32            input k                   line k
    float16            inputs 2 k, 2 k + 1       half a line each
    bfloat16, pairs    inputs 2 k, 2 k + 1       the high and the low half of 32 bits an output

A tile of `rows` x `panels` reads one line of each panel a turn and adds its products with one or
two inputs of each row. **Each sum is one chain of fused multiply-adds over the inputs in order**,
whatever the tile and however wide its vectors, so a row has the same bits in any of them.

16-bit weights become float32 in registers, exactly. `pairs` are bfloat16 weights for inputs that
are bfloat16 too, both 32 bits wide: `vdpbf16ps` adds the product of the high halves to a sum, then
that of the low halves, each with one rounding, so the order of the layout is that of the chain. Its
sums are those of `bfloat16` weights and the same inputs as float32, but that it takes numbers below
1e-38 as zeros.

How many rows and panels make a tile is a matter of registers: `ROWS` and `PANELS`. Each tile is a
function of its own, so that its loop has all registers and it is compiled once, whoever calls it.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from llvmlite import ir
from numba import types

from nanoengine.kernels.emit import I32, Emit, writes, written_by
from nanoengine.kernels.isa import CURRENT, ISA
from nanoengine.kernels.jit import by_types

PANEL = 16  # outputs side by side
LINE = 64  # bytes of a panel that a tile reads each turn

I8, I16, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.FloatType()


def tile_rows(isa: ISA) -> int:
    """Rows of the largest tile: sums, the weights of a turn and an input fill the registers."""
    vectors = PANEL * 32 // isa.vector_bits * tile_panels(isa)
    # Why 8: more rows of 512 bits are no faster.
    return min(8, (isa.registers - vectors - 1) // vectors)


def tile_panels(isa: ISA) -> int:
    """Panels of a tile of many rows: a register holds a whole line at 512 bits, so that one panel
    would have a load for each multiplication."""
    return 2 if isa.vector_bits == 8 * LINE else 1


def few_rows(isa: ISA) -> dict[int, int]:
    """Panels of a tile by its number of rows, where these are so few that one panel would leave the
    multipliers waiting for their own sums."""
    if tile_panels(isa) == 2:
        return {1: 2}
    vectors, most = PANEL * 32 // isa.vector_bits, isa.registers // 4 * 3  # sums in registers
    return {r: 4 if 4 * r * vectors < most else 2 for r in (1, 2) if 2 * r * vectors <= most}


def tile_shapes(isa: ISA) -> list[tuple[int, int]]:
    """(rows, panels) of every tile."""
    shapes = {(r, p) for r in range(1, tile_rows(isa) + 1) for p in (1, tile_panels(isa))}
    return sorted(shapes | set(few_rows(isa).items()))


ROWS, PANELS = tile_rows(CURRENT), tile_panels(CURRENT)
FEW = few_rows(CURRENT)


def kind_of(array_type) -> str:
    """What the numbers of a packed weight are.

    numba has no 16-bit floats on a CPU, so their bits come as whole numbers: int16 is float16,
    uint16 bfloat16, uint32 pairs of the latter.
    """
    names = {types.float32: "float32", types.int16: "float16", types.uint16: "bfloat16"}
    return names.get(array_type.dtype, "pairs")


class FloatTile(Emit):
    """Writes the turns of a tile: what a line of weights and an input are."""

    def __init__(self, builder, isa: ISA, kind: str):
        super().__init__(None, builder, bits=isa.vector_bits, isa=isa)
        self.kind = kind
        self.inputs = 1 if kind in ("float32", "pairs") else 2  # of a row, each turn

    def weights(self, line, k: int) -> list:
        """The vectors of one line for input k of a turn. Why not of both: where sums fill the
        registers, there is room for those of one."""
        of_a_word = PANEL // self.width
        if self.kind == "float16":
            halves = ir.VectorType(I16, self.width)
            return [
                self.widen_halves(self.get(halves, line, (k * of_a_word + v) * self.width * 2))
                for v in range(of_a_word)
            ]
        if self.kind == "float32":
            return [self.get(self.vector, line, v * self.width * 4) for v in range(of_a_word)]
        pairs = [self.get(self.words, line, v * self.width * 4) for v in range(of_a_word)]
        return pairs if self.kind == "pairs" else [self.halves(pair)[k] for pair in pairs]

    def value(self, row, turn, k: int):
        """Input k of a row for a turn, in all lanes."""
        if self.kind == "pairs":
            return self.splat(self.get(I32, self.at(row, turn)), self.words)
        return self.broadcast(self.at(row, self.builder.mul(turn, I64(self.inputs)), I64(k)))


POINTERS = {f"{name}*": kind.as_pointer() for name, kind in {
    "byte": I8, "short": I16, "half": I16, "int": I32, "float": FLOAT
}.items()}  # fmt: skip


def tile_function(arguments: str):
    """Has a tile's writer make a function of it: `make(module, isa, *shape)` gives the one of the
    module, written where there is none yet. Its arguments are pointers where a kind is said, else
    whole numbers of 64 bits.

    Why functions: kernels that are compiled together share one, and its loop has all registers.
    """
    parts = [part.split() for part in arguments.split(",")]
    kinds = [POINTERS[part[0]] if len(part) == 2 else I64 for part in parts]

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
                given = {part[-1]: arg for part, arg in zip(parts, function.args, strict=True)}
                write(builder, isa, SimpleNamespace(**given), *shape)
                builder.ret_void()
            return module.globals[name]

        make.kinds = kinds
        return make

    return decorate


def tile_call(shapes, make):
    """Has compiled code call the tile of so many rows and panels, the last two arguments: one of
    `shapes(isa)`, made by `make(module, kinds, rows, panels)`. The arguments before are the tile's,
    but that a pointer is an array and a place in it."""

    def write(emit, *values):
        builder, operands = emit.builder, emit.operands(*values[:-2])

        def call(rows, panels):
            function = make(builder.module, emit.kinds, rows, panels)
            kinds = [of.type for of in function.args]
            builder.call(function, [*map(builder.bitcast, operands, kinds)])

        switched(builder, *values[-2:], shapes(CURRENT), call)

    return written_by(write)


def switched(builder, rows, panels, shapes, write):
    """Writes a case for each of `shapes`, (rows, panels); the one of these numbers runs."""
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
    "float* x, x_stride, byte* w, w_stride, turns, float* start, start_stride, float* out,"
    " out_stride, ahead, ahead_stride"
)
def float_tile(builder, isa: ISA, of, kind: str, rows: int, panels: int):
    """out[r, 16 p + j] = start[r, 16 p + j] + sum over all inputs k of x[r, k] * w[p, k, j].

    x holds floats, or pairs. Strides of w and what is `ahead` are bytes, the others numbers. With
    each turn it prefetches the byte `ahead` + turn * `ahead_stride` after each panel's first.
    """
    tile = FloatTile(builder, isa, kind)
    inputs = tile.rows(of.x, of.x_stride, rows)
    # Why moving places, and the second panel as a distance: pointers fill all other registers.
    place, asked = tile.variable(of.w), tile.variable(tile.at(of.w, of.ahead))
    outputs = tile.rows(of.out, of.out_stride, rows)
    lanes = [I64(i) for i in range(0, PANEL * panels, tile.width)]
    for line in outputs:
        tile.prefetch(line, write=True)
    sums = [
        [tile.variable(tile.load(tile.at(line, lane))) for lane in lanes]
        for line in tile.rows(of.start, of.start_stride, rows)
    ]

    pairs = kind == "bfloat16" and isa.vector_bits < 512

    def weights_of_inputs(lines):
        for k in range(tile.inputs):
            if k and pairs and rows > 1:
                # Why: the same words at another place, for all that LLVM knows. It would keep those
                # of the first inputs in a register that is not there.
                same = ir.FunctionType(lines[0].type, [lines[0].type])
                lines = [builder.asm(same, "", "=r,0", [line], False) for line in lines]
            yield [vector for line in lines for vector in tile.weights(line, k)]

    def step(turn):
        # Why not for one row: it reads in order at the speed of memory, and asking takes a tenth of
        # that. Halves made floats take two steps of the chain a line, which leaves time to ask.
        if rows > 1 or tile.inputs == 2:
            for line in tile.rows(tile.moved(asked, of.ahead_stride), of.w_stride, panels):
                tile.prefetch(line, level=2 if rows > 1 else 0)
        of_inputs = weights_of_inputs(tile.rows(tile.moved(place, I64(LINE)), of.w_stride, panels))
        # Why: one row would wait for each vector; many have no registers for those of two inputs.
        for k, weights in enumerate(list(of_inputs) if pairs and rows == 1 else of_inputs):
            for row, cells in zip(inputs, sums, strict=True):
                value = tile.value(row, turn, k)
                for weight, cell in zip(weights, cells, strict=True):
                    builder.store(tile.add_product(builder.load(cell), weight, value), cell)

    tile.loop(of.turns, step, unroll=unrolled(isa, kind, rows, panels))
    for line, cells in zip(outputs, sums, strict=True):
        for cell, lane in zip(cells, lanes, strict=True):
            tile.store(builder.load(cell), tile.at(line, lane))


def unrolled(isa: ISA, kind: str, rows: int, panels: int) -> int:
    """Turns of a tile's loop that are written out. Why few where sums fill the registers: LLVM
    would load the weights of all turns first, and keep sums in memory meanwhile, as
    `tests/kernels/test_assembly.py` sees."""
    full = rows * panels * (PANEL * 32 // isa.vector_bits) >= 3 * isa.registers // 8
    if kind == "float32" and isa.vector_bits < 512:
        return 2 if full and isa.registers == 32 else 4
    return 1 if full else 4 if kind in ("float32", "pairs") else 2


@tile_call(
    tile_shapes,
    lambda module, kinds, rows, panels: float_tile(module, CURRENT, kind_of(kinds.w), rows, panels),
)
def tile(x, x_at, x_stride, w, w_at, w_stride, turns, start, start_at, start_stride,
         out, out_at, out_stride, ahead, ahead_stride, rows, panels):  # fmt: skip
    """`float_tile` for `rows` x `panels` * 16 results. `start` is the bias (stride 0), or `out`."""


@writes(types.float32)
def number(emit, array, at):
    """The number at a place, as float32: of weights in any form, and of inputs in pairs."""
    builder, kind = emit.builder, kind_of(emit.kinds.array)
    data = emit.pointer(emit.kinds.array, array, I64(0))
    if kind == "float32":
        return builder.load(emit.at(data, at))
    bits = builder.load(emit.at(builder.bitcast(data, I16.as_pointer()), at))
    if kind == "float16":
        none = ir.Constant(ir.VectorType(I16, emit.width), None)
        one = emit.widen_halves(builder.insert_element(none, bits, I32(0)))
        return builder.extract_element(one, I32(0))
    return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), FLOAT)


@by_types()
def place(w, k, j, width):
    """Where input k of output j is in a panel of `width` outputs, in numbers of 16 bits or more."""
    if kind_of(w) in ("float32", "float16"):
        return lambda w, k, j, width: k * width + j
    return lambda w, k, j, width: (k // 2 * width + j) * 2 + 1 - k % 2


@by_types()
def inputs_in(x):
    """How many inputs one number of x stands for."""
    count = 1 if x.dtype == types.float32 else 2
    return lambda x: count
