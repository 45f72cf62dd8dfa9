"""The Triton kernels of paged attention: varlen attention, and decode with split contexts.

Called only by `attention/triton.py` and `triton_mla.py`, which choose grids and tile sizes. Keys
and values are read through a sequence's block table:

    position     0 ........ 15 16 ....... 31 32 ... 40            key tiles, aligned to position 0
    table        [ block 7   |  block 2   |  block 9 ]            any order, blocks may be shared
    cache        block 7: [P, K, D] at block_id * block_stride    tokens first, then KV heads

One tile of queries holds all query heads of one KV head (row = token * GROUP + head), so keys and
values are read once per group. Softmax is online, in float32, in base 2: the hardware has exp2, and
log2(e) is part of the scale of scores. Keys and values of an fp8 cache
are converted to the queries' dtype in registers, which is exact; their scales multiply scores and
outputs. In a decode, bfloat16 queries are first converted to float16, because the hardware converts
fp8 to float16.

Key tiles are aligned to position 0 of the sequence and processed in ascending order, and a tile
that a row may not see leaves that row unchanged. So a row's result never depends on the rest of the
batch. The chunks of its sequence only decide which tiles run the masked code, whose last bit may
differ if the compiler fuses a multiplication with an addition.

Legend: D head dim, P block size, N keys per tile, M rows per tile. Strides count elements and are
constants, so address arithmetic folds and 16-byte copies are proven aligned. Offsets inside a block
are 32-bit; only the start of a token or a block is 64-bit. Arguments that change between steps are
never specialized on, so that a running engine never waits for the compiler.

These kernels have been run in Triton's interpreter and compiled to machine code ahead of time; they
have not run on a GPU yet.

Source: FlashAttention-2 (Dao 2023, section 3.1) for the online softmax; Flash-Decoding (Dao et al.
2023) for split-KV; "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581) for packing query
heads into the rows of a paged kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

MIN_SCORE = tl.constexpr(-1.0e30)
"""The initial running maximum. It is finite, so that a row without visible keys gives 0, not
NaN."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile: rows (query tokens times heads per KV head), keys, warps of 32 threads, and pipeline
    stages (key tiles in flight, including the current one)."""

    rows: int
    keys: int
    warps: int
    stages: int


class CacheConstants(NamedTuple):
    """Compile-time constants of one layer's cache: the strides of keys and values."""

    block_size: int
    k_block: int
    k_token: int
    k_head: int
    v_block: int
    v_token: int
    v_head: int


class AttentionConstants(NamedTuple):
    """Compile-time constants of a launch.

    Attributes:
        softcap, window: 0 for none.
        group: query heads per KV head.
        dim: head_dim rounded up to a power of two.
        m, n: rows and keys per tile.
        split, max_splits, kv_heads: only for decodes: keys per split, the maximum number of splits
            (longer sequences have longer splits), and KV heads.
        all_masked: no tile skips its mask. Which tiles need no mask depends on the rows of a tile,
            and code without a mask may round differently.
    """

    q_token: int
    q_head: int
    o_token: int
    o_head: int
    scale: float
    softcap: float
    window: int
    group: int
    sinks: bool
    head_dim: int
    dim: int
    m: int
    n: int
    split: int = 0
    max_splits: int = 0
    kv_heads: int = 0
    all_masked: bool = False


