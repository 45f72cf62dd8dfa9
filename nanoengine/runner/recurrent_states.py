"""Which recurrent states a step reads and writes, for models with linear attention or SSM layers.

Called by InputBatch if there is a state group. Legend: S sequences, D sequences with one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from nanoengine.attention.batch import ScanStep, SegmentChunks, SequenceSegment
from nanoengine.layers.delta_rule import CHUNK
from nanoengine.runner.transfers import ship

Ints = NDArray[np.int64]
Numbers = TypeVar("Numbers", Ints, torch.Tensor)


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
) -> tuple[ScanStep, ...]:
    """The states that these sequences [S] read and write; `order` is the index of each in the plan.

    A sequence reads the first state that its table has from the block of the preceding token on. It
    writes the states of all blocks that it computes.
    """
    size = block_size
    firsts, lasts = starts // size, (starts + counts - 1) // size
    before, writes = _around(table, first_state, size, rows, starts, lasts)
    reads = slots_read(before, writes, starts)
    spans: dict[int, SequenceSegment] = {}
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
        spans[int(i)] = SequenceSegment(at, at + count, start, int(reads[i]), tuple(written))
    waves = _waves(order, reads, writes, spans)
    found = []
    for wave in range(int(waves.max(initial=0)) + 1):
        one = np.flatnonzero((counts == 1) & (waves == wave))
        several = tuple(span for i, span in spans.items() if waves[i] == wave)
        cuts = pieces_of(several) if several and device.type != "cpu" else ()
        tokens, *slots = ship(device, offsets[one], reads[one], writes[one], *cuts)
        found.append(
            ScanStep(
                tokens=slice(len(one)) if not len(one) or one[-1] < len(one) else tokens,
                reads=slots[0],
                writes=slots[1],
                spans=several,
                pieces=SegmentChunks(*slots[2:]) if cuts else None,
            )
        )
    return tuple(found)


def decode_wave(
    positions: torch.Tensor, table: torch.Tensor, first_state: int, block_size: int
) -> ScanStep:
    """Like `state_waves`, for decodes that don't depend on each other. Takes their positions [S]
    and the state group's table [S, M], and never reads values on the host. Padding reads and writes
    slot 0."""
    at = torch.stack(((positions - 1).clip(0), positions)) // block_size  # [2, S]
    ids = table.expand(2, *table.shape).gather(2, at[..., None])[..., 0].long()
    before, writes = state_slots(ids, first_state)
    reads = slots_read(before, writes, positions)
    return ScanStep(tokens=slice(None), reads=reads, writes=writes)


def decodes_are_apart(
    table: NDArray[np.int32], first_state: int, block_size: int, rows: Ints, starts: Ints
) -> bool:
    """Whether none of these decodes starts from a state that another one writes."""
    before, writes = _around(table, first_state, block_size, rows, starts, starts // block_size)
    return _are_apart(slots_read(before, writes, starts), writes)


def state_slots(ids: Numbers, num_blocks: int) -> Numbers:
    """Slots of states from their ids, which follow the block ids; slot 0 for the null block.

    >>> state_slots(np.array([0, 64, 65]), num_blocks=64)
    array([0, 1, 2])
    """
    return (ids - (num_blocks - 1)).clip(0)


def slots_read(before: Numbers, writes: Numbers, starts: Numbers) -> Numbers:
    """The slots from which sequences start: the slot of the block before their first token, or the
    slot that they write if that block has no state; slot 0 at position 0."""
    return (before + writes * (before == 0)) * (starts > 0)


def pieces_of(spans: Sequence[SequenceSegment]) -> tuple[Ints, Ints]:
    """The two arrays from which `SegmentChunks` is made for these spans."""
    cuts: list[tuple[int, ...]] = []
    firsts = [0]
    for start, end, position, read, writes in spans:
        slots = {start + count: slot for count, slot in writes}
        ends = {*slots, *range(start + CHUNK - position % CHUNK, end, CHUNK)}
        for one, other in pairwise(sorted({start, *ends})):
            cuts.append((one, other, start, read, slots.get(other, 0)))
        firsts.append(len(cuts))
    return np.array(cuts, np.int64), np.array(firsts, np.int64)


def _around(
    table: NDArray[np.int32], first_state: int, size: int, rows: Ints, starts: Ints, lasts: Ints
) -> tuple[Ints, Ints]:
    """State slots of the block with the token before each sequence's first, and of its last
    block."""
    blocks = np.array((np.maximum(starts - 1, 0) // size, lasts))
    before, writes = state_slots(table[rows, blocks].astype(np.int64), first_state)
    return before, writes


def _are_apart(reads: Ints, writes: Ints) -> bool:
    moved = reads[reads != writes]
    return not len(moved) or not np.isin(moved, writes).any()


def _waves(order: Ints, reads: Ints, writes: Ints, spans: Mapping[int, SequenceSegment]) -> Ints:
    """The wave in which each sequence [S] runs: after the sequences that write the state it reads.

    The writer always comes earlier in the plan: a state can be found only after the step that
    writes it has been planned.
    """
    waves = np.zeros(len(order), np.int64)
    if not spans and _are_apart(reads, writes):
        return waves
    written = {slot: i for i, span in spans.items() for _, slot in span.writes}
    written |= {int(slot): i for i, slot in enumerate(writes)}
    late = [i for i in np.argsort(order) if written.get(int(reads[i]), i) != i]
    for i in late:
        waves[i] = waves[written[int(reads[i])]] + 1
    return waves
