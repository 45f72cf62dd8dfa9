"""Weights on huge pages: one block of memory for all of a model's tensors on a CPU.

Why: a step reads every weight once. On pages of 4 KiB the hardware looks up an address every 4 KiB,
and its prefetchers stop there; numpy asks the kernel for pages of 2 MiB where arrays are large, and
small tensors get theirs only side by side in one of those.

A page lies on the socket of the thread that first touches it. So those who will read it do that
here (`kernels/pool.py`), before anything is loaded.

Weights that are packed part by part get theirs from `rooms.py`.
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
"""Of a buffer that stays where it was made by `room_for`. Why: it would be there twice while it
moves, and a head may be a third of a small model."""

MOVED_BYTES = 16 << 20
"""Bytes of buffers that move before what they leave is given back to the system. Why: the C library
keeps small pieces for itself, so that all of a model's would stay in memory twice."""


def place_parameters(model: nn.Module) -> None:
    """Moves the parameters, not loaded yet, into one array; what they hold is lost.

    Nothing is copied, and memory that nobody has touched is given back untouched.
    """
    named = [(path, p) for path, p in model.named_parameters() if p.device.type == "cpu"]
    tensors = _side_by_side([parameter for _, parameter in named])
    for (path, parameter), tensor in zip(named, tensors, strict=True):
        parameter.data = touched(tensor, path)


def place_buffers(model: nn.Module) -> None:
    """Moves what is kept in buffers, the packed numbers of quantized layers, into one array."""
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
    while named:  # one by one, so that only the last ones are there twice
        module, path, name, buffer = named.pop()
        setattr(module, name, touched(places.pop(), path).copy_(buffer))
        moved += buffer.nbytes
        if moved >= MOVED_BYTES or not named:
            moved, buffer = 0, None
            _give_back()


def _give_back() -> None:
    """Has the C library give back memory that nobody uses, where it can: glibc's."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def touched(tensor: torch.Tensor, path: str = "") -> torch.Tensor:
    """The tensor, whose memory lies where the workers are that will read it; `kernels/pool.py`.

    `path`: of the parameter or the module that it belongs to. Who computes a gated output reads its
    row of the gate and that of up (`cpu_decoder.activate`), so each half is shared out by itself.

    Why not by who writes it: a checkpoint's tensors come one by one, and each is written by all.
    """
    # Why here: they bring numba, which no other device needs.
    from nanoengine.kernels.pool import touch
    from nanoengine.kernels.threads import num_workers

    halves = 2 if ".gate_up_proj" in path and ".experts." not in path else 1
    for part in tensor.view(-1).view(torch.uint8).chunk(halves):
        touch(part.numpy(), num_workers())
    return tensor


def _is_small(buffer: torch.Tensor) -> bool:
    """Whether it is no large array, nor in one."""
    return buffer.untyped_storage().nbytes() < LARGE_BYTES


def room_for(size: int) -> torch.Tensor:
    """Bytes, uint8 and empty, from the begin of a cache line on; on huge pages if they are many."""
    whole = np.empty(size + LINE, np.uint8)
    at = -whole.ctypes.data % LINE
    return torch.from_numpy(whole[at : at + size])


def _side_by_side(tensors: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Empty tensors of the same shapes and dtypes in one array."""
    sizes = [-(-tensor.nbytes // LINE) * LINE for tensor in tensors]
    parts = room_for(sum(sizes)).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(tensors, parts, strict=True)
    ]
