"""The Triton kernels of paged attention: varlen attention, and decode with split contexts.

Called by `attention/triton.py` alone, which chooses grids and tile sizes. They know pointers and
strides, not batches or models. Everything is read through the block table of a sequence:

    position     0 ........ 15 16 ....... 31 32 ... 40            key tiles, aligned to position 0
    table        [ block 7   |  block 2   |  block 9 ]            any order, blocks may be shared
    cache        block 7: [P, K, D] at block_id * block_stride    tokens first, then KV heads

One tile of queries holds all query heads of one KV head (row = token * GROUP + head), so that keys
and values are read once a group. Softmax is online, in float32, in base 2: the score scale is
multiplied by log2(e) once, and exp2 is the hardware's instruction. Keys and values of an fp8 cache
become the queries' dtype in registers, which is exact; their scales multiply scores and outputs. In
a decode bfloat16 queries become float16 first, for that is what the hardware converts fp8 to.

Key tiles are aligned to position 0 of the sequence and taken in rising order, and a tile that a row
may not see leaves that row as it was. So a row's result never depends on the batch around it. How
its queries were cut into chunks only decides which tiles take the masked code, whose last bit may
differ where the compiler fuses a multiplication with an addition.

Legend: D head dim, P block size, N keys a tile, M rows a tile. Strides are elements and constants,
so address arithmetic folds and 16-byte copies are proven aligned. Offsets inside a block are
32-bit; only the start of a token or a block is 64-bit. Arguments that change from step to step are
never specialized on, so that serving does not wait for the compiler again.

These kernels have been run in Triton's interpreter and compiled to machine code ahead of time;
they have not run on a GPU yet.

Source: FlashAttention-2 (Dao 2023, section 3.1) for the online softmax; Flash-Decoding (Dao et al.
2023) for split-KV; "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581) for packing query
heads into the rows of a paged kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nanoengine.attention.triton_splits import counted_last

MIN_SCORE = tl.constexpr(-1.0e30)
"""First running maximum. Finite, so that a row that sees nothing yet gives 0 and not NaN."""


@triton.jit
def tile_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, N: tl.constexpr):
    """Block ids of positions start ... start + N - 1: one, or N where blocks are smaller."""
    positions = start
    if N > BLOCK_SIZE:
        positions = start + tl.arange(0, N)
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def load_keys(
    cache, blocks, start, low, end,
    C_BLOCK: tl.constexpr, C_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The rows of positions start ... start + N - 1 of one KV head, [N, DIM], from a paged cache.

    `start` is a multiple of N. MASKED: rows outside low ... end - 1 are 0. Why: past the end lies
    memory that nobody wrote, before a window the null block; 0 * NaN would reach the output.
    """
    tokens = tl.arange(0, N)
    dims = tl.arange(0, DIM)[None, :]
    if N <= BLOCK_SIZE:
        offsets = (start % BLOCK_SIZE + tokens) * C_TOKEN
        rows = cache + blocks.to(tl.int64) * C_BLOCK + offsets[:, None]
    else:
        offsets = (start + tokens) % BLOCK_SIZE * C_TOKEN
        rows = cache + (blocks.to(tl.int64) * C_BLOCK + offsets)[:, None]
    if MASKED:
        inside = start + tokens < end
        if WINDOW > 0:
            inside = inside & (start + tokens >= low)
        return tl.load(rows + dims, mask=inside[:, None] & (dims < HEAD_DIM), other=0.0)
    if HEAD_DIM != DIM:
        return tl.load(rows + dims, mask=dims < HEAD_DIM, other=0.0)
    return tl.load(rows + dims)


