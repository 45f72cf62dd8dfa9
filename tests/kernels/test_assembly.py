"""The CPU kernels' tiles, compiled to assembly for other CPUs. The hot loop must contain the
intended number of the intended instruction, and must not spill registers."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace

import pytest
from llvmlite import ir

from benchmarks.suite import cpu_peak
from nanoengine.kernels.gemm import PANEL, float_tile, tile_shapes
from nanoengine.kernels.groupwise_gemm import (
    MINS,
    NONE,
    ZEROS,
    Form,
    float_row_tile,
    groupwise_tile,
    max_groupwise_rows,
    spread_rows,
)
from nanoengine.kernels.int8_gemm import shapes8, shapes16, tile8, tile16
from nanoengine.kernels.isa import ISA, ISAS
from tests.support import assembly
from tests.support.assembly import ARM, CPUS, TILES, assembly_of, inner_loops, intrinsics_on, spills

pytestmark = pytest.mark.guards(
    "nanoengine/kernels/*gemm.py",
    "nanoengine/kernels/emit.py",
    "nanoengine/kernels/isa.py",
    "nanoengine/kernels/dequant.py",
    "benchmarks/suite/cpu_peak.py",
    "tests/support/assembly.py",
)

BY_NAME = {isa.name: isa for isa in ISAS}
I64, FLOAT = ir.IntType(64), ir.FloatType()


def register_of(isa: ISA, bits: int) -> str:
    """The register type of a vector of that many bits."""
    return r"v\d+\.4s" if isa.name == "neon" else {128: "%xmm", 256: "%ymm", 512: "%zmm"}[bits]


def fma(isa: ISA) -> str:
    """The fused multiply-add of a full float32 vector."""
    name = "fmla" if isa.name == "neon" else r"vfmadd\d+ps"
    return rf"(?:{name})\s.*{register_of(isa, isa.vector_bits)}"


def byte_dot(isa: ISA) -> str:
    return rf"{isa.byte_dots}\s.*{register_of(isa, isa.byte_bits)}"


def bf16_dot(isa: ISA) -> str:
    return rf"{isa.bf16_dots}\s.*{register_of(isa, isa.vector_bits)}"


def hottest_loop(text: str, instruction: str) -> list[str]:
    """The inner loop that contains the instruction most often."""
    loops = inner_loops(text)
    return max(loops, key=lambda loop: count(loop, instruction), default=[])


def count(loop: list[str], instruction: str) -> int:
    return sum(re.search(instruction, line) is not None for line in loop)


def test_the_assembly_parser_passes_its_doctests():
    assert doctest.testmod(assembly).failed == 0


# --- the measured peaks ---------------------------------------------------------------------------


def products(isa: ISA, kind: str):
    def write(module: ir.Module) -> None:
        function_type = ir.FunctionType(ir.VoidType(), [FLOAT.as_pointer(), I64])
        function = ir.Function(module, function_type, "products")
        builder = ir.IRBuilder(function.append_basic_block())
        cpu_peak.write_products(builder, isa, kind, *function.args)
        builder.ret_void()

    return write


@pytest.mark.parametrize("cpu", CPUS)
def test_peak_loops_contain_only_the_measured_instruction(cpu):
    isa = BY_NAME[CPUS[cpu][1]]
    kinds = {"float": fma(isa)}
    if isa.bf16_dots != "generic":
        kinds["bfloat16"] = bf16_dot(isa)
    if isa.byte_dots != "generic":
        kinds["int8"] = byte_dot(isa)
    for kind, instruction in kinds.items():
        loop = hottest_loop(assembly_of(cpu, products(isa, kind)), instruction)
        found = count(loop, instruction)
        assert found and found % cpu_peak.chains(isa) == 0, (kind, loop)
        whole = {"vpmaddubsw": 3}.get(isa.byte_dots, 1) if kind == "int8" else 1
        assert len(loop) <= whole * found + 3, (kind, loop)  # 3 for the loop counter
        assert spills(loop) == [], kind


@pytest.mark.parametrize("cpu", ["x86-64-v3", "znver5", "neoverse-n1"])
def test_a_tile_that_is_too_large_for_the_registers_is_detected(cpu):
    isa = BY_NAME[CPUS[cpu][1]]
    greedy = replace(isa, registers=2 * isa.registers)
    loop = hottest_loop(assembly_of(cpu, products(greedy, "float")), fma(isa))
    assert spills(loop), loop


@pytest.mark.parametrize("cpu", ["x86-64-v3", "sapphirerapids"])
def test_a_tile_of_the_wrong_width_is_detected(cpu):
    isa = BY_NAME[CPUS[cpu][1]]
    narrow = replace(isa, vector_bits=isa.vector_bits // 2)
    assert count(hottest_loop(assembly_of(cpu, products(narrow, "float")), "vfmadd"), fma(isa)) == 0


# --- linear layers --------------------------------------------------------------------------------


def instruction_by_format(isa: ISA) -> dict[str, str]:
    """The multiply instruction per packed weight format."""
    forms = dict.fromkeys(("float32", "float16", "bfloat16"), fma(isa))
    return forms if isa.bf16_dots == "generic" else forms | {"pairs": bf16_dot(isa)}


# One-row tiles that spill, by vector width in bits. They are still faster with the vectors of both
# inputs loaded than without.
SPILLING = {256: {("bfloat16", 1, 4)}, 128: {("bfloat16", 1, 4), ("float16", 1, 4)}}


@pytest.mark.parametrize("cpu", CPUS)
def test_tiles_of_linear_layers_multiply_full_vectors_and_keep_their_sums_in_registers(cpu):
    isa = BY_NAME[CPUS[cpu][1]]
    for kind, instruction in instruction_by_format(isa).items():
        for rows, panels in tile_shapes(isa):
            text = assembly_of(cpu, lambda module: float_tile(module, isa, kind, rows, panels))  # noqa: B023
            loop = hottest_loop(text, instruction)
            per_iteration = rows * panels * PANEL * 32 // isa.vector_bits
            found = count(loop, instruction)
            assert found and found % per_iteration == 0, (kind, rows, panels, loop)
            expected = (kind, rows, panels) in SPILLING.get(isa.vector_bits, ())
            assert bool(spills(loop)) == expected, (kind, rows, panels, spills(loop))


# --- quantized linear layers, and the estimates of the pruned argmax ------------------------------


def one_panel(tile):
    """Writes a tile that handles one panel."""
    return lambda module, isa, rows, panels: tile(module, isa, rows=rows)


def grouped(*numbers: int):
    """The entry of `TILES_OF_BYTES` for a group-wise quantized `Form`."""

    def write(module, isa, rows, panels):
        return groupwise_tile(module, isa, *Form(*numbers), rows, 0)

    return lambda isa: [(rows, 1) for rows in range(1, max_groupwise_rows(isa) + 1)], write, 32, 8


def spread(*numbers: int):
    """The entry for a `Form` with spread-out panels. Signed forms multiply pairs of 16-bit
    inputs."""
    form = Form(*numbers)

    def write(module, isa, rows, panels):
        return groupwise_tile(module, isa, *form, rows, 1)

    inputs, bits = (2, 16) if form.is_signed else (8, 8)
    return lambda isa: [(rows, 1) for rows in spread_rows(isa)], write, inputs, bits


TILES_OF_BYTES = {
    # Per entry: tile shapes, the code generator, inputs per loop iteration, bits of the operands.
    "int8": (shapes8, tile8, 4, 8),
    "int16": (shapes16, one_panel(tile16), 4, 16),
    "Q4_0": grouped(4, 1, 0, 1, 1, NONE),
    "Q4_0, zeros": grouped(4, 1, 0, 1, 1, ZEROS),
    "Q4_K": grouped(4, 0, 0, 1, 2, MINS),
    "Q6_K": grouped(6, 1, 0, 2, 2, NONE),
    "Q8_0": grouped(8, 1, 0, 1, 1, NONE),
    "Q4_0, spread": spread(4, 1, 0, 1, 1, NONE),
    "Q4_K, spread": spread(4, 0, 0, 1, 2, MINS),
    "Q6_K, spread": spread(6, 1, 0, 2, 2, NONE),
    "Q8_0, spread": spread(8, 1, 0, 1, 1, NONE),
}

MULTIPLIES = {
    # LLVM replaces vpdpwssd by vpmaddwd and an addition on CPUs where that is faster.
    "vpdpbusd": {8: "vpdpbusd", 16: "vpdpwssd|vpmaddwd"},
    "vpmaddubsw": {8: "vpmaddubsw", 16: "vpmaddwd"},
    "generic": {8: "mul|mla", 16: "mul|mla"},  # twice the operand width
}

# The fewest rows at which tiles spill. With 16 registers, spilled sums cost less than smaller
# tiles. The tiles with the most rows spill too, and are faster than tiles with fewer rows.
SPILLING_BYTES = {
    "avx2": {
        "int16": 4,
        "Q4_0": 2,
        "Q4_0, zeros": 2,
        "Q4_K": 1,
        "Q6_K": 1,
        "Q8_0": 2,
        "Q6_K, spread": 3,
    },
    "avx2_vnni": {"int16": 4, "Q4_0": 4, "Q4_0, zeros": 4, "Q4_K": 3, "Q6_K": 1, "Q8_0": 3},
    "avx512": {"int16": 8, "Q6_K": 2},
    "avx512_vnni": {"Q4_0, zeros": 7, "Q4_K": 8, "Q6_K": 8},
    "avx512_bf16": {"Q4_0, zeros": 7, "Q4_K": 8, "Q6_K": 8},
    "neon": {"Q4_0": 2, "Q4_K": 1, "Q6_K": 1, "Q8_0": 1},
}


@pytest.mark.parametrize("kind", TILES_OF_BYTES)
@pytest.mark.parametrize("cpu", CPUS)
def test_tiles_of_bytes_multiply_full_vectors_and_keep_their_sums_in_registers(cpu, kind):
    isa, (shapes, tile, inputs, bits) = BY_NAME[CPUS[cpu][1]], TILES_OF_BYTES[kind]
    register, instruction = register_of(isa, isa.byte_bits), MULTIPLIES[isa.byte_dots][bits]
    if isa.byte_dots == "generic":
        bits *= 2
        register = {16: r"v\d+\.8h", 32: r"v\d+\.4s"}[bits]
    instruction = rf"\b(?:{instruction})\s.*{register}"
    for rows, panels in shapes(isa):
        text = assembly_of(cpu, lambda module: tile(module, isa, rows=rows, panels=panels))  # noqa: B023
        loop = hottest_loop(text, instruction)
        per_iteration = rows * panels * PANEL * inputs * bits // isa.byte_bits
        found = count(loop, instruction)
        assert found and found % per_iteration == 0, (kind, rows, panels, found, loop)
        fewest = SPILLING_BYTES.get(isa.name, {}).get(kind, 99)
        if rows < fewest:
            assert spills(loop) == [], (kind, rows, panels, spills(loop))


# --- one row of float inputs by codes that are dequantized in registers ---------------------------


@pytest.mark.parametrize("cpu", CPUS)
def test_groupwise_tiles_of_one_float_row_keep_their_sums_in_registers(cpu):
    isa, forms = (
        BY_NAME[CPUS[cpu][1]],
        {"Q8_0": (8, 1, 0, 1, 1, NONE), "Q4_K": (4, 0, 0, 1, 2, MINS)},
    )
    for name, form in forms.items():
        for panels in (1, 4) if isa.vector_bits == 512 else (1,):
            text = assembly_of(cpu, lambda module: float_row_tile(module, isa, *form, panels))  # noqa: B023
            loop = hottest_loop(text, fma(isa))
            per_unit = panels * 32 * PANEL * 32 // isa.vector_bits
            assert count(loop, fma(isa)) == per_unit, (name, panels)
            # Scales may be spilled there, once per unit. LLVM for ARM also spills codes.
            limit = per_unit if isa.name == "neon" else 16
            assert len(spills(loop)) < limit, (name, panels, spills(loop))


@pytest.mark.parametrize("cpu", CPUS)
def test_weight_only_tiles_of_one_row_keep_their_sums_in_registers(cpu):
    isa, per_panel = BY_NAME[CPUS[cpu][1]], PANEL * 32 // BY_NAME[CPUS[cpu][1]].vector_bits
    text = intrinsics_on(cpu)["weight-only, one row"]
    tiles = re.findall(
        r"^nanoengine_dequantized_row_tile_(\d+)_(\d)_\w+:$(.*?)^\.Lfunc_end", text, re.M | re.S
    )
    assert len(tiles) == 16
    for form, panels, body in tiles:
        inputs = 2 if int(form) % 16 in (2, 4) else 1
        loops = [loop for loop in inner_loops(body) if count(loop, fma(isa))]
        for loop in loops:
            found = count(loop, fma(isa))
            assert found % (inputs * int(panels) * per_panel) == 0, (form, panels, loop)
            # With 16 registers, tiles of two panels spill and are still faster than tiles of one.
            if isa.vector_bits == 512 or (isa.registers == 16 and panels == "1"):
                assert spills(loop) == [], (form, panels, spills(loop))
        assert loops, (form, panels)


# --- attention ------------------------------------------------------------------------------------


def has_tile(isa: ISA, name: str) -> bool:
    """Whether the instruction set has this tile; see `attention_microkernels.can_interleave`."""
    fits = isa.vector_bits == 512 and ("products" not in name or isa.bf16_dots != "generic")
    return fits or "interleaved" not in name


ATTENTION_TILES = [
    (cpu, name) for cpu in CPUS for name in TILES
    if name.startswith("attention") and has_tile(BY_NAME[CPUS[cpu][1]], name)
]  # fmt: skip


@pytest.mark.parametrize(("cpu", "name"), ATTENTION_TILES)
def test_tiles_of_attention_multiply_full_vectors_and_keep_their_sums_in_registers(cpu, name):
    isa = BY_NAME[CPUS[cpu][1]]
    dots = "products" in name and isa.bf16_dots != "generic"
    instruction = bf16_dot(isa) if dots else fma(isa)
    loop = hottest_loop(intrinsics_on(cpu)[name], instruction)
    assert count(loop, instruction) >= 8, loop
    assert spills(loop) == []


def test_every_instruction_set_with_required_features_has_a_test_cpu():
    assert {name for _, name in CPUS.values()} == {isa.name for isa in ISAS if isa.needs}
    assert [cpu for cpu, (triple, _) in CPUS.items() if triple == ARM] == ["neoverse-n1"]
