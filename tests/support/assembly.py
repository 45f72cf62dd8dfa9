"""Compiles a kernel's tile for another CPU: LLVM code to assembly, and its loops.

`tests/kernels/test_assembly.py` checks that each inner loop contains the intended instruction, and
that no vector is spilled to memory.

A tile that takes its instruction set as an argument is compiled in this process. A tile that uses
the process's own set is compiled in another process, which assumes that CPU:

    python -m tests.support.assembly CPU        # prints JSON: the assembly of each of `TILES`
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

CPUS = {
    # LLVM's name of a CPU: its triple, and the instruction set of the kernels on it
    "x86-64-v3": (X86, "avx2"),
    "alderlake": (X86, "avx2_vnni"),
    "x86-64-v4": (X86, "avx512"),
    "icelake-server": (X86, "avx512_vnni"),
    "sapphirerapids": (X86, "avx512_bf16"),
    "znver5": (X86, "avx512_bf16"),
    "neoverse-n1": (ARM, "neon"),
}

TILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: module, intrinsic, and the types of its arguments that are not int64: the element type
    # of an array, or the name of a constant of the module, which becomes a literal
    "attention, float32": (
        "attention_microkernels", "line_tile",
        {"a": "float32", "b": "float32", "c": "float32", "factors": "float32",
         "rows": "ROWS", "vectors": "VECTORS"},
    ),
    "attention, bfloat16 cache": (
        "attention_microkernels", "line_tile",
        {"a": "float32", "b": "uint32", "c": "float32", "factors": "float32",
         "rows": "ROWS", "vectors": "VECTORS"},
    ),
    "attention, bfloat16 products": (
        "attention_microkernels", "line_tile",
        {"a": "uint32", "b": "uint32", "c": "float32", "factors": "float32",
         "rows": "ROWS", "vectors": "VECTORS"},
    ),
    "attention, interleaved softmax, float32": (
        "attention_microkernels", "_add_and_softmax",
        {"scores": "float32", "weights": "float32", "maximum": "float32", "total": "float32",
         "factors": "float32", "b": "float32", "sums": "float32"},
    ),
    "attention, interleaved softmax, bfloat16 products": (
        "attention_microkernels", "_add_and_softmax",
        {"scores": "float32", "weights": "uint32", "maximum": "float32", "total": "float32",
         "factors": "float32", "b": "uint32", "sums": "float32"},
    ),
    "weight-only, one row": (
        "dequant", "matmul_dequantized",
        {"x": "float32", "w": "int8", "zeros": "float32", "scales": "float32",
         "start": "float32", "out": "float32"},
    ),
}  # fmt: skip

VECTOR = re.compile(r"%[xyz]mm\d+|\b[qv]\d+\b")
STACK = re.compile(r"\(%rsp\)|\[sp(?:\]|, #)")  # at a fixed offset


@cache
def target(cpu: str) -> binding.TargetMachine:
    """LLVM's compiler for a CPU of `CPUS`."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    found = binding.Target.from_triple(CPUS[cpu][0])
    return found.create_target_machine(cpu=cpu, opt=3, reloc="pic")


def assembly_of(cpu: str, write: Callable[[ir.Module], object]) -> str:
    """The assembly of what `write` adds to a module, with numba's optimizations."""
    module = ir.Module("tiles")
    module.triple = CPUS[cpu][0]
    write(module)
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "external"  # otherwise LLVM removes the unused function
    machine = target(cpu)
    parsed = binding.parse_assembly(str(module))
    parsed.data_layout = str(machine.target_data)
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def inner_loops(text: str) -> list[list[str]]:
    r"""The instructions of each innermost loop, in the order of the text.

    >>> inner_loops("f:\n.L1:\n\tincq %rax\n.L2:\n\tdecq %rcx\n\tjne .L2\n\tjne .L1")
    [['decq %rcx', 'jne .L2']]
    """
    lines = [re.split(r"\s#\s|//", line)[0].strip() for line in text.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    spans = []
    for at, line in enumerate(lines):
        jump = re.match(r"(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s.*?(\.L\w+)$", line)
        if jump and labels.get(jump[1], at) < at:
            spans.append((labels[jump[1]], at))
    inner = [
        (lo, hi) for lo, hi in spans
        if not any((lo, hi) != nested and lo <= nested[0] and nested[1] <= hi for nested in spans)
    ]  # fmt: skip
    return [
        [line for line in lines[lo : hi + 1] if line and not line.startswith(".")]
        for lo, hi in inner
    ]


def spills(loop: list[str]) -> list[str]:
    """The instructions that move a vector to or from the stack."""
    return [line for line in loop if VECTOR.search(line) and STACK.search(line)]


def intrinsic_in(module: ir.Module, name: str) -> None:
    """Writes a function that contains only one of `TILES`, for this process's CPU."""
    import inspect

    from numba import types
    from numba.core.registry import cpu_target

    module_name, intrinsic_name, argument_types = TILES[name]
    kernel_module = import_module(f"nanoengine.kernels.{module_name}")
    intrinsic, context = getattr(kernel_module, intrinsic_name), cpu_target.target_context
    context.refresh()
    kinds = []
    for argument in list(inspect.signature(intrinsic._defn).parameters)[1:]:
        kind = argument_types.get(argument, types.int64)
        if isinstance(kind, str) and hasattr(types, kind):
            kind = types.Array(getattr(types, kind), 1, "C")
        elif isinstance(kind, str):
            kind = types.literal(getattr(kernel_module, kind))
        kinds.append(kind)
    signature, codegen = intrinsic._defn(cpu_target.typing_context, *kinds)
    function_type = ir.FunctionType(ir.VoidType(), [context.get_value_type(kind) for kind in kinds])
    function = ir.Function(module, function_type, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    codegen(context, builder, signature, function.args)
    builder.ret_void()


@cache
def intrinsics_on(cpu: str) -> dict[str, str]:
    """The assembly of all `TILES`, compiled by a process that assumes this CPU."""
    from nanoengine.kernels.isa import ISAS

    triple, name = CPUS[cpu]
    (needs,) = (isa.needs for isa in ISAS if isa.name == name)
    flags = ",".join(f"+{feature}" for feature in needs)
    variables = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": flags}
    if triple == ARM:  # numba itself keeps the host's CPU
        variables = {"NUMBA_CPU_FEATURES": "+sse2"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.assembly", cpu],
        capture_output=True, text=True, check=False, env=os.environ | variables,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _main(cpu: str) -> None:
    from nanoengine.kernels import isa

    machine = CPUS[cpu][0].split("-")[0]
    platform.machine = lambda: machine
    isa.use(CPUS[cpu][1])
    written = {}
    for name in TILES:
        written[name] = assembly_of(cpu, lambda module: intrinsic_in(module, name))  # noqa: B023
    print(json.dumps(written))


if __name__ == "__main__":
    _main(sys.argv[1])
