"""Tiles without numba: one function compiled for this CPU, for any supported instruction set."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import binding, ir

from nanoengine.kernels.isa import ISA, available, cpu_features

RUNNABLE: list[ISA] = available(cpu_features())


def runnable(name: str) -> ISA:
    """The instruction set of this name; skips the test if the CPU lacks it."""
    for isa in RUNNABLE:
        if isa.name == name:
            return isa
    pytest.skip(f"this CPU has no {name}")


class Compiled:
    """A tile's function; arrays are passed as pointers to their first element."""

    def __init__(self, make: Callable[[ir.Module], ir.Function]) -> None:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        module = ir.Module("tile")
        module.triple = binding.get_process_triple()
        function = make(module)
        function.linkage = "external"
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(),
            features=binding.get_host_cpu_features().flatten(),
            opt=3,
            jit=True,
        )
        tuning = binding.create_pipeline_tuning_options(speed_level=3)
        builder = binding.create_pass_builder(machine, tuning)
        builder.getModulePassManager().run(parsed, builder)
        self.engine = binding.create_mcjit_compiler(parsed, machine)
        self.engine.finalize_object()
        address = self.engine.get_function_address(function.name)
        kinds = [
            ctypes.c_void_p if isinstance(a.type, ir.PointerType) else ctypes.c_int64
            for a in function.args
        ]
        self.function = ctypes.CFUNCTYPE(None, *kinds)(address)

    def __call__(self, *arguments: np.ndarray | int) -> None:
        self.function(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))
