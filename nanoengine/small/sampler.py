"""sample: from logits to a token. A pure function of (logits, parameters, seed, position).

A random generator has a state, which each draw of another sequence would advance. Here the random
number is a hash of seed and position, so a sequence gets the same tokens alone, in a batch, and
after a preemption.
"""

from __future__ import annotations

import torch

from nanoengine.settings.params import SamplingParams

BITS = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A pseudorandom number in [0, 1) for each (seed, position).

    Source: the output function of SplitMix64, Steele, Lea and Flood (2014).

    >>> round(uniform(7, 0), 4)
    0.5243
    """

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS
        return z ^ (z >> 31)

    return (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & BITS) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position`, from logits [V].

    Filters keep the most likely tokens: tokens with at least min_p times the largest probability,
    of these the first top_k, and of these the fewest that reach top_p of the remaining probability.
    """
    if params.is_greedy:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / params.temperature
    probs, token_ids = scaled.softmax(-1).sort(descending=True, stable=True)
    probs[probs < params.min_p * probs[0]] = 0.0
    if params.top_k > 0:
        probs[params.top_k :] = 0.0
    before = probs.cumsum(-1) - probs
    probs[before >= params.top_p * probs.sum()] = 0.0
    # Inverse transform: the token at which the running sum exceeds a random share of the total.
    ends = probs.cumsum(-1)
    index = torch.searchsorted(ends, uniform(seed, position) * ends[-1], right=True)
    return int(token_ids[index])
