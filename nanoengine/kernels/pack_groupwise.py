"""pack_codes, pack_lines: write the panels of a group-wise quantized weight for `cpu_groupwise.py`.

`layers/groupwise_panels.py` calls these once for some rows. Codes come in blocks of bytes, in a
file's format or one per byte; a table gives the location of the bits of each four codes, so this
file does not depend on block formats.

Why in one pass on all threads: allocating memory for a copy of the codes may take longer than
packing them.
"""

from __future__ import annotations

import numpy as np

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.gemm import LINE, PANEL
from nanoengine.kernels.groupwise_gemm import UNITS
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for

QUADS = 8  # per unit
LOW, LOW_SHIFT, HIGH, HIGH_SHIFT = range(4)


@compiled(fastmath=(), inline=True)
def _pack_plane(codes, words, line, lowest_bit, width):
    """Writes one plane of a unit of an output: `width` bits of its codes, from bit `lowest_bit` on.
    Callers pass constants, so that the loops are unrolled."""
    quads = 8 // width
    mask = np.uint32(0x01010101 * ((1 << width) - 1))
    for i in range(width):
        word = np.uint32(0)
        for k in range(quads):
            word |= (codes[quads * i + k] >> np.uint32(lowest_bit) & mask) << np.uint32(k * width)
        words[line + (lowest_bit + i) * PANEL] = word


@compiled(fastmath=(), inline=True)
def _word(rows, at):
    """Four bytes from here on; the compiler makes one load of them."""
    word = np.uint32(rows[at])
    for i in range(1, 4):
        word |= np.uint32(rows[at + np.uint64(i)]) << np.uint32(8 * i)
    return word


@compiled(fastmath=())
def _pack_codes(rows, size, sources, widths, data, first, step, header, bits, flip, lo, hi):
    words, flat, codes = data.view(np.uint32), rows.reshape(-1), empty((QUADS,), np.uint32)
    (count, row_bytes), block_units = rows.shape, len(sources) // QUADS
    units = row_bytes // size * block_units
    low, high = widths
    low_mask = np.uint32(0x01010101 * ((1 << low) - 1))
    high_mask, spread = np.uint32(0x01010101 * ((1 << abs(high)) - 1)), high < 0
    for p in range(lo, hi):
        for j in range(min(PANEL, count - p * PANEL)):
            at, quad = np.uint64((p * PANEL + j) * row_bytes), 0
            for unit in range(units):
                for i in range(QUADS):
                    source = sources[quad + i]
                    code = _word(flat, at + source[LOW]) >> np.uint32(source[LOW_SHIFT]) & low_mask
                    if spread:
                        # Four adjacent bits go to four bytes.
                        upper = np.uint32(flat[at + source[HIGH]]) >> np.uint32(source[HIGH_SHIFT])
                        upper = (upper & np.uint32(15)) * np.uint32(0x204081) & high_mask
                        code |= upper << np.uint32(low)
                    elif high:
                        upper = _word(flat, at + source[HIGH]) >> np.uint32(source[HIGH_SHIFT])
                        code |= (upper & high_mask) << np.uint32(low)
                    codes[i] = code ^ flip
                quad += QUADS
                if quad == len(sources):
                    quad = 0
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
def pack_codes(rows, size, sources, widths, data, first, step, header, bits, flip, num_workers):
    """Writes the codes of rows into the panels that begin at byte `first` of data.

    Args:
        rows: uint8 [N, row bytes], whole blocks of `size` bytes.
        sources: uint64 [C, 4], for each four codes of a block: their byte, and the right shift of
            their bits; the same for their upper bits.
        widths: bits of a code there, and upper bits: 0, or negative if the upper bits of four codes
            are adjacent in one byte.
        bits, flip: bits per code in the panels, and the mask of bits to invert in each byte.
    """
    operands = rows, size, sources, widths, data, first, step, header, bits, np.uint32(flip)
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
                is_inside = j < rows and group < columns
                lines[at // width + j] = numbers[p * PANEL + j, group] if is_inside else 0


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
