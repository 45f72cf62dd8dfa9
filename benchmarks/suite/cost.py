"""ModelCost: the FLOPs and bytes that a step requires, from the model's config.

The benchmark divides them by measured seconds and compares with the peaks of the hardware
(`peak.py`). With T tokens, L rows of logits, and c(t) the context of token t (the number of tokens
that it attends to, including itself; at most the sliding window):

    tail     = H*D*h + 3*h*I                                   of a layer, after attention
    weights  = layers * (h*(H + 2K)*D + tail) - tail           parameters that all tokens use
    FLOPs    = 2*T*weights + 2*L*(tail + V*h) + sum over layers, tokens: 4*H*D*c(t)
    bytes    = (weights + (tail + V*h if L)) * weight          every weight once per step
             + sum over layers, sequences: 2*K*D*element*(context read once + tokens written)

In the last layer only rows with logits continue after attention, so its tail counts with L. h
hidden size, I intermediate size, V vocabulary, H / K query / KV heads, D head dim. Norms, RoPE,
embedding lookups, sampling, activations and the scales of quantized weights are excluded: they are
small, and excluding them only makes the reported shares lower. The head counts completely. Greedy
tokens on a CPU read a quarter of it (`PrunedArgmaxHead`), so the bandwidth of such runs is
reported too high. With experts, a token uses k of E; a step reads the experts that its T tokens
select under uniform routing, E * (1 - (1 - k/E)**T), and in the last layer those of its L rows.

Source: the roofline model (Williams, Waterman and Patterson, 2009), for one step of a transformer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoengine.observe.metrics import StepRecord

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The sizes of a model that determine its cost.

    `dense_params` are the parameters of attention and dense MLPs over all layers, `expert_params`
    the parameters of one expert, summed over the layers with experts; `tail_params` are the part of
    `dense_params` after attention in one layer. `windows` has one entry per layer; None is full
    attention. `element_bytes` is the size of a KV entry, `weight_bytes` of a weight.
    """

    dense_params: int
    tail_params: int
    expert_params: int
    num_experts: int
    experts_per_token: int
    head_params: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    element_bytes: int
    weight_bytes: float

    @classmethod
    def from_config(
        cls, config: dict[str, Any], element_bytes: int, weight_bytes: float | None = None
    ) -> ModelCost:
        """Reads a Hugging Face config; `element_bytes` is the size of a KV entry, and of a weight
        if `weight_bytes` is None."""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        moe_size = config.get("moe_intermediate_size") or config["intermediate_size"]
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        mlp = hidden * experts if experts else 3 * hidden * config["intermediate_size"]
        return cls(
            dense_params=layers * (attention + mlp),
            tail_params=hidden * head_dim * heads + mlp,
            expert_params=layers * 3 * hidden * moe_size if experts else 0,
            num_experts=experts,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            head_params=config["vocab_size"] * hidden,
            vocab_size=config["vocab_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            windows=_windows(config),
            element_bytes=element_bytes,
            weight_bytes=element_bytes if weight_bytes is None else weight_bytes,
        )

    def step(self, record: StepRecord) -> tuple[float, float]:
        """FLOPs and bytes of one step."""
        starts = np.asarray(record.starts, dtype=np.int64)
        counts = np.asarray(record.num_scheduled, dtype=np.int64)
        tokens, logits = int(counts.sum()), sum(record.num_logits)
        if not tokens and not logits:
            return 0.0, 0.0
        expert = self.expert_params // len(self.windows)  # of one layer
        tail = self.tail_params + expert * self.experts_per_token
        weights = self.dense_params + self.expert_params * self.experts_per_token - tail
        flops = 2.0 * tokens * weights + 2.0 * logits * (tail + self.head_params)
        entries, params = 0.0, float(self.dense_params - self.tail_params)
        if logits:
            params += self.tail_params + self.head_params
        params += (self.expert_params - expert) * self._experts_met(tokens)
        params += expert * self._experts_met(logits)
        for window, num_layers in Counter(self.windows).items():
            pairs = (_pairs(starts + counts, window) - _pairs(starts, window)).sum()
            flops += 4.0 * num_layers * self.num_heads * self.head_dim * float(pairs)
            context = starts + counts
            if window is not None:
                context = np.minimum(context, window - 1 + counts)
            kv_tokens = float((context[counts > 0] + counts[counts > 0]).sum())
            entries += 2.0 * num_layers * self.num_kv_heads * self.head_dim * kv_tokens
        return flops, params * self.weight_bytes + entries * self.element_bytes

    def _experts_met(self, tokens: int) -> float:
        """Expected number of experts of a layer that this many tokens select."""
        if not self.num_experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.num_experts * (1 - missed)

    def run(self, records: SequenceOf[StepRecord]) -> tuple[float, float]:
        """FLOPs and bytes of all steps."""
        costs = [self.step(record) for record in records]
        return sum(flops for flops, _ in costs), sum(nbytes for _, nbytes in costs)


def _pairs(end: Ints, window: int | None) -> Ints:
    """(query, key) pairs of tokens 0 ... end - 1: the sum of min(position + 1, window)."""
    inside = end if window is None else np.minimum(end, window)
    return inside * (inside + 1) // 2 + (end - inside) * (window or 0)


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` if the config has them."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if config.get("layer_types"):
        return tuple(
            window if kind == "sliding_attention" else None for kind in config["layer_types"]
        )
    if config.get("use_sliding_window") is False:
        window = None
    return (window,) * layers
