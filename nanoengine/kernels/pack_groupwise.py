"""pack_codes, pack_lines: write the panels of a group-wise quantized weight for `cpu_groupwise.py`.

`layers/groupwise_panels.py` calls these once for some rows. Codes come in blocks of bytes, in a
file's format or one per byte; a table gives the location of the bits of each four codes. The
meaning of a block format is not known here.

Why on all threads, and without a copy of the codes between file and panel: allocating memory may
take longer than the packing.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.gemm import LINE, PANEL
from nanoengine.kernels.groupwise_gemm import UNITS
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

FOURS = 8  # per unit
LOW, LOW_SHIFT, HIGH, HIGH_SHIFT = range(4)


@compiled(fastmath=(), part=True)
def _pack_plane(codes, words, line, place, width):
    """One plane of a unit of an output: `width` bits of its codes from bit `place` on. Callers pass
    constants, so that the loops are unrolled."""
    fours = 8 // width
    mask = np.uint32(0x01010101 * ((1 << width) - 1))
    for i in range(width):
        word = np.uint32(0)
        for k in range(fours):
            word |= (codes[fours * i + k] >> np.uint32(place) & mask) << np.uint32(k * width)
        words[line + (place + i) * PANEL] = word


@compiled(fastmath=(), part=True)
def _word(rows, at):
    """Four bytes from here on; the compiler makes one load of them."""
    word = np.uint32(rows[at])
    for i in range(1, 4):
        word |= np.uint32(rows[at + np.uint64(i)]) << np.uint32(8 * i)
    return word


@compiled(fastmath=())
def _pack_codes(rows, size, places, widths, data, first, step, header, bits, flip, lo, hi):
    words, flat, codes = data.view(np.uint32), rows.reshape(-1), empty((FOURS,), np.uint32)
    (count, row_bytes), each = rows.shape, len(places) // FOURS
    units = row_bytes // size * each
    low, high = widths
    low_mask = np.uint32(0x01010101 * ((1 << low) - 1))
    high_mask, spread = np.uint32(0x01010101 * ((1 << abs(high)) - 1)), high < 0
    for p in range(lo, hi):
        for j in range(min(PANEL, count - p * PANEL)):
            at, four = np.uint64((p * PANEL + j) * row_bytes), 0
            for unit in range(units):
                for i in range(FOURS):
                    place = places[four + i]
                    code = _word(flat, at + place[LOW]) >> np.uint32(place[LOW_SHIFT]) & low_mask
                    if spread:
                        # Four adjacent bits go to four bytes.
                        more = np.uint32(flat[at + place[HIGH]]) >> np.uint32(place[HIGH_SHIFT])
                        more = (more & np.uint32(15)) * np.uint32(0x204081) & high_mask
                        code |= more << np.uint32(low)
                    elif high:
                        more = _word(flat, at + place[HIGH]) >> np.uint32(place[HIGH_SHIFT])
                        code |= (more & high_mask) << np.uint32(low)
                    codes[i] = code ^ flip
                four += FOURS
                if four == len(places):
                    four = 0
                    at += np.uint64(size)
                start = first + p * step + LINE + (unit // UNITS + 1) * header
                line = (start + unit * bits * LINE) // 4 + j
                if bits == 8:
                    _pack_plane(codes, words, line, 0, 8)
                elif bits >= 4:
                    _pack_plane(codes, words, line, 0, 4)
                else:
                    _pack_plane(codes, words, line, 0, 2)
                if bits == 6:
                    _pack_plane(codes, words, line, 4, 2)
                elif bits == 5:
                    _pack_plane(codes, words, line, 4, 1)
                elif bits == 3:
                    _pack_plane(codes, words, line, 2, 1)


@compiled(fastmath=())
def pack_codes(rows, size, places, widths, data, first, step, header, bits, flip, num_workers):
    """Writes the codes of rows into the panels that begin at byte `first` of data.

    Args:
        rows: uint8 [N, row bytes], whole blocks of `size` bytes.
        places: uint64 [C, 4], for each four codes of a block: their byte, and the right shift of
            their bits; the same for their upper bits.
        widths: bits of a code there, and upper bits: 0, or negative if the upper bits of four codes
            are adjacent in one byte.
        bits, flip: bits per code in the panels, and the mask of bits to invert in each byte.
    """
    operands = rows, size, places, widths, data, first, step, header, bits, np.uint32(flip)
    parallel_for(_pack_codes, -(-len(rows) // PANEL), num_workers, operands)


@compiled(fastmath=())
def _pack_lines(numbers, data, first, step, block, groups, stride, lanes, lo, hi):
    lines, (count, columns) = data.view(numbers.dtype), numbers.shape
    width = numbers.itemsize
    for p in range(lo, hi):
        rows = min(PANEL, count - p * PANEL)
        for group in range(-(-columns // groups) * groups):
            at = first + p * step + group // groups * block + group % groups * stride
            for j in range(lanes):
                there = j < rows and group < columns
                lines[at // width + j] = numbers[p * PANEL + j, group] if there else 0


@compiled(fastmath=())
def pack_lines(numbers, data, first, step, block, groups, stride, lanes, num_workers):
    """Writes values [N, G] of groups, 16 adjacent outputs, from byte `first` of data on, which is
    the location of the first group of the first block in the first panel.

    Args:
        step, block, stride: bytes from panel to panel, block to block and group to group.
        groups: groups per block; those after the last one are 0.
        lanes: outputs of a panel that are written; outputs after the last row are 0.
    """
    operands = numbers, data, first, step, block, groups, stride, lanes
    parallel_for(_pack_lines, -(-len(numbers) // PANEL), num_workers, operands)
