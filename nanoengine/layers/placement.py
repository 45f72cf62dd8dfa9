"""Weights on huge pages: one array for all tensors of a model on a CPU.

Why: a step reads every weight once. With pages of 4 KiB, the CPU translates an address every 4 KiB,
and its prefetchers stop at page boundaries. numpy requests huge pages of 2 MiB for large arrays;
small tensors get them only as parts of such an array.

The OS allocates a page on the NUMA node of the thread that first touches it. So the threads that
will read a page touch it here (`kernels/pool.py`), before anything is loaded.

Weights that are packed part by part get their memory from `preallocate.py`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection

import numpy as np
import torch
from torch import nn

LINE = 64  # bytes of a cache line; every tensor starts at one

LARGE_BYTES = 32 << 20
"""Buffers of at least this size [bytes] are not moved. Why: a buffer exists twice while it is
moved, and a head may be a third of a small model."""

MOVED_BYTES = 16 << 20
"""After moving this many bytes of buffers, their old memory is returned to the OS. Why: the C
library caches small allocations, so otherwise all of a model's buffers would stay in memory
twice."""


def place_parameters(model: nn.Module) -> None:
    """Moves the parameters into one array, before loading; their content is lost.

    Nothing is copied. The old memory was never touched, so it is not resident.
    """
    named = [(path, p) for path, p in model.named_parameters() if p.device.type == "cpu"]
    tensors = _allocate_contiguous([parameter for _, parameter in named])
    for (path, parameter), tensor in zip(named, tensors, strict=True):
        parameter.data = first_touch(tensor, path)


def place_buffers(model: nn.Module) -> None:
    """Moves buffers, which are the packed weights of quantized layers, into one array."""
    named = [
        (module, path, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.device.type == "cpu"
        and (_is_small(buffer) or buffer.data_ptr() % LINE or ".experts." in path)
    ]
    targets = _allocate_contiguous([buffer for *_, buffer in named])
    moved = 0
    while named:  # one by one, so that few buffers exist twice at a time
        module, path, name, buffer = named.pop()
        setattr(module, name, first_touch(targets.pop(), path).copy_(buffer))
        moved += buffer.nbytes
        if moved >= MOVED_BYTES or not named:
            moved, buffer = 0, None
            _release_memory()


def _release_memory() -> None:
    """Makes the C library return unused memory to the OS, if it is glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def first_touch(tensor: torch.Tensor, path: str = "") -> torch.Tensor:
    """Touches a tensor's memory from the workers that will read it (`kernels/pool.py`), and returns
    the tensor.

    `path` is the full name of its parameter or module. The worker that computes a gated output
    reads its rows of gate and of up (`cpu_decoder.activate`), so each half is distributed
    separately. Why loading does not do this: all workers write to each tensor as it is loaded.
    """
    # Why here: they import numba, which other devices don't need.
    from nanoengine.kernels.pool import touch
    from nanoengine.kernels.threads import num_workers

    halves = 2 if ".gate_up_proj" in path and ".experts." not in path else 1
    for part in tensor.view(-1).view(torch.uint8).chunk(halves):
        touch(part.numpy(), num_workers())
    return tensor


def _is_small(buffer: torch.Tensor) -> bool:
    """Whether it is neither a large array nor a part of one."""
    return buffer.untyped_storage().nbytes() < LARGE_BYTES


def empty_bytes(size: int) -> torch.Tensor:
    """Allocates uninitialised memory, uint8, aligned to a cache line; large ones on huge pages."""
    whole = np.empty(size + LINE, np.uint8)
    at = -whole.ctypes.data % LINE
    return torch.from_numpy(whole[at : at + size])


def _allocate_contiguous(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Allocates tensors of the same shapes and dtypes in one array."""
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    parts = empty_bytes(sum(sizes)).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
