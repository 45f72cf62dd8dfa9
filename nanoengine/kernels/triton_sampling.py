"""The Triton kernel that samples a token from a line of logits: greedily, or randomly from all or
from the likeliest tokens.

Called by `runner/sampling/triton_sampling.py` alone; `runner/sampling/draw.py` has the same steps
in plain torch. One program samples one line in as many passes as it needs, so nothing waits for the
host and only the token is written:

    greedy      one pass: the best logit and its token
    drawn       two passes, and a part of one: the sum of weights per tile, then the tile that
                contains the target
    filtered    two passes, or three without a top_k of at most `top_n`: the candidates,
                and the total weight. Usually the candidates include all tokens that the filters
                keep; else two or three binary searches over counts or weights, with one pass per
                step

A filter keeps a prefix of the tokens in order of likelihood. Floats as integers keep their order
(see `to_keys`), so a binary search over integers finds the end of a prefix; a pass computes how
many tokens, or what weight, are above the middle. Bits that are zero in all 16-bit logits are
shifted out, and no search covers keys whose tokens have no weight.

The candidates are the `top_n` likeliest tokens and some more, found without a search over
the line: each of `block` lanes has kept its best token, and the `top_n` best of these give
a lower bound.

Weights are integers, summed in 64 bits: exact in any order, so neither tile sizes nor other lines
change a token. Tokens differ from torch's only if the last bit of an exponential decides.

`params` determine a line's weights: (the line's largest logit, temperature, min_p).

The kernel has run in Triton's interpreter and been compiled ahead of time, but not on a GPU yet.

Source: FlashInfer also samples with a threshold search instead of a sort; drawing by inverse
transform over integer weights is ours.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0**34)
"""Weight of a line's most likely token, as in `runner/sampling/draw.py`."""

REACH = tl.constexpr(24.0)
"""A logit this many temperatures below the largest has weight 0. exp(-x) * SCALE is less than 1
from x = 34 ln 2 on, and roundings are far smaller than the margin of 24 above that."""


class SamplingConstants(NamedTuple):
    """Compile-time constants of a launch; the kernels' S.

    Attributes:
        line, size: stride of the lines of logits, and their length.
        block, tiles, stages: logits per tile, tiles per line, tiles in flight.
        shift: low bits that are zero in any logit, as float32.
        top_n, capacity: the number of likeliest tokens that a filtered line collects, and
            the maximum with tokens of equal logits.
    """

    line: int
    size: int
    block: int
    tiles: int
    stages: int
    shift: int
    top_n: int
    capacity: int


@triton.jit
def load_tile(row, start, S: tl.constexpr):
    """The logits start ... start + S.block - 1 as float32; -inf past the end."""
    at = start + tl.arange(0, S.block)
    return tl.load(row + at, mask=at < S.size, other=float("-inf")).to(tl.float32)


@triton.jit
def to_keys(x, S: tl.constexpr):
    """Integers in the order of the floats; equal where these are, -0.0 and 0.0 included."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> S.shift


@triton.jit
def from_key(key, S: tl.constexpr):
    """The float with this key."""
    bits = key << S.shift
    if key < 0:
        bits = bits | ((1 << S.shift) - 1)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_weights(x, params):
    """Weights of logits as int64: SCALE for the largest, 0 below min_p; as `draw_weights`."""
    largest, temperature, min_p = params
    relative = tl.exp((x - largest) / temperature)
    relative = tl.where(relative < min_p, 0.0, relative)
    return (relative * SCALE).to(tl.int64)


@triton.jit
def best_token(row, S: tl.constexpr):
    """The largest logit, the first token with it, whether it is valid (no NaN in the line, and the
    largest is finite), and the best logit of each lane with its tile's start, [block]."""
    best = tl.full([S.block], float("-inf"), tl.float32)
    best_at = tl.full([S.block], 0, tl.int32)
    wrong = tl.full([S.block], 0, tl.int32)
    for start in tl.range(0, S.size, S.block, num_stages=S.stages):
        x = load_tile(row, start, S)
        better = x > best
        best = tl.where(better, x, best)
        best_at = tl.where(better, start, best_at)
        wrong = wrong | (x != x).to(tl.int32)
    largest = tl.max(best, 0)
    at = tl.where(best == largest, best_at + tl.arange(0, S.block), S.size)
    valid = (tl.max(wrong, 0) == 0) & (tl.abs(largest) < float("inf"))
    return largest, tl.min(at, 0), valid, best, best_at


