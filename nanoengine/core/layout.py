"""KVLayout: the KV cache that an executor has allocated, as plain numbers.

An executor reports it when it has started; the Scheduler and the BlockManager are built from it.

    KVLayout ── num_blocks x block_size tokens ── KVGroup (full attention)   a block table each
                                              └── KVGroup (window of w)      for its layers
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table and one retention rule.

    `sliding_window` [tokens]: None keeps everything; w lets a token see itself and the w - 1 tokens
    before it.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV cache that an executor has allocated: what the BlockManager may hand out.

    `num_blocks` counts the null block; `block_bytes` are the bytes of one block over all layers of
    its group.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    groups: tuple[KVGroup, ...]