@triton.jit
def tile_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """Block ids of positions start ... start + N - 1: one, or N if blocks are smaller."""
    positions = start
    if N > BLOCK_SIZE:
        positions = start + tl.arange(0, N)
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def load_keys(
    cache, blocks, start, low, end,
    C_BLOCK: tl.constexpr, C_TOKEN: tl.constexpr, BLOCK_SIZE: tl.constexpr, A: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Loads the rows of positions start ... start + N - 1 of one KV head, [N, DIM], from a paged
    cache.

    `start` is a multiple of N. MASKED: rows outside low ... end - 1 are 0. Why: memory after the
    end is uninitialized, and before a window the table has the null block; 0 * NaN would be NaN.
    """
    tokens = tl.arange(0, A.n)
    dims = tl.arange(0, A.dim)[None, :]
    if A.n <= BLOCK_SIZE:
        offsets = (start % BLOCK_SIZE + tokens) * C_TOKEN
        rows = cache + blocks.to(tl.int64) * C_BLOCK + offsets[:, None]
    else:
        offsets = (start + tokens) % BLOCK_SIZE * C_TOKEN
        rows = cache + (blocks.to(tl.int64) * C_BLOCK + offsets)[:, None]
    if MASKED:
        inside = start + tokens < end
        if A.window > 0:
            inside = inside & (start + tokens >= low)
        return tl.load(rows + dims, mask=inside[:, None] & (dims < A.head_dim), other=0.0)
    if A.head_dim != A.dim:
        return tl.load(rows + dims, mask=dims < A.head_dim, other=0.0)
    return tl.load(rows + dims)


@triton.jit
def attend_tile(
    q, acc, total, row_max, k_cache, v_cache, blocks, positions, start, low, end, k_scale,
    CACHE: tl.constexpr, A: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys start ... start + N - 1 for all rows.

    State of each row, in float32: `row_max` is the greatest score so far, `total` the sum of 2 **
    (score - high), `acc` [M, DIM] the same sum weighted by the values. `total` is [M], or [M, N]
    with one sum per column of tiles; see `attend`.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    key = load_keys(
        k_cache, blocks, start, low, end, CACHE.k_block, CACHE.k_token, CACHE.block_size, A, MASKED
    )
    scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")  # [M, N]
    if key.dtype != q.dtype:
        scores = scores * k_scale
    if A.softcap > 0.0:
        # tanh(x) = 1 - 2 / (e^2x + 1): exact at both infinities, and needs only exp2.
        power = tl.exp2(scores * (2.0 * LOG2_E * A.scale / A.softcap))
        scores = (A.softcap * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    else:
        scores = scores * (A.scale * LOG2_E)
    if MASKED:
        keys = (start + tl.arange(0, A.n))[None, :]
        visible = keys <= positions[:, None]
        if A.window > 0:
            visible = visible & (keys > positions[:, None] - A.window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    if len(total.shape) == 2:
        total = total * rescale[:, None] + weights
    else:
        total = total * rescale + tl.sum(weights, 1)
    value = load_keys(
        v_cache, blocks, start, low, end, CACHE.v_block, CACHE.v_token, CACHE.block_size, A, MASKED
    ).to(q.dtype)
    acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return acc, total, new_max


@triton.jit
def attend(
    q, k_cache, v_cache, table, positions, start, low, full_end, end, k_scale,
    CACHE: tl.constexpr, A: tl.constexpr, SUM_LAST: tl.constexpr,
):  # fmt: skip
    """Attends the rows at `positions` [M] over the keys low ... end - 1, in tiles from `start` on.

    Every row sees all keys before `full_end`, a multiple of N, so these tiles need no mask. With a
    sliding window or A.all_masked all tiles are masked.

    SUM_LAST: sums of weights are kept per column of a tile and added after the last tile. Why: a
    sum across threads synchronizes them in every tile. Why not always: the columns of a tile with
    many rows need too many registers.
    """
    # Why not tl.zeros: in Triton 3.7, which torch 2.13 for CUDA requires, it does not accept `A.m`.
    acc = tl.full([A.m, A.dim], 0, tl.float32)
    total = tl.full([A.m, A.n] if SUM_LAST else [A.m], 0, tl.float32)
    row_max = tl.full([A.m], MIN_SCORE, tl.float32)
    for masked in tl.static_range(1 if A.window > 0 or A.all_masked else 0, 2):
        blocks = tile_blocks(table, start, end, CACHE.block_size, A.n)
        for first in range(start, end if masked == 1 else full_end, A.n):
            acc, total, row_max = attend_tile(
                q, acc, total, row_max, k_cache, v_cache, blocks, positions, first, low, end,
                k_scale, CACHE, A, masked == 1,
            )  # fmt: skip
            blocks = tile_blocks(table, first + A.n, end, CACHE.block_size, A.n)
        start = tl.maximum(start, full_end)
    if SUM_LAST:
        total = tl.sum(total, 1)
    return acc, total, row_max


@triton.jit
def sink_share(pointers, inside, row_max):
    """The sinks' contribution to sums of 2 ** (score - high). It is clamped so that the result is 0
    if a sink is far above all scores."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return tl.exp2(tl.minimum(sink * LOG2_E - row_max, 126.0))


@triton.jit
def queries_of_tile(query_start_loc, tile, num_decodes, num_prefills, TILE_TOKENS: tl.constexpr):
    """Finds the prefill sequence of a query tile. Returns the sequence, the start of its queries,
    their number, and the number of them before the tile.

    Sequence i starts at tile `query_start // TILE_TOKENS + i`. This leaves enough tiles for any
    lengths, in closed form, without a prefix sum or a host sync. Surplus tiles are past their
    sequence's end and exit.

    Source: vLLM's Triton backend, which searches by bisection, whose loads depend on each other;
    here one vector of comparisons is summed.
    """
    SEARCH: tl.constexpr = 256
    before = 0
    for first in range(0, num_prefills, SEARCH):
        index = first + tl.arange(0, SEARCH)
        inside = index < num_prefills
        starts = tl.load(query_start_loc + num_decodes + index, mask=inside, other=0) - num_decodes
        before += tl.sum((inside & (starts // TILE_TOKENS + index <= tile)).to(tl.int32), 0)
    last = before - 1
    start = tl.load(query_start_loc + num_decodes + last)
    length = tl.load(query_start_loc + num_decodes + last + 1) - start
    first_tile = (start - num_decodes) // TILE_TOKENS + last
    return num_decodes + last, start, length, (tile - first_tile) * TILE_TOKENS


@triton.jit(
    do_not_specialize=["table_stride", "num_decodes", "num_prefills", "k_scale", "v_scale"],
    do_not_specialize_on_alignment=["sinks", "block_tables", "query_start_loc", "seq_lens"],
)
def varlen_kernel(
    out, q, k_cache, v_cache, sinks, block_tables, query_start_loc, seq_lens,
    table_stride, num_decodes, num_prefills, k_scale, v_scale,
    CACHE: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries of one sequence, for one KV head. Grid: [tiles, K].

    For prompts, chunks after a context, and draft verification: query token i of a sequence is at
    position seq_len - query_len + i, and sees the keys up to this position.
    """
    TILE_TOKENS: tl.constexpr = A.m // A.group
    # Why in reverse: the last tiles of a prompt see the most keys, so they start first and don't
    # leave the GPU idle at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, query_start, query_len, tile_start = queries_of_tile(
        query_start_loc, tile, num_decodes, num_prefills, TILE_TOKENS
    )
    context = tl.load(seq_lens + seq) - query_len
    if tile_start < query_len:
        rows = tl.arange(0, A.m)
        tokens = tile_start + rows // A.group
        dims = tl.arange(0, A.dim)[None, :]
        inside = (rows < TILE_TOKENS * A.group) & (tokens < query_len)
        mask = inside[:, None] & (dims < A.head_dim)
        token_rows = (query_start + tokens).to(tl.int64)
        heads = kv_head * A.group + rows % A.group
        offsets = token_rows[:, None] * A.q_token + (heads[:, None] * A.q_head + dims)
        query = tl.load(q + offsets, mask=mask, other=0.0)
        first_position = context + tile_start
        end = context + tl.minimum(tile_start + TILE_TOKENS, query_len)
        low = 0
        if A.window > 0:
            low = tl.maximum(first_position - A.window + 1, 0)
        acc, total, row_max = attend(
            query, k_cache + kv_head * CACHE.k_head, v_cache + kv_head * CACHE.v_head,
            block_tables + seq.to(tl.int64) * table_stride, context + tokens,
            low // A.n * A.n, low, (first_position + 1) // A.n * A.n, end, k_scale,
            CACHE, A, False,
        )  # fmt: skip
        if A.sinks:
            total += sink_share(sinks + heads, inside, row_max)
        # Why: padding of a graph's batch has no keys; its result is 0.
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        if v_cache.dtype.element_ty != q.dtype.element_ty:
            result = result * v_scale
        offsets = token_rows[:, None] * A.o_token + (heads[:, None] * A.o_head + dims)
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def split_keys(seq_len, max_splits, A: tl.constexpr):
    """Computes the splits of the keys that a sequence's last token sees.

    A split has A.split tokens, or a multiple if more than `max_splits` splits would be needed. The
    size depends only on this sequence's length, so the order of its sums is the same in any batch,
    and the buffers of partial results are small at any length. Splits start at position 0; with a
    window the first and the last may be cut, so there may be one more.

    Returns:
        The first visible key, the size of a split, the first visible split, and their number.
    """
    low = 0
    if A.window > 0:
        low = tl.maximum(seq_len - A.window, 0)
    size = A.split * tl.cdiv(seq_len - low, A.split * max_splits)
    size = tl.maximum(size, A.split)
    return low, size, low // size, tl.cdiv(seq_len, size) - low // size


@triton.jit(
    do_not_specialize=["table_stride", "max_splits", "k_scale", "v_scale"],
    do_not_specialize_on_alignment=["sinks", "block_tables", "seq_lens"],
)
def decode_kernel(
    out, part_out, part_lse, q, k_cache, v_cache, sinks, block_tables, seq_lens,
    table_stride, max_splits, k_scale, v_scale,
    CACHE: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """One query token over some of its sequence's splits, for one KV head. Grid: [S * K, programs].

    Why KV heads vary fastest: all heads of a token are adjacent in memory, and are read at the same
    time. Why one axis with sequences: the other axes of a grid are limited to 65,535.

    A sequence with one split writes its result directly. With more, program p computes the splits
    p, p + programs, ... and writes each split's normalized result to `part_out` [S, H, max_splits,
    D] and its base-2 log-sum-exp to `part_lse` [S, H, max_splits], both float32 and contiguous;
    `merge_kernel` adds them. The number of programs affects only speed, never the result.
    """
    kv_head, seq = tl.program_id(0) % A.kv_heads, tl.program_id(0) // A.kv_heads
    seq_len = tl.load(seq_lens + seq)
    low, size, first_split, num_splits = split_keys(seq_len, A.max_splits, A)
    num_splits = tl.maximum(num_splits, 1)  # a padding row without tokens writes zeros
    # Why: launches are sized for the longest possible sequence; surplus programs exit at once.
    programs = tl.minimum(tl.num_programs(1), num_splits)
    if tl.program_id(1) < programs:
        rows = tl.arange(0, A.m)
        dims = tl.arange(0, A.dim)[None, :]
        mask = (rows < A.group)[:, None] & (dims < A.head_dim)
        heads = kv_head * A.group + rows
        query_row = q + seq.to(tl.int64) * A.q_token
        out_row = out + seq.to(tl.int64) * A.o_token
        query = tl.load(query_row + (heads[:, None] * A.q_head + dims), mask=mask, other=0.0)
        if (q.dtype.element_ty == tl.bfloat16) & (k_cache.dtype.element_ty != tl.bfloat16):
            # Why: hardware converts fp8 to pairs of float16; bfloat16 would need a second
            # conversion of every key and value. Queries fit: one above 65,504 would give NaN, and
            # no token.
            query = query.to(tl.float16)
        positions = tl.full([A.m], 0, tl.int32) + (seq_len - 1)
        part_row = seq.to(tl.int64) * (A.kv_heads * A.group)
        for split in range(tl.program_id(1), num_splits, programs):
            split_start = (first_split + split) * size
            end = tl.minimum(split_start + size, seq_len)
            acc, total, row_max = attend(
                query, k_cache + kv_head * CACHE.k_head, v_cache + kv_head * CACHE.v_head,
                block_tables + seq.to(tl.int64) * table_stride, positions,
                tl.maximum(split_start, low // A.n * A.n), low, end // A.n * A.n, end, k_scale,
                CACHE, A, True,
            )  # fmt: skip
            denominator = total
            if A.sinks:  # noqa: SIM102
                if num_splits == 1:
                    denominator += sink_share(sinks + heads, rows < A.group, row_max)
            result = acc / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
            if v_cache.dtype.element_ty != q.dtype.element_ty:
                result = result * v_scale
            if num_splits == 1:
                pointers = out_row + (heads[:, None] * A.o_head + dims)
                tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
            else:
                part = (part_row + heads) * max_splits + split
                tl.store(part_lse + part, row_max + tl.log2(total), mask=rows < A.group)
                tl.store(part_out + part[:, None] * A.head_dim + dims, result, mask=mask)


@triton.jit(
    do_not_specialize=["split_limit", "max_splits"],
    do_not_specialize_on_alignment=["sinks", "seq_lens"],
)
def merge_kernel(
    out, part_out, part_lse, sinks, seq_lens, split_limit, max_splits, A: tl.constexpr
):  # fmt: skip
    """Adds the splits of one head of one decode, if there are several, weighted by their sums.
    Grid: [S, H].

    Splits are added 16 at a time, from the sequence's first, so the order of the sums depends only
    on this sequence. split_limit: the maximum number of splits, which determines their size.
    max_splits: the size of the buffers.
    """
    STEP: tl.constexpr = 16
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, num_splits = split_keys(tl.load(seq_lens + seq), split_limit, A)
    if num_splits > 1:
        part = (seq * tl.num_programs(1) + head) * max_splits
        dims = tl.arange(0, A.dim)
        acc = tl.full([A.dim], 0, tl.float32)
        total = tl.full([], 0, tl.float32)
        row_max = total + MIN_SCORE
        for first in range(0, num_splits, STEP):
            splits = first + tl.arange(0, STEP)
            lse = tl.load(part_lse + part + splits, mask=splits < num_splits, other=float("-inf"))
            mask = (splits < num_splits)[:, None] & (dims < A.head_dim)[None, :]
            rows = part_out + (part + splits)[:, None] * A.head_dim + dims[None, :]
            values = tl.load(rows, mask=mask, other=0.0)
            new_max = tl.maximum(row_max, tl.max(lse, 0))
            weights = tl.exp2(lse - new_max)
            rescale = tl.exp2(row_max - new_max)
            total = total * rescale + tl.sum(weights, 0)
            acc = acc * rescale + tl.sum(weights[:, None] * values, 0)
            row_max = new_max
        if A.sinks:
            total += sink_share(sinks + head, True, row_max)
        row = out + seq * A.o_token + head * A.o_head + dims
        tl.store(row, (acc / total).to(out.dtype.element_ty), mask=dims < A.head_dim)
