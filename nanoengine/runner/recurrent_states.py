"""The recurrent states that a step reads and writes, for models with linear attention or SSMs.

Called by InputBatch if there is a state group. Legend: S sequences.
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
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.speculative import parse_speculative

Ints = NDArray[np.int64]
Array = TypeVar("Array", Ints, torch.Tensor)


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
    draft_token_ids: Mapping[int, Sequence[int]],
) -> tuple[ScanStep, ...]:
    """The waves of a step: the states that these sequences [S] read and write.

    A sequence reads the state of the block of its preceding token, or the next state in its table.
    It writes the states of all blocks that it computes. `order` has each sequence's plan entry. The
    state after each of a row's drafts, its last tokens, has its own entry: they follow the entry of
    the block of the last other token.
    """
    num_drafts = np.array([len(draft_token_ids.get(row, ())) for row in rows.tolist()], np.int64)
    size, known = block_size, counts - num_drafts
    firsts, lasts = starts // size, (starts + known - 1) // size
    before, writes = _slots_at(table, first_state, size, rows, starts, lasts)
    reads = initial_slots(before, writes, starts)
    spans: dict[int, SequenceSegment] = {}
    for i in np.flatnonzero(counts > 1):
        start, count = int(starts[i]), int(counts[i])
        end = lasts[i] + 1
        entries = state_slots(table[rows[i], firsts[i] : end + num_drafts[i]], first_state)
        entries, drafts = np.split(entries, [end - firsts[i]])
        written = [
            (min(int(firsts[i] + n + 1) * size - start, int(known[i])), int(entries[n]))
            for n in np.flatnonzero(entries)
        ]
        written += [(int(known[i]) + n, int(slot)) for n, slot in enumerate(drafts, start=1)]
        if start and not before[i]:
            reads[i] = written[0][1]
        first = int(offsets[i])
        spans[int(i)] = SequenceSegment(first, first + count, start, int(reads[i]), tuple(written))
    waves = _waves(order, reads, writes, spans)
    steps = []
    for wave in range(int(waves.max(initial=0)) + 1):
        decodes = np.flatnonzero((counts == 1) & (waves == wave))
        prefills = tuple(span for i, span in spans.items() if waves[i] == wave)
        cuts = chunk_segments(prefills) if prefills and device.type != "cpu" else ()
        tokens, *slots = ship(device, offsets[decodes], reads[decodes], writes[decodes], *cuts)
        are_first = not len(decodes) or decodes[-1] < len(decodes)
        steps.append(
            ScanStep(
                tokens=slice(len(decodes)) if are_first else tokens,
                reads=slots[0],
                writes=slots[1],
                spans=prefills,
                pieces=SegmentChunks(*slots[2:]) if cuts else None,
            )
        )
    return tuple(steps)


def states_per_row(config: EngineConfig) -> int:
    """One for the sequence, one for a snapshot, and one per draft."""
    return 2 + (parse_speculative(config.speculative).k if config.speculative else 0)


def decode_scan_step(
    positions: torch.Tensor, table: torch.Tensor, first_state: int, block_size: int
) -> ScanStep:
    """Like `state_waves`, for decodes that don't depend on each other, from their positions [S] and
    the state group's table [S, M]. Never reads values on the host. Padding reads and writes slot
    0."""
    blocks = torch.stack(((positions - 1).clip(0), positions)) // block_size  # [2, S]
    ids = table.expand(2, *table.shape).gather(2, blocks[..., None])[..., 0].long()
    before, writes = state_slots(ids, first_state)
    reads = initial_slots(before, writes, positions)
    return ScanStep(tokens=slice(None), reads=reads, writes=writes)


def are_independent(
    table: NDArray[np.int32], first_state: int, block_size: int, rows: Ints, starts: Ints
) -> bool:
    """Whether none of these decodes starts from a state that another one writes."""
    before, writes = _slots_at(table, first_state, block_size, rows, starts, starts // block_size)
    return _share_no_slot(initial_slots(before, writes, starts), writes)


def state_slots(ids: Array, num_blocks: int) -> Array:
    """Slots of states from their ids, which follow the block ids; slot 0 for the null block.

    >>> state_slots(np.array([0, 64, 65]), num_blocks=64)
    array([0, 1, 2])
    """
    return (ids - (num_blocks - 1)).clip(0)


def initial_slots(before: Array, writes: Array, starts: Array) -> Array:
    """The slots from which sequences start: the slot of the block before their first token, or the
    slot that they write if that block has no state; slot 0 at position 0."""
    return (before + writes * (before == 0)) * (starts > 0)


def chunk_segments(spans: Sequence[SequenceSegment]) -> tuple[Ints, Ints]:
    """The arrays `cuts` and `firsts` of `SegmentChunks` for these spans."""
    cuts: list[tuple[int, ...]] = []
    firsts = [0]
    for start, end, position, read, writes in spans:
        slots = {start + count: slot for count, slot in writes}
        ends = {*slots, *range(start + CHUNK - position % CHUNK, end, CHUNK)}
        for low, high in pairwise(sorted({start, *ends})):
            cuts.append((low, high, start, read, slots.get(high, 0)))
        firsts.append(len(cuts))
    return np.array(cuts, np.int64), np.array(firsts, np.int64)


def _slots_at(
    table: NDArray[np.int32], first_state: int, size: int, rows: Ints, starts: Ints, lasts: Ints
) -> tuple[Ints, Ints]:
    """For each sequence, the state slots of the block of its preceding token and of its last
    block."""
    blocks = np.array((np.maximum(starts - 1, 0) // size, lasts))
    before, writes = state_slots(table[rows, blocks].astype(np.int64), first_state)
    return before, writes


def _share_no_slot(reads: Ints, writes: Ints) -> bool:
    copied = reads[reads != writes]
    return not len(copied) or not np.isin(copied, writes).any()


def _waves(order: Ints, reads: Ints, writes: Ints, spans: Mapping[int, SequenceSegment]) -> Ints:
    """The wave in which each sequence [S] runs: after the sequences that write the state it reads.

    The writer always comes earlier in the plan: a state can be found only after the step that
    writes it has been planned.
    """
    waves = np.zeros(len(order), np.int64)
    if not spans and _share_no_slot(reads, writes):
        return waves
    writers = {slot: i for i, span in spans.items() for _, slot in span.writes}
    writers |= {int(slot): i for i, slot in enumerate(writes)}
    dependent = [i for i in np.argsort(order) if writers.get(int(reads[i]), i) != i]
    for i in dependent:
        waves[i] = waves[writers[int(reads[i])]] + 1
    return waves
