"""The Triton kernel that picks a token from a line of logits: greedy, drawn, or drawn from the
likeliest.

Called by `runner/triton_pick.py` alone; the same steps in plain torch are `runner/pick.py`. One
program has one line and passes over it as often as it must, so nothing waits for the host and
nothing but the token is written:

    greedy      once: the best logit, and which token has it
    drawn       twice, and a part of it: the sum of weights a tile, then the tile where they pass
    filtered    once a bit of a logit, two or three times: where do counts or weights pass?

A filter keeps a prefix of the tokens in order of likelihood. Floats as integers keep their order
(see `to_keys`), so the end of a prefix is found by halving an interval of integers; a pass tells
how many tokens, or what weight, lie above its middle. Bits that are zero in all 16-bit logits are
shifted out.

Weights are whole numbers, summed in 64-bit integers: exact in any order, so neither tile sizes nor
neighbours change a token. From torch's tokens these differ only where the last bit of an
exponential decides.

It has been run in Triton's interpreter and compiled ahead of time; it has not run on a GPU yet.

Source: threshold search in place of a sort is how FlashInfer samples; drawing by inverse transform
over whole-number weights is ours.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0**34)
"""Weight of a line's most likely token, as in `runner/draw.py`."""


@triton.jit
def load_tile(row, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The logits start ... start + BLOCK - 1 as float32; -inf past the end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def to_keys(x, SHIFT: tl.constexpr):
    """Integers in the order of the floats; equal where these are, -0.0 and 0.0 included."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def from_key(key, SHIFT: tl.constexpr):
    """The float that has this key."""
    bits = key << SHIFT
    if key < 0:
        bits = bits | ((1 << SHIFT) - 1)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(x, largest, temperature, min_p):
    """Weights of logits as int64: SCALE for the largest, 0 below min_p; see `draw.draw_weights`."""
    relative = tl.exp((x - largest) / temperature)
    relative = tl.where(relative < min_p, 0.0, relative)
    return (relative * SCALE).to(tl.int64)


@triton.jit
def best_token(row, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The largest logit, the first token that has it, and whether it is a number: no NaN in the
    line, and no infinity on top."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_at = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        x = load_tile(row, start, SIZE, BLOCK)
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, start, best_at)
        wrong = wrong | (x != x).to(tl.int32)
    largest = tl.max(best, 0)
    at = tl.where(best == largest, best_at + tl.arange(0, BLOCK), SIZE)
    valid = (tl.max(wrong, 0) == 0) & (tl.abs(largest) < float("inf"))
    return largest, tl.min(at, 0), valid


@triton.jit
def amounts(
    row, start, key, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """What each token of a tile adds: BY_KEY 1 where it has this key, else its weight."""
    x = load_tile(row, start, SIZE, BLOCK)
    if BY_KEY:
        found = (to_keys(x, SHIFT) == key).to(tl.int64)
    else:
        found = weigh(x, largest, temperature, min_p)
    return found


@triton.jit
def tile_sums(
    row, key, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SHIFT: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """The sums of `amounts` of all tiles, [TILES] int64."""
    sums = tl.zeros([TILES], tl.int64)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        found = amounts(row, start, key, largest, temperature, min_p, SIZE, BLOCK, SHIFT, BY_KEY)
        sums = tl.where(tl.arange(0, TILES) == start // BLOCK, tl.sum(found, 0), sums)
    return sums


@triton.jit
def token_above(
    row, sums, target, key, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """The first token, by id, with which the running sum of `amounts` is above the target."""
    passed = tl.cumsum(sums, 0) <= target
    start = tl.sum(passed.to(tl.int32), 0) * BLOCK
    before = tl.sum(tl.where(passed, sums, 0), 0)
    found = amounts(row, start, key, largest, temperature, min_p, SIZE, BLOCK, SHIFT, BY_KEY)
    return start + tl.sum((before + tl.cumsum(found, 0) <= target).to(tl.int32), 0)


@triton.jit
def amount_from(
    row, key, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHIFT: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The count, or the weight, of the tokens whose key is at least this one, which is not that of
    -inf."""
    total = tl.zeros([BLOCK], tl.int64 if BY_WEIGHT else tl.int32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        x = load_tile(row, start, SIZE, BLOCK)
        above = to_keys(x, SHIFT) >= key
        if BY_WEIGHT:
            total += tl.where(above, weigh(x, largest, temperature, min_p), 0)
        else:
            total += above.to(tl.int32)
    return tl.sum(total, 0).to(tl.int64)


@triton.jit
def find(
    row, wanted, low, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHIFT: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """The likeliest key down to which the count, or the weight, is at least `wanted`, and how much
    of it lies above that key. Down to `low` there must be as much."""
    before = wanted * 0
    high = to_keys(largest, SHIFT).to(tl.int64) + 1
    low = low.to(tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        amount = amount_from(
            row, middle.to(tl.int32), largest, temperature, min_p,
            SIZE, BLOCK, STAGES, SHIFT, BY_WEIGHT,
        )  # fmt: skip
        if amount >= wanted:
            low = middle
        else:
            high = middle
            before = amount
    return low.to(tl.int32), before


@triton.jit
def draw_target(uniform, total):
    """Which unit of the weight is drawn, 0 ... total - 1."""
    return tl.minimum(tl.floor(uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def draw_filtered(
    row, top_k, top_p, uniform, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """A token of those that min_p, top_k and then top_p leave; see `pick.draw_thresholds`."""
    low = to_keys(largest * 0.0 - float("inf"), SHIFT)
    kept = tl.sum(
        tile_sums(
            row, 0, largest, temperature, min_p, SIZE, BLOCK, TILES, STAGES, SHIFT, False
        ), 0,
    )  # fmt: skip
    if top_k < SIZE:
        low, before = find(
            row, top_k, low, largest, temperature, min_p, SIZE, BLOCK, STAGES, SHIFT, False
        )
        each = weigh(from_key(low, SHIFT), largest, temperature, min_p)
        kept = (top_k - before) * each + amount_from(
            row, low + 1, largest, temperature, min_p, SIZE, BLOCK, STAGES, SHIFT, True
        )
    rank = kept * 0
    # First where top_p cuts, if it does; then where the token to draw lies.
    for drawing in range(tl.where(top_p < 1.0, 0, 1), 2):
        # Sums are whole, so to reach `top_p * kept` is to reach the next whole number.
        needed = tl.maximum(tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64), 1)
        wanted = tl.where(drawing == 1, draw_target(uniform, kept) + 1, needed)
        low, before = find(
            row, wanted, low, largest, temperature, min_p, SIZE, BLOCK, STAGES, SHIFT, True
        )
        each = weigh(from_key(low, SHIFT), largest, temperature, min_p)
        rank = tl.floor((wanted - 1 - before).to(tl.float64) / each.to(tl.float64)).to(tl.int64)
        kept = before + (rank + 1) * each
    sums = tile_sums(row, low, largest, temperature, min_p, SIZE, BLOCK, TILES, STAGES, SHIFT, True)
    return token_above(row, sums, rank, low, largest, temperature, min_p, SIZE, BLOCK, SHIFT, True)


@triton.jit(do_not_specialize=["param_stride"])
def pick_kernel(
    ids, valid, logits, draw_params, param_stride,
    LINE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SHIFT: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """A token of each line of logits [L, SIZE]: ids [L] int64, and whether it has one. Grid: [L].

    `draw_params` [5, L] float64 are those of `DrawParams`. Without DRAW all lines are greedy,
    without FILTER none filters. A line without a valid token gets 0.
    """
    line = tl.program_id(0).to(tl.int64)
    row = logits + line * LINE
    largest, token, is_valid = best_token(row, SIZE, BLOCK, STAGES)
    if DRAW:
        temperature = tl.load(draw_params + line).to(tl.float32)
        if is_valid & (temperature > 0.0):
            top_k = tl.load(draw_params + param_stride + line).to(tl.int64)
            top_p = tl.load(draw_params + 2 * param_stride + line)
            min_p = tl.load(draw_params + 3 * param_stride + line).to(tl.float32)
            uniform = tl.load(draw_params + 4 * param_stride + line)
            filters = False
            if FILTER:
                filters = (top_k < SIZE) | (top_p < 1.0) | (min_p > 0.0)
            if filters:
                token = draw_filtered(
                    row, top_k, top_p, uniform, largest, temperature, min_p,
                    SIZE, BLOCK, TILES, STAGES, SHIFT,
                )  # fmt: skip
            else:
                sums = tile_sums(
                    row, 0, largest, temperature, 0.0,
                    SIZE, BLOCK, TILES, STAGES, SHIFT, False,
                )  # fmt: skip
                token = token_above(
                    row, sums, draw_target(uniform, tl.sum(sums, 0)), 0,
                    largest, temperature, 0.0, SIZE, BLOCK, SHIFT, False,
                )  # fmt: skip
    tl.store(ids + line, tl.where(is_valid, token, 0).to(tl.int64))
    tl.store(valid + line, is_valid.to(tl.int8))
