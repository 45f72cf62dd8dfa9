"""Attention whose bits depend on a token and its context alone, not on how a step computes it.

Called by `attention/triton.py` for `deterministic=True`. One kernel serves decodes, chunks and
whole prompts, so that a token's arithmetic is the same machine code in all of them:

    context     0 ....... 511 | 512 ...... 1023 | 1024 .. 1100     splits of a fixed size, from 0 on
    a program   softmax within a split -> (result, log-sum-exp)    masked code in all tiles
    then        the splits' results, merged one after the other

Where sequences are many, a program takes all splits of its tile and merges them as they come. Where
they are few, programs share the splits, and the last one merges what all have written, by the same
function. Merging is written with explicit fused multiply-adds, so that both compile to the same
operations.

A split that holds no key which a row may see leaves that row's result as it was, to the bit, so it
doesn't matter which tokens share a row's tile. The price is speed: tiles are a compromise between
decodes and prompts, and slower than the default kernels.

It has been run in Triton's interpreter and compiled ahead of time; it has not run on a GPU yet.

Source: Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), for splits of a
fixed size instead of a fixed number of splits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nanoengine.attention.base import LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.triton_kernels import (
    MIN_SCORE,
    TileConfig,
    attend,
    load_queries,
    queries_of_tile,
    sink_share,
)
from nanoengine.attention.triton_splits import counted_last
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class UniformConfig(TileConfig):
    """A tile, and the tokens of a split."""

    split: int = 512


@functools.cache
def uniform_config(arch: int, head_dim: int, group_size: int, dtype: torch.dtype) -> UniformConfig:
    """Tile sizes: enough rows for prompts, few enough that a decode is not all padding."""
    dim = next_power_of_2(head_dim)
    rows = max(32 if dim <= 256 else 16, next_power_of_2(group_size))
    if dim > 256:
        return UniformConfig(rows, keys=16, warps=8, stages=1 if dtype == torch.float32 else 2)
    if dtype == torch.float32:
        return UniformConfig(rows, keys=16, warps=8, stages=2)
    if dim > 128:
        return UniformConfig(rows, keys=32, warps=8, stages=2)
    return UniformConfig(rows, keys=32, warps=4, stages=4 if arch in (80, 90, 100, 103) else 3)


@triton.jit
def merge(acc, total, high, part, lse):
    """Adds one split: state as in `attend_tile`, but `part` is normalized and `lse` its weight."""
    new_high = tl.maximum(high, lse)
    shrink = tl.exp2(high - new_high)
    weight = tl.exp2(lse - new_high)
    total = tl.fma(total, shrink, weight)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), part * weight[:, None])
    return acc, total, new_high


@triton.jit(
    do_not_specialize=[
        "table_stride", "first_seq", "num_seqs", "max_splits", "k_scale", "v_scale"
    ],
    do_not_specialize_on_alignment=["sinks", "block_tables", "query_start_loc", "seq_lens"],
)  # fmt: skip
def uniform_kernel(
    out, part_out, part_lse, counters, q, k_cache, v_cache, sinks, block_tables, query_start_loc,
    seq_lens, table_stride, first_seq, num_seqs, max_splits, k_scale, v_scale,
    CACHE: tl.constexpr, A: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one sequence, for one KV head. Grid: [tiles, K, programs].

    With one program a tile it merges its splits as they come. With more, which only decodes have,
    program p takes the splits p, p + programs, ... and writes each to `part_out`
    [T, H, max_splits, D] and `part_lse` [T, H, max_splits], float32 and contiguous, counted from
    the first split that the tile sees; the program that comes last merges them.
    """
    TILE_TOKENS: tl.constexpr = A.m // A.group
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq, query_start, query_len, tile_start = queries_of_tile(
        query_start_loc, tile, first_seq, num_seqs, TILE_TOKENS
    )
    context = tl.load(seq_lens + seq) - query_len
    end = context + tl.minimum(tile_start + TILE_TOKENS, query_len)
    low = 0
    if A.window > 0:
        low = tl.maximum(context + tile_start - A.window + 1, 0)
    first_split = low // A.split
    num_splits = tl.cdiv(end, A.split) - first_split
    # Why: launches are sized for the longest sequence that may come; the others exit at once.
    programs = tl.minimum(tl.num_programs(2), tl.maximum(num_splits, 1))
    if (tile_start < query_len) & (tl.program_id(2) < programs):
        query, tokens, token_rows, heads, inside, dims, mask = load_queries(
            q, kv_head, query_start, query_len, tile_start, A
        )
        part_row = (token_rows * (tl.num_programs(1) * A.group) + heads) * max_splits
        all_acc = tl.full([A.m, A.dim], 0, tl.float32)
        all_total = tl.full([A.m], 0, tl.float32)
        all_high = tl.full([A.m], MIN_SCORE, tl.float32)
        for split in range(tl.program_id(2), num_splits, programs):
            split_start = (first_split + split) * A.split
            start = tl.maximum(split_start, low // A.n * A.n)
            acc, total, high = attend(
                query, k_cache + kv_head * CACHE.k_head, v_cache + kv_head * CACHE.v_head,
                block_tables + seq.to(tl.int64) * table_stride, context + tokens,
                # Why no full tiles: which ones are full depends on the rows of the tile.
                start, low, start, tl.minimum(split_start + A.split, end), k_scale,
                CACHE, A, False,
            )  # fmt: skip
            part = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            if v_cache.dtype.element_ty != q.dtype.element_ty:
                part = part * v_scale
            lse = high + tl.log2(total)
            if programs == 1:
                all_acc, all_total, all_high = merge(all_acc, all_total, all_high, part, lse)
            else:
                row = part_row + split
                tl.store(part_lse + row, lse, mask=inside)
                tl.store(part_out + row[:, None] * A.head_dim + dims, part, mask=mask)
        whole = programs == 1
        if not whole:
            whole = counted_last(counters + seq * tl.num_programs(1) + kv_head, programs)
            if whole:
                for split in range(0, num_splits):
                    row = part_row + split
                    lse = tl.load(part_lse + row, mask=inside, other=float("-inf"))
                    place = part_out + row[:, None] * A.head_dim + dims
                    part = tl.load(place, mask=mask, other=0.0)
                    all_acc, all_total, all_high = merge(all_acc, all_total, all_high, part, lse)
        if whole:
            if A.sinks:
                all_total += sink_share(sinks + heads, inside, all_high)
            result = all_acc / tl.where(all_total > 0.0, all_total, 1.0)[:, None]
            out_place = token_rows[:, None] * A.o_token + (heads[:, None] * A.o_head + dims)
            tl.store(out + out_place, result.to(out.dtype.element_ty), mask=mask)


def attend_uniform(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    batch: Batch,
    constants: Constants,
    num_sms: int,
    counters: torch.Tensor,
    sinks: torch.Tensor,
) -> None:
    """Attends all sequences of a batch: in one launch, or decodes first where they are few.

    `constants` are those of `triton.attention_constants`, `counters` those of the backend, `sinks`
    those of `triton.sinks_of`.
    """
    k_cache, v_cache, spec = cache
    heads, kv_heads, window = spec.num_heads, spec.num_kv_heads, spec.sliding_window
    table, of_launch = batch.block_tables[spec.group], constants["A"]
    tile_tokens = of_launch.m // of_launch.group

    def attend_seqs(first_seq: int, num_seqs: int, num_tokens: int, programs: int) -> None:
        # Why float32 even where nothing is written: another dtype would be another compilation.
        shape = (num_tokens if programs > 1 else 0, heads, max_splits)
        part_out = torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        launch(
            uniform_kernel, (num_tokens // tile_tokens + num_seqs, kv_heads, programs),
            constants,
            out, part_out, part_lse, counters, q, k_cache, v_cache, sinks, table,
            batch.query_start_loc, batch.seq_lens, table.stride(0), first_seq, num_seqs, max_splits,
            spec.k_scale, spec.v_scale,
        )  # fmt: skip

    decodes, first = batch.num_decodes, 0
    max_splits = cdiv(min(batch.max_seq_len, window or batch.max_seq_len), of_launch.split)
    max_splits += window is not None  # the first and the last may be cut
    # Why 4 programs an SM: about as many as fit. From there on sharing splits gains nothing, so
    # those that share are always fewer than `NUM_COUNTERS`.
    programs = min(max_splits, cdiv(4 * num_sms, max(decodes, 1) * kv_heads))
    if decodes and programs > 1:
        attend_seqs(0, decodes, decodes, programs)
        first = decodes
    if first < batch.num_seqs:
        attend_seqs(first, batch.num_seqs - first, batch.num_tokens - first, 1)
