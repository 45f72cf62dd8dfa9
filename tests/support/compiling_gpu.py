"""The emulated GPU with Triton's compiler instead of its interpreter.

    python -m tests.support.compiling_gpu FAMILY ...        prints a line of JSON per family
    python -m tests.support.compiling_gpu 'FAMILY {"hidden_size": 44}'    with fields of its config

Every launch passes Triton's own binder, specialization and ptxas, is checked against the GPU's
limits, counted, and dropped: its outputs stay zero, or true. This finds launches that fail for a
family or a kind of step; `emulated_gpu.py` finds wrong values. Triton's interpreter and its
compiler exclude each other, so a test runs this in its own process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from tests.support.emulated_gpu import (
    CAPABILITY,
    CUDA,
    EmulatedGPU,
    Graph,
    tensors_of,
)
from tests.support.engines import checkpoint, greedy, make_engine, random_prompts, run

SHARED_BYTES = 227 * 1024
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "max_num_seqs": 2,
    "max_num_batched_tokens": 48, "max_model_len": 160, "num_kv_blocks": 40,
}  # fmt: skip
PROMPTS = random_prompts(2, [60, 90])
"""Longer than a step's budget: some steps contain a single chunk of one prompt."""


class Loader:
    """The interface through which Triton loads machine code."""

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 1, name, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}


class Driver(DriverBase):
    """Triton's driver for a GPU with the emulated compute capability."""

    def __init__(self, gpu: CompilingGPU) -> None:
        self.utils = Loader()
        self.launcher_cls = gpu.launcher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_benchmarker(self) -> None:
        return None


class CountedGraph(Graph):
    """Counts replays without running them, since they would compute zeros."""

    def replay(self) -> None:
        self.gpu.num_replayed += 1


class CompilingGPU(EmulatedGPU):
    """See the module. `num_compiled`: the number of compiled kernel specializations."""

    num_compiled = 0

    def launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Returns the launcher of a compiled kernel."""
        self.num_compiled += 1

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert x < 2**31 and y < 65536 and z < 65536, (metadata.name, x, y, z)
            if any(type(argument) is torch.Tensor for argument in rest):
                raise ValueError(f"{metadata.name}: pointer argument is on the host")
            self.kernels[metadata.name] += 1

        return launch

    def _launch(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        out = super()._launch(func, name, args, kwargs)
        if "empty" in name:
            for tensor in tensors_of(out):
                tensor.host_tensor.fill_(tensor.dtype == torch.bool)  # type: ignore[attr-defined]
        return out

    def _replacements(self) -> dict[str, Any]:
        return super()._replacements() | {"CUDAGraph": lambda: CountedGraph(self)}

    def __enter__(self) -> CompilingGPU:
        super().__enter__()
        # Why never undone: a compiled kernel keeps its launcher.
        triton.runtime.driver.set_active(Driver(self))
        return self


def start_and_run(gpu: CompilingGPU, family: str, directory: str) -> dict[str, Any]:
    """Runs a tiny model of the family and returns its launch counts or its error."""
    gpu.num_compiled = 0
    try:
        engine = make_engine(directory, **OPTIONS)
        gpu.waits.clear()
        gpu.kernels.clear()
        gpu.num_replayed = 0
        run(engine, PROMPTS, greedy(4))
        engine.close()
    except Exception as error:
        return {"family": family, "error": "".join(traceback.format_exception(error)[-4:])}
    waits = [wait for wait in gpu.waits if "runner/transfers.py wait" not in wait]
    return {
        "family": family, "launches": gpu.kernels.total(), "compiled": gpu.num_compiled,
        "replays": gpu.num_replayed, "waits": waits, "disorder": list(gpu.disorder),
        "left": gpu.num_allocated,
    }  # fmt: skip


def main(families: Sequence[str]) -> None:
    """Prints one line per family."""
    assert "TRITON_INTERPRET" not in os.environ
    torch.set_num_threads(1)
    directories = {}
    for family in families:
        name, _, fields = family.partition(" ")
        directories[family] = checkpoint(name, **json.loads(fields or "{}"))
    with CompilingGPU() as gpu:
        for family, directory in directories.items():
            print(json.dumps(start_and_run(gpu, family, directory)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
