"""CURRENT: the instruction set for which this process's kernels are compiled.

A kernel's tiles depend on the CPU: the width of vectors, the number of registers, and whether one
instruction multiplies and accumulates bytes or bfloat16. One description contains all of this. The
files that write instructions (`emit.py`, the tiles) use nothing else.

It belongs to the process, not to an engine: kernels are compiled once for all engines, and the
compiler's target is made when the first kernel is declared. The first access to `CURRENT` therefore
fixes it. It is the CPU's best, unless `use` has named a smaller one before, for tests and
comparisons. The compiler then uses only instructions of that set too, if nothing has been compiled
with numba before.

Every instruction that not all CPUs have has a generic replacement with the same results. **Products
and attention therefore have the same bits under each of them**, if the CPU has fused multiply-adds.
The compiler may reorder the sums in `cpu_layers.py`: a model's log-probabilities differed by up to
1.4e-6 in float32.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from llvmlite import binding
from numba.core import config

from nanoengine.errors import ConfigError
from nanoengine.settings.checks import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class ISA:
    """One instruction set, as kernels use it.

    Attributes:
        needs: LLVM's names of the required features, and the machine's name for ARM.
        vector_bits, registers: width and number of the vector registers.
        byte_dots: dot products of bytes. vpdpbusd: four unsigned times signed bytes, added to 32
            bits; vpmaddubsw: two, in 16 bits; generic: shifts and multiplications.
        byte_bits: bits of a vector of bytes.
        bf16_dots: dot products of two pairs of bfloat16 values, added to float32.
        has_fp16: whether one instruction converts float16 to float32.
    """

    name: str
    needs: tuple[str, ...] = ()
    vector_bits: int
    registers: int
    byte_dots: Literal["vpdpbusd", "vpmaddubsw", "generic"] = "generic"
    byte_bits: int
    bf16_dots: Literal["vdpbf16ps", "generic"] = "generic"
    has_fp16: bool

    def __str__(self) -> str:
        int8_dots = f"{self.byte_dots} ({self.byte_bits} bits)"
        if self.byte_dots != "vpdpbusd" and any("vnni" in name for name in self.needs):
            int8_dots += " (numba 0.66 or later has vpdpbusd)"
        return (
            f"{self.name}: {self.vector_bits}-bit vectors, int8 dot products by {int8_dots},"
            f" bfloat16 dot products by {self.bf16_dots}"
        )


AVX2 = ("avx2", "f16c", "fma")
AVX512 = (*AVX2, "avx512bw", "avx512dq", "avx512f", "avx512vl")


def adapt_to_llvm(isa: ISA, llvm: tuple[int, ...]) -> ISA:
    """The instruction set as kernels may use it with an LLVM of this version.

    Why: LLVM before 22 has other types in `vpdpbusd`, and wrong ones terminate the process.
    """
    if isa.byte_dots != "vpdpbusd" or llvm >= (22,):
        return isa
    return replace(isa, byte_dots="vpmaddubsw", byte_bits=256)


# fmt: off
ALL = (  # best first: a CPU uses the first one that it supports
    ISA(name="avx512_bf16", needs=(*AVX512, "avx512vnni", "avx512bf16"), vector_bits=512,
        registers=32, byte_dots="vpdpbusd", byte_bits=512, bf16_dots="vdpbf16ps", has_fp16=True),
    ISA(name="avx512_vnni", needs=(*AVX512, "avx512vnni"), vector_bits=512, registers=32,
        byte_dots="vpdpbusd", byte_bits=512, has_fp16=True),
    # Why 256: there is no vpsignb of 512 bits.
    ISA(name="avx512", needs=AVX512, vector_bits=512, registers=32, byte_dots="vpmaddubsw",
        byte_bits=256, has_fp16=True),
    ISA(name="avx2_vnni", needs=(*AVX2, "avxvnni"), vector_bits=256, registers=16,
        byte_dots="vpdpbusd", byte_bits=256, has_fp16=True),
    ISA(name="avx2", needs=AVX2, vector_bits=256, registers=16, byte_dots="vpmaddubsw",
        byte_bits=256, has_fp16=True),
    ISA(name="neon", needs=("aarch64",), vector_bits=128, registers=32, byte_bits=128,
        has_fp16=True),
    ISA(name="generic", vector_bits=128, registers=16, byte_bits=128, has_fp16=False),
    # Any CPU runs these: the compiler splits a vector that is too wide. For tests.
    ISA(name="generic_256", vector_bits=256, registers=16, byte_bits=256, has_fp16=False),
    ISA(name="generic_512", vector_bits=512, registers=32, byte_bits=512, has_fp16=False),
)
# fmt: on
ISAS = tuple(adapt_to_llvm(isa, binding.llvm_version_info) for isa in ALL)


def available(features: Collection[str]) -> list[ISA]:
    """The instruction sets of a CPU with these features, the best first."""
    return [isa for isa in ISAS if set(isa.needs) <= set(features)]


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features for which numba compiles: LLVM's names of this CPU's features, and the machine's
    name."""
    machine = platform.machine().lower().replace("arm64", "aarch64")
    if config.CPU_FEATURES is not None:
        flags = config.CPU_FEATURES.split(",")
        return frozenset({flag[1:] for flag in flags if flag.startswith("+")} | {machine})
    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not support this on every system
        found = {}
    return frozenset({name for name, has in found.items() if has} | {machine})


