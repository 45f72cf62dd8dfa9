"""MoE routing on a GPU: scores, the experts of each token, and the choices sorted by expert.

    route_kernel    logits -> each token's experts and weights; counts per block and expert
    align_kernel    these counts -> where each expert's rows begin, and the choices in that order

Called by `layers/triton_experts.py` alone. A program processes a block of tokens in tiles of
`ROWS`. Counts of whole blocks replace atomic additions, so the order is the same as after a stable
sort, and nothing waits for the host. The kernels compute `layers.moe.Router` and
a stable sort by expert; of equal scores the expert with the lowest index is chosen, as on the CPU.

The kernels have run in Triton's interpreter and been compiled to machine code ahead of time; they
have not run on a GPU yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""The key of entries that cannot be chosen any more. It is below the key of -inf, so that no expert
is chosen twice."""


@triton.jit
def keys_of(values, valid):
    """Integers in the order of float32 values, NaN last as in torch; `LOWEST` where `valid` is
    false."""
    bits = values.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(valid, tl.where(values == values, keys, 0x7FFFFFFF), LOWEST)


@triton.jit
def pop_largest(keys, lanes):
    """The index of each row's largest key, the first of equals; and the keys without it."""
    best = tl.argmax(keys, 1)
    return best, tl.where(lanes[None, :] == best[:, None], LOWEST, keys)


@triton.jit
def mask_groups(
    preferred, experts, ROWS: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    """The scores, -inf outside the TOP_GROUPS best groups of SIZE experts per row. Groups are
    compared by the sum of their BEST (1 or 2) largest scores."""
    groups, group_of = tl.arange(0, WIDTH), experts // SIZE
    sums = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    for group in range(GROUPS):
        scores = tl.where((group_of == group)[None, :], preferred, float("-inf"))
        rest = tl.where(experts[None, :] == tl.argmax(scores, 1)[:, None], float("-inf"), scores)
        best = tl.max(scores, 1)
        if BEST > 1:
            best += tl.max(rest, 1)
        sums = tl.where((groups == group)[None, :], best[:, None], sums)
    keys = keys_of(sums, (groups < GROUPS)[None, :])
    is_kept = tl.full(preferred.shape, 0, tl.int1)
    for _ in range(TOP_GROUPS):
        best, keys = pop_largest(keys, groups)
        is_kept = is_kept | (group_of[None, :] == best[:, None])
    return tl.where(is_kept, preferred, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens", "steps"])
def route_kernel(
    ids, weights, counts, logits, correction, num_tokens, steps,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_WIDTH: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr,
    NORMALIZED: tl.constexpr, EPSILON: tl.constexpr, MIN_TOTAL: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """ids [T, k] int32 and weights [T, k] from logits [T, E]; counts [blocks, E]: how many of a
    block's tokens chose each expert. Grid: [blocks] of steps * ROWS tokens.

    correction [E] float32, if CORRECTED. WIDTH, CHOICES, GROUP_WIDTH: E, k and the number of groups
    rounded up to powers of two.
    """
    experts, choices = tl.arange(0, WIDTH), tl.arange(0, CHOICES)
    real = (experts < EXPERTS)[None, :]
    counted = tl.full([WIDTH], 0, tl.int32)
    for step in range(steps):
        tokens = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        valid = (tokens < num_tokens)[:, None]
        row = tokens.to(tl.int64)[:, None]
        x = tl.load(logits + row * EXPERTS + experts[None, :], mask=valid & real, other=0.0)
        x = tl.where(real, x.to(tl.float32), float("-inf"))
        scores = x
        if SIGMOID:
            scores = 1 / (1 + tl.exp(-x))
        else:
            scores = tl.exp(x - tl.max(x, 1)[:, None])
            scores = scores / tl.sum(scores, 1)[:, None]
        preferred = scores
        if CORRECTED:
            preferred += tl.load(correction + experts, mask=experts < EXPERTS, other=0.0)[None, :]
        if GROUPS > 1:
            preferred = mask_groups(
                preferred, experts, ROWS, EXPERTS // GROUPS, GROUPS, GROUP_WIDTH, TOP_GROUPS, BEST
            )
        keys = keys_of(preferred, real)
        chosen = tl.full([ROWS, CHOICES], 0, tl.int32)
        picked = tl.full([ROWS, CHOICES], 0, tl.float32)
        for choice in range(TOP_K):
            best, keys = pop_largest(keys, experts)
            score = tl.sum(tl.where(experts[None, :] == best[:, None], scores, 0.0), 1)
            is_choice = (choices == choice)[None, :]
            chosen = tl.where(is_choice, best[:, None], chosen)
            picked = tl.where(is_choice, score[:, None], picked)
        if NORMALIZED:
            total = tl.maximum(tl.sum(picked, 1)[:, None], MIN_TOTAL)
            picked = picked / (total + EPSILON)
        mask = valid & (choices < TOP_K)[None, :]
        cells = row * TOP_K + choices[None, :]
        tl.store(ids + cells, chosen, mask=mask)
        tl.store(weights + cells, (picked * FACTOR).to(weights.dtype.element_ty), mask=mask)
        counted += tl.sum((valid & real & (keys == LOWEST)).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + experts, counted, mask=experts < EXPERTS)


@triton.jit(do_not_specialize=["num_tokens", "steps", "blocks"])
def align_kernel(
    order, starts, tiles, ids, counts, num_tokens, steps, blocks,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """order [T * k]: token * k + choice, sorted by expert and in ascending order per expert; starts
    [E + 1]: where each expert's entries begin; tiles [E]: index of its first tile, with tiles of M
    rows. Grid, ids and counts: as in `route_kernel`."""
    block, experts = tl.program_id(0), tl.arange(0, WIDTH)
    real = experts < EXPERTS
    total, before = tl.full([WIDTH], 0, tl.int32), tl.full([WIDTH], 0, tl.int32)
    for first in range(0, blocks, 16):
        other_blocks = first + tl.arange(0, 16)[:, None]
        cells = counts + other_blocks * EXPERTS + experts[None, :]
        part = tl.load(cells, mask=(other_blocks < blocks) & real[None, :], other=0)
        total += tl.sum(part, 0)
        before += tl.sum(tl.where(other_blocks < block, part, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        needed = (total + M - 1) // M
        tl.store(starts + experts, begin, mask=real)
        tl.store(starts + EXPERTS, num_tokens * TOP_K)
        tl.store(tiles + experts, tl.cumsum(needed, 0) - needed, mask=real)
    begin += before
    for step in range(steps):
        tokens = (block * steps + step) * ROWS + tl.arange(0, ROWS)
        valid = tokens < num_tokens
        chosen_counts = tl.full([ROWS, WIDTH], 0, tl.int32)
        for choice in range(TOP_K):
            chosen = tl.load(ids + tokens * TOP_K + choice, mask=valid, other=-1)
            chosen_counts += (experts[None, :] == chosen[:, None]).to(tl.int32)
        positions = begin[None, :] + tl.cumsum(chosen_counts, 0) - chosen_counts
        for choice in range(TOP_K):
            chosen = tl.load(ids + tokens * TOP_K + choice, mask=valid, other=-1)
            cells = tl.sum(tl.where(experts[None, :] == chosen[:, None], positions, 0), 1)
            tl.store(order + cells, tokens * TOP_K + choice, mask=valid)
        begin += tl.sum(chosen_counts, 0)
