"""KVLayout: the sizes of the KV cache that an executor has allocated.

An executor returns it from `start`; the PrefixCache and the BlockManager are built from it.

    KVLayout ── num_blocks x block_size tokens ── KVGroup (full attention)   one block table
             │                                └── KVGroup (window of w)      per group
             └─ num_states ─────────────────────── KVGroup (state group)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table and one retention rule.

    `sliding_window` [tokens]: with w, a token attends to itself and to the w - 1 tokens before it,
    and older blocks are dropped; None keeps all.

    `snapshot_every` [blocks] makes it a state group. Its layers keep one recurrent state of fixed
    size per sequence, and no keys and values. A table entry is the state after that block's last
    computed token. A token needs the state after the previous token, as in a window of two. The
    state in every `snapshot_every`-th entry is kept as a snapshot; entries in between are null.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    snapshot_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The blocks that the BlockManager may allocate.

    Attributes:
        num_blocks: number of blocks, including the null block.
        block_size: tokens per block.
        block_bytes: bytes per block, over all layers of a group.
        groups: the KV groups; a state group, at most one, comes last.
        num_states: states of the state group; their ids follow the ids of the blocks.
        state_bytes: bytes per state, over all layers of the state group.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    groups: tuple[KVGroup, ...]
    num_states: int = 0
    state_bytes: int = 0

    @property
    def has_groups(self) -> bool:
        """True if there is more than one group, or one group that does not keep all blocks."""
        return len(self.groups) > 1 or self.groups[0].sliding_window is not None

    @property
    def snapshot_every(self) -> int | None:
        """Blocks between two snapshots; None: there is no state group."""
        return self.groups[-1].snapshot_every