def choose(name: str | None, features: Collection[str]) -> ISA:
    """The instruction set with this name; None: the best of those that the CPU supports.

    Raises:
        ConfigError: unknown name, or the CPU does not support it.
    """
    supported = available(features)
    if name is None:
        return supported[0]
    for isa in supported:
        if isa.name == name:
            return isa
    names = [isa.name for isa in ISAS]
    if name in names:
        choices = ", ".join(isa.name for isa in supported)
        raise ConfigError(f"cpu_isa={name!r} is not supported by this CPU: use one of {choices}")
    raise ConfigError(f"cpu_isa must be an instruction set, got {name!r}; {nearest(name, names)}")


def target_features(isa: ISA) -> str | None:
    """LLVM's flags for exactly this instruction set; None: all features of this CPU.

    Why exactly: with AVX-512 enabled, a tile for AVX2 would be compiled with 32 registers. Any CPU
    with the instruction set can use the code, so it may be compiled elsewhere.
    """
    if not isa.needs:
        return config.CPU_FEATURES
    return ",".join(f"+{name}" for name in isa.needs if name != "aarch64")


def use(name: str | None) -> None:
    """Sets the instruction set of this process's kernels; None: keeps the current one, or the best.

    Raises:
        ConfigError: unknown name, the CPU does not support it, or kernels already use another one.
    """
    if name is None:
        return
    isa = choose(name, cpu_features())
    current = globals().get("CURRENT")
    if current is None:
        _set_current(isa)
    elif isa is not current:
        raise ConfigError(
            f"cpu_isa={name!r}: the kernels of this process are compiled for {current.name!r}, and"
            " all of its engines share them: set cpu_isa for the first engine of a new process"
        )


def _set_current(isa: ISA) -> ISA:
    """Sets `CURRENT` and the compiler's target. Why CPU_NAME "generic": with the host's name, LLVM
    would also use that CPU's other features and schedule instructions for it, so the code could
    only be used there. Perf: docs/benchmarks.md compares both."""
    config.CPU_FEATURES = target_features(isa)
    config.CPU_NAME = "generic"
    globals()["CURRENT"] = isa
    return isa


CURRENT: ISA


def __getattr__(name: str) -> ISA:
    """`CURRENT`, determined at the first access."""
    if name != "CURRENT":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _set_current(choose(None, cpu_features()))
