"""StatePool: a BlockPool whose last ids are recurrent states, with the same lifecycle.

Blocks 0 to `num_blocks` - 1 hold keys and values; the next `num_states` ids hold one state each, in
their own queue. Ids are unique, so only counts and allocations need the kind.
"""

from __future__ import annotations

from nanoengine.core.block_pool import BlockPool, Queue


class StatePool(BlockPool):
    """A pool of `num_blocks` blocks and `num_states` states, which may be 0."""

    def __init__(self, num_blocks: int, num_groups: int = 1, num_states: int = 0) -> None:
        self.num_states = num_states
        super().__init__(num_blocks, num_groups)

    def _make_blocks(self) -> None:
        super()._make_blocks()
        self._states = Queue(self.num_states)
        self._add(self._states)

    @property
    def num_free_states(self) -> int:
        """States that `allocate` can return now, empty and cached."""
        return self._states.num_free

    def allocate(self, count: int, *, states: bool = False) -> list[int]:
        """Allocates blocks, or states, with one reference each: see `BlockPool.allocate`."""
        return self._pop_free(self._states if states else self._kv, count)
