"""KVLayout: the KV cache that an executor has allocated, as plain numbers.

An executor returns it from `start`; the PrefixCache and the BlockManager are built from it.

    KVLayout ── num_blocks x block_size tokens ── KVGroup (full attention)   a block table each
             │                                └── KVGroup (window of w)      for its layers
             └─ num_states ─────────────────────── KVGroup (state group)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table and one retention rule.

    `sliding_window` [tokens]: with w, a token sees itself and the w - 1 tokens before it, and older
    blocks are dropped; None keeps all.

    `snapshot_every` [blocks] makes it a state group, whose layers keep one state of fixed size a
    sequence, and no keys and values. An entry of its table is the state behind that block's last
    computed token; a token needs the state behind the token before it, as in a window of two. A
    state in every `snapshot_every`-th entry stays behind as a snapshot; between these, entries are
    null.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None
    snapshot_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The blocks that the BlockManager may hand out.

    Attributes:
        num_blocks: the null block included.
        block_size: tokens of a block.
        block_bytes: bytes of a block, over all layers of a group.
        groups: a state group, at most one, comes last.
        num_states: states of the state group; their ids follow those of the blocks.
        state_bytes: bytes of a state, over all layers of the state group.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    groups: tuple[KVGroup, ...]
    num_states: int = 0
    state_bytes: int = 0

    @property
    def has_groups(self) -> bool:
        """True if there is more than one group, or one that does not keep all blocks."""
        return len(self.groups) > 1 or self.groups[0].sliding_window is not None

    @property
    def snapshot_every(self) -> int | None:
        """Blocks between two snapshots; None: there is no state group."""
        return self.groups[-1].snapshot_every
