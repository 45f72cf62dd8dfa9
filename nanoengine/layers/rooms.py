"""The last place of weights in groups, given to their layers before these pack them into it.

Called by `models/cpu.py` for a model that is quantized, and for no other.

Why before: a system takes longer to give a page than to fill it, so no page is asked for twice.
"""

from __future__ import annotations

import torch
from torch import nn

from nanoengine.kernels.tiles import LINE
from nanoengine.layers.placement import room_for, touched

ROOM_BYTES = 256 << 20
"""Of an array of `Rooms`. What nobody has taken of it takes no memory."""


class Rooms:
    """Takes rooms for weights from large arrays, one behind the other."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """As `room_for`, and touched."""
        whole = -(-size // LINE) * LINE
        if whole > len(self._free):
            self._free = room_for(max(whole, ROOM_BYTES))
        room, self._free = self._free[:size], self._free[whole:]
        return touched(room)


def give_rooms(model: nn.Module) -> None:
    """The layers that pack weights into a `room` get rooms that are side by side."""
    rooms = Rooms()
    for path, module in model.named_modules():
        # Why not experts: kernels want those of a layer at equal distances.
        if hasattr(module, "room") and ".experts." not in path:
            module.room = rooms.take
