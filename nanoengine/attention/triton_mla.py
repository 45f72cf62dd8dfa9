"""TritonMLABackend: paged MLA (multi-head latent attention) on CUDA, in the absorbed form.

Made by `attention.make_backend` for models with MLA, which `models/mla.py` explains. The cache has
one row per token for all heads: a key, whose first elements are also the value. A tile of rows is
the heads of one token, or of a few tokens, and a program reads each cache row once, for both key
and value.

    row in the cache   [ latent: rank elements | RoPE: rope elements ]
    scores             query latent . latent + query rope . rope
    out                softmax(scores) . latent                              [T, H, rank]

    rotate and store (all tokens) -> attend (decodes, in splits) -> merge the splits
                                  -> attend (prompts)

Prompts use the same kernel with other tiles. With 512 + 64 elements, a score and its part of the
result cost 2,176 floating-point operations per head. With keys and values materialized per head
they would cost 640, plus 262,144 per head and context token in every chunk.

The number of splits per context is limited to what fills the GPU, because each split stores a
result for all heads: 67 MB for 256 sequences with 128 heads. It depends on the number of sequences,
and so may the last bits of a decode. `deterministic` is refused, because these models have experts.

The kernels have been run in Triton's interpreter and compiled ahead of time; they have not run on a
GPU yet.

Source: the absorbed form is from DeepSeek-V2 (arXiv 2405.04434), appendix C; splits as in
`triton_kernels.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from nanoengine.attention.base import AttentionSpec, LayerCache, Rotation
from nanoengine.attention.batch import Batch
from nanoengine.attention.triton import (
    KernelConfig,
    Splits,
    Strides,
    TritonBackend,
    cache_constants,
    padded,
)
from nanoengine.attention.triton_kernels import (
    MIN_SCORE,
    AttentionConstants,
    CacheConstants,
    TileConfig,
    load_keys,
    merge_kernel,
    queries_of_tile,
    split_keys,
    tile_blocks,
)
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2

ROPE_ROWS = 16
"""Heads per program of `rotate_latents_kernel`."""


@triton.jit
def apply_rope(pointers, target, cosine, sine, inside, ROPE: tl.constexpr, dims):
    """Applies RoPE to each row: (a, b) -> (a cos - b sin, b cos + a sin) over the halves of ROPE
    elements."""
    first = tl.load(pointers + dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(pointers + ROPE // 2 + dims, mask=inside, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + dims, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(target + ROPE // 2 + dims, (second * cosine + first * sine).to(dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rotate_latents_kernel(
    q, heads, vectors, cos, sin, weight, cache, slot_mapping,
    Q_HEAD: tl.constexpr, HEAD: tl.constexpr, NOPE_DIM: tl.constexpr, VECTOR: tl.constexpr,
    COS_TOKEN: tl.constexpr, SIN_TOKEN: tl.constexpr, CACHE: tl.constexpr,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Prepares one token's queries and its row of the cache.

    Applies RoPE to the last ROPE elements of its heads [T, H, HEAD], and writes them to q [T, H,
    Q_HEAD] after the first RANK elements. Of the token's vector, norms the latent, applies RoPE to
    the rest, and stores both.

    Grid: [T, 1 + H / ROWS rounded up]; the first program of a token computes the vector. WIDTH and
    HALF are RANK and ROPE / 2 rounded up to powers of two.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HALF)[None, :]
    inside = dims < ROPE // 2
    cosine = tl.load(cos + token * COS_TOKEN + dims, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * SIN_TOKEN + dims, mask=inside, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping + token)
        block, offset = slot // CACHE.block_size, slot % CACHE.block_size
        vector, cache_row = vectors + token * VECTOR, cache + block * CACHE.k_block
        cache_row += offset * CACHE.k_token
        columns = tl.arange(0, WIDTH)
        mask = columns < RANK
        value = tl.load(vector + columns, mask=mask, other=0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / RANK + EPS)
        # The weight's dtype determines the rounding: see `layers/kernels.py`.
        normed = normed.to(weight.dtype.element_ty).to(tl.float32)
        normed = normed * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(cache_row + columns, normed.to(cache.dtype.element_ty), mask=mask)
        apply_rope(vector + RANK, cache_row + RANK, cosine, sine, inside, ROPE, dims)
    else:
        rows = (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)[:, None]
        pointers = heads + (token * NUM_HEADS + rows) * HEAD + NOPE_DIM
        target = q + (token * NUM_HEADS + rows) * Q_HEAD + RANK
        apply_rope(pointers, target, cosine, sine, inside & (rows < NUM_HEADS), ROPE, dims)


@triton.jit(
    do_not_specialize=["table_stride", "num_decodes", "num_prefills", "max_splits"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def mla_kernel(
    out, part_out, part_lse, q, cache, block_tables, query_start_loc, seq_lens,
    table_stride, num_decodes, num_prefills, max_splits,
    CACHE: tl.constexpr, A: tl.constexpr, ROPE_PART: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows: heads of one or a few tokens of a sequence. Grid: [tiles * H /
    A.group rounded up, programs].

    With A.split > 0 a tile is a decode, and its programs compute its splits round-robin; several
    splits are written as in `decode_kernel`. Otherwise tiles are found as in `varlen_kernel`.
    ROPE_PART: like A, for the RoPE elements after the latent.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    TILE_TOKENS: tl.constexpr = A.m // A.group
    HEAD_TILES: tl.constexpr = (HEADS + A.group - 1) // A.group
    tile, head_tile = tl.program_id(0) // HEAD_TILES, tl.program_id(0) % HEAD_TILES
    if A.split > 0:
        seq, query_start, query_len, tile_start = tile, tile, 1, 0
    else:
        tile = tl.num_programs(0) // HEAD_TILES - 1 - tile
        seq, query_start, query_len, tile_start = queries_of_tile(
            query_start_loc, tile, num_decodes, num_prefills, TILE_TOKENS
        )
    if tile_start < query_len:
        seq_len = tl.load(seq_lens + seq)
        rows = tl.arange(0, A.m)
        tokens = tile_start + rows // A.group
        heads = head_tile * A.group + rows % A.group
        inside = (rows < TILE_TOKENS * A.group) & (tokens < query_len) & (heads < HEADS)
        token_rows = (query_start + tokens).to(tl.int64)
        dims, rope_dims = tl.arange(0, A.dim)[None, :], tl.arange(0, ROPE_PART.dim)[None, :]
        mask = inside[:, None] & (dims < A.head_dim)
        pointers = (q + token_rows * A.q_token + heads * A.q_head)[:, None]
        query = tl.load(pointers + dims, mask=mask, other=0.0)
        rope_mask = inside[:, None] & (rope_dims < ROPE_PART.head_dim)
        query_rope = tl.load(pointers + A.head_dim + rope_dims, mask=rope_mask, other=0.0)
        positions = seq_len - query_len + tokens
        last = seq_len - query_len + tl.minimum(tile_start + TILE_TOKENS, query_len)
        table = block_tables + seq.to(tl.int64) * table_stride
        size, num_splits = last, 1
        if A.split > 0:
            _, size, _, num_splits = split_keys(seq_len, max_splits, A)
        for split in range(tl.program_id(1), num_splits, tl.num_programs(1)):
            end = tl.minimum(split * size + size, last)
            acc = tl.full([A.m, A.dim], 0, tl.float32)
            total = tl.full([A.m, A.n], 0, tl.float32)
            row_max = tl.full([A.m], MIN_SCORE, tl.float32)
            blocks = tile_blocks(table, split * size, end, CACHE.block_size, A.n)
            for first in range(split * size, end, A.n):
                latent = load_keys(
                    cache, blocks, first, 0, end, CACHE.k_block, CACHE.k_token,
                    CACHE.block_size, A, True,
                )  # fmt: skip
                rope_keys = load_keys(
                    cache + A.head_dim, blocks, first, 0, end, CACHE.k_block, CACHE.k_token,
                    CACHE.block_size, ROPE_PART, True,
                )  # fmt: skip
                scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(query_rope, tl.trans(rope_keys), scores, input_precision="ieee")
                visible = (first + tl.arange(0, A.n))[None, :] <= positions[:, None]
                scores = tl.where(visible, scores * (A.scale * LOG2_E), float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, 1))
                weights = tl.exp2(scores - new_max[:, None])
                rescale = tl.exp2(row_max - new_max)
                total = total * rescale[:, None] + weights
                acc = tl.dot(
                    weights.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee"
                )
                row_max = new_max
                blocks = tile_blocks(table, first + A.n, end, CACHE.block_size, A.n)
            sums = tl.sum(total, 1)
            result = acc / sums[:, None]
            if num_splits == 1:
                pointers = (out + token_rows * A.o_token + heads * A.o_head)[:, None]
                tl.store(pointers + dims, result.to(out.dtype.element_ty), mask=mask)
            else:
                part = (seq.to(tl.int64) * HEADS + heads) * max_splits + split
                tl.store(part_lse + part, row_max + tl.log2(sums), mask=inside)
                tl.store(part_out + part[:, None] * A.head_dim + dims, result, mask=mask)


@functools.cache
def mla_config(arch: int, num_heads: int, dtype: torch.dtype) -> KernelConfig:
    """Returns tile sizes for a GPU of compute capability `arch`; see `triton.kernel_config`.

    Why at most 32 rows: 64 spill registers, with any number of warps. Why not fewer for prompts and
    many heads: each tile of rows reads the whole context, though from the L2 cache.
    """
    if dtype == torch.float32:
        prefill, decode = TileConfig(16, 16, 8, 1), TileConfig(16, 16, 16, 1)
    else:
        prefill = TileConfig(32, 32, 8, 3 if arch in (80, 90, 100, 103) else 2)
        small = TileConfig(16, 32, 4, 3 if arch in (90, 100, 103) else 2)
        decode = small if num_heads <= 16 else prefill
    # Why longer for many heads: each split writes a float32 result per head.
    return KernelConfig(prefill, decode, split_tokens=256 if num_heads <= 32 else 512)


@functools.cache
def mla_constants(
    heads: int, rank: int, rope: int, scale: float, q: Strides, out: Strides,
    cache: CacheConstants, tile: TileConfig, splits: tuple[int, ...],
) -> tuple[Constants, Constants]:  # fmt: skip
    """The constants of `mla_kernel` and of `merge_kernel`. `splits`: the tokens per split, or ()
    for prompts."""
    attention = AttentionConstants(
        *q[:2], *out[:2], scale, 0.0, 0, min(heads, tile.rows), False, rank, padded(rank),
        tile.rows, tile.keys, *splits,
    )  # fmt: skip
    rope_keys = attention._replace(head_dim=rope, dim=padded(rope))
    constants = Constants(
        CACHE=cache, A=attention, ROPE_PART=rope_keys, HEADS=heads, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return constants, Constants(A=attention, num_warps=4)


class TritonMLABackend(TritonBackend):
    """MLA in the absorbed form: one KV head whose values are parts of their keys.

    Raises:
        ConfigError: as `TritonBackend`, but for other head dims.
    """

    head_dims: ClassVar[range] = range(2, 641)
    programs_per_sm: ClassVar[int] = 8  # registers and shared memory allow one or two at a time
    has_splits_by_batch: ClassVar[bool] = True

    def rotate_and_store_latents(
        self, heads: torch.Tensor, vectors: torch.Tensor, rotation: Rotation, weight: torch.Tensor,
        eps: float, cache: LayerCache, batch: Batch,
    ) -> torch.Tensor:  # fmt: skip
        """Applies norm and RoPE to vectors [T, rank + rope] and stores them.

        Returns:
            Queries [T, H, rank + rope]; only their RoPE elements are set, from heads [T, H, NoPE
            dim + rope].
        """
        k_cache, _, spec = cache
        rank, (cos, sin) = spec.value_dim, rotation
        assert heads.is_contiguous() and vectors.is_contiguous()
        num_tokens, num_heads, size = heads.shape
        rope = spec.head_dim - rank
        q = heads.new_empty(num_tokens, num_heads, spec.head_dim)
        launch(
            rotate_latents_kernel, (num_tokens, 1 + cdiv(num_heads, ROPE_ROWS)),
            Constants(
                Q_HEAD=spec.head_dim, HEAD=size, NOPE_DIM=size - rope, VECTOR=spec.head_dim,
                COS_TOKEN=cos.stride(0), SIN_TOKEN=sin.stride(0),
                CACHE=cache_constants(k_cache, k_cache), NUM_HEADS=num_heads, RANK=rank,
                WIDTH=next_power_of_2(rank), ROPE=rope, HALF=next_power_of_2(rope // 2),
                ROWS=ROPE_ROWS, EPS=eps, num_warps=2
            ),
            q, heads, vectors, cos, sin, weight, k_cache, batch.slot_mapping[spec.group],
        )  # fmt: skip
        return q

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: Batch) -> torch.Tensor:
        """Queries [T, H, rank + rope] -> [T, H, rank]."""
        k_cache, _, spec = cache
        rank = spec.value_dim
        out = q.new_empty(len(q), spec.num_heads, rank)
        table, lens = batch.block_tables[spec.group], batch.seq_lens
        config, num_decodes = self._config(spec), batch.num_decodes
        num_prefills = batch.num_seqs - num_decodes
        layer_args = spec.num_heads, rank, spec.head_dim - rank, spec.scale
        strides = q.stride(), out.stride(), cache_constants(k_cache, k_cache)
        if num_decodes:
            by_group: dict[Any, Splits] = batch.attention  # type: ignore[assignment]
            head_tiles = cdiv(spec.num_heads, config.decode.rows)
            splits = by_group.get(spec.group)
            if splits is None:
                as_tiles = replace(spec, num_kv_heads=head_tiles, head_dim=rank)
                splits = by_group[spec.group] = self._splits(batch, as_tiles)
            attend_constants, merge_constants = mla_constants(
                *layer_args, *strides, config.decode, (config.split_tokens,)
            )
            launch(
                mla_kernel, (head_tiles * num_decodes, splits.grid[1]), attend_constants,
                out, splits.part_out, splits.part_lse, q, k_cache, table, batch.query_start_loc,
                lens, table.stride(0), 0, 0, splits.max_splits,
            )  # fmt: skip
            if splits.max_splits > 1:
                launch(
                    merge_kernel, (num_decodes, spec.num_heads), merge_constants,
                    out, splits.part_out, splits.part_lse, out, lens, splits.max_splits,
                    splits.max_splits,
                )  # fmt: skip
        if num_prefills:
            group = min(spec.num_heads, config.prefill.rows)
            tokens = batch.num_tokens - num_decodes
            tiles = tokens // (config.prefill.rows // group) + num_prefills
            constants, _ = mla_constants(*layer_args, *strides, config.prefill, ())
            launch(
                mla_kernel, (tiles * cdiv(spec.num_heads, group), 1), constants,
                out, out, out, q, k_cache, table, batch.query_start_loc, lens, table.stride(0),
                num_decodes, num_prefills, 1,
            )  # fmt: skip
        return out

    def _config(self, spec: AttentionSpec) -> KernelConfig:
        return mla_config(self.arch, spec.num_heads, self.dtype)