@triton.jit
def attend_tile(
    q, acc, total, high, k_cache, v_cache, blocks, positions, start, low, end, k_scale,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    KC_BLOCK: tl.constexpr, KC_TOKEN: tl.constexpr,
    VC_BLOCK: tl.constexpr, VC_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, N: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the keys start ... start + N - 1 for all rows.

    State of each row: `high` the greatest score so far, `total` the sum of 2 ** (score - high),
    `acc` that sum weighted with the values [M, DIM], all float32. `total` is [M], or [M, N] with a
    sum for each column of tiles; see `attend`.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    key = load_keys(
        k_cache, blocks, start, low, end,
        KC_BLOCK, KC_TOKEN, BLOCK_SIZE, N, WINDOW, HEAD_DIM, DIM, MASKED,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee")  # [M, N]
    if key.dtype != q.dtype:
        scores = scores * k_scale
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (e^2x + 1): right at both infinities, and only exp2 is needed.
        power = tl.exp2(scores * (2.0 * LOG2_E * SCALE / SOFTCAP))
        scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (power + 1.0))
    else:
        scores = scores * (SCALE * LOG2_E)
    if MASKED:
        keys = (start + tl.arange(0, N))[None, :]
        visible = keys <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    new_high = tl.maximum(high, tl.max(scores, 1))
    weights = tl.exp2(scores - new_high[:, None])
    shrink = tl.exp2(high - new_high)
    if len(total.shape) == 2:
        total = total * shrink[:, None] + weights
    else:
        total = total * shrink + tl.sum(weights, 1)
    value = load_keys(
        v_cache, blocks, start, low, end,
        VC_BLOCK, VC_TOKEN, BLOCK_SIZE, N, WINDOW, HEAD_DIM, DIM, MASKED,
    ).to(q.dtype)  # fmt: skip
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_high


@triton.jit
def attend(
    q, k_cache, v_cache, table, positions, start, low, full_end, end, k_scale,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    KC_BLOCK: tl.constexpr, KC_TOKEN: tl.constexpr,
    VC_BLOCK: tl.constexpr, VC_TOKEN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SUM_LAST: tl.constexpr,
):  # fmt: skip
    """Attends the rows at `positions` [M] over the keys low ... end - 1, in tiles from `start` on.

    Every row sees all keys before `full_end`, a multiple of N, so these tiles need no mask. With a
    sliding window no tile is surely full: all are masked.

    SUM_LAST: sums of weights are kept for each column of a tile and added up after the last one.
    Why: adding up across threads waits for them all, in every tile. Why not always: the columns of
    a tile of many rows are too many registers.
    """
    acc = tl.zeros([M, DIM], tl.float32)
    total = tl.zeros([M, N] if SUM_LAST else [M], tl.float32)
    high = tl.full([M], MIN_SCORE, tl.float32)
    if WINDOW == 0:
        blocks = tile_blocks(table, start, end, BLOCK_SIZE, N)
        for first in range(start, full_end, N):
            acc, total, high = attend_tile(
                q, acc, total, high, k_cache, v_cache, blocks, positions, first, low, end, k_scale,
                SCALE, SOFTCAP, WINDOW, KC_BLOCK, KC_TOKEN, VC_BLOCK, VC_TOKEN,
                BLOCK_SIZE, N, HEAD_DIM, DIM, False,
            )  # fmt: skip
            blocks = tile_blocks(table, first + N, end, BLOCK_SIZE, N)
        start = tl.maximum(start, full_end)
    blocks = tile_blocks(table, start, end, BLOCK_SIZE, N)
    for first in range(start, end, N):
        acc, total, high = attend_tile(
            q, acc, total, high, k_cache, v_cache, blocks, positions, first, low, end, k_scale,
            SCALE, SOFTCAP, WINDOW, KC_BLOCK, KC_TOKEN, VC_BLOCK, VC_TOKEN,
            BLOCK_SIZE, N, HEAD_DIM, DIM, True,
        )  # fmt: skip
        blocks = tile_blocks(table, first + N, end, BLOCK_SIZE, N)
    if SUM_LAST:
        total = tl.sum(total, 1)
    return acc, total, high


@triton.jit
def sink_share(places, inside, high):
    """What sinks add to sums of 2 ** (score - high); so much that a result is 0 where one is far
    above all scores."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    return tl.exp2(tl.minimum(sink * LOG2_E - high, 126.0))


@triton.jit
def sequence_of_tile(query_start_loc, tile, num_decodes, num_prefills, TILE_TOKENS: tl.constexpr):
    """Which prefill sequence a query tile belongs to, and its first tile.

    Sequence i starts at tile `query_start // TILE_TOKENS + i`: room for its tiles whatever the
    lengths are, a closed form that needs no prefix sum and no answer from the host. Tiles left
    over lie past their sequence's end and exit.

    Source: the query-block search of vLLM's Triton backend; here one vector count instead of a
    bisection, whose loads would wait for each other.
    """
    SEARCH: tl.constexpr = 256
    before = 0
    for first in range(0, num_prefills, SEARCH):
        index = first + tl.arange(0, SEARCH)
        inside = index < num_prefills
        starts = tl.load(query_start_loc + num_decodes + index, mask=inside, other=0) - num_decodes
        before += tl.sum((inside & (starts // TILE_TOKENS + index <= tile)).to(tl.int32), 0)
    last = before - 1
    start = tl.load(query_start_loc + num_decodes + last) - num_decodes
    return num_decodes + last, start // TILE_TOKENS + last


@triton.jit(
    do_not_specialize=["table_stride", "num_decodes", "num_prefills", "k_scale", "v_scale"],
    do_not_specialize_on_alignment=["sinks", "block_tables", "query_start_loc", "seq_lens"],
)
def varlen_kernel(
    out, q, k_cache, v_cache, sinks, block_tables, query_start_loc, seq_lens,
    table_stride, num_decodes, num_prefills, k_scale, v_scale,
    O_TOKEN: tl.constexpr, O_HEAD: tl.constexpr,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    KC_BLOCK: tl.constexpr, KC_TOKEN: tl.constexpr, KC_HEAD: tl.constexpr,
    VC_BLOCK: tl.constexpr, VC_TOKEN: tl.constexpr, VC_HEAD: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of queries of one sequence, for one KV head. Grid: [tiles, K].

    Serves prompts, chunks with a context before them and draft verification alike: the query token
    i of a sequence is at position seq_len - query_len + i and sees the keys up to there.
    """
    TILE_TOKENS: tl.constexpr = M // GROUP
    # Why backwards: the last tiles of a prompt see the most keys; started first, they don't
    # keep the GPU waiting at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, first_tile = sequence_of_tile(
        query_start_loc, tile, num_decodes, num_prefills, TILE_TOKENS
    )
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    tile_start = (tile - first_tile) * TILE_TOKENS
    if tile_start < query_len:
        rows = tl.arange(0, M)
        tokens = tile_start + rows // GROUP
        dims = tl.arange(0, DIM)[None, :]
        mask = ((rows < TILE_TOKENS * GROUP) & (tokens < query_len))[:, None] & (dims < HEAD_DIM)
        token_rows = (query_start + tokens).to(tl.int64)[:, None]
        heads = (kv_head * GROUP + rows % GROUP)[:, None]
        query = tl.load(q + token_rows * Q_TOKEN + (heads * Q_HEAD + dims), mask=mask, other=0.0)

        context = seq_len - query_len
        first_position = context + tile_start
        end = context + tl.minimum(tile_start + TILE_TOKENS, query_len)
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first_position - WINDOW + 1, 0)
        acc, total, high = attend(
            query, k_cache + kv_head * KC_HEAD, v_cache + kv_head * VC_HEAD,
            block_tables + seq.to(tl.int64) * table_stride, context + tokens,
            low // N * N, low, (first_position + 1) // N * N, end, k_scale,
            SCALE, SOFTCAP, WINDOW, KC_BLOCK, KC_TOKEN, VC_BLOCK, VC_TOKEN,
            BLOCK_SIZE, M, N, HEAD_DIM, DIM, False,
        )  # fmt: skip
        if SINKS:
            inside = (rows < TILE_TOKENS * GROUP) & (tokens < query_len)
            total += sink_share(sinks + kv_head * GROUP + rows % GROUP, inside, high)
        result = acc / total[:, None]
        if v_cache.dtype.element_ty != q.dtype.element_ty:
            result = result * v_scale
        result = result.to(out.dtype.element_ty)
        tl.store(out + token_rows * O_TOKEN + (heads * O_HEAD + dims), result, mask=mask)


