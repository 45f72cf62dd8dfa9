"""CausalConv: a short depthwise convolution over a sequence's last tokens.

    inputs   t-3  t-2  t-1  t        kernel 4
    weight   w0   w1   w2   w3       output t = their products, added from left to right

The state of a sequence is its last `kernel - 1` inputs. A token's output has the same bits in a
decode and in a prefill chunk, because both add in the same order.

Legend: T tokens, N tokens of one sequence, C channels, W kernel, S states.
"""

from __future__ import annotations

import torch

from nanoengine.attention.batch import SequenceSegment
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.layers.layer import Layer, ModelContext


class CausalConv(Layer):
    """The weights [W, C], and the states [S, W - 1, C] that `bind` provides.

    Args:
        rank_channels: the checkpoint's number of channels, and the indices of this rank's, [C].
    """

    def __init__(
        self,
        kernel: int,
        channels: int,
        *,
        bias: bool,
        rank_channels: tuple[int, torch.Tensor],
        context: ModelContext,
    ) -> None:
        super().__init__()
        self.shape, self.rank_channels = (kernel, channels), rank_channels
        self.weight = context.parameter(*self.shape)
        self.bias = context.parameter(channels) if bias else None
        self.states = torch.empty(0)

    def bind(self, states: torch.Tensor) -> None:
        """Binds the layer to its states, [S, (W - 1) * C]."""
        kernel, channels = self.shape
        self.states = states.unflatten(1, (kernel - 1, channels))

    def step(self, x: torch.Tensor, reads: torch.Tensor, writes: torch.Tensor) -> torch.Tensor:
        """Advances several sequences by one token each: [T, C] -> the same. `reads` and `writes`
        are the slots of each token's old and new state."""
        before = self.states.index_select(0, reads)
        inputs = torch.cat((before, x.to(before.dtype).unsqueeze(1)), dim=1)  # [T, W, C]
        self.states.index_copy_(0, writes, inputs[:, 1:])
        return self._sum_taps([inputs[:, tap] for tap in range(self.shape[0])], x.dtype)

    def scan(self, x: torch.Tensor, span: SequenceSegment) -> torch.Tensor:
        """Computes the tokens of one sequence: [N, C] -> the same."""
        before = self.states[span.read]
        inputs = torch.cat((before, x.to(before.dtype)))  # [W - 1 + N, C]
        for count, state in span.writes:
            self.states[state].copy_(inputs[count : count + len(before)])
        taps = [inputs[tap : tap + len(x)] for tap in range(self.shape[0])]
        return self._sum_taps(taps, x.dtype)

    def _sum_taps(self, taps: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        total = taps[0] * self.weight[0]
        for tap, weight in zip(taps[1:], self.weight[1:], strict=True):
            total += tap * weight
        if self.bias is not None:
            total += self.bias
        return total.to(dtype)

    def weight_slots(self, path: str) -> dict[str, WeightSlot]:
        """Checkpoints store the weight as [C, 1, W]."""
        channels, indices = self.rank_channels

        def slot(tensor: torch.Tensor) -> WeightSlot:
            def store(stored: torch.Tensor) -> None:
                tensor.copy_(stored[indices.to(stored.device)])

            return WeightSlot(shape=(channels, *tensor.shape[1:]), store=store)

        slots = {f"{path}.weight": slot(self.weight.T.unsqueeze(1))}
        return slots if self.bias is None else slots | {f"{path}.bias": slot(self.bias)}
