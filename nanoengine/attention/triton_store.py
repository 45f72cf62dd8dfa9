"""The Triton kernel that writes the paged KV cache.

`rotate_store_kernel` reads the fused projection, applies norm and RoPE to query and key heads, and
stores keys and values. Called only by `attention/triton.py`. An fp8 cache contains element *
factor, rounded to nearest, where the factor is one over the layer's scale;
`attention/kv_quantization.py` is the reference implementation.

It has been run in Triton's interpreter and compiled to machine code ahead of time; it has not run
on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def to_cache(x, cache, factor):
    """Converts x to the cache's dtype; for fp8 in registers."""
    if cache.dtype.element_ty == tl.float8e4nv:
        # Why NaN stays: a broken model must not give plausible results.
        scaled = x.to(tl.float32) * factor
        x = tl.clamp(scaled, -LARGEST_FP8, LARGEST_FP8, propagate_nan=tl.PropagateNan.ALL)
    return x.to(cache.dtype.element_ty)


@triton.jit
def norm_half(half, rstd, weight, heads, mask):
    """Returns one half of normed heads, rounded as the weight's dtype requires: see
    `attention/base.py`."""
    half = (half * rstd).to(weight.dtype.element_ty).to(tl.float32)
    half = half * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    return half.to(heads.dtype.element_ty).to(tl.float32)


@triton.jit(
    do_not_specialize=["k_factor", "v_factor"], do_not_specialize_on_alignment=["slot_mapping"]
)
def rotate_store_kernel(
    out, heads, cos, sin, weight, k_cache, v_cache, slot_mapping, k_factor, v_factor,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, COS_TOKEN: tl.constexpr, SIN_TOKEN: tl.constexpr,
    CACHE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Applies norm and RoPE to one token's query and key heads, and stores its keys and values.

    Grid: [T, all heads / ROWS rounded up]. A program computes some rows of one token's projection
    (query heads, key heads and value heads, in this order), each as two halves, which RoPE
    combines: (a, b) -> (a cos - b sin, b cos + a sin). Queries go to `out` [T, H, D], contiguous.
    HALF is HEAD_DIM / 2 rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // CACHE.block_size, slot % CACHE.block_size
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, HALF)[None, :]
    inside = dims < HEAD_DIM // 2
    has_rope = rows < NUM_HEADS + NUM_KV_HEADS
    mask = inside & (rows < NUM_HEADS + 2 * NUM_KV_HEADS)
    pointers = heads + token * TOKEN + (rows * HEAD + dims)
    raw_first = tl.load(pointers, mask=mask, other=0.0)
    raw_second = tl.load(pointers + HEAD_DIM // 2, mask=mask, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rstd = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        weights = weight + (rows * HEAD_DIM + dims)
        first = norm_half(first, rstd, weights, heads, inside & has_rope)
        second = norm_half(second, rstd, weights + HEAD_DIM // 2, heads, inside & has_rope)
    cosine = tl.load(cos + token * COS_TOKEN + dims, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * SIN_TOKEN + dims, mask=inside, other=0.0).to(tl.float32)
    new_first = (first * cosine - second * sine).to(out.dtype.element_ty)
    new_second = (second * cosine + first * sine).to(out.dtype.element_ty)

    is_query = rows < NUM_HEADS
    target = out + token * (NUM_HEADS * HEAD_DIM) + (rows * HEAD_DIM + dims)
    tl.store(target, new_first, mask=inside & is_query)
    tl.store(target + HEAD_DIM // 2, new_second, mask=inside & is_query)

    is_key = has_rope & (rows >= NUM_HEADS)
    target = k_cache + block * CACHE.k_block + offset * CACHE.k_token
    target += (rows - NUM_HEADS) * CACHE.k_head + dims
    tl.store(target, to_cache(new_first, k_cache, k_factor), mask=inside & is_key)
    tl.store(target + HEAD_DIM // 2, to_cache(new_second, k_cache, k_factor), mask=inside & is_key)

    is_value = mask & (rows >= NUM_HEADS + NUM_KV_HEADS)
    target = v_cache + block * CACHE.v_block + offset * CACHE.v_token
    target += (rows - NUM_HEADS - NUM_KV_HEADS) * CACHE.v_head + dims
    tl.store(target, to_cache(raw_first, v_cache, v_factor), mask=is_value)
    tl.store(target + HEAD_DIM // 2, to_cache(raw_second, v_cache, v_factor), mask=is_value)
