"""Draws: the numbers of `random.Random(seed).randint`, many at a time.

The standard workload is defined by that generator, call by call. At 100,000 requests it is asked 56
million times; here whole prompts are taken from the same stream at once. Called by `workload.py`.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

REFILL = 2**15
"""Raw 32-bit numbers taken from the generator at once."""


class Draws:
    """Integers of one seeded stream, in the order and of the values that `random.Random` gives.

    Why it can: both are the Mersenne Twister, and `randint` takes the top bits of a 32-bit number,
    as many as the range needs, and those of the next one for as long as they are out of range.

    >>> ours, theirs = Draws(7), random.Random(7)
    >>> ours.integers(5, 900, 3).tolist() == [theirs.randint(5, 900) for _ in range(3)]
    True
    """

    def __init__(self, seed: int) -> None:
        _, (*key, position), _ = random.Random(seed).getstate()
        self._generator = np.random.MT19937()
        self._generator.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
        self._raw = np.zeros(0, dtype=np.uint64)
        self._next = 0

    def integers(self, low: int, high: int, count: int) -> NDArray[np.int64]:
        """The next `count` numbers from low to high, both included; at most 2**32 - 1 apart."""
        width, parts, missing = high - low + 1, [], count
        while missing:
            if self._next == len(self._raw):
                self._raw, self._next = self._generator.random_raw(REFILL), 0
            window = self._raw[self._next : self._next + 2 * missing + 64]
            drawn = window >> (32 - width.bit_length())
            taken = np.flatnonzero(drawn < width)[:missing]
            missing -= len(taken)
            self._next += len(window) if missing else int(taken[-1]) + 1
            parts.append(drawn[taken].astype(np.int64) + low)
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
