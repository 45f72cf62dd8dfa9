"""Transfers between host and device: the inputs of a step, and its sampled tokens.

    ship       numpy ──► pinned buffer ──► device      one transfer, on the current stream
    Download   device ──► pinned buffer ──► numpy      on a side stream, when the step is done

Only `Download.wait` makes the host wait. Called by the runner.

Why a pinned buffer for each transfer: the device reads and writes it later, while the host builds
the next step. torch reuses a freed pinned buffer after the copies that used it have finished, so
this costs no allocation after the first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray


def ship(device: torch.device, *arrays: NDArray[np.generic]) -> list[torch.Tensor]:
    """Copies arrays to the device in one transfer; returns tensors of the same shapes and dtypes.

    On a CPU they share the arrays' memory if the arrays are contiguous.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    # Why 16: kernels use aligned loads.
    ends = accumulate(-(-array.nbytes // 16) * 16 for array in arrays)
    *offsets, size = 0, *ends
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host = buffer.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    sent = buffer.to(device, non_blocking=True)
    return [
        sent[offset : offset + array.nbytes]
        .view(getattr(torch, array.dtype.name))
        .view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    ]


class Download:
    """Copies tensors to the host after all work issued so far.

    Args:
        stream: a side stream of the GPU for the copies, so that no step waits for them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        self._host = []
        # Why stored: torch must not reuse their memory before it is copied.
        self._sources = list(tensors)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for tensor in tensors:
                self._host.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                self._host[-1].copy_(tensor, non_blocking=True)
            self._arrived = stream.record_event()

    def wait(self) -> list[torch.Tensor]:
        """Waits for the copies; returns the tensors on the host."""
        self._arrived.synchronize()
        self._sources = []
        return self._host
