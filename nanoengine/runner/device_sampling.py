"""Samples tokens without asking the host: what a GPU runs, inside a CUDA graph or outside.

    kind        for batches in which                      how
    GREEDY      all lines take the most likely token      argmax
    DRAWN       no line filters                           draw from all tokens
    FILTERED    some line filters                         threshold search

The host knows the kind from the sampling parameters. All else has fixed shapes and no branch on a
value, so nothing waits, and a captured graph fits every batch of its kind. The tokens are those
that the CPU samples with `sampling_ops.py`, where it may look at values and take shortcuts.

On CUDA one kernel does all kinds (`triton_sampling.py`). This file is its readable form, and serves
float64. An exponential may differ between the two in its last bit, and now and then that changes a
token: by estimate once in millions of draws where few tokens are likely, once in ten thousand where
all are. On one device a seed's tokens are always the same.

Threshold search (`Thresholds`): a filter keeps a prefix of the tokens in order of likelihood, and
the token to draw lies where the running sum of weights, in that order, passes a number. Neither
needs the order itself, only the sums up to a bin of logits, so a histogram replaces the sort:

    bits of a logit  [ first 16 | last 16 ]    65,536 bins for the first half; in the bin where the
                                               sum passes, 65,536 for the last; then equal logits

Weights are whole numbers, so atomics may add them in any order. Called by the sampler and by the
decode step. Legend: L lines of logits, V vocabulary.

Source: radix selection; Alabi et al., "Fast k-selection algorithms for graphics processing units".
"""

from __future__ import annotations

import enum

import numpy as np
import torch

from nanoengine.runner.greedy import MAX_VOCAB_SIZE
from nanoengine.runner.sampling_ops import (
    CHUNK,
    GOLDEN,
    DrawParams,
    argmax,
    draw,
    draw_all_sorted,
    draw_target,
    draw_weights,
    mix,
    pad_to_blocks,
    widen,
)

BINS = 2**16
COUNT, WEIGHT = 0, 1


