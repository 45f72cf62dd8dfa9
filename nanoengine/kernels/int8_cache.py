"""What `cpu_attention` does beside the plain way where keys and values are int8.

    one head of a block    its lines of numbers, as floats have them (`attention_tiles.py`)
                           behind all of them a float32 scale a token, [P]

A row is multiplied by a Hadamard matrix and rounded when it is stored (`store_rows`). Its numbers
are widened in registers, or once for many rows (`attention_tiles.run_of`), and the scales are
multiplied with scores and weights. Where queries and weights are pairs of bfloat16 numbers, two
lines become one of pairs: a whole number of 8 bits is one of bfloat16. Queries are multiplied by
the matrix before a step's tasks and outputs after them (`times_hadamard`), so that the tasks, which
read the cache, need no matrix.

Functions of the plain way that follow from the types of their arguments have one more form for
int8, once this file is imported: by `CPUBackend`, for a cache of int8. `attention/stored.py` is the
readable form.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from nanoengine.kernels.arrays import empty
from nanoengine.kernels.attention_tiles import (
    FASTMATH,
    KV_TILE,
    ask_for,
    ask_for_scales,
    scale_numbers,
    scale_row,
    scales_of,
    scales_of_tile,
)
from nanoengine.kernels.cpu_attention import lines_of, store_head, transform_rows
from nanoengine.kernels.cpu_layers import SMALL
from nanoengine.kernels.emit import Emit
from nanoengine.kernels.jit import compiled
from nanoengine.kernels.pool import parallel_for
from nanoengine.kernels.tiles import LINE

LEAST = np.float32(2.0**-100)  # see `attention/stored.py`
OPTIONS = {"fastmath": set(FASTMATH)}
LANES = 8  # of vectors: `CPUBackend.head_dims` are multiples of it


@overload(scale_numbers)
def _four(array):
    return (lambda array: 4) if array.dtype == types.int8 else None


@compiled(fastmath=FASTMATH, part=True)
def _scale_place(block, head, token, sizes):
    """Where a flat cache, seen as float32, has the scale of a token's head."""
    _, num_kv_heads, head_dim, block_size = sizes
    first = (block * num_kv_heads + head) * block_size
    return (first * (head_dim + 4) + block_size * head_dim) // 4 + token % block_size


@intrinsic
def _add_and_subtract(typing, row, first, second):
    """LANES elements of a row from `first` on become their sums with those from `second` on, which
    become the differences. Where both are one place, it multiplies them by a Hadamard matrix."""

    def codegen(context, builder, sig, args):
        emit = Emit(context, builder, row, LANES * row.dtype.bitwidth)
        at, behind = (emit.pointer(row, args[0], place) for place in args[1:])
        a, b = emit.load(at), emit.load(behind)
        with builder.if_else(builder.icmp_signed("==", *args[1:])) as (alone, apart):
            with alone:
                x = a
                for step in (1, 2, 4):
                    other = emit.shuffle(x, x, [i ^ step for i in range(LANES)])
                    signs = [-1.0 if i & step else 1.0 for i in range(LANES)]
                    x = emit.fma(x, ir.Constant(emit.vector, signs), other)
                emit.store(x, at)
            with apart:
                emit.store(builder.fadd(a, b), at)
                emit.store(builder.fsub(a, b), behind)
        return context.get_dummy_value()

    return types.void(row, first, second), codegen


@compiled(fastmath=FASTMATH, part=True)
def _times_hadamard(row):
    """`stored.hadamard`, in place, with the same additions in the same order."""
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


@overload(transform_rows, jit_options=OPTIONS)
def times_hadamard(rows, cache, workers):
    """`cpu_attention.transform_rows`."""

    def transform(rows, cache, workers):
        size = rows.shape[2]
        workers = 1 if rows.size <= SMALL else workers
        parallel_for(_transform_rows, rows.size // size, workers, (rows.reshape(-1), size))

    return transform if cache.dtype == types.int8 else None


@compiled(fastmath=FASTMATH, part=True)
def _store_row(source, row, cache, at, step, scale_at):
    """Writes a row's numbers from `at` on, `step` apart, and its scale; `row` is for the product
    with the matrix."""
    size = len(source) & -len(source)
    scale_row(source, 0, source.dtype.type(1 / size), row, 0, len(source))
    _times_hadamard(row)
    most = np.uint32(0)  # Why whole numbers: NaN is the largest, and the loop is of vectors
    for d in range(len(row)):
        size = np.uint32(np.float32(row[d]).view(np.uint32) & np.uint32(0x7FFFFFFF))
        most = size if size > most else most
    largest = np.uint32(most).view(np.float32)
    scale = largest / np.float32(127)
    cache.view(np.float32)[scale_at] = scale
    factor = np.float32(1) / scale if largest > LEAST else np.float32(0)
    for d in range(len(row)):
        cache[at + d * step] = np.int8(np.rint(np.float32(row[d]) * factor))


@overload(store_head, jit_options=OPTIONS)
def store_rows(key, value, slot, head, k_cache, v_cache, sizes):
    """`cpu_attention.store_head`."""

    def rows(key, value, slot, head, k_cache, v_cache, sizes):
        lanes = min(sizes[3], KV_TILE)
        k_at, v_at = lines_of(k_cache, slot, head, lanes, sizes)
        scale_at = _scale_place(slot // sizes[3], head, slot, sizes)
        row = empty((len(key),), key.dtype)
        _store_row(key, row, k_cache, k_at, lanes, scale_at)
        _store_row(value, row, v_cache, v_at, 1, scale_at)

    return rows if k_cache.dtype == types.int8 else None


@overload(scales_of, jit_options=OPTIONS)
def places_of_scales(cache, table, head, begin, sizes):
    """`attention_tiles.scales_of`."""

    def scales(cache, table, head, begin, sizes):
        at = _scale_place(table[begin // sizes[3]], head, begin, sizes)
        return cache.view(np.float32), at

    return scales if cache.dtype == types.int8 else None


@overload(ask_for_scales, jit_options=OPTIONS)
def asked_scales(cache, at, sizes):
    """`attention_tiles.ask_for_scales`."""

    def asked(cache, at, sizes):
        of_head = sizes[3] * (sizes[2] + 4)
        first = at // of_head * of_head
        begin = first + sizes[3] * sizes[2] + (at - first) // sizes[2] * 4
        for line in range(begin, begin + 4 * min(sizes[3], KV_TILE), LINE):
            ask_for(cache, line, 0)

    return asked if cache.dtype == types.int8 else None


@overload(scales_of_tile, jit_options=OPTIONS)
def gathered_scales(cache, table, head, first, end, sizes, scales):
    """`attention_tiles.scales_of_tile`."""

    def gathered(cache, table, head, first, end, sizes, scales):
        lanes = min(sizes[3], KV_TILE)
        of_run, at = scales_of(cache, table, head, first, sizes)
        if lanes == KV_TILE:
            return of_run[at : at + KV_TILE]
        for begin in range(first, end, lanes):
            of_run, at = scales_of(cache, table, head, begin, sizes)
            run, of_tokens = of_run[at : at + lanes], scales[begin % KV_TILE :]
            for t in range(len(run)):
                of_tokens[t] = run[t]
        return scales

    return gathered if cache.dtype == types.int8 else None
