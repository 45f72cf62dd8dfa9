"""KV groups: which blocks a group of layers needs, may drop, and can start from.

Full attention needs the keys and values of every token. With a sliding window of w tokens, the
query at position p attends to positions p - w + 1 to p. Blocks entirely before that are freed, and
replaced by the null block in the table:

    block_size 2, window 4, 7 tokens computed     [ 0 0 | 0 0 | x x | x . ]     2 nulls

Pure functions of a KVGroup, used by the BlockManager and the PrefixCache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nanoengine.core.layout import KVGroup


def num_dropped_blocks(group: KVGroup, num_computed_tokens: int, block_size: int) -> int:
    """Number of blocks at the start of a table that are outside the windows of all later queries.

    >>> [num_dropped_blocks(KVGroup(layers=(0,), sliding_window=4), n, 2) for n in (4, 5, 6, 7, 11)]
    [0, 1, 1, 2, 4]
    """
    if group.sliding_window is None:
        return 0
    return max(0, num_computed_tokens - group.sliding_window + 1) // block_size


def num_needed_blocks(group: KVGroup, num_tokens: int, max_chunk: int, block_size: int) -> int:
    """Maximum number of KV blocks that a group holds at once, with chunked prefill.

    Args:
        num_tokens: length of the sequence.
        max_chunk: maximum number of tokens per chunk.

    >>> num_needed_blocks(KVGroup(layers=(0,)), 100, 64, 16)
    7
    >>> num_needed_blocks(KVGroup(layers=(0,), sliding_window=16), 100, 32, 16)
    4
    """
    num_blocks = -(-num_tokens // block_size)
    if group.snapshot_every is not None:
        return 0
    if group.sliding_window is None:
        return num_blocks
    # Why: n tokens at any offset within a block occupy at most ceil((n - 1) / size) + 1 blocks.
    return min(num_blocks, -(-(group.sliding_window + max_chunk - 2) // block_size) + 1)


def longest_hit(group: KVGroup, found: Sequence[object], block_size: int, max_length: int) -> int:
    """The longest prefix, in blocks and up to `max_length`, whose needed blocks are all found.

    Full attention needs every block of it; a window only the last ceil((window - 1) / block_size).

    >>> longest_hit(KVGroup(layers=(0,)), [True, True, False, True], 16, 4)
    2
    >>> longest_hit(KVGroup(layers=(0,), sliding_window=17), [False, False, True, True], 16, 4)
    4
    """
    window = group.sliding_window
    needed = max_length if window is None else -(-(window - 1) // block_size)
    longest, consecutive = 0, 0
    for length in range(1, max_length + 1):
        consecutive = consecutive + 1 if found[length - 1] else 0
        if consecutive >= min(needed, length):
            longest = length
    return longest


def longest_common_hit(
    groups: Sequence[KVGroup], found: Sequence[Sequence[object]], block_size: int
) -> int:
    """The longest prefix, in blocks, that every group can start from.

    One group may shorten the prefix, and its new end may lie where another group's window was not
    found, which shortens it again. So all groups are checked repeatedly until none shortens it.

    Args:
        found: `found[g][i]` is true if group g has the i-th block. A block id serves as well,
            because the null block is 0.

    >>> groups = (KVGroup(layers=(0,)), KVGroup(layers=(1,), sliding_window=2))
    >>> longest_common_hit(groups, [[1, 1, 1], [1, 1, 0]], 16)
    2
    """
    length, previous = min(map(len, found)), -1
    if all(map(all, found)):  # Why: the common case, in which no group shortens the prefix.
        return length
    while length != previous:
        previous = length
        for group, hits in zip(groups, found, strict=True):
            length = longest_hit(group, hits, block_size, length)
    return length


def make_kv_groups(
    windows: Sequence[int | None],
    state_layers: Sequence[int] = (),
    snapshot_every: int = 1,
    attention_layers: Collection[int] | None = None,
) -> tuple[KVGroup, ...]:
    """Groups layers with the same window into groups of (nearly) equal size, and `state_layers`
    into their own group. Only `attention_layers` hold keys and values (None: all layers except
    `state_layers`).

    One pool serves all groups, so each block has the size of the largest group. A model with 22
    windowed layers and 4 full ones would waste most of its full blocks, so the windowed layers are
    split into groups of 4. Source: vLLM's hybrid KV-cache manager.

    >>> [g.layers for g in make_kv_groups([None, None, None])]
    [(0, 1, 2)]
    >>> [(g.layers, g.sliding_window) for g in make_kv_groups([4, 4, None, 4, 4, None])]
    [((0, 1), 4), ((3, 4), 4), ((2, 5), None)]
    >>> [g.layers for g in make_kv_groups([None, None, None, None], state_layers=(0, 1, 2))]
    [(3,), (0, 1, 2)]
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        if layer not in state_layers if attention_layers is None else layer in attention_layers:
            by_window.setdefault(window, []).append(layer)
    smallest = min(map(len, by_window.values()))
    largest = max(map(len, by_window.values()))
    size = largest if largest < 1.25 * smallest else smallest
    groups = [
        KVGroup(layers=tuple(layers[i : i + size]), sliding_window=window)
        for window, layers in by_window.items()
        for i in range(0, len(layers), size)
    ]
    if state_layers:
        states = KVGroup(
            layers=tuple(state_layers), sliding_window=2, snapshot_every=snapshot_every
        )
        groups.append(states)
    return tuple(groups)
