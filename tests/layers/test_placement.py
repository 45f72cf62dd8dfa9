"""Packed weights are moved to one allocation without taking memory twice."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nanoengine.kernels import pool
from nanoengine.kernels.cpu_decoder import activate
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import share_of
from nanoengine.layers import placement
from nanoengine.layers.packed import PackedLinear

COUNT, SIZE = 300, 1 << 20


def resident() -> int:
    """Resident memory of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_moved_buffers_are_in_memory_once() -> None:
    """Regression: the C library kept the freed memory, so a model used twice its size."""
    model, between = nn.Module(), []
    torch.empty(30 << 20, dtype=torch.uint8)  # From now on the C library keeps smaller blocks.
    before = resident()
    for i in range(COUNT):
        model.register_buffer(f"b{i}", torch.full((SIZE,), i % 251, dtype=torch.uint8))
        between.append(torch.empty(2000))
    placement.place_buffers(model)
    assert (resident() - before) / (COUNT * SIZE) < 1.5
    found = list(model.buffers())
    assert [int(buffer[-1]) for buffer in found] == [i % 251 for i in range(COUNT)]
    starts = sorted(buffer.data_ptr() for buffer in found)
    assert starts[-1] - starts[0] == (COUNT - 1) * SIZE


@compiled(fastmath=())
def gated(x, weight, out, workers):
    activate(x, weight, 0, out, workers)


def test_the_worker_that_touches_gate_and_up_reads_them(monkeypatch) -> None:
    """NaN in the memory that one of four workers touches must reach that worker's outputs only."""
    found: list[np.ndarray] = []
    monkeypatch.setattr(pool, "touch", lambda memory, workers: found.append(memory))
    workers, inner, inputs = 4, 512, 32
    model = nn.Module()
    model.mlp, model.mlp.gate_up_proj = nn.Module(), PackedLinear("gate_up_proj")
    method = model.mlp.gate_up_proj
    method.create((2 * inner, inputs), torch.float32, torch.device("cpu"))
    placement.place_parameters(model)
    method.load(torch.ones(2 * inner, inputs))
    panels, bias = method.operands(None)
    assert sum(part.nbytes for part in found) == panels.nbytes
    for worker in range(workers):
        broken = panels.copy()
        for part in found:
            first = (part.ctypes.data - panels.ctypes.data) // 4
            lo, hi = share_of.py_func(part.nbytes // 4, worker, workers)
            broken[first + lo : first + hi] = np.nan
        out = np.empty((1, inner), np.float32)
        gated(np.ones((1, inputs), np.float32), (broken, bias), out, workers)
        lo, hi = share_of.py_func(inner, worker, workers)
        assert np.flatnonzero(np.isnan(out[0])).tolist() == list(range(lo, hi))
