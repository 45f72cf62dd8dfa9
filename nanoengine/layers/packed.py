"""PackedLinear: 16-bit or 32-bit weights in panels, multiplied by our own CPU kernels.

Weights are packed in place at load, so no weight exists twice; only a large head also has an int8
copy (`PrunedArgmaxHead`). Selected by `CPUKernels`. The reference implementations are
`UnquantizedLinear`, and for the pruned argmax `runner/sampling/draw.py` over all outputs.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoengine.kernels import cpu_argmax
from nanoengine.kernels import cpu_linear as kernels
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.kernels import Masks, UnquantizedLinear

MIN_PRUNED_BYTES = 2**24
"""Heads of at least this size [bytes] get an int8 copy, which adds a quarter of their size or more.
Why: a smaller weight stays in the CPU's cache, where reading it is cheap."""

NO_MASKS = np.empty((0, 0), np.int32)
MAX_ROWS, MAX_ROWS_OF_PAIRS = 256, 8
"""Largest number of rows for which the pruned argmax is faster than computing all outputs. The
second is for CPUs that multiply pairs of bfloat16 as fast as int8.

Perf: one row of 1,024 times 151,936 outputs, 22 against 7 ms (two Zen 3 cores). 640 times 32,000 on
two Zen 5 cores: 256 rows, 32 against 18 ms; 8, 16 and 32 rows of pairs, 0.9, 1.5 and 3.0 against
1.0, 1.9 and 3.9.
"""


