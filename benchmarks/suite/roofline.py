"""The roofline of an offline run: the shortest time in which a machine could serve some requests.

All requests start together, prompts first; then there is one decode step per further token of the
longest output. `roofline` is for the GPU report, and includes the losses of a real engine:

    seconds = prefill FLOPs / rate
            + sum over decode steps of   max(weights / bandwidth, their FLOPs / rate)
                                       + KV of all contexts / bandwidth
                                       + logits, written and read once / bandwidth
                                       + a fixed cost

A step with many sequences is bound by the FLOPs of its weights, a step with few by their bytes;
attention is bound by bytes in either case. Prefill is assumed to be bound by FLOPs alone, for all
rows in every layer, including the last one. `ideal_seconds` is for the comparison of engines on a
CPU: each step takes the larger of all its FLOPs and all its bytes, and a shared prefix is computed
and read once.

Pure arithmetic on a `ModelCost`, independent of engines and machines.

Source: the roofline model (Williams, Waterman and Patterson, 2009).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from benchmarks.suite.cost import ModelCost
from benchmarks.suite.workloads import shared_prefix
from nanoengine.bench.workload import WorkItem
from nanoengine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The peaks of a GPU or a CPU: bytes/s of memory, FLOP/s of matrix products. `ideal_seconds`
    may use a separate rate for attention."""

    bytes_per_s: float
    flops_per_s: float
    attention_flops_per_s: float | None = None


H200_MEASURABLE = Card(bytes_per_s=4.3e12, flops_per_s=790e12)
"""Expected values of an H200 in a copy and in a bf16 GEMM; assumed, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """The losses of a real engine; the defaults are an ideal engine.

    Attributes:
        memory_frac: share of the bandwidth that reading KV and logits reaches.
        gemm_frac: share of both rates that matrix products reach.
        step_s: fixed cost of a step in seconds: launches and gaps between steps.
    """

    memory_frac: float = 1.0
    gemm_frac: float = 1.0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of an ideal run, part by part, and of each of its decode steps."""

    prefill_s: float
    weights_s: float
    kv_s: float
    logits_s: float
    fixed_s: float
    step_s: tuple[float, ...]
    output_tokens: int

    @property
    def seconds(self) -> float:
        """The whole run."""
        return self.prefill_s + self.weights_s + self.kv_s + self.logits_s + self.fixed_s

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over the whole run."""
        return self.output_tokens / self.seconds


def roofline(
    cost: ModelCost,
    lengths: SequenceOf[tuple[int, int]],
    card: Card,
    *,
    losses: Losses | None = None,
    kv_element_bytes: int | None = None,
) -> Roofline:
    """The ideal run of requests of (prompt, output) tokens, all resident at once.

    Args:
        cost: cost of a dense model with full attention.
        kv_element_bytes: bytes of a key or value entry; None: the bytes of a weight.

    Raises:
        ConfigError: the model has experts or windows, or there is nothing to run.
    """
    if cost.num_experts or any(window is not None for window in cost.windows):
        raise ConfigError("the roofline only supports dense models with full attention")
    if not lengths or min(map(min, lengths)) < 1:
        raise ConfigError("the roofline needs requests with a prompt and an output")
    losses = losses or Losses()
    prompts, outputs = np.array(lengths, dtype=np.int64).T
    gemm_flops = card.flops_per_s * losses.gemm_frac
    pairs = float((prompts * (prompts + 1) // 2).sum())
    attention = 4.0 * len(cost.windows) * cost.num_heads * cost.head_dim * pairs
    prefill = 2.0 * cost.dense_params * float(prompts.sum()) + attention
    steps = [
        decode_step(
            cost,
            batch=int((outputs > step).sum()),
            context=int((prompts + step)[outputs > step].sum()),
            card=card,
            losses=losses,
            kv_element_bytes=kv_element_bytes,
        )
        for step in range(1, int(outputs.max()))
    ]
    weights, kv, logits = np.array(steps).reshape(-1, 3).T
    return Roofline(
        prefill_s=prefill / gemm_flops,
        weights_s=float(weights.sum()),
        kv_s=float(kv.sum()),
        logits_s=float(logits.sum()),
        fixed_s=losses.step_s * len(steps),
        step_s=tuple((weights + kv + logits + losses.step_s).tolist()),
        output_tokens=int(outputs.sum()),
    )


def decode_step(
    cost: ModelCost,
    *,
    batch: int,
    context: int,
    card: Card,
    losses: Losses | None = None,
    kv_element_bytes: int | None = None,
) -> tuple[float, float, float]:
    """Seconds of one decode step for weights, KV and logits.

    Args:
        batch: sequences.
        context: tokens whose KV is read, over all sequences.
    """
    losses = losses or Losses()
    params = cost.dense_params + cost.head_params
    weights = max(
        params * cost.element_bytes / card.bytes_per_s, 2.0 * batch * params / card.flops_per_s
    )
    entry = cost.element_bytes if kv_element_bytes is None else kv_element_bytes
    kv_bytes = 2.0 * len(cost.windows) * cost.num_kv_heads * cost.head_dim * entry * context
    # Why twice: the head writes the logits, and the sampler reads them.
    logits_bytes = 2.0 * batch * cost.vocab_size * cost.element_bytes
    memory = card.bytes_per_s * losses.memory_frac
    return weights / losses.gemm_frac, kv_bytes / memory, logits_bytes / memory


# --- engines on a CPU -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bits per stored value, including scales: layer weights, the head's weights, cached KV."""

    body_bits: float = 32
    head_bits: float = 32
    kv_bits: float = 32


def ideal_seconds(
    cost: ModelCost, requests: SequenceOf[WorkItem], card: Card, formats: Formats
) -> float:
    """Seconds of a whole workload on an ideal engine.

    It computes logits only where a token is sampled, and overlaps perfectly. Weights are read once
    per step, cached keys and values once per step and sequence. Norms, activations and lookups are
    excluded: they only make the reached share lower.

    Args:
        cost: cost of a dense model with full attention.
    """
    prefix = shared_prefix(requests)
    own = [len(ids) - prefix for ids, _ in requests]
    new = prefix + sum(own)
    # Why: a causal token attends to itself and all earlier ones: n (n + 1) / 2 pairs for a prompt
    # of n.
    pairs = prefix * (prefix + 1) / 2 + sum(n * prefix + n * (n + 1) / 2 for n in own)
    seconds = _step(cost, card, formats, new, len(requests), pairs, new)
    for num_generated in range(1, max(length for _, length in requests)):
        contexts = [len(ids) + num_generated for ids, length in requests if length > num_generated]
        live = len(contexts)
        read = sum(contexts) - (live - 1) * prefix
        seconds += _step(cost, card, formats, live, live, sum(contexts), read)
    return seconds


def _step(
    cost: ModelCost,
    card: Card,
    formats: Formats,
    new: int,
    sampled: int,
    pairs: float,
    kv_tokens: int,
) -> float:
    """One step: `new` tokens through the layers, `sampled` of them through the head."""
    layers = len(cost.windows)
    linear = 2 * (new * cost.dense_params + sampled * cost.head_params)
    attention = 4 * pairs * cost.num_heads * cost.head_dim * layers
    bits = (
        cost.dense_params * formats.body_bits
        + cost.head_params * formats.head_bits
        + 2 * kv_tokens * cost.num_kv_heads * cost.head_dim * layers * formats.kv_bits
    )
    computing = linear / card.flops_per_s
    computing += attention / (card.attention_flops_per_s or card.flops_per_s)
    return max(computing, bits / 8 / card.bytes_per_s)
