"""The shortest time that a workload can take on a machine, by arithmetic.

An ideal engine runs all requests at once, computes a shared prefix once, multiplies by the
vocabulary matrix only where a token is sampled, and overlaps perfectly: every step takes the larger
of FLOPs over rate and bytes over bandwidth. Weights are read once a step, cached keys and values
once a step and sequence, a shared prefix once for all. Norms, activations and look-ups are left
out: they only make the reached share lower. Standard library only.

Source: the roofline model (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workloads import Request, shared_prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a dense model costs time: parameters of the layers and of the head, and attention."""

    body_params: int
    head_params: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        """Reads a Hugging Face config of a dense model with gated MLPs."""
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config["head_dim"]
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            body_params=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_params=config["vocab_size"] * hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine gives: 1e9 bytes/s, and 1e9 FLOP/s of linear layers and of attention."""

    read_gbs: float
    linear_gflops: float
    attention_gflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bits of a stored number, scales included: layer weights, the head's weights, cached KV."""

    body_bits: float = 32
    head_bits: float = 32
    kv_bits: float = 32


def ideal_seconds(shape: Shape, requests: list[Request], limits: Limits, formats: Formats) -> float:
    """Seconds of the whole workload on an ideal engine."""
    prefix = shared_prefix(requests)
    own = [len(prompt) - prefix for prompt, _ in requests]
    new = prefix + sum(own)
    # Why: a causal token attends to itself and all before it, so a prompt of n has n (n + 1) / 2.
    pairs = prefix * (prefix + 1) / 2 + sum(n * prefix + n * (n + 1) / 2 for n in own)
    seconds = _step(shape, limits, formats, new, len(requests), pairs, new)
    for made in range(1, max(output for _, output in requests)):
        contexts = [len(prompt) + made for prompt, output in requests if output > made]
        live = len(contexts)
        read = sum(contexts) - (live - 1) * prefix
        seconds += _step(shape, limits, formats, live, live, sum(contexts), read)
    return seconds


def _step(
    shape: Shape,
    limits: Limits,
    formats: Formats,
    new: int,
    sampled: int,
    pairs: float,
    kv_tokens: int,
) -> float:
    """One step: `new` tokens through the layers, `sampled` of them through the head."""
    linear = 2 * (new * shape.body_params + sampled * shape.head_params)
    attention = 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
    kv_numbers = 2 * kv_tokens * shape.num_kv_heads * shape.head_dim * shape.num_layers
    bits = (
        shape.body_params * formats.body_bits
        + shape.head_params * formats.head_bits
        + kv_numbers * formats.kv_bits
    )
    computing = linear / limits.linear_gflops + attention / limits.attention_gflops
    return max(computing, bits / 8 / limits.read_gbs) / 1e9
