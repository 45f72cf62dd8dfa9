"""Preallocated memory for group-wise quantized weights.

`models/cpu.py` calls this only for quantized models, before their layers pack weights.

Why: the OS takes longer to provide a page than packing to fill it, so weights are packed into their
final memory.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoengine.kernels.gemm import LINE
from nanoengine.layers.placement import empty_bytes, first_touch

ARENA_BYTES = 256 << 20
"""Size of a `WeightArena`'s arrays [bytes]. Unused pages take no memory."""


class WeightArena:
    """Allocates consecutive weights from large arrays."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> torch.Tensor:
        """Like `empty_bytes`, and touches the memory (`first_touch`)."""
        whole = -(-size // LINE) * LINE
        if whole > len(self._free):
            self._free = empty_bytes(max(whole, ARENA_BYTES))
        memory, self._free = self._free[:size], self._free[whole:]
        return first_touch(memory)


def preallocate(model: nn.Module) -> None:
    """Makes all layers with an attribute `allocate` get their packed weights' memory from an
    arena."""
    arena = WeightArena()
    for path, module in model.named_modules():
        # Why not experts: kernels require equal distances between a layer's experts.
        if hasattr(module, "allocate") and ".experts." not in path:
            module.allocate = arena.allocate
