"""KVLayout: the KV cache that an executor has allocated, as plain numbers.

An executor returns it from `start`; the PrefixCache and the BlockManager are built from it.

    KVLayout ── num_blocks x block_size tokens ── KVGroup (full attention)   a block table each
                                              └── KVGroup (window of w)      for its layers
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table and one retention rule.

    `sliding_window` [tokens]: with w, a token sees itself and the w - 1 tokens before it, and older
    blocks are dropped; None keeps all.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The blocks that the BlockManager may hand out.

    Attributes:
        num_blocks: the null block included.
        block_size: tokens of a block.
        block_bytes: bytes of a block, over all layers of a group.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    groups: tuple[KVGroup, ...]
