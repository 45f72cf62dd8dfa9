"""The Triton kernel that samples a token from a line of logits: greedy, drawn, or drawn from the
likeliest.

Called by `runner/triton_sampling.py` alone; the same steps in plain torch are
`runner/device_sampling.py`. One program samples one line and passes over it as often as it must, so
nothing waits for the host and nothing but the token is written:

    greedy      once: the best logit, and which token has it
    drawn       twice, and a part of it: the sum of weights a tile, then the tile where they pass
    filtered    twice, or three times without a top_k of at most WIDTH: the candidates, and what all
                weigh. Mostly the filters leave no other; if they do, once for each halving of an
                interval, two or three times: where do counts or weights pass?

A filter keeps a prefix of the tokens in order of likelihood. Floats as integers keep their order
(see `to_keys`), so the end of a prefix is found by halving an interval of integers; a pass tells
how many tokens, or what weight, lie above its middle. Bits that are zero in all 16-bit logits are
shifted out, and no search looks where tokens have no weight.

The candidates are the WIDTH likeliest tokens and some more, found without a search over the line:
each of BLOCK lanes has kept the best of its tokens, so WIDTH tokens reach the WIDTH-th of those.

Weights are whole numbers, summed in 64-bit integers: exact in any order, so neither tile sizes nor
neighbours change a token. From torch's tokens these differ only where the last bit of an
exponential decides.

The kernel has run in Triton's interpreter and been compiled ahead of time, but not on a GPU yet.

Source: threshold search in place of a sort is how FlashInfer samples; drawing by inverse transform
over whole-number weights is ours.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE = tl.constexpr(2.0**34)
"""Weight of a line's most likely token, as in `runner/sampling_ops.py`."""

REACH = tl.constexpr(24.0)
"""So many temperatures below the largest logit a weight is less than 1, so nothing: from 34 ln 2 on
exp(-x) * SCALE is, and roundings are far smaller than what 24 has above that."""


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
    """Weights of logits as int64: SCALE for the largest, 0 below min_p; as `draw_weights`."""
    relative = tl.exp((x - largest) / temperature)
    relative = tl.where(relative < min_p, 0.0, relative)
    return (relative * SCALE).to(tl.int64)