def full_argmax(outputs: torch.Tensor, masks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `LinearMethod.argmax` from all outputs, [L, N] float32."""
    ids, largest = np.empty(len(outputs), np.int64), np.empty(len(outputs), np.float32)
    cpu_argmax.largest_of(outputs.numpy(), masks, ids, largest, num_workers())
    return torch.from_numpy(ids), torch.from_numpy(largest)


PANEL_DTYPES = {
    torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16
}  # fmt: skip
"""The numpy dtype of a packed weight per torch dtype, since numpy has no bfloat16 and numba no
float16. The sign distinguishes the two in the kernels: int16 is float16, uint16 is bfloat16."""


class PackedLinear(UnquantizedLinear):
    """A float32, bfloat16 or float16 weight on the CPU, packed when all of its rows are loaded.

    16-bit weights are converted to float32 in registers, so results have the bits of a float32
    copy. A tied weight is packed in place too; the embedding then looks up its rows through `rows`.
    A row's result has the same bits in any batch.

    Args:
        rounds_inputs: round inputs to bfloat16, multiply them by bfloat16 weights, and accumulate
            in float32.
    """

    has_kernel = True

    def __init__(self, name: str, *, rounds_inputs: bool = False) -> None:
        super().__init__(name)
        self.rounds_inputs = rounds_inputs

    def set_weight(self, weight: torch.Tensor) -> None:
        super().set_weight(weight)
        self.shape, dtype = weight.shape, weight.dtype
        assert dtype in PANEL_DTYPES and weight.device.type == "cpu", (dtype, weight.device)
        assert dtype == torch.bfloat16 or not self.rounds_inputs, dtype
        assert dtype == torch.float32 or self.shape[1] % 2 == 0, self.shape
        self.is_packed, self.rows_left = False, self.shape[0]
        self.no_bias = np.zeros(self.shape[0], np.float32)

    def load(self, weight: torch.Tensor, first: int = 0) -> None:
        if self.is_packed:
            self._replace(weight, first)
            return
        super().load(weight, first)
        self.rows_left -= len(weight)
        if not self.rows_left:
            self.finish()

    def finish(self) -> None:
        if not self.is_packed:
            flat, dtype = self.weight.detach().view(-1), self.weight.dtype
            # Why kept: making a numpy view takes about as long as multiplying a small row.
            self.panels = flat.view(PANEL_DTYPES[dtype]).numpy()
            self.pack(0, self.shape[0])
            self.is_packed = True

    def pack(self, start: int, stop: int) -> None:
        """Packs rows that fill whole panels, in place."""
        inputs, in_pairs = self.shape[1], self.weight.dtype == torch.bfloat16
        bits = self.panels.view(f"u{self.panels.itemsize}")[start * inputs : stop * inputs]
        kernels.pack(bits, inputs, stop - start, in_pairs, num_workers())

    def _replace(self, weight: torch.Tensor, first: int) -> None:
        start = first // PANEL * PANEL
        stop = min(-(-(first + len(weight)) // PANEL) * PANEL, self.shape[0])
        if stop - start > len(weight):  # the first and the last panel have other rows too
            whole = self.rows(torch.arange(start, stop))
            whole[first - start :][: len(weight)] = weight
            weight = whole
        self.weight[start:stop].copy_(weight)
        self.pack(start, stop)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() != 2:
            return self.apply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)
        out = np.empty((x.shape[0], self.shape[0]), np.float32)
        kernel = kernels.linear_bf16_inputs if self.rounds_inputs else kernels.linear
        kernel(x.contiguous().numpy(), *self.operands(bias), out, num_workers())
        return torch.from_numpy(out)

    def operands(self, bias: torch.Tensor | None) -> tuple[np.ndarray, ...]:
        """The kernel's operands: the weight's panels and the bias, zeros if there is none."""
        return *self.weight_operands(), self.no_bias if bias is None else bias.numpy()

    def weight_operands(self) -> tuple[np.ndarray, ...]:
        """The kernel's operands for this weight."""
        return (self.panels.view(np.uint32) if self.rounds_inputs else self.panels,)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.is_packed:
            return super().rows(ids).float()
        out = np.empty((ids.shape[0], self.shape[1]), np.float32)
        kernels.unpack_rows(self.panels, ids.numpy(), out, self.shape[0], num_workers())
        return torch.from_numpy(out)


class PrunedArgmaxHead(PackedLinear):
    """A packed weight with an int8 copy, which `argmax` uses if that is faster."""

    def __init__(self, name: str, *, rounds_inputs: bool = False) -> None:
        super().__init__(name, rounds_inputs=rounds_inputs)
        for buffer in ("values", "scales", "slack"):
            self.register_buffer(buffer, None)

    def pack(self, start: int, stop: int) -> None:
        super().pack(start, stop)
        if self.weight.nbytes >= MIN_PRUNED_BYTES:
            outputs, inputs = self.shape
            if self.values is None:
                panels, padded = outputs // PANEL, -(-inputs // 4) * 4
                self.values = torch.empty(panels, padded * PANEL, dtype=torch.int8)
                self.scales, self.slack = torch.empty(2, outputs)
            cpu_argmax.quantize_outputs(self.panels, *self._copy(), inputs, num_workers())

    def _copy(self) -> tuple[np.ndarray, ...]:
        """The int8 copy as the kernels read it. Why not kept: buffers are moved after loading
        (`layers/placement.py`), and a view would keep their old memory."""
        return self.values.numpy(), self.scales.numpy(), self.slack.numpy()

    def argmax(
        self, x: torch.Tensor, softcap: float | None = None, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.values is None:
            return None
        bits = NO_MASKS if masks is None else masks()
        if len(x) > (MAX_ROWS_OF_PAIRS if self.rounds_inputs and kernels.BF16_DOTS else MAX_ROWS):
            return full_argmax(self.apply(x, None), bits) if softcap is None else None
        if self.rounds_inputs:
            x = x.bfloat16().float()
        ids, largest = np.empty(len(x), np.int64), np.empty(len(x), np.float32)
        found = cpu_argmax.largest_outputs(
            x.contiguous().numpy(), self.panels, *self._copy(), self.no_bias,
            np.float32(softcap or 0), bits, ids, largest, num_workers(),
        )  # fmt: skip
        return (torch.from_numpy(ids), torch.from_numpy(largest)) if found else None
