"""TritonLatentBackend: paged MLA (multi-head latent attention) on CUDA, in the absorbed form.

`attention.make_backend` makes it for a model with MLA, which `models/mla.py` explains. The cache
has one row per token, which serves all heads: a key whose first elements are the value too. So a
tile of rows is the heads of one token, or of a few tokens, and a program reads each cache row once,
for both key and value.

    row in the cache   [ latent: rank elements | RoPE: rope elements ]
    scores             query latent . latent + query rope . rope
    out                softmax(scores) . latent                              [T, H, rank]

    rotate and store (all tokens) -> attend (decodes, split contexts) -> merge their splits
                                  -> attend (prompts)

Prompts use the same kernel with other tiles. With 512 + 64 elements, a score and its part of the
result cost 2,176 floating-point operations per head. With keys and values materialized per head
they would cost 640, plus 262,144 per head and context token in every chunk.

A context has at most as many splits as fill the GPU together with the other sequences, because each
split stores a result of all heads' latents: 67 MB for 256 sequences with 128 heads. So the last
bits of a decode may depend on the number of sequences. With `deterministic` all tokens are computed
like prompts, without splits, which is slow for few sequences with long contexts.

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

TURNED_ROWS = 16
"""Heads per program that applies RoPE."""


@triton.jit
def turn(place, target, cosine, sine, inside, ROPE: tl.constexpr, dims):
    """Applies RoPE to each row: (a, b) -> (a cos - b sin, b cos + a sin) over the halves of ROPE
    elements."""
    first = tl.load(place + dims, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + ROPE // 2 + dims, mask=inside, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + dims, (first * cosine - second * sine).to(kind), mask=inside)
    tl.store(target + ROPE // 2 + dims, (second * cosine + first * sine).to(kind), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def turn_latents_kernel(
    q, heads, vectors, cos, sin, weight, cache, slot_mapping,
    Q_HEAD: tl.constexpr, HEAD: tl.constexpr, STILL: tl.constexpr, VECTOR: tl.constexpr,
    COS_TOKEN: tl.constexpr, SIN_TOKEN: tl.constexpr, CACHE: tl.constexpr,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    ROPE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Applies RoPE to the last ROPE elements of one token's heads [T, H, HEAD] and writes them to q
    [T, H, Q_HEAD] after its first RANK elements. Norms the latent of the token's vector, applies
    RoPE to the rest of the vector, and stores both.

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
        row, line = vectors + token * VECTOR, cache + block * CACHE.k_block
        line += offset * CACHE.k_token
        columns = tl.arange(0, WIDTH)
        mask = columns < RANK
        value = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 0) / RANK + EPS)
        # The weight's dtype says where to round: see `layers/kernels.py`.
        normed = normed.to(weight.dtype.element_ty).to(tl.float32)
        normed = normed * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(line + columns, normed.to(cache.dtype.element_ty), mask=mask)
        turn(row + RANK, line + RANK, cosine, sine, inside, ROPE, dims)
    else:
        rows = (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)[:, None]
        place = heads + (token * NUM_HEADS + rows) * HEAD + STILL
        target = q + (token * NUM_HEADS + rows) * Q_HEAD + RANK
        turn(place, target, cosine, sine, inside & (rows < NUM_HEADS), ROPE, dims)


@triton.jit(
    do_not_specialize=["table_stride", "num_decodes", "num_prefills", "max_splits"],
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def latent_kernel(
    out, part_out, part_lse, q, cache, block_tables, query_start_loc, seq_lens,
    table_stride, num_decodes, num_prefills, max_splits,
    CACHE: tl.constexpr, A: tl.constexpr, TURNED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of rows, the heads of one sequence's tokens. Grid: [tiles * H / A.group
    rounded up, programs].

    With A.split a tile is a decode, and its programs compute its splits round-robin; several splits
    are written as in `decode_kernel`. Without, tiles are found as in `varlen_kernel`. TURNED: like
    A, for the RoPE elements after the latent.
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
        dims, turned_dims = tl.arange(0, A.dim)[None, :], tl.arange(0, TURNED.dim)[None, :]
        mask = inside[:, None] & (dims < A.head_dim)
        place = (q + token_rows * A.q_token + heads * A.q_head)[:, None]
        query = tl.load(place + dims, mask=mask, other=0.0)
        of_turned = inside[:, None] & (turned_dims < TURNED.head_dim)
        query_turned = tl.load(place + A.head_dim + turned_dims, mask=of_turned, other=0.0)
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
            high = tl.full([A.m], MIN_SCORE, tl.float32)
            blocks = tile_blocks(table, split * size, end, CACHE.block_size, A.n)
            for first in range(split * size, end, A.n):
                latent = load_keys(
                    cache, blocks, first, 0, end, CACHE.k_block, CACHE.k_token,
                    CACHE.block_size, A, True,
                )  # fmt: skip
                turned = load_keys(
                    cache + A.head_dim, blocks, first, 0, end, CACHE.k_block, CACHE.k_token,
                    CACHE.block_size, TURNED, True,
                )  # fmt: skip
                scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(query_turned, tl.trans(turned), scores, input_precision="ieee")
                visible = (first + tl.arange(0, A.n))[None, :] <= positions[:, None]
                scores = tl.where(visible, scores * (A.scale * LOG2_E), float("-inf"))
                new_high = tl.maximum(high, tl.max(scores, 1))
                weights = tl.exp2(scores - new_high[:, None])
                shrink = tl.exp2(high - new_high)
                total = total * shrink[:, None] + weights
                acc = tl.dot(
                    weights.to(latent.dtype), latent, acc * shrink[:, None], input_precision="ieee"
                )
                high = new_high
                blocks = tile_blocks(table, first + A.n, end, CACHE.block_size, A.n)
            sums = tl.sum(total, 1)
            result = acc / sums[:, None]
            if num_splits == 1:
                place = (out + token_rows * A.o_token + heads * A.o_head)[:, None]
                tl.store(place + dims, result.to(out.dtype.element_ty), mask=mask)
            else:
                part = (seq.to(tl.int64) * HEADS + heads) * max_splits + split
                tl.store(part_lse + part, high + tl.log2(sums), mask=inside)
                tl.store(part_out + part[:, None] * A.head_dim + dims, result, mask=mask)


@functools.cache
def latent_config(arch: int, num_heads: int, dtype: torch.dtype) -> KernelConfig:
    """Returns tile sizes for a GPU of compute capability `arch`; see `triton.kernel_config`.

    Why at most 32 rows: 64 spill, with any number of warps. Why not fewer for prompts and many
    heads: each tile of rows reads the whole context again, if from the L2 cache.
    """
    if dtype == torch.float32:
        prefill, decode = TileConfig(16, 16, 8, 1), TileConfig(16, 16, 16, 1)
    else:
        prefill = TileConfig(32, 32, 8, 3 if arch in (80, 90, 100, 103) else 2)
        few = TileConfig(16, 32, 4, 3 if arch in (90, 100, 103) else 2)
        decode = few if num_heads <= 16 else prefill
    # Why longer for many heads: each split writes a result per head, in float32.
    return KernelConfig(prefill, decode, split_tokens=256 if num_heads <= 32 else 512)


@functools.cache
def latent_constants(
    heads: int, rank: int, rope: int, scale: float, q: Strides, out: Strides,
    cache: CacheConstants, tile: TileConfig, splits: tuple[int, ...],
) -> tuple[Constants, Constants]:  # fmt: skip
    """The constants of `latent_kernel` and of `merge_kernel`; `splits`: the tokens per split, or
    ()."""
    attention = AttentionConstants(
        *q[:2], *out[:2], scale, 0.0, 0, min(heads, tile.rows), False, rank, padded(rank),
        tile.rows, tile.keys, *splits,
    )  # fmt: skip
    turned = attention._replace(head_dim=rope, dim=padded(rope))
    constants = Constants(
        CACHE=cache, A=attention, TURNED=turned, HEADS=heads, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return constants, Constants(A=attention, num_warps=4)


class TritonLatentBackend(TritonBackend):
    """Attention whose values are parts of their keys, for one KV head and any number of heads.

    Raises:
        ConfigError: as `TritonBackend`, but for other head dims.
    """

    head_dims: ClassVar[range] = range(2, 641)
    programs_per_sm: ClassVar[int] = 8  # registers and shared memory allow one or two at a time
    has_splits_by_batch: ClassVar[bool] = True

    def store(self, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, batch: Batch) -> None:
        """Writes k [T, 1, rank + rope]; v is a part of it."""
        cache.k_cache.flatten(0, 1).index_copy_(0, batch.slot_mapping[cache.spec.group], k)

    def rotate_and_store_latents(
        self, heads: torch.Tensor, vectors: torch.Tensor, rotation: Rotation, weight: torch.Tensor,
        eps: float, cache: LayerCache, batch: Batch,
    ) -> torch.Tensor:  # fmt: skip
        """Applies norm and RoPE to vectors [T, rank + rope] and stores them.

        Returns:
            Queries [T, H, rank + rope]; only the RoPE elements are set, from heads [T, H, still +
            rope].
        """
        k_cache, _, spec = cache
        rank, (cos, sin) = spec.value_dim, rotation
        assert heads.is_contiguous() and vectors.is_contiguous()
        num_tokens, num_heads, size = heads.shape
        rope = spec.head_dim - rank
        q = heads.new_empty(num_tokens, num_heads, spec.head_dim)
        launch(
            turn_latents_kernel, (num_tokens, 1 + cdiv(num_heads, TURNED_ROWS)),
            Constants(
                Q_HEAD=spec.head_dim, HEAD=size, STILL=size - rope, VECTOR=spec.head_dim,
                COS_TOKEN=cos.stride(0), SIN_TOKEN=sin.stride(0),
                CACHE=cache_constants(k_cache, k_cache), NUM_HEADS=num_heads, RANK=rank,
                WIDTH=next_power_of_2(rank), ROPE=rope, HALF=next_power_of_2(rope // 2),
                ROWS=TURNED_ROWS, EPS=eps, num_warps=2,
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
        if self.deterministic:  # Why: a decode then runs the same code as a chunk's token.
            num_decodes = 0
        num_prefills = batch.num_seqs - num_decodes
        of_layer = spec.num_heads, rank, spec.head_dim - rank, spec.scale
        strides = q.stride(), out.stride(), cache_constants(k_cache, k_cache)
        if num_decodes:
            of_step: dict[Any, Splits] = batch.attention  # type: ignore[assignment]
            head_tiles = cdiv(spec.num_heads, config.decode.rows)
            splits = of_step.get(spec.group)
            if splits is None:
                as_tiles = replace(spec, num_kv_heads=head_tiles, head_dim=rank)
                splits = of_step[spec.group] = self._splits(batch, as_tiles)
            attending, merging = latent_constants(
                *of_layer, *strides, config.decode, (config.split_tokens,)
            )
            launch(
                latent_kernel, (head_tiles * num_decodes, splits.grid[1]), attending,
                out, splits.part_out, splits.part_lse, q, k_cache, table, batch.query_start_loc,
                lens, table.stride(0), 0, 0, splits.max_splits,
            )  # fmt: skip
            if splits.max_splits > 1:
                launch(
                    merge_kernel, (num_decodes, spec.num_heads), merging,
                    out, splits.part_out, splits.part_lse, out, lens, splits.max_splits,
                    splits.max_splits,
                )  # fmt: skip
        if num_prefills:
            group = min(spec.num_heads, config.prefill.rows)
            tokens = batch.num_tokens - num_decodes
            tiles = tokens // (config.prefill.rows // group) + num_prefills
            constants, _ = latent_constants(*of_layer, *strides, config.prefill, ())
            launch(
                latent_kernel, (tiles * cdiv(spec.num_heads, group), 1), constants,
                out, out, out, q, k_cache, table, batch.query_start_loc, lens, table.stride(0),
                num_decodes, num_prefills, 1,
            )  # fmt: skip
        return out

    def _config(self, spec: AttentionSpec) -> KernelConfig:
        return latent_config(self.arch, spec.num_heads, self.dtype)
