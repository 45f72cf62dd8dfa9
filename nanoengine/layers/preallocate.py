"""Preallocated memory for group-wise quantized weights, given to layers before they pack into it.

`models/cpu.py` calls this only for quantized models.

Why before: the OS takes longer to provide a page than the packing to fill it, so no page is
requested twice.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoengine.kernels.gemm import LINE
from nanoengine.layers.placement import empty_bytes, touched

ARENA_BYTES = 256 << 20
"""Size of an array of `WeightArena` [bytes]. Its unused pages take no memory."""


class WeightArena:
    """Allocates consecutive memory for weights from large arrays."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """As `empty_bytes`, and touches the memory."""
        whole = -(-size // LINE) * LINE
        if whole > len(self._free):
            self._free = empty_bytes(max(whole, ARENA_BYTES))
        memory, self._free = self._free[:size], self._free[whole:]
        return touched(memory)


def preallocate(model: nn.Module) -> None:
    """Gives consecutive memory to all layers that allocate their packed weights by `allocate`."""
    arena = WeightArena()
    for path, module in model.named_modules():
        # Why not experts: kernels need a layer's experts at equal distances.
        if hasattr(module, "allocate") and ".experts." not in path:
            module.allocate = arena.take
