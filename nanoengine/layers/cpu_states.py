"""Layers that keep states, on the CPU: compiled calls of whole layers, and of what stands between
two projections. Put in place by `CPUKernels.fuse`; the readable forms are in `models/states.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend, Rotation
from nanoengine.attention.batch import Batch, StateWave
from nanoengine.kernels.cpu_delta import delta_rule
from nanoengine.kernels.cpu_states import state_layers
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.cpu_decoder import LayerParts
from nanoengine.layers.linear import Linear

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]


def spans_of(waves: Sequence[StateWave]) -> Spans:
    """The sequences of a step as kernels read them, wave after wave.

    Returns:
        pieces: [P, 4] int64: a sequence's tokens from one to before another, the slot that the
            sequence starts from, and the slot where the state behind these tokens goes.
        firsts: [S + 1], where the pieces of each sequence begin.
        edges: where the sequences of each wave begin, and how many there are.
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


class CPUDelta:
    """`GatedDeltaNet.mix` of one layer as one compiled call, in float32.

    Attributes:
        operands: what `delta_rule` calls weights, shape and eps.
    """

    def __init__(self, layer: Any) -> None:
        plan, order = layer.plan, layer.out_order
        self._views, self._layer = NumpyViews(), layer
        of_all = torch.arange(plan.num_value_heads) if order is None else order.argsort()
        weights = layer.conv1d.weight, layer.decay.a_log, layer.decay.dt_bias, layer.norm.weight
        heads = plan.num_value_heads // plan.num_key_heads
        self.operands = (
            (*(weight.detach().numpy() for weight in weights), of_all.numpy()),
            (plan.num_key_heads, heads, plan.key_dim, plan.value_dim),
            np.float32(layer.eps),
        )

    def __call__(
        self, qkvz: torch.Tensor, ba: torch.Tensor, batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        plan, states = self._layer.plan, self._views(self._layer.rows)
        out = np.empty((len(qkvz), plan.num_value_heads * plan.value_dim), np.float32)
        spans = spans_of(batch.state_waves)
        delta_rule(qkvz.numpy(), ba.numpy(), spans, states, *self.operands, out, num_workers())
        found = torch.from_numpy(out)
        return found if rows is None else found.index_select(0, rows)


class StateParts(LayerParts):
    """What a decoder layer with a state is made of.

    Attributes:
        mixer: the layer's `StateLayer`.
    """

    kernel = staticmethod(state_layers)

    def __init__(self, layer: Any, backend: AttentionBackend) -> None:
        self.mixer, self.backend = layer.mixer, backend
        super().__init__(layer)

    def of_mixer(self, layer: Any) -> list[Linear]:
        mixer = layer.mixer
        if mixer.plan.kind == "conv":
            return [mixer.in_proj, mixer.out_proj]
        return [mixer.in_proj_qkvz, mixer.in_proj_ba, mixer.out_proj]

    @property
    def memory(self) -> Any:
        return self.mixer.rows

    def bound(self) -> tuple[None, tuple[Any, ...]]:
        return None, (self.memory.numpy(),)

    def step(self, rotation: Rotation, batch: Batch, spec: Any, *rows: Any) -> tuple[Any, ...]:
        kept: Any = batch.attention
        if () not in kept.arrays:  # once for all layers
            kept.arrays[()] = spans_of(batch.state_waves)
        spans: Spans = kept.arrays[()]
        return spans

    def operands(self) -> tuple[Any, Any]:
        """What `kernel` has behind the states."""
        projections, second = self.ends()
        numbers = np.float32(self.norms[0].eps), self.before[0] is not None
        return (self.weight_of(self.before[0]), self.of_rule(projections), numbers), second

    def of_rule(self, projections: list[Any]) -> tuple[Any, ...]:
        """The mixer's weights, up to the last projection."""
        if self.mixer.plan.kind != "conv":
            return tuple(projections), *CPUDelta(self.mixer).operands
        conv = self.mixer.conv
        bias = np.empty(0, np.float32) if conv.bias is None else conv.bias.detach().numpy()
        return *projections, (conv.weight.detach().numpy(), bias)