@triton.jit
def split_keys(seq_len, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How the keys that a sequence's last token sees are split.

    A split is SPLIT tokens, or so many times SPLIT that MAX_SPLITS of them hold all: the size
    follows from this sequence's length alone, so its sums are cut at the same places whatever runs
    beside it, and the buffers of partial results stay small at any length. Splits start at
    position 0; with a window the first and the last may be cut, so there may be one more.

    Returns:
        The first key seen, the size of a split, the first split seen, and how many are seen.
    """
    low = 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - WINDOW, 0)
    size = SPLIT * tl.cdiv(seq_len - low, SPLIT * MAX_SPLITS)
    size = tl.maximum(size, SPLIT)
    return low, size, low // size, tl.cdiv(seq_len, size) - low // size


@triton.jit
def combine(
    out_row, part_out, part_lse, part, num_splits, sink,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one query head, from row `part` on, weighted by their sums.

    Splits are taken 16 at a time, counted from the sequence's first: the order of the sums depends
    on this sequence alone. None at all give zeros. `sink` is the place of the head's.
    """
    STEP: tl.constexpr = 16
    dims = tl.arange(0, DIM)
    acc = tl.zeros([DIM], tl.float32)
    total = tl.zeros([], tl.float32)
    high = total + MIN_SCORE
    for first in range(0, num_splits, STEP):
        splits = first + tl.arange(0, STEP)
        lse = tl.load(part_lse + part + splits, mask=splits < num_splits, other=float("-inf"))
        mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        rows = part_out + (part + splits)[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(rows, mask=mask, other=0.0)
        new_high = tl.maximum(high, tl.max(lse, 0))
        weights = tl.exp2(lse - new_high)
        shrink = tl.exp2(high - new_high)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
        high = new_high
    if SINKS:
        total += sink_share(sink, True, high)
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_row + dims, result.to(out_row.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(
    do_not_specialize=["table_stride", "max_splits", "k_scale", "v_scale"],
    do_not_specialize_on_alignment=["sinks", "block_tables", "seq_lens"],
)
def decode_kernel(
    out, part_out, part_lse, counters, q, k_cache, v_cache, sinks, block_tables, seq_lens,
    table_stride, max_splits, k_scale, v_scale,
    O_TOKEN: tl.constexpr, O_HEAD: tl.constexpr,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr,
    KC_BLOCK: tl.constexpr, KC_TOKEN: tl.constexpr, KC_HEAD: tl.constexpr,
    VC_BLOCK: tl.constexpr, VC_TOKEN: tl.constexpr, VC_HEAD: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """One query token over some of its sequence's splits, for one KV head. Grid: [S, K, programs].

    The only split of a sequence is its result. Of more, program p takes the splits p, p + programs,
    ... and writes each one's normalized result to `part_out` [S, H, max_splits, D] and its base-2
    log-sum-exp to `part_lse` [S, H, max_splits], both float32 and contiguous; the program that
    comes last adds them up. The number of programs is a matter of speed, never of the result.
    """
    seq, kv_head = tl.program_id(0), tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    seq_len = tl.load(seq_lens + seq)
    low, size, first_split, num_splits = split_keys(seq_len, WINDOW, SPLIT, MAX_SPLITS)
    # Why: launches are sized for the longest sequence that may come; the others exit at once.
    programs = tl.minimum(tl.num_programs(2), tl.maximum(num_splits, 1))
    if tl.program_id(2) < programs:
        rows = tl.arange(0, M)
        dims = tl.arange(0, DIM)[None, :]
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)
        heads = kv_head * GROUP + rows
        query_row = q + seq.to(tl.int64) * Q_TOKEN
        out_row = out + seq.to(tl.int64) * O_TOKEN
        query = tl.load(query_row + (heads[:, None] * Q_HEAD + dims), mask=mask, other=0.0)
        if (q.dtype.element_ty == tl.bfloat16) & (k_cache.dtype.element_ty != tl.bfloat16):
            # Why: hardware turns fp8 into float16, in pairs, and bfloat16 is a second conversion of
            # every key and value. Queries fit: a number above 65,504 would come out as no token.
            query = query.to(tl.float16)
        positions = tl.zeros([M], tl.int32) + (seq_len - 1)
        part_row = seq.to(tl.int64) * (num_kv_heads * GROUP)
        for split in range(tl.program_id(2), num_splits, programs):
            split_start = (first_split + split) * size
            end = tl.minimum(split_start + size, seq_len)
            acc, total, high = attend(
                query, k_cache + kv_head * KC_HEAD, v_cache + kv_head * VC_HEAD,
                block_tables + seq.to(tl.int64) * table_stride, positions,
                tl.maximum(split_start, low // N * N), low, end // N * N, end, k_scale,
                SCALE, SOFTCAP, WINDOW, KC_BLOCK, KC_TOKEN, VC_BLOCK, VC_TOKEN,
                BLOCK_SIZE, M, N, HEAD_DIM, DIM, True,
            )  # fmt: skip
            whole = total
            if SINKS:  # noqa: SIM102
                if num_splits == 1:
                    whole += sink_share(sinks + heads, rows < GROUP, high)
            result = acc / whole[:, None]
            if v_cache.dtype.element_ty != q.dtype.element_ty:
                result = result * v_scale
            if num_splits == 1:
                place = out_row + (heads[:, None] * O_HEAD + dims)
                tl.store(place, result.to(out.dtype.element_ty), mask=mask)
            else:
                part = (part_row + heads) * max_splits + split
                tl.store(part_lse + part, high + tl.log2(total), mask=rows < GROUP)
                tl.store(part_out + part[:, None] * HEAD_DIM + dims, result, mask=mask)
        if num_splits != 1:  # noqa: SIM102
            # Why not `and`: in a kernel both of its sides are computed.
            if counted_last(counters + seq * num_kv_heads + kv_head, programs):
                for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                    part = (part_row + head) * max_splits
                    combine(
                        out_row + head * O_HEAD, part_out, part_lse, part, num_splits, sinks + head,
                        HEAD_DIM, DIM, SINKS,
                    )  # fmt: skip
