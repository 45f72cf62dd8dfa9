"""The Triton kernels around a decode's forward: its inputs from what the device keeps of each row,
and the advance of the rows after it.

Called by `runner/triton_rows.py` alone; the same in plain torch is `runner/device_rows.py`.

The kernels have run in Triton's interpreter and been compiled ahead of time; they have not run on a
GPU yet.

Source: SplitMix64, see `runner/sampling/draw.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FACTORS = tl.constexpr((0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@triton.jit
def uniform(seed, position):
    """The number of `draw.uniforms` from a seed mixed before: float64 in [0, 1)."""
    z = seed.to(tl.uint64) + (position + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * FACTORS[0]
    z = (z ^ (z >> 27)) * FACTORS[1]
    return ((z ^ (z >> 31)) >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)


class RowSizes(NamedTuple):
    """Numbers of a row of the embedding and of the table of angles."""

    embedding: int
    angles: int


@triton.jit
def copy_row(target, source, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """SIZE numbers that lie side by side, WIDTH at a time."""
    for start in range(0, SIZE, WIDTH):
        at = start + tl.arange(0, WIDTH)
        tl.store(target + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)


@triton.jit
def gather_kernel(
    token_ids, positions, slot_mapping, seq_lens, block_tables, draw_params,
    rows, pool, lengths, tables, columns, seeds, x, rotation, embedding, angles,
    LINES: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    SIZES: tl.constexpr,
):  # fmt: skip
    """The inputs of one row of a decode, in one group of layers. Grid: [S, G].

    `draw_params` [5, LINES] takes the row's `columns` [4, LINES] and its random number. All tensors
    are contiguous; the shapes are in `device_rows.py`. SIZES, if not None: x [S, N] takes the
    token's row of the embedding, `rotation` [S, D] that of its position.
    """
    at, group = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + at)
    position = tl.load(lengths + row)
    table = tables + (group * LINES + row) * NUM_BLOCKS
    line = (group * tl.num_programs(0) + at).to(tl.int64)
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    tl.store(slot_mapping + line, block * BLOCK_SIZE + position % BLOCK_SIZE)
    for start in range(0, NUM_BLOCKS, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        ids = tl.load(table + entry, mask=entry < NUM_BLOCKS)
        tl.store(block_tables + line * NUM_BLOCKS + entry, ids, mask=entry < NUM_BLOCKS)
    if group == 0:
        token = tl.load(pool + row)
        tl.store(token_ids + at, token)
        if SIZES is not None:
            place, line = embedding + token * SIZES.embedding, at.to(tl.int64)
            copy_row(x + line * SIZES.embedding, place, SIZES.embedding, 2 * WIDTH)
            place = angles + position * SIZES.angles
            copy_row(rotation + line * SIZES.angles, place, SIZES.angles, WIDTH // 4)
        tl.store(positions + at, position)
        tl.store(seq_lens + at, (position + 1).to(tl.int32))
        for column in tl.static_range(4):
            value = tl.load(columns + column * LINES + row)
            tl.store(draw_params + column * LINES + at, value)
        number = uniform(tl.load(seeds + row), position + 1)
        tl.store(draw_params + 4 * LINES + at, number)


@triton.jit(do_not_specialize=["count"])
def advance_kernel(
    pool, lengths, rows, token_ids, count, PADDING: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Rows [count] get their next tokens, a position further; PADDING is none. Grid: [tiles]."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + at, mask=at < count, other=PADDING)
    moves = row != PADDING
    tl.store(pool + row, tl.load(token_ids + at, mask=moves), mask=moves)
    tl.store(lengths + row, tl.load(lengths + row, mask=moves) + 1, mask=moves)
