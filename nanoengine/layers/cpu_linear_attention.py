"""Recurrent layers on the CPU: compiled calls of whole layers, or of everything between their two
projections.

`CPUKernels.fuse` installs them; the reference implementations are in `models/linear_attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend, Rotation
from nanoengine.attention.batch import Batch, ScanStep
from nanoengine.attention.cpu import CPUStep
from nanoengine.kernels.cpu_delta import delta_rule
from nanoengine.kernels.cpu_linear_attention import Convolution, Delta
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.cpu_decoder import LayerParts
from nanoengine.layers.linear import Linear

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]


def spans_of(waves: Sequence[ScanStep]) -> Spans:
    """The sequences of a step in the layout that kernels read, wave after wave.

    A piece is a run of a sequence's tokens after which a state is written.

    Returns:
        pieces: [P, 4] int64: a piece's first token and the token after its last, the slot from
            which the sequence starts, and the slot for the state after the piece.
        firsts: [S + 1], the index of each sequence's first piece, and P.
        edges: the index of each wave's first sequence, and S.
    """
    pieces, counts, edges = [np.empty((0, 4), np.int64)], [0], [0]
    for wave in waves:
        reads, tokens = wave.reads.numpy(), wave.tokens
        at = np.arange(len(reads)) if isinstance(tokens, slice) else tokens.numpy()
        pieces.append(np.stack((at, at + 1, reads, wave.writes.numpy()), axis=1))
        counts += [1] * len(reads)
        for start, _, _, read, writes in wave.spans:
            ends = [start, *(start + count for count, _ in writes)]
            slots = [slot for _, slot in writes]
            pieces.append(
                np.array([*zip(ends, ends[1:], [read] * len(slots), slots, strict=False)])
            )
            counts.append(len(slots))
        edges.append(len(counts) - 1)
    return np.concatenate(pieces), np.cumsum(counts), np.array(edges)


class CPURule:
    """Everything between the two projections of one layer as one compiled call, in float32.

    Attributes:
        rule: the compiled function.
        mixer: the kernel's named tuple of a whole layer's operands: projections, then `operands`.
        operands: the function's arguments after the states.
    """

    rule: Any
    mixer: Any
    operands: tuple[Any, ...]

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Called like the layer's `mix`: the projected tensors, the batch, and the rows to
        return."""
        *projected, batch, rows = arguments
        states, (groups, heads, _, values) = self._layer.flat_states.numpy(), self.operands[1]
        out = np.empty((len(projected[0]), groups * heads * values), np.float32)
        self.rule(
            *(tensor.numpy() for tensor in projected), spans_of(batch.state_waves), states,
            *self.operands, out, num_workers(),
        )  # fmt: skip
        found = torch.from_numpy(out)
        return found if rows is None else found.index_select(0, rows)


class CPUDelta(CPURule):
    """The compiled form of `GatedDeltaNet.mix`."""

    rule, mixer = staticmethod(delta_rule), Delta

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        plan, order = layer.plan, layer.out_order
        out_order = torch.arange(plan.num_value_heads) if order is None else order.argsort()
        weights = layer.conv1d.weight, layer.decay.a_log, layer.decay.dt_bias, layer.norm.weight
        heads = plan.num_value_heads // plan.num_key_heads
        self.operands = (
            (*(weight.detach().numpy() for weight in weights), out_order.numpy()),
            (plan.num_key_heads, heads, plan.key_dim, plan.value_dim),
            np.float32(layer.eps),
        )


class RecurrentParts(LayerParts):
    """The submodules of a decoder layer whose mixer is recurrent.

    Attributes:
        mixer: the layer's `RecurrentLayer`.
    """

    def __init__(self, layer: Any, backend: AttentionBackend) -> None:
        self.mixer, self.backend = layer.mixer, backend
        super().__init__(layer)

    def collect_mixer(self, layer: Any) -> list[Linear]:
        mixer = layer.mixer
        if mixer.plan.kind == "delta":
            return [mixer.in_proj_qkvz, mixer.in_proj_ba, mixer.out_proj]
        return [mixer.in_proj, mixer.out_proj]

    @property
    def cache(self) -> Any:
        return self.mixer.flat_states

    def spec_and_arrays(self) -> tuple[None, tuple[Any, ...]]:
        return None, (self.cache.numpy(),)

    def step(self, rotation: Rotation, batch: Batch, spec: Any, *rows: Any) -> tuple[Any, ...]:
        kept: CPUStep = batch.attention
        if kept.spans is None:  # once for all layers
            kept.spans = spans_of(batch.state_waves)
        return kept.spans

    def mixer_operands(self, projections: list[Any]) -> Any:
        if self.mixer.plan.kind != "conv":
            rule = self.mixer.mixer_fn
            return rule.mixer(*projections, *rule.operands)
        conv = self.mixer.conv
        bias = np.empty(0, np.float32) if conv.bias is None else conv.bias.detach().numpy()
        return Convolution(*projections, conv.weight.detach().numpy(), bias)
