"""VariedPlan: what a model's layers compute where they are not alike. A field of `LayerPlan`.

Loaded for a model that has one; it knows neither keys of a config nor tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedPlan:
    """Layers of two shapes, of which the last may attend to keys and values of earlier ones.

    Attributes:
        shapes: head dim and number of KV heads, of layers with a window and of the others.
        keys_are_values: in layers without a window both are one projection.
        num_shared: so many last layers attend to the keys and values of the last layer of their
            kind before them.
        shared_width: how many times as wide as others' their MLP is.
        input_size: of the input that each layer has besides; 0: there is none.
    """

    shapes: tuple[tuple[int, int], tuple[int, int]]
    keys_are_values: bool
    num_shared: int
    shared_width: int
    input_size: int

    @property
    def widest(self) -> tuple[int, int]:
        """The shape of the layers that keep the most."""
        return max(self.shapes, key=math.prod)

    def in_a_slice(self, window: int | None) -> int:
        """How many layers of this kind share a slice of the KV cache."""
        return math.prod(self.widest) // math.prod(self.shapes[window is None])

    def slices(self, windows: Sequence[int | None]) -> list[tuple[int, ...]]:
        """The layers that keep keys and values, those together that share a slice."""
        own, found = windows[: len(windows) - self.num_shared], []
        for window in dict.fromkeys(own):
            alike = [n for n, other in enumerate(own) if other == window]
            size = self.in_a_slice(window)
            found += [tuple(alike[n : n + size]) for n in range(0, len(alike), size)]
        return sorted(found)