class SamplingKind(enum.Enum):
    """How the lines of a batch are sampled; see the module."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    FILTERED = "filtered"


def sample_on_device(
    logits: torch.Tensor, params: DrawParams, kind: SamplingKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a token a line: ids [L] int64, and whether the line has a valid one, [L] bool.

    Args:
        logits: [L, V], any float dtype.
        params: temperature 0 for greedy lines, top_k V where it is off.
    """
    if has_kernel(logits.device, logits.dtype):
        from nanoengine.runner.triton_sampling import sample_lines

        draws, filters = kind is not SamplingKind.GREEDY, kind is SamplingKind.FILTERED
        return sample_lines(logits, params.packed, draws, filters)
    size = max(1, CHUNK // (4 if kind is SamplingKind.FILTERED else 1) // logits.shape[-1])
    chunks = [
        _sample_chunk(logits[start : start + size], params[start : start + size], kind)
        for start in range(0, len(logits), size)
    ]
    ids, largest = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    valid = largest.isfinite()
    return torch.where(valid, ids, 0), valid


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the Triton kernel samples these lines."""
    return device.type == "cuda" and dtype != torch.float64


def _sample_chunk(
    logits: torch.Tensor, params: DrawParams, kind: SamplingKind
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, best = argmax(logits)
    if kind is SamplingKind.GREEDY:
        return ids, best
    wide = pad_to_blocks(widen(logits))
    largest = best[:, None].to(wide.dtype)
    # Greedy lines divide by a temperature of 0, so what they draw is thrown away below.
    drawn = draw(wide, largest, params)
    if kind is SamplingKind.FILTERED:
        filters = (params.column("top_k") < logits.shape[-1]) | (params.column("top_p") < 1)
        filters = filters | (params.column("min_p") > 0)
        drawn = torch.where(filters[:, 0], draw_thresholds(wide, largest, params), drawn)
    return torch.where(params.column("temperature")[:, 0] == 0, ids, drawn), best


def draw_thresholds(
    logits: torch.Tensor, largest: torch.Tensor, params: DrawParams
) -> torch.Tensor:
    """Draws from the tokens that min_p, top_k and then top_p leave; ids [L].

    Arguments as for `draw`. `draw_all_sorted`, which sorts, is the readable form.
    """
    if logits.dtype == torch.float64:  # Why: only in tests; two more digits aren't worth having
        return draw_all_sorted(logits, largest, params)
    found = Thresholds(logits, draw_weights(logits, largest, params).double())
    total = found.sum_until(found.find(params.column("top_k"), by=COUNT))
    # Sums are whole, so to reach `top_p * total` is to reach the next whole number.
    needed = (params.column("top_p") * total).ceil().clamp(min=1)
    kept = found.sum_until(found.find(needed, by=WEIGHT))
    return found.token(found.find(draw_target(kept, params) + 1, by=WEIGHT))


class Place:
    """Where, in order of likelihood, a running amount reaches what was wanted.

    Attributes:
        bins: the bin of each digit, [L, 1] int64.
        before: count and weight of the likelier tokens of other logits, [2, L, 1] float64.
        weight: of each of the tokens that share this logit, [L, 1].
        rank: which of them it is, by id, from 0, [L, 1].
    """

    __slots__ = ("before", "bins", "rank", "weight")

    def __init__(
        self,
        bins: list[torch.Tensor],
        before: torch.Tensor,
        held: torch.Tensor,
        wanted: torch.Tensor,
        by: int,
    ) -> None:
        self.bins, self.before = bins, before
        self.weight = held[WEIGHT] / held[COUNT]  # exact: equal logits have equal weights
        each = torch.ones_like(self.weight) if by == COUNT else self.weight
        self.rank = ((wanted - 1 - before[by]) / each).floor()


class Thresholds:
    """Searches in float32 logits [L, V] with whole-number weights [L, V] float64."""

    def __init__(self, logits: torch.Tensor, weights: torch.Tensor) -> None:
        # Why: as integers, floats of one sign keep their order; flipping the other bits turns the
        # negative ones round. Adding 0.0 makes -0.0 equal to 0.0. Bins count downwards.
        bits = (logits + 0.0).view(torch.int32)
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        self._digits = [(0x7FFF - (keys >> 16)).long(), (0xFFFF - (keys & 0xFFFF)).long()]
        self._amounts = [torch.ones_like(weights), weights]
        self._first = self._histogram(self._digits[0], self._amounts)

    @staticmethod
    def _histogram(digit: torch.Tensor, amounts: list[torch.Tensor]) -> torch.Tensor:
        """Count and weight of each bin, [2, L, BINS]."""
        held = amounts[0].new_zeros((2, len(digit), BINS))
        for total, amount in zip(held, amounts, strict=True):
            total.scatter_add_(-1, digit, amount)
        return held

    def _inside(self, bins: list[torch.Tensor]) -> torch.Tensor:
        """The tokens whose first digits are these, [L, V] bool."""
        inside = self._digits[0] == bins[0]
        return inside & (self._digits[1] == bins[1]) if len(bins) > 1 else inside

    def find(self, wanted: torch.Tensor, by: int) -> Place:
        """The first token with which the count, or the weight, is at least `wanted`, [L, 1]."""
        held, bins = self._first, list[torch.Tensor]()
        before = held.new_zeros((2, len(wanted), 1))
        while True:
            ends = before + held.cumsum(-1)
            # Why the clamp: a line of NaN finds nothing; its index must stay valid.
            at = torch.searchsorted(ends[by], wanted).clamp_(max=BINS - 1)
            both = at.expand(2, -1, -1)
            here = held.gather(-1, both)
            before, bins = ends.gather(-1, both) - here, [*bins, at]
            if len(bins) == len(self._digits):
                return Place(bins, before, here, wanted, by)
            inside = self._inside(bins)
            held = self._histogram(self._digits[1], [a * inside for a in self._amounts])

    @staticmethod
    def sum_until(place: Place) -> torch.Tensor:
        """Weight of all tokens up to and including the one found, [L, 1]."""
        return place.before[WEIGHT] + (place.rank + 1) * place.weight

    def token(self, place: Place) -> torch.Tensor:
        """The id of the token found, [L]."""
        ranks = self._inside(place.bins).cumsum(-1, dtype=torch.int32)
        at = torch.searchsorted(ranks, place.rank.to(torch.int32) + 1)
        return at.clamp_(max=ranks.shape[-1] - 1)[:, 0]


def device_params(packed: torch.Tensor) -> DrawParams:
    """The five rows of `DrawParams`, already on the device, [5, L] float64."""
    return DrawParams(packed, uses_min_p=True, max_top_k=MAX_VOCAB_SIZE)


def mixed_seeds(seeds: np.ndarray) -> np.ndarray:
    """Seeds [R] as `row_uniforms` takes them: int64, mixed once on the host."""
    return mix(np.asarray(seeds).astype(np.uint64)).view(np.int64)


def row_uniforms(mixed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`sampling_ops.uniforms` on the device: float64 [L] from int64 [L], the same bits.

    Integers wrap as unsigned ones do; only shifts to the right must leave the sign behind.
    """
    z = mixed + (positions + 1) * _signed(int(GOLDEN))
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    return (z >> count) & (2 ** (64 - count) - 1)
