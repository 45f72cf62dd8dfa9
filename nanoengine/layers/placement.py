"""Weights on huge pages: one memory block for all tensors of a model on a CPU.

Why: a step reads every weight once. With pages of 4 KiB the hardware translates an address every 4
KiB, and its prefetchers stop there. numpy asks the OS for pages of 2 MiB for large arrays, and
small tensors get huge pages only if they share such an array.

A page is allocated on the socket of the thread that first touches it. So the threads that will read
a page touch it here (`kernels/pool.py`), before anything is loaded.

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
"""Buffers of at least this size [bytes] stay where `empty_bytes` made them. Why: a buffer exists
twice while it moves, and a head may be a third of a small model."""

MOVED_BYTES = 16 << 20
"""How many bytes of buffers are moved before their old memory is returned to the OS. Why: the C
library caches small pieces, so otherwise all of a model's buffers would stay in memory twice."""


def place_parameters(model: nn.Module) -> None:
    """Moves the parameters, before loading, into one array; their content is lost.

    Nothing is copied, and memory that was never touched is freed.
    """
    named = [(path, p) for path, p in model.named_parameters() if p.device.type == "cpu"]
    tensors = _side_by_side([parameter for _, parameter in named])
    for (path, parameter), tensor in zip(named, tensors, strict=True):
        parameter.data = touched(tensor, path)


def place_buffers(model: nn.Module) -> None:
    """Moves buffers, the packed weights of quantized layers, into one array."""
    named = [
        (module, path, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
        and buffer.device.type == "cpu"
        and (_is_small(buffer) or buffer.data_ptr() % LINE or ".experts." in path)
    ]
    places = _side_by_side([buffer for *_, buffer in named])
    moved = 0
    while named:  # one by one, so that only the last ones exist twice
        module, path, name, buffer = named.pop()
        setattr(module, name, touched(places.pop(), path).copy_(buffer))
        moved += buffer.nbytes
        if moved >= MOVED_BYTES or not named:
            moved, buffer = 0, None
            _give_back()


def _give_back() -> None:
    """Makes the C library return unused memory to the OS, if it is glibc."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def touched(tensor: torch.Tensor, path: str = "") -> torch.Tensor:
    """Returns the tensor after touching its memory from the workers that will read it;
    `kernels/pool.py`.

    `path` is the full name of its parameter or module. The worker that computes a gated output
    reads its rows of gate and up (`cpu_decoder.activate`), so each half is distributed separately.
    Why not by the writing thread: a checkpoint's tensors are loaded one by one, and all workers
    write each.
    """
    # Why here: they import numba, which no other device needs.
    from nanoengine.kernels.pool import touch
    from nanoengine.kernels.threads import num_workers

    halves = 2 if ".gate_up_proj" in path and ".experts." not in path else 1
    for part in tensor.view(-1).view(torch.uint8).chunk(halves):
        touch(part.numpy(), num_workers())
    return tensor


def _is_small(buffer: torch.Tensor) -> bool:
    """Whether it is not a large array, nor part of one."""
    return buffer.untyped_storage().nbytes() < LARGE_BYTES


def empty_bytes(size: int) -> torch.Tensor:
    """Allocates empty bytes, uint8, aligned to a cache line; on huge pages if they are many."""
    whole = np.empty(size + LINE, np.uint8)
    at = -whole.ctypes.data % LINE
    return torch.from_numpy(whole[at : at + size])


def _side_by_side(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Empty tensors of the same shapes and dtypes in one array."""
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    parts = empty_bytes(sum(sizes)).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
