"""Samples one token from each line of logits, in torch: greedy, or drawn with or without filters.

Called by the Sampler and the DecodeStep. A sampled token depends only on its own line, bit for bit,
whatever the other lines and the number of lines and threads are. Three rules ensure this:

    random numbers   a hash of (seed, position): no generator with shared state
    exact sums       probabilities as integers, which sum to the same value in any order
    total order      more likely tokens first; equally likely ones by token id

On a CPU the Sampler groups lines by their filters, and `draw_top_p` reads values to stop early. On
a GPU the host would have to wait for a value. So `sample_on_device` treats all lines alike, and a
captured CUDA graph is valid for every batch of its `SamplingKind`:

    GREEDY      all lines take the most likely token      argmax
    DRAWN       no line filters                           draw from all tokens
    FILTERED    some line filters                         sort, then draw from what the filters keep

On CUDA one kernel does all three (`triton_sampling.py`). This file is its reference implementation,
and handles float64. The last bit of an exponential may differ between the two, which rarely changes
a token: about once in millions of draws if few tokens are likely, and once in ten thousand if all
are. On one device a seed always gives the same tokens.

Legend: L lines of logits, V vocabulary (a multiple of BLOCK where lines are drawn: see
`pad_to_blocks`), K candidates.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from nanoengine.runner.sampling.greedy import MAX_VOCAB_SIZE
from nanoengine.runner.transfers import ship

CPU_CHUNK = 2**19
"""Logits processed at a time on a CPU: few enough that all passes over them stay in the cache."""

CHUNK = 2**23
"""The same on a GPU: large enough to amortise launches; a float64 copy takes 64 MiB."""

BLOCK = 64
"""Tokens whose sum or maximum is computed before a search, which then reads V / BLOCK values."""

FIRST_WIDTH = 64
"""Number of candidates tried first for top_p or min_p: enough if the model is fairly sure."""

SCALE = 2.0**34
"""Integer weight of a line's most likely token."""

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2**64 divided by the golden ratio, odd, as int64: its multiples spread evenly over 64 bits."""

Bits = TypeVar("Bits", NDArray[np.int64], torch.Tensor)
"""int64, as an array or as a tensor on any device. Sums and products wrap as for unsigned integers;
only right shifts must mask the sign."""


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), [L]; the seeds as `mix` returns them.

    >>> uniforms(mix(np.array([7, 8])), np.array([0, 0])).round(4).tolist()
    [0.5243, 0.9262]
    """
    return random_bits(seeds, positions) * 2.0**-53


def random_bits(seeds: Bits, positions: Bits) -> Bits:
    """53 random bits for each (seed, position), int64 [L].

    Counter-based: nothing is kept between calls, so a token can be drawn again after preemption.
    The seed is mixed before the position is added. Otherwise seeds that differ by a multiple of
    GOLDEN would share a stream.

    Source: the SplitMix64 output function of Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014; keying by counter as in Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3".
    """
    return _shift(mix(seeds + (positions + 1) * GOLDEN), 11)


def mix(z: Bits) -> Bits:
    """The output function of SplitMix64."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Bits, count: int) -> Bits:
    return (z >> count) & (2 ** (64 - count) - 1)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The sampling parameters of L lines.

    Attributes:
        packed: temperature, top_k (V if off), top_p (1), min_p (0) and the random number per line,
            [5, L] float64: one copy to the device.
        uses_min_p, max_top_k: bounds over the lines, known on the host.
    """

    packed: torch.Tensor
    uses_min_p: bool = True
    max_top_k: int = MAX_VOCAB_SIZE

    @staticmethod
    def pack(columns: np.ndarray, uniform: np.ndarray, device: torch.device) -> DrawParams:
        """Packs `Sampler.params` [4, L] and random numbers [L]."""
        (packed,) = ship(device, np.vstack((columns, uniform)))
        return DrawParams(packed, bool(columns[3].any()), int(columns[1].max()))

    def __getitem__(self, lines: slice | torch.Tensor) -> DrawParams:
        return DrawParams(self.packed[:, lines], self.uses_min_p, self.max_top_k)

    def column(self, name: str) -> torch.Tensor:
        """One parameter as [L, 1], float64, ready to broadcast over the vocabulary."""
        return self.packed[
            ("temperature", "top_k", "top_p", "min_p", "uniform").index(name), :, None
        ]


