"""Measures the peaks of this machine: memory bandwidth, and FLOP/s of products.

A throughput says little without the limits of the hardware, and a data sheet knows neither the
machine's other users nor its memory channels. So the benchmark measures both in the same run: on a
GPU by torch, on a CPU by kernels with the instructions of the engine's kernels (`cpu_peak.py`). Why
not torch there: its library may use narrower instructions than the CPU has, and engines would then
exceed "the limit".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUFFER_BYTES = 512 * 2**20
"""Bytes to read: many times a last-level cache (H200: 50 MiB, Zen 3: 32 MiB per chiplet)."""

GEMM_SIZE = 8192
"""Side of the square matrices: enough work to fill a GPU, in a few milliseconds."""

TURNS = 2**20
"""Iterations of a compute kernel: a few milliseconds, long compared with waking a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks of the device: 1e9 bytes/s, and 1e9 FLOP/s with operands of `dtype`; `by` names the
    implementation."""

    read_gbs: float
    gemm_gflops: float
    dtype: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUPeaks:
    """The peaks of all threads: 1e9 bytes/s, and 1e9 multiplications and additions per second with
    operands of each dtype that the instruction set `isa` supports."""

    isa: str
    threads: int
    read_gbs: float
    gflops: dict[str, float]


def measure_peaks(
    device: torch.device,
    dtype: torch.dtype,
    *,
    products: str | None = None,
    seconds: float = 0.5,
    buffer_bytes: int = BUFFER_BYTES,
    gemm_size: int = GEMM_SIZE,
) -> Peaks:
    """Measures both peaks, each for about `seconds`; the fastest repetition counts.

    Why the fastest: other processes can only slow a repetition down.

    Args:
        products: "int8" if weights and activations are multiplied in int8, on a CPU; None: as
            `dtype`. A CPU without such instructions is measured in float32.
        buffer_bytes: must be far larger than the caches.
        gemm_size: side of the matrices, on a GPU.
    """
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        products_of = products or kind
        found = measure_cpu_peaks([products_of], seconds=seconds, buffer_bytes=buffer_bytes)
        ((kind, rate),) = found.gflops.items()
        return Peaks(read_gbs=found.read_gbs, gemm_gflops=rate, dtype=kind, by=found.isa)
    return Peaks(
        read_gbs=_bandwidth(device, buffer_bytes, seconds) / 1e9,
        gemm_gflops=_gemm_rate(device, dtype, gemm_size, seconds) / 1e9,
        dtype=kind,
        by="torch.mm",
    )


def measure_cpu_peaks(
    kinds: list[str] | None = None,
    *,
    seconds: float = 0.5,
    buffer_bytes: int = BUFFER_BYTES,
) -> CPUPeaks:
    """Measures reading, and the products of each kind, for about `seconds` each.

    Args:
        kinds: of "float32", "float64", "bfloat16", "int8"; unsupported ones become float32. None:
            all supported ones except float64.
    """
    import numpy as np

    from benchmarks.suite import cpu_peak
    from nanoengine.kernels.isa import CURRENT
    from nanoengine.kernels.threads import num_workers, start_workers

    start_workers()
    workers, cpu = num_workers(), torch.device("cpu")
    if kinds is None:
        kinds = [kind for kind in cpu_peak.KERNELS if kind != "float64"]
    gflops = {}
    for requested in kinds:
        kind = requested if requested in cpu_peak.KERNELS else "float32"
        kernel = cpu_peak.KERNELS[kind]
        real = np.float64 if kind == "float64" else np.float32
        data = np.zeros((workers, cpu_peak.ROOM), real)
        fastest = _fastest(lambda: kernel(data, TURNS), cpu, seconds)  # noqa: B023
        gflops[kind] = workers * TURNS * cpu_peak.operations(kind) / fastest / 1e9
    memory, seen = cpu_peak.buffer(buffer_bytes, workers), np.empty(workers, np.int32)
    fastest = _fastest(lambda: cpu_peak.read(memory, seen, workers), cpu, seconds)
    return CPUPeaks(
        isa=CURRENT.name, threads=workers, read_gbs=memory.nbytes / fastest / 1e9, gflops=gflops
    )


def _bandwidth(device: torch.device, buffer_bytes: int, seconds: float) -> float:
    """Bytes/s: the better of summing a buffer and of copying one half onto the other.

    A sum only reads; a copy reads and writes each byte once. Devices differ in which one is closer
    to the peak.
    """
    target, source = torch.ones(2, buffer_bytes // 8, dtype=torch.float32, device=device)
    sum_s = _fastest(source.sum, device, seconds / 2)
    copy_s = _fastest(lambda: target.copy_(source), device, seconds / 2)
    return source.nbytes / min(sum_s, copy_s / 2)


def _gemm_rate(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of a product of two square matrices of random values.

    Why random: constant bits draw less power, so a GPU would keep clocks that no model reaches.
    """
    a, b = torch.empty(2, size, size, dtype=dtype, device=device).normal_()
    out = torch.empty_like(a)
    return 2 * size**3 / _fastest(lambda: torch.mm(a, b, out=out), device, seconds)


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest wall time of one call, in seconds, after one warm-up call."""
    work()
    _synchronize(device)
    fastest, count = float("inf"), 0
    deadline = time.perf_counter() + seconds
    while not count or time.perf_counter() < deadline:
        start = time.perf_counter()
        work()
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
        count += 1
    return fastest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
