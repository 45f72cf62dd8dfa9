"""The hardware's peaks as this machine shows them now: memory bandwidth and matrix products.

A throughput says little without what the hardware could do, and a data sheet knows neither the
machine's other users nor its memory channels. So the benchmark measures both in the same run.
Knows torch, nothing of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BUFFER_BYTES = 512 * 2**20
"""Read for the bandwidth: many times a last-level cache (H200: 50 MiB, Zen 3: 32 MiB a chiplet)."""

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices: enough work to fill the device, yet only milliseconds of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the device reached: 1e9 bytes/s, and 1e9 FLOP/s in `dtype`."""

    read_gbs: float
    gemm_gflops: float
    dtype: str


def measure_peaks(
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float = 0.5,
    buffer_bytes: int = BUFFER_BYTES,
    gemm_size: int | None = None,
) -> Peaks:
    """Measures both peaks, each for about `seconds`; the fastest repetition counts.

    Why the fastest: other processes can only slow a repetition down.

    Args:
        buffer_bytes: must be far larger than the caches.
        gemm_size: side of the matrices; None takes `GEMM_SIZE` of the device type.
    """
    size = gemm_size or GEMM_SIZE[device.type]
    return Peaks(
        read_gbs=_bandwidth(device, buffer_bytes, seconds) / 1e9,
        gemm_gflops=_gemm_rate(device, dtype, size, seconds) / 1e9,
        dtype=str(dtype).removeprefix("torch."),
    )


def _bandwidth(device: torch.device, buffer_bytes: int, seconds: float) -> float:
    """Bytes/s: the better of summing a buffer and of copying one half onto the other.

    A sum only reads; a copy reads and writes each byte once. Which of the two gets nearer to the
    hardware differs between devices.
    """
    target, source = torch.ones(2, buffer_bytes // 8, dtype=torch.float32, device=device)
    sum_s = _fastest(source.sum, device, seconds / 2)
    copy_s = _fastest(lambda: target.copy_(source), device, seconds / 2)
    return source.nbytes / min(sum_s, copy_s / 2)


def _gemm_rate(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """FLOP/s of a product of two square matrices."""
    a = torch.full((size, size), 0.5, dtype=dtype, device=device)
    b, out = a.clone(), torch.empty_like(a)
    return 2 * size**3 / _fastest(lambda: torch.mm(a, b, out=out), device, seconds)


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Shortest wall time of one call, in seconds, after one call that warms up."""
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
