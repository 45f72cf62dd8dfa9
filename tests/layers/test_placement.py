"""Packed weights move side by side, and take their memory once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nanoengine.layers import placement

COUNT, SIZE = 300, 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is another one")
def test_buffers_are_in_memory_once_after_they_moved() -> None:
    """What they left stayed with the C library, so that a model was there twice."""
    model, between = nn.Module(), []
    torch.empty(30 << 20, dtype=torch.uint8)  # From now on the C library keeps what is smaller.
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
