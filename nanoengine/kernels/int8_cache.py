"""The functions of `cpu_attention` that differ for an int8 KV cache.

    one head of a block    its lines of elements, as with floats (`attention_microkernels.py`)
                           followed by one float32 scale per token, [P]

A row is multiplied by a Hadamard matrix and rounded when it is stored (`store_rows`). Its elements
are converted in registers, or once for many rows (`attention_microkernels.read_run`), and scores
and weights are multiplied by the scales. If queries and weights are pairs of bfloat16, two lines
become one line of pairs: bfloat16 represents 8-bit integers exactly. Queries are multiplied by the
matrix before a step's tasks, and outputs after them (`times_hadamard`), so the tasks themselves
need no matrix.

`cpu_attention` uses these functions if the cache is int8, and imports this file only then.
`attention/kv_quantization.py` is the reference implementation.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_microkernels import (
    FASTMATH,
    KV_TILE,
    line_indices,
    prefetch_element,
    scale_row,
)
from nanoengine.kernels.emit import Emit, emit_intrinsic
from nanoengine.kernels.gemm import LINE
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import SMALL, parallel_for

MIN_MAGNITUDE = np.float32(2.0**-100)  # see `attention/kv_quantization.py`
LANES = 8  # per vector: `CPUBackend.head_dims` are multiples of it


@compiled(fastmath=FASTMATH, inline=True)
def _scale_index(block, head, token, sizes):
    """Index of the scale of a token's head in a flat cache, viewed as float32."""
    _, num_kv_heads, head_dim, block_size = sizes
    first = (block * num_kv_heads + head) * block_size
    return (first * (head_dim + 4) + block_size * head_dim) // 4 + token % block_size


@emit_intrinsic()
def _add_and_subtract(emit, row, first, second):
    """Replaces LANES elements a, from `first` on, and b, from `second` on, by a + b and a - b. If
    `first` equals `second`, multiplies a by a Hadamard matrix."""
    builder, kind = emit.builder, emit.kinds.row
    tile = Emit(emit.context, builder, kind, LANES * kind.dtype.bitwidth)
    first_at, second_at = (tile.pointer(kind, row, index) for index in (first, second))
    a, b = tile.load(first_at), tile.load(second_at)
    with builder.if_else(builder.icmp_signed("==", first, second)) as (single, separate):
        with single:
            x = a
            for step in (1, 2, 4):
                swapped = tile.shuffle(x, x, [i ^ step for i in range(LANES)])
                signs = [-1.0 if i & step else 1.0 for i in range(LANES)]
                x = tile.fma(x, ir.Constant(tile.vector, signs), swapped)
            tile.store(x, first_at)
        with separate:
            tile.store(builder.fadd(a, b), first_at)
            tile.store(builder.fsub(a, b), second_at)


@compiled(fastmath=FASTMATH, inline=True)
def _times_hadamard(row):
    """`kv_quantization.hadamard`, in place, with the same additions in the same order."""
    for i in range(0, len(row), LANES):
        _add_and_subtract(row, i, i)
    step, size = LANES, len(row) & -len(row)
    while step < size:
        for block in range(0, len(row), 2 * step):
            for i in range(block, block + step, LANES):
                _add_and_subtract(row, i, i + step)
        step *= 2


@compiled(fastmath=FASTMATH)
def _transform_rows(rows, size, lo, hi):
    for i in range(lo, hi):
        _times_hadamard(rows[i * size : (i + 1) * size])


def times_hadamard(rows, cache, workers):
    """`cpu_attention.transform_rows`."""
    size = rows.shape[2]
    workers = 1 if rows.size <= SMALL else workers
    parallel_for(_transform_rows, rows.size // size, workers, (rows.reshape(-1), size))


@compiled(fastmath=FASTMATH, inline=True)
def _store_row(source, row, cache, at, step, scale_at):
    """Writes a row's elements from `at` on, `step` apart, and its scale; `row` is a buffer for the
    product with the matrix."""
    size = len(source) & -len(source)
    scale_row(source, 0, source.dtype.type(1 / size), row, 0, len(source))
    _times_hadamard(row)
    largest_bits = np.uint32(0)  # Why integers: NaN is the largest, and the loop vectorizes
    for d in range(len(row)):
        size = np.uint32(np.float32(row[d]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        largest_bits = size if size > largest_bits else largest_bits
    largest = np.uint32(largest_bits).view(np.float32)
    scale = largest / np.float32(127)
    cache.view(np.float32)[scale_at] = scale
    factor = np.float32(1) / scale if largest > MIN_MAGNITUDE else np.float32(0)
    for d in range(len(row)):
        cache[at + d * step] = np.int8(np.rint(np.float32(row[d]) * factor))


def store_rows(key, value, slot, head, k_cache, v_cache, sizes):
    """`cpu_attention.store_head`."""
    lanes = min(sizes[3], KV_TILE)
    k_at, v_at = line_indices(k_cache, slot, head, lanes, sizes)
    scale_at = _scale_index(slot // sizes[3], head, slot, sizes)
    row = empty((len(key),), key.dtype)
    _store_row(key, row, k_cache, k_at, lanes, scale_at)
    _store_row(value, row, v_cache, v_at, 1, scale_at)


def run_scales_index(cache, table, head, begin, sizes):
    """`cpu_attention.run_scales`."""
    at = _scale_index(table[begin // sizes[3]], head, begin, sizes)
    return cache.view(np.float32), at


def prefetch_run_scales(cache, at, sizes):
    """`cpu_attention.prefetch_scales`."""
    head_bytes = sizes[3] * (sizes[2] + 4)
    first = at // head_bytes * head_bytes
    begin = first + sizes[3] * sizes[2] + (at - first) // sizes[2] * 4
    for line in range(begin, begin + 4 * min(sizes[3], KV_TILE), LINE):
        prefetch_element(cache, line, 0)


def gather_scales(cache, table, head, first, end, sizes, scales):
    """`cpu_attention.tile_scales`."""
    lanes = min(sizes[3], KV_TILE)
    floats, at = cache.view(np.float32), _scale_index(table[first // sizes[3]], head, first, sizes)
    if lanes == KV_TILE:
        return floats[at : at + KV_TILE]
    for begin in range(first, end, lanes):
        at = _scale_index(table[begin // sizes[3]], head, begin, sizes)
        source, target = floats[at : at + lanes], scales[begin % KV_TILE :]
        for t in range(len(source)):
            target[t] = source[t]
    return scales