@triton.jit
def best_token(row, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The largest logit, the first token that has it, whether it is a number (no NaN in the line,
    and no infinity on top), and the best of each lane with its tile's start, [BLOCK]."""
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
    return largest, tl.min(at, 0), valid, best, best_at


@triton.jit
def weightless_key(largest, temperature, SHIFT: tl.constexpr):
    """A key whose tokens have no weight, nor have those of lower ones; int64.

    Why one below: the difference may be rounded up, even to `largest`.
    """
    infinity = largest * 0.0 + float("inf")
    key = to_keys(largest - REACH * temperature, SHIFT).to(tl.int64) - 1
    return tl.maximum(key, to_keys(-infinity, SHIFT).to(tl.int64))


@triton.jit
def next_best(
    row, best, best_at, SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """The likeliest token of each lane after this one: its logit, and the start of its tile."""
    after = tl.full([BLOCK], float("-inf"), tl.float32)
    after_at = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        x = load_tile(row, start, SIZE, BLOCK)
        follows = (x < best) | ((x == best) & (start > best_at))
        better = follows & (x > after)
        after = tl.where(better, x, after)
        after_at = tl.where(better, start, after_at)
    return after, after_at


@triton.jit
def collect(
    row, candidates, best, best_at, wanted, largest, low,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, SHIFT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """Writes the likeliest tokens to `candidates` [2, ROOM] int32, in any order: the bits of their
    logits, and their ids. Returns how many.

    They are all tokens down to some logit: at least `wanted`, or all above the key `low`. More than
    ROOM, among many equals, end it: what is written then is of no use.
    """
    least = low
    high = to_keys(largest, SHIFT).to(tl.int64) + 1
    while high - least > 1:
        middle = (least + high) >> 1
        reach = to_keys(best, SHIFT) >= middle.to(tl.int32)
        if tl.sum(reach.to(tl.int32), 0) >= wanted:
            least = middle
        else:
            high = middle
    least = tl.maximum(least, low + 1).to(tl.int32)
    # First the best of each lane, then the next: few lanes have more than one so likely.
    count = 0
    more = 1
    while more > 0:
        found = (to_keys(best, SHIFT) >= least).to(tl.int32)
        more = tl.sum(found, 0)
        places = count + tl.cumsum(found, 0) - 1
        inside = (found > 0) & (places < ROOM)
        tl.store(candidates + places, best.to(tl.int32, bitcast=True), mask=inside)
        tl.store(candidates + ROOM + places, best_at + tl.arange(0, BLOCK), mask=inside)
        count += more
        if count > ROOM:
            more = 0
        if more > 0:
            best, best_at = next_best(row, best, best_at, SIZE, BLOCK, STAGES)
    # Why: threads read from here on what others have written.
    tl.debug_barrier()
    return count


@triton.jit
def load_candidates(
    candidates, start, count, largest, temperature, min_p,
    STEP: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The candidates start ... start + STEP - 1: logits, ids and weights; -inf past the last."""
    at = start + tl.arange(0, STEP)
    bits = tl.load(candidates + at, mask=at < count, other=0)
    x = tl.where(at < count, bits.to(tl.float32, bitcast=True), float("-inf"))
    ids = tl.load(candidates + ROOM + at, mask=at < count, other=0)
    return x, ids, weigh(x, largest, temperature, min_p)


@triton.jit
def draw_candidate(
    candidates, count, total, top_k, top_p, uniform, largest, temperature, min_p,
    SIZE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A token of those that the filters leave, and whether they leave candidates alone.

    `total` is the weight that top_p is a share of, if no top_k cuts.
    """
    STEP: tl.constexpr = 16
    x, ids, weights = load_candidates(
        candidates, 0, count, largest, temperature, min_p, ROOM, ROOM
    )  # fmt: skip
    # How many are likelier, and what these weigh.
    ranks = tl.zeros([ROOM], tl.int32)
    before = tl.zeros([ROOM], tl.int64)
    for start in range(0, count, STEP):
        others, other_ids, other_weights = load_candidates(
            candidates, start, count, largest, temperature, min_p, STEP, ROOM
        )  # fmt: skip
        likelier = (others[None, :] > x[:, None]) | (
            (others[None, :] == x[:, None]) & (other_ids[None, :] < ids[:, None])
        )
        ranks += tl.sum(likelier.to(tl.int32), 1)
        before += tl.sum(tl.where(likelier, other_weights[None, :], 0), 1)
    weights = tl.where(ranks < top_k, weights, 0)
    weight = tl.sum(weights, 0)
    total = tl.where(top_k < SIZE, weight, total)
    needed = weight_needed(top_p, total)
    weights = tl.where(before < needed, weights, 0)
    target = draw_target(uniform, tl.sum(weights, 0))
    drawn = (before <= target) & (target < before + weights)
    return tl.sum(tl.where(drawn, ids, 0), 0), weight >= needed


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
    of it lies above that key. Down to `low` there is as much, or it is `low`.

    Halves the interval by key and by logit in turn. Why: half of all keys are those of logits next
    to 0, and no line has many of these; but it may.
    """
    before = wanted * 0
    high = to_keys(largest, SHIFT).to(tl.int64) + 1
    low = low.to(tl.int64)
    by_logit = 0
    while high - low > 1:
        middle = (low + high) >> 1
        if by_logit > 0:
            x = 0.5 * from_key(low.to(tl.int32), SHIFT) + 0.5 * from_key(high.to(tl.int32), SHIFT)
            middle = tl.minimum(tl.maximum(to_keys(x, SHIFT).to(tl.int64), low + 1), high - 1)
        by_logit = 1 - by_logit
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
def weight_needed(top_p, total):
    """What tokens that top_p leaves weigh at least; sums are whole, so it is the next whole one."""
    return tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def draw_filtered(
    row, candidates, best, best_at, top_k, top_p, uniform, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A token of those that min_p, top_k and then top_p leave; see `draw_all_sorted`."""
    low = weightless_key(largest, temperature, SHIFT)
    count = collect(
        row, candidates, best, best_at, tl.minimum(top_k, WIDTH), largest, low,
        SIZE, BLOCK, STAGES, SHIFT, ROOM,
    )  # fmt: skip
    total = low * 0
    if top_k >= SIZE:
        total = tl.sum(
            tile_sums(
                row, 0, largest, temperature, min_p, SIZE, BLOCK, TILES, STAGES, SHIFT, False
            ), 0,
        )  # fmt: skip
    token, found = draw_candidate(
        candidates, tl.minimum(count, ROOM), total, top_k, top_p, uniform,
        largest, temperature, min_p, SIZE, ROOM,
    )  # fmt: skip
    found = found & (count <= ROOM) & ((top_k <= WIDTH) | (top_k >= SIZE))
    if found == 0:
        token = search(
            row, low.to(tl.int32), total, top_k, top_p, uniform, largest, temperature, min_p,
            SIZE, BLOCK, TILES, STAGES, SHIFT,
        )  # fmt: skip
    return token


@triton.jit
def search(
    row, low, kept, top_k, top_p, uniform, largest, temperature, min_p,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The token that `draw_filtered` draws, whatever the line and the filters.

    Tokens of the key `low` and below have no weight; `kept` is that of all, if no top_k cuts.
    """
    if top_k < SIZE:
        # What tokens without weight it would also count adds nothing to what is kept.
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
        needed = weight_needed(top_p, kept)
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
def sample_kernel(
    ids, valid, candidates, logits, draw_params, param_stride,
    LINE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
    DRAW: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """A token of each line of logits [L, SIZE]: ids [L] int64, and whether it has one. Grid: [L].

    `draw_params` [5, L] float64 are those of `DrawParams`. Without DRAW all lines are greedy,
    without FILTER none filters. A line without a valid token gets 0. `candidates`
    [L, 2, ROOM] int32 is for lines that filter.
    """
    line = tl.program_id(0).to(tl.int64)
    row = logits + line * LINE
    largest, token, is_valid, best, best_at = best_token(row, SIZE, BLOCK, STAGES)
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
                    row, candidates + 2 * ROOM * line, best, best_at, top_k, top_p, uniform,
                    largest, temperature, min_p,
                    SIZE, BLOCK, TILES, STAGES, SHIFT, WIDTH, ROOM,
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