@triton.jit
def weightless_key(params, S: tl.constexpr):
    """A key at and below which tokens have no weight; int64.

    Why one below: the difference may be rounded up, even to `largest`.
    """
    largest, temperature, _ = params
    infinity = largest * 0.0 + float("inf")
    key = to_keys(largest - REACH * temperature, S).to(tl.int64) - 1
    return tl.maximum(key, to_keys(-infinity, S).to(tl.int64))


@triton.jit
def next_best(row, best, best_at, S: tl.constexpr):
    """The next likeliest token of each lane after `best`: its logit, and the start of its tile."""
    after = tl.full([S.block], float("-inf"), tl.float32)
    after_at = tl.full([S.block], 0, tl.int32)
    for start in tl.range(0, S.size, S.block, num_stages=S.stages):
        x = load_tile(row, start, S)
        follows = (x < best) | ((x == best) & (start > best_at))
        better = follows & (x > after)
        after = tl.where(better, x, after)
        after_at = tl.where(better, start, after_at)
    return after, after_at


@triton.jit
def collect(row, candidates, best, best_at, min_count, params, low, S: tl.constexpr):
    """Writes the likeliest tokens to `candidates` [2, capacity] int32, in any order: the bits of
    their logits, and their ids. Returns how many.

    They are all tokens down to some logit: at least `min_count`, or all above the key `low`. If
    there are more than `capacity`, due to many equal logits, it stops, and the candidates are
    unusable.
    """
    lowest = low
    high = to_keys(params[0], S).to(tl.int64) + 1
    while high - lowest > 1:
        middle = (lowest + high) >> 1
        reaches = to_keys(best, S) >= middle.to(tl.int32)
        if tl.sum(reaches.to(tl.int32), 0) >= min_count:
            lowest = middle
        else:
            high = middle
    lowest = tl.maximum(lowest, low + 1).to(tl.int32)
    # First the best token of each lane, then the next: few lanes have several that are so likely.
    count = 0
    num_found = 1
    while num_found > 0:
        is_candidate = (to_keys(best, S) >= lowest).to(tl.int32)
        num_found = tl.sum(is_candidate, 0)
        slots = count + tl.cumsum(is_candidate, 0) - 1
        inside = (is_candidate > 0) & (slots < S.capacity)
        tl.store(candidates + slots, best.to(tl.int32, bitcast=True), mask=inside)
        tl.store(candidates + S.capacity + slots, best_at + tl.arange(0, S.block), mask=inside)
        count += num_found
        if count > S.capacity:
            num_found = 0
        if num_found > 0:
            best, best_at = next_best(row, best, best_at, S)
    # Why: from here on threads read what others have written.
    tl.debug_barrier()
    return count


@triton.jit
def load_candidates(candidates, start, count, params, STEP: tl.constexpr, S: tl.constexpr):
    """The candidates start ... start + STEP - 1: logits, ids and weights; -inf past the last."""
    at = start + tl.arange(0, STEP)
    bits = tl.load(candidates + at, mask=at < count, other=0)
    x = tl.where(at < count, bits.to(tl.float32, bitcast=True), float("-inf"))
    ids = tl.load(candidates + S.capacity + at, mask=at < count, other=0)
    return x, ids, token_weights(x, params)