def line_chunks(logits: torch.Tensor, count: int | None = None) -> Iterator[slice]:
    """Slices of the lines of logits [L, V], or of `count` lines, that are processed one at a
    time."""
    elements = CPU_CHUNK if logits.device.type == "cpu" else CHUNK
    size = max(1, elements // logits.shape[-1])
    count = len(logits) if count is None else count
    return (slice(start, start + size) for start in range(0, count, size))


def upcast(logits: torch.Tensor) -> torch.Tensor:
    """Converts 16-bit logits to float32, which their differences and quotients need."""
    return logits if logits.dtype == torch.float64 else logits.float()


def pad_to_blocks(logits: torch.Tensor) -> torch.Tensor:
    """Appends tokens that can't be drawn until V is a multiple of BLOCK; no copy if it is."""
    missing = -logits.shape[-1] % BLOCK
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each line, lowest id among equals: ids [L] int64 and logits [L].

    Block maxima first: they vectorise, while an argmax over V does not. A NaN anywhere in a line
    wins and is returned as its logit, so the caller sees it without another pass.

    Perf: 0.05 ms per line at V = 151,936, against 0.16 for torch.argmax (CPU time, one busy Zen 3
    core).
    """
    blocks = pad_to_blocks(logits).unflatten(-1, (-1, BLOCK))  # [L, V / BLOCK, BLOCK]
    block = blocks.amax(-1).argmax(-1)
    best = blocks[torch.arange(len(block), device=block.device), block]  # [L, BLOCK]
    inside = best.argmax(-1)
    return block * BLOCK + inside, best.gather(-1, inside[:, None])[:, 0]


def top_candidates(values: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest values of each line, sorted; lower id first among equals.

    Returns values and ids [L, width], the same as the start of a stable descending sort. Each of
    the `width` best tokens is in one of the `width` best blocks, so only those are searched. Value
    and id are packed into one integer, which orders equal values.

    Perf: 0.2 ms per line for 50 of 151,936, against 0.27 for torch.topk, which may swap equal
        values,
    and 17 for the sort (CPU time, one busy Zen 3 core).
    """
    if values.dtype == torch.float64:  # only log-probabilities of float64 models, in tests
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return ordered.values[:, :width], ordered.indices[:, :width]
    ids = torch.arange(values.shape[-1], device=values.device)
    candidates = values
    if width * BLOCK < values.shape[-1]:
        blocks = pad_to_blocks(values).unflatten(-1, (-1, BLOCK))
        block_ids = torch.arange(blocks.shape[1], device=values.device)
        block = _largest(blocks.amax(-1), block_ids, width)[:, :, None]  # [L, width, 1]
        candidates = blocks.gather(1, block.expand(-1, -1, BLOCK)).flatten(1)  # [L, width * BLOCK]
        ids = (block * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    ids = _largest(candidates, ids, width)
    return values.gather(-1, ids), ids


def _largest(values: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """The ids of the `width` largest float32 values, sorted; equal values by lower id."""
    # Why: read as integers, floats of one sign keep their order; inverting the other bits corrects
    # the order of negative ones. Adding 0.0 makes -0.0 equal to 0.0. The low 32 bits hold the
    # negated id, so that a lower id compares as larger.
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (bits.long() << 32) - ids
    return -_largest_keys(keys, width) & 0xFFFFFFFF


def _largest_keys(keys: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest of each line's integers, descending. All are distinct, so the result is
    unique."""
    if keys.device.type != "cpu":
        return keys.topk(width).values
    # Perf: 0.19 ms against 0.50 for 512 of 151,936, and 1.9 ms against 10 for all of them, as
    # numpy's integer partition and sort are vectorised (numpy 2.4, torch 2.13, one Zen 3 core).
    unordered = keys.numpy()
    if width < keys.shape[-1]:
        unordered = np.partition(unordered, -width)[:, -width:]
    return torch.from_numpy(np.sort(unordered)[:, ::-1].copy())


def draw(logits: torch.Tensor, largest: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draws from all tokens; ids [L].

    Inverse transform in id order: the token at which the running sum of weights exceeds the target.
    Sums of blocks find the block, and sums inside it find the token.

    Args:
        logits: [L, V] float32 or float64; -inf for tokens that can't be drawn. Not changed.
        largest: [L, 1], the largest logit of each line.
    """
    weights = draw_weights(logits, largest, params).unflatten(-1, (-1, BLOCK))
    sums = weights.double().sum(-1)  # [L, V / BLOCK]
    cumulative = sums.cumsum(-1)
    target = draw_target(cumulative[:, -1:], params)
    block = _first_above(cumulative, target)
    before = (cumulative - sums).gather(-1, block)
    inside = weights.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
    token = _first_above(before + inside.cumsum(-1), target)
    return (block * BLOCK + token)[:, 0]


def draw_top_k(logits: torch.Tensor, largest: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draws from the tokens that min_p, top_k and then top_p keep; ids [L].

    top_p is a share of the probability that remains after min_p and top_k. Arguments as for `draw`.
    If `max_top_k` is not known, all tokens are sorted, and no value is read on the host.
    """
    width = min(params.max_top_k, logits.shape[-1])
    return _draw_candidates(top_candidates(logits, width), largest, params)[0]


def draw_top_p(logits: torch.Tensor, largest: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Draws from the tokens that min_p and then top_p keep, for lines without top_k; ids [L].
    Either all lines have a min_p, or none has. Arguments as for `draw`.

    The number of tokens that the filters keep is not known beforehand. A few candidates are tried
    first. Lines that need more are tried again with eight times as many, up to all tokens.
    """
    total = None
    if not params.uses_min_p:
        blocks = draw_weights(logits, largest, params).unflatten(-1, (-1, BLOCK))
        total = blocks.double().sum((-1, -2))[:, None]
    width, vocab_size = min(FIRST_WIDTH, logits.shape[-1]), logits.shape[-1]
    ids, covered = _draw_candidates(top_candidates(logits, width), largest, params, total)
    while width < vocab_size and not covered.all():
        width = min(8 * width, vocab_size)
        open_lines = (~covered).nonzero()[:, 0]
        ids[open_lines], covered[open_lines] = _draw_candidates(
            top_candidates(logits[open_lines], width),
            largest[open_lines],
            params[open_lines],
            None if total is None else total[open_lines],
        )
    return ids


def _draw_candidates(
    candidates: tuple[torch.Tensor, torch.Tensor],
    largest: torch.Tensor,
    params: DrawParams,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from `candidates`, the result of `top_candidates`. Returns ids [L], and whether the
    candidates include all tokens that the filters keep, [L] bool.

    `total` [L, 1] is the weight of all tokens, to which top_p refers. None uses the sum of the
    candidates, which is the same if min_p or top_k has removed the last of them.
    """
    values, ids = candidates
    # [L, K], descending along the line: every filter keeps a prefix.
    weights = draw_weights(values, largest, params).double()
    weights *= torch.arange(weights.shape[-1], device=ids.device) < params.column("top_k")
    cumulative = weights.cumsum(-1)
    needed = params.column("top_p") * (cumulative[:, -1:] if total is None else total)
    # Why the negations: a line of NaN must be covered; otherwise it would be sorted for nothing.
    covered = ~(weights[:, -1] > 0) if total is None else ~(cumulative[:, -1] < needed[:, 0])
    weights *= cumulative - weights < needed
    kept = weights.cumsum(-1)
    token = _first_above(kept, draw_target(kept[:, -1:], params))
    return ids.gather(-1, token)[:, 0], covered


def draw_weights(logits: torch.Tensor, largest: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Weights [L, V] float32: integers, SCALE for the most likely token; 0 below min_p.

    Integers below 2**53 are summed exactly in float64, so their sums are the same in any order. A
    token 2**34 times less likely than the best one gets weight 0 and is never drawn.
    """
    relative = (logits - largest).float().div_(params.column("temperature").float()).exp_()
    if params.uses_min_p:
        relative.masked_fill_(relative < params.column("min_p").float(), 0.0)
    return torch.div(relative, 1 / SCALE, rounding_mode="trunc", out=relative)


def draw_target(total: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """An integer in [0, total - 1]: the unit of weight that is drawn. [L, 1] float64."""
    # Why: if uniform is almost 1, uniform * total may round to total itself.
    return torch.minimum((params.column("uniform") * total).floor(), total - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [L, 1] of the first running sum above the target. The sum rises there, so the token has
    a weight."""
    # Why the clamp: a line of NaN finds nothing; its index must stay valid until it is discarded.
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)


Drawer = Callable[[torch.Tensor, torch.Tensor, DrawParams], torch.Tensor]
"""`draw` or another function with its arguments."""


def sample_lines(
    logits: torch.Tensor,
    params: DrawParams | None,
    drawer: Drawer | None,
    lines: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per line: ids [L] int64, and whether each is valid, [L] bool.

    Args:
        logits: [L, V], any float dtype; may have more lines if `lines` are given.
        params: temperature 0 for greedy lines. None if all are greedy.
        drawer: draws the other lines. None if all are greedy.
        lines: [L] int64, the lines to sample; None: all. Why not selected before: on a CPU a copy
            of a few lines at a time stays in the cache.
    """
    if params is None or drawer is None:
        if lines is not None and 2 * len(lines) < len(logits):
            logits, lines = logits[lines], None
        # Perf: 47 of 48 lines of 151,936 float32 take 2.2 ms, and 6.6 with a copy of them (CPU
        # time, one busy Zen 4 core).
        ids, largest = argmax(logits)
        if lines is not None:
            ids, largest = ids[lines], largest[lines]
    else:
        chunks = []
        for part in line_chunks(logits, None if lines is None else len(lines)):
            chunk = logits[part if lines is None else lines[part]]
            chunks.append(_draw_chunk(chunk, params[part], drawer))
        ids, largest = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    valid = largest.isfinite()
    return torch.where(valid, ids, 0), valid


def _draw_chunk(
    logits: torch.Tensor, params: DrawParams, drawer: Drawer
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = pad_to_blocks(upcast(logits))
    ids, largest = argmax(wide)
    # Greedy lines divide by a temperature of 0; their draws are discarded.
    drawn = drawer(wide, largest[:, None], params)
    return torch.where(params.column("temperature")[:, 0] == 0, ids, drawn), largest


class SamplingKind(enum.Enum):
    """How a device samples the lines of a batch; see the module's docstring."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    FILTERED = "filtered"


def sample_on_device(
    logits: torch.Tensor, params: DrawParams, kind: SamplingKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples lines of one kind, as `sample_lines`, without reading values on the host. A top_k
    that is off must be V."""
    if has_kernel(logits.device, logits.dtype):
        from nanoengine.runner.sampling import triton_sampling

        draws, filters = kind is not SamplingKind.GREEDY, kind is SamplingKind.FILTERED
        return triton_sampling.sample_lines(logits, params.packed, draws, filters)
    ids, valid = sample_lines(logits, params, None if kind is SamplingKind.GREEDY else draw)
    if kind is SamplingKind.FILTERED:
        filters = (params.column("top_k") < logits.shape[-1]) | (params.column("top_p") < 1)
        filters = filters | (params.column("min_p") > 0)
        filtered, _ = sample_lines(logits, params, draw_top_k)
        ids = torch.where(filters[:, 0], filtered, ids)
    return ids, valid


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton kernel samples these lines."""
    return device.type == "cuda" and dtype != torch.float64
