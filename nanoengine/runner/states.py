"""Which states a step reads and writes, of models whose layers keep one in place of a KV cache.

Called by RowBuffers where there is a state group. Legend: S sequences, D sequences with one token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from nanoengine.attention.batch import Span, StateWave
from nanoengine.runner.transfers import ship

Ints = NDArray[np.int64]


def state_waves(
    device: torch.device,
    table: NDArray[np.int32],
    first_state: int,
    block_size: int,
    order: Ints,
    rows: Ints,
    starts: Ints,
    counts: Ints,
    offsets: Ints,
) -> tuple[StateWave, ...]:
    """Which states these sequences [S] read and write; `order` is each one's place in the plan.

    A sequence reads the first state of its table from the block of the token before its own on,
    and writes all states of the blocks it computes.
    """
    size = block_size
    firsts, lasts = starts // size, (starts + counts - 1) // size
    writes = state_slots(table[rows, lasts], first_state)
    before = state_slots(table[rows, np.maximum(starts - 1, 0) // size], first_state)
    reads = np.where(before > 0, before, writes) * (starts > 0)
    spans: dict[int, Span] = {}
    for i in np.flatnonzero(counts > 1):
        start, count = int(starts[i]), int(counts[i])
        entries = state_slots(table[rows[i], firsts[i] : lasts[i] + 1], first_state)
        written = [
            (min(int(firsts[i] + n + 1) * size - start, count), int(entries[n]))
            for n in np.flatnonzero(entries)
        ]
        if start and not before[i]:
            reads[i] = written[0][1]
        at = int(offsets[i])
        spans[int(i)] = Span(at, at + count, start, int(reads[i]), tuple(written))
    waves = _waves(order, reads, writes, spans)
    found = []
    for wave in range(int(waves.max(initial=0)) + 1):
        one = np.flatnonzero((counts == 1) & (waves == wave))
        tokens, *slots = ship(device, offsets[one], reads[one], writes[one])
        several = tuple(span for i, span in spans.items() if waves[i] == wave)
        found.append(StateWave(tokens=tokens, reads=slots[0], writes=slots[1], spans=several))
    return tuple(found)


def state_slots(ids: Ints, num_blocks: int) -> Ints:
    """Where states lie, by their ids, which follow those of the blocks; slot 0 for the null block.

    >>> state_slots(np.array([0, 64, 65]), num_blocks=64)
    array([0, 1, 2])
    """
    return np.maximum(ids.astype(np.int64) - (num_blocks - 1), 0)


def _waves(order: Ints, reads: Ints, writes: Ints, spans: Mapping[int, Span]) -> Ints:
    """In which wave each sequence [S] runs: behind those that write what it reads.

    The writer always comes earlier in the plan: a state can be found only after the step that
    writes it has been planned.
    """
    waves = np.zeros(len(order), np.int64)
    if not spans and not np.isin(reads[reads != writes], writes).any():
        return waves
    written = {slot: i for i, span in spans.items() for _, slot in span.writes}
    written |= {int(slot): i for i, slot in enumerate(writes)}
    late = [i for i in np.argsort(order) if written.get(int(reads[i]), i) != i]
    for i in late:
        waves[i] = waves[written[int(reads[i])]] + 1
    return waves
