"""A weight's memory is touched first by the workers that read it."""

from __future__ import annotations

import numpy as np
import pytest

from nanoengine.kernels import cpu_linear, cpu_quantized, shares
from nanoengine.kernels.tiles import PANEL

NOTHING = np.empty(0, np.float32)


class Memory:
    """Bytes that know which of them were written."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.written: list[int] = []

    def __len__(self) -> int:
        return self.nbytes

    def __setitem__(self, at: int, value: int) -> None:
        self.written.append(at)


@pytest.mark.parametrize("workers", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("kernel", ["linear", "linear_dequantized", "linear8", "linear4"])
def test_the_worker_that_reads_a_panel_has_touched_it(kernel, workers, monkeypatch):
    panels, panel_bytes = 120, 5 * shares.PAGE
    out = np.empty((1, panels * PANEL), np.float32)
    room, given, reader = {
        "linear": (cpu_linear, (out[:, :1], NOTHING, NOTHING), "linear_panels"),
        "linear_dequantized": (
            cpu_linear, (out[:, :1], NOTHING, 8, NOTHING, NOTHING, 1, NOTHING),
            "dequantized_panels",
        ),
        "linear8": (cpu_quantized, (NOTHING,) * 4, "linear8_panels"),
        "linear4": (cpu_quantized, (*(NOTHING,) * 5, 1, NOTHING), "linear4_panels"),
    }[kernel]  # fmt: skip
    read: list[tuple[int, int]] = []
    monkeypatch.setattr(room, reader, lambda *arguments: read.append(arguments[-2:]))
    monkeypatch.setattr(cpu_quantized, "quantize_rows", lambda *_: (NOTHING,) * 3)
    monkeypatch.setattr(cpu_quantized, "sums8", lambda offsets: offsets)
    assert room.share_of is shares.share_of
    for module in (room, shares):
        monkeypatch.setattr(module, "share_of", shares.share_of.py_func)
    in_all = 0
    for worker in range(workers):
        memory = Memory(panels * panel_bytes)
        for module in (room, shares):
            monkeypatch.setattr(module, "prange", lambda count, worker=worker: [worker])
        shares.touch.py_func(memory, workers)
        getattr(room, kernel).py_func(*given, out, workers)
        lo, hi = (panel * panel_bytes for panel in read.pop())
        in_all += hi - lo
        touched = set(range(lo, hi, shares.PAGE)) & {
            at // shares.PAGE * shares.PAGE for at in memory.written
        }
        assert len(touched) * shares.PAGE > hi - lo - 2 * panel_bytes
    assert in_all == panels * panel_bytes


def test_every_page_is_touched():
    memory = np.ones(10 * shares.PAGE + 17, np.uint8)
    shares.touch(memory, 3)
    pages = memory[: 10 * shares.PAGE].reshape(10, -1)
    assert (pages == 0).any(1).all() and (pages == 1).sum(1).min() > shares.PAGE - 3
    shares.touch(memory[:0], 3)
