"""A GPU visit (`benchmarks/suite/gpu_visit.py`) on an emulated GPU, at tiny sizes.

    OUT=folder python -m tests.support.emulated_visit

The parts run by their commands, in one process on the GPU of `compiling_gpu.py`, so wrong names or
arguments and kernels that do not compile fail here. Values are zeros, so no result counts as wrong.
GPU tests are collected but not run. The profiler of hardware counters is skipped, and the program
that it would profile runs.
"""

from __future__ import annotations

import contextlib
import runpy
import shlex
import subprocess
import sys
import traceback
from typing import Any
from unittest import mock

import torch

from benchmarks.suite import gpu_visit, peak, shapes
from benchmarks.suite.gpu import engine, kernels, processes, suite, timing
from nanoengine.bench import workload
from tests.support.compiling_gpu import CompilingGPU

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
}  # fmt: skip
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ENGINE = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
SCALE = workload.Scale(2, (3, 9), (2, 3))


def make_small() -> None:
    """Shrinks models, workloads and kernel sizes in the report's modules."""
    for sizes in shapes.SHAPES.values():
        sizes |= SMALL | (FEW_EXPERTS if "num_experts" in sizes else {})
    workload.STANDARD = SCALE
    engine.OPTIONS |= ENGINE | {"num_kv_blocks": 20}
    cpu = torch.profiler.ProfilerActivity.CPU  # a build without CUDA supports no other activity
    probe = engine.Probe(synchronize=torch.cuda.synchronize, activity=cpu)
    steps = {"batches": (2,), "prompt_len": 8, "num_steps": 6, "probe": probe}
    engine.step_cases.__kwdefaults__ |= steps
    engine.token_cases.__kwdefaults__ |= {"max_tokens": 3}
    kernels.peak_cases.__kwdefaults__ |= {"copy_mib": (1,), "gemm_sizes": (16,)}
    heads = {"heads": kernels.Heads(num_heads=4, num_kv_heads=2, head_dim=32)}
    kernels.decode_cases.__kwdefaults__ |= heads | {"batches": (2,), "contexts": (40,)}
    kernels.prefill_cases.__kwdefaults__ |= heads | {"lengths": (20,), "tokens": 40}
    kernels.parity_cases.__kwdefaults__ |= heads
    kernels.ROTATED_BYTES, kernels.MAX_MODEL_LEN, timing.REPEATS = 1, 64, 1
    for lengths, _ in kernels.PARITY.values():
        lengths[:] = [(min(query, 9), min(query, 9) + (context - query) // 400)
                      for query, context in lengths[:2]]  # fmt: skip
    measured = peak.Peaks(read_gbs=1.0, gemm_gflops=1.0, dtype="float32", by="torch.mm")
    peak.measure_peaks = lambda *_, **__: measured


def execute(command: list[str], limit_s: float, log: Any, env: dict[str, str]) -> int:
    """Replaces `processes.execute`: runs the same command in this process."""
    start, *arguments = command[command.index(sys.executable) + 1 :]
    if arguments[:1] == ["pytest"]:
        done = subprocess.run([*command, "--collect-only"], stdout=log, stderr=log, env=env)
        return done.returncode
    if start == "bench.py" and "--shape" in arguments:
        arguments += shlex.split("--max-num-seqs 2 --num-kv-blocks 20")
        arguments += shlex.split("--num-requests 2 --max-model-len 64 --max-num-batched-tokens 64")
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            run(start, arguments)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def run(start: str, arguments: list[str]) -> None:
    """Runs a Python program as its interpreter would."""
    if start == "-m":
        suite.main(*arguments[1:])
        assert arguments[0] == suite.__name__
    else:
        with mock.patch.object(sys, "argv", [start, *arguments]):
            runpy.run_path(str(processes.ROOT / start), run_name="__main__")


def main(*arguments: str) -> None:
    """Runs the visit."""
    torch.set_num_threads(1)
    processes.execute = execute
    gpu_visit.is_bad = lambda row: "failed" in row
    with CompilingGPU():
        make_small()
        gpu_visit.main(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
