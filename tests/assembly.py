"""What a kernel's tile becomes on a CPU that is not here: LLVM code to assembly, and its loops.

`tests/test_assembly.py` asks of each inner loop that it holds the instruction that it was written
for, and that no vector waits in memory because the registers did not do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from llvmlite import binding, ir

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

CPUS = {
    # LLVM's name of a CPU: its triple, and the instruction set that kernels are written in there
    "x86-64-v3": (X86, "avx2"),
    "alderlake": (X86, "avx2_vnni"),
    "x86-64-v4": (X86, "avx512"),
    "icelake-server": (X86, "avx512_vnni"),
    "sapphirerapids": (X86, "avx512_bf16"),
    "znver5": (X86, "avx512_bf16"),
    "neoverse-n1": (ARM, "neon"),
}

VECTOR = re.compile(r"%[xyz]mm\d+|\b[qv]\d+\b")
STACK = re.compile(r"\(%rsp\b|\[sp\b")


@cache
def target(cpu: str) -> binding.TargetMachine:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    found = binding.Target.from_triple(CPUS[cpu][0])
    return found.create_target_machine(cpu=cpu, opt=3, reloc="pic")


def assembly_of(cpu: str, write: Callable[[ir.Module], object]) -> str:
    """The assembly of what `write` puts into a module, optimized as numba does it."""
    module = ir.Module("tiles")
    module.triple = CPUS[cpu][0]
    write(module)
    machine = target(cpu)
    parsed = binding.parse_assembly(str(module))
    parsed.data_layout = str(machine.target_data)
    parsed.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return str(machine.emit_assembly(parsed))


def inner_loops(text: str) -> list[list[str]]:
    r"""The instructions of each loop that has no loop inside, in the order of the text.

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
        if not any((lo, hi) != other and lo <= other[0] and other[1] <= hi for other in spans)
    ]  # fmt: skip
    return [
        [line for line in lines[lo : hi + 1] if line and not line.startswith(".")]
        for lo, hi in inner
    ]


def spills(loop: list[str]) -> list[str]:
    """The instructions that move a vector to or from the stack."""
    return [line for line in loop if VECTOR.search(line) and STACK.search(line)]