@triton.jit
def draw_candidate(candidates, count, total, top_k, top_p, uniform, params, S: tl.constexpr):
    """A token drawn from those that the filters keep, and whether they keep only candidates.

    `total` is the weight to which top_p refers if no top_k applies.
    """
    STEP: tl.constexpr = 16
    x, ids, weights = load_candidates(candidates, 0, count, params, S.capacity, S)
    # For each candidate, how many are likelier, and their weight.
    ranks = tl.full([S.capacity], 0, tl.int32)
    weight_before = tl.full([S.capacity], 0, tl.int64)
    for start in range(0, count, STEP):
        other_x, other_ids, other_w = load_candidates(candidates, start, count, params, STEP, S)
        likelier = (other_x[None, :] > x[:, None]) | (
            (other_x[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
        )
        ranks += tl.sum(likelier.to(tl.int32), 1)
        weight_before += tl.sum(tl.where(likelier, other_w[None, :], 0), 1)
    weights = tl.where(ranks < top_k, weights, 0)
    weight = tl.sum(weights, 0)
    total = tl.where(top_k < S.size, weight, total)
    needed = weight_needed(top_p, total)
    weights = tl.where(weight_before < needed, weights, 0)
    target = draw_target(uniform, tl.sum(weights, 0))
    drawn = (weight_before <= target) & (target < weight_before + weights)
    return tl.sum(tl.where(drawn, ids, 0), 0), weight >= needed


@triton.jit
def amounts(row, start, key, params, S: tl.constexpr, BY_KEY: tl.constexpr):
    """The amount that each token of a tile adds: BY_KEY 1 if it has this key, else its weight."""
    x = load_tile(row, start, S)
    return (to_keys(x, S) == key).to(tl.int64) if BY_KEY else token_weights(x, params)


@triton.jit
def tile_sums(row, key, params, S: tl.constexpr, BY_KEY: tl.constexpr):
    """The sums of `amounts` of all tiles, [tiles] int64."""
    sums = tl.full([S.tiles], 0, tl.int64)
    for start in tl.range(0, S.size, S.block, num_stages=S.stages):
        parts = amounts(row, start, key, params, S, BY_KEY)
        sums = tl.where(tl.arange(0, S.tiles) == start // S.block, tl.sum(parts, 0), sums)
    return sums


@triton.jit
def token_above(row, sums, target, key, params, S: tl.constexpr, BY_KEY: tl.constexpr):
    """The first token, by id, at which the running sum of `amounts` exceeds the target."""
    passed = tl.cumsum(sums, 0) <= target
    start = tl.sum(passed.to(tl.int32), 0) * S.block
    sum_before = tl.sum(tl.where(passed, sums, 0), 0)
    parts = amounts(row, start, key, params, S, BY_KEY)
    return start + tl.sum((sum_before + tl.cumsum(parts, 0) <= target).to(tl.int32), 0)


@triton.jit
def amount_from(row, key, params, S: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """The count, or the weight, of the tokens whose key is at least this one, which must not be the
    key of -inf."""
    total = tl.full([S.block], 0, tl.int64 if BY_WEIGHT else tl.int32)
    for start in tl.range(0, S.size, S.block, num_stages=S.stages):
        x = load_tile(row, start, S)
        above = to_keys(x, S) >= key
        if BY_WEIGHT:
            total += tl.where(above, token_weights(x, params), 0)
        else:
            total += above.to(tl.int32)
    return tl.sum(total, 0).to(tl.int64)


@triton.jit
def find_key(row, target, low, params, S: tl.constexpr, BY_WEIGHT: tl.constexpr):
    """The largest key down to which the count, or the weight, is at least `target`, and the amount
    above that key. The amount down to `low` must suffice, or the result is `low`.

    Halves the interval alternately by key and by logit. Why: half of all keys belong to logits
    close to 0. Lines usually have few of these, but some may have many.
    """
    above = target * 0
    high = to_keys(params[0], S).to(tl.int64) + 1
    low = low.to(tl.int64)
    by_logit = 0
    while high - low > 1:
        middle = (low + high) >> 1
        if by_logit > 0:
            x = 0.5 * from_key(low.to(tl.int32), S) + 0.5 * from_key(high.to(tl.int32), S)
            middle = tl.minimum(tl.maximum(to_keys(x, S).to(tl.int64), low + 1), high - 1)
        by_logit = 1 - by_logit
        amount = amount_from(row, middle.to(tl.int32), params, S, BY_WEIGHT)
        if amount >= target:
            low = middle
        else:
            high = middle
            above = amount
    return low.to(tl.int32), above


@triton.jit
def draw_target(uniform, total):
    """The unit of the weight that is drawn, 0 ... total - 1."""
    return tl.minimum(tl.floor(uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def weight_needed(top_p, total):
    """Minimum weight of the tokens that top_p keeps; sums are integers, so it is rounded up."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def draw_filtered(row, candidates, best, best_at, top_k, top_p, uniform, params, S: tl.constexpr):
    """A token drawn from those that min_p, top_k and then top_p keep; see `draw_top_k`."""
    low = weightless_key(params, S)
    count = collect(row, candidates, best, best_at, tl.minimum(top_k, S.top_n), params, low, S)
    total = low * 0
    if top_k >= S.size:
        total = tl.sum(tile_sums(row, 0, params, S, False), 0)
    token, is_complete = draw_candidate(
        candidates, tl.minimum(count, S.capacity), total, top_k, top_p, uniform,
        params, S,
    )  # fmt: skip
    is_complete = is_complete & (count <= S.capacity) & ((top_k <= S.top_n) | (top_k >= S.size))
    if is_complete == 0:
        token = search(row, low.to(tl.int32), total, top_k, top_p, uniform, params, S)
    return token


@triton.jit
def search(row, low, kept_weight, top_k, top_p, uniform, params, S: tl.constexpr):
    """The token that `draw_filtered` draws, for any line and any filters.

    Tokens with keys up to `low` have no weight; `kept_weight`: the total weight, if no top_k
    applies.
    """
    if top_k < S.size:
        # Tokens without weight may be among the top_k, but add nothing to the weight.
        low, above = find_key(row, top_k, low, params, S, False)
        each = token_weights(from_key(low, S), params)
        kept_weight = (top_k - above) * each + amount_from(row, low + 1, params, S, True)
    rank = kept_weight * 0
    # First the end of what top_p keeps, if it applies; then the token to draw.
    for drawing in range(tl.where(top_p < 1.0, 0, 1), 2):
        needed = weight_needed(top_p, kept_weight)
        target = tl.where(drawing == 1, draw_target(uniform, kept_weight) + 1, needed)
        low, above = find_key(row, target, low, params, S, True)
        each = token_weights(from_key(low, S), params)
        rank = tl.floor((target - 1 - above).to(tl.float64) / each.to(tl.float64)).to(tl.int64)
        kept_weight = above + (rank + 1) * each
    sums = tile_sums(row, low, params, S, True)
    return token_above(row, sums, rank, low, params, S, True)


@triton.jit(do_not_specialize=["param_stride"])
def sample_kernel(
    ids, valid, candidates, logits, draw_params, param_stride,
    S: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """Samples a token for each line of logits [L, V]: ids [L] int64, and whether it is valid. Grid:
    [L].

    `draw_params` [5, L] float64 are as in `DrawParams`. Without DRAW all lines are greedy, without
    FILTER no line filters. A line without a valid token gets 0. `candidates` [L, 2, capacity] int32
    is for lines that filter.
    """
    line = tl.program_id(0).to(tl.int64)
    row = logits + line * S.line
    largest, token, is_valid, best, best_at = best_token(row, S)
    if DRAW:
        temperature = tl.load(draw_params + line).to(tl.float32)
        if is_valid & (temperature > 0.0):
            top_k = tl.load(draw_params + param_stride + line).to(tl.int64)
            top_p = tl.load(draw_params + 2 * param_stride + line)
            min_p = tl.load(draw_params + 3 * param_stride + line).to(tl.float32)
            uniform = tl.load(draw_params + 4 * param_stride + line)
            filters = False
            if FILTER:
                filters = (top_k < S.size) | (top_p < 1.0) | (min_p > 0.0)
            if filters:
                token = draw_filtered(
                    row, candidates + 2 * S.capacity * line, best, best_at, top_k, top_p, uniform,
                    (largest, temperature, min_p), S,
                )  # fmt: skip
            else:
                params = (largest, temperature, 0.0)
                sums = tile_sums(row, 0, params, S, False)
                target = draw_target(uniform, tl.sum(sums, 0))
                token = token_above(row, sums, target, 0, params, S, False)
    tl.store(ids + line, tl.where(is_valid, token, 0).to(tl.int64))
    tl.store(valid + line, is_valid.to(tl.int8))
