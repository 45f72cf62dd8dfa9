"""int8 and int4 weights on the CPU: kernels of their own multiply them by int8 activations, and
those of float32 by float ones.

What they compute is `QuantizedLinear`, which packs and multiplies in plain torch;
`tests/kernels/test_cpu_kernels.py` holds them to it. Chosen by `CPUKernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.kernels import cpu_linear as floats
from nanoengine.kernels import cpu_quantized as kernels
from nanoengine.kernels import cpu_screen
from nanoengine.kernels.byte_tiles import PANEL, UNIT
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.kernels import Masks
from nanoengine.layers.packed import NO_MASKS
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_weight import QuantizedWeight, pack_pairs, row_factors


def kind_for(quantization: Quantization) -> type[QuantizedLinear]:
    """The method whose kernels multiply activations as this says."""
    return CPUWeightOnlyLinear if quantization.activations == "float" else CPUQuantizedLinear


class PanelLinear(QuantizedLinear):
    """A quantized weight in panels; its largest output is found among all that are computed."""

    is_packed = True

    @property
    def has_kernel(self) -> bool:
        return self.is_packed and self.order is None

    def operands(self, bias: torch.Tensor | None) -> tuple[Any, ...]:
        """What the kernel reads of this weight, and the bias, zeros if there is none."""
        if self._operands is None or self._bias is not bias:
            padded = torch.zeros(self.out_features + -self.out_features % PANEL)
            if bias is not None:
                padded[: self.out_features] = bias
            self._bias, self._operands = bias, (*self.weight_operands(), padded.numpy())
        return self._operands

    def argmax(
        self, x: torch.Tensor, softcap: float | None = None, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        bits = NO_MASKS if masks is None else masks()
        if softcap is not None or bits is None:
            return None
        ids, largest = np.empty(len(x), np.int64), np.empty(len(x), np.float32)
        cpu_screen.largest_of(self.apply(x, None).numpy(), bits, ids, largest, num_workers())
        return torch.from_numpy(ids), torch.from_numpy(largest)


class CPUQuantizedLinear(PanelLinear):
    """A quantized weight in panels. Activations are quantized row by row, so that a row's result
    has the same bits alone and in any batch.

    int8 weights have one scale an output; int4 ones a scale a group of inputs, in float16 relative
    to the output's factor. What has another form (int8 in groups, groups that are no multiple of
    32) is computed as `QuantizedLinear` does.
    """

    def pack(self, weight: QuantizedWeight) -> None:
        self.group_size = weight.group_size
        self.is_packed = self._fits(weight)
        self._operands: tuple[Any, ...] | None = None  # made at first use, in their last place
        if not self.is_packed:
            super().pack(weight)
            return
        if weight.bits == 8:
            self.values = _panels(_padded(weight.values, UNIT), 4)
            self.scales = _panels(_padded(weight.scales))
            return
        # A byte holds inputs i and i + 4 of their eight, plus 8.
        eights = _padded(weight.values, UNIT).add(8).to(torch.uint8).unflatten(1, (-1, 2, 4))
        self.values = _panels((eights[:, :, 0] | (eights[:, :, 1] << 4)).flatten(1), 4)
        factors = row_factors(weight.scales).unsqueeze(1)
        self.scales = _panels(_padded(factors))
        self.register_buffer("group_scales", None)
        self.group_scales = _float16(_panels(_padded(weight.scales / factors)))
        self.zeros = torch.empty(0, dtype=torch.uint8)
        if weight.zeros is not None:
            self.zeros = _float16(_panels(_padded(weight.zeros)))

    def _fits(self, weight: QuantizedWeight) -> bool:
        if weight.table:
            return False
        one_group = weight.group_size == self.in_features
        if weight.bits == 8:
            return one_group and weight.zeros is None
        return one_group or weight.group_size % UNIT == 0

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.is_packed:
            return super().multiply(x, bias)
        out = np.empty((x.shape[0], self.out_features), np.float32)
        kernel = kernels.linear8 if self.bits == 8 else kernels.linear4
        kernel(x.contiguous().numpy(), *self.operands(bias), out, num_workers())
        return torch.from_numpy(out)

    def weight_operands(self) -> tuple[Any, ...]:
        """What the kernel reads of this weight."""
        arrays = self.values.numpy(), self.scales.numpy()
        if self.bits == 8:
            return arrays
        units = max(1, self.group_size // UNIT)
        return *arrays, self.group_scales.numpy(), self.zeros.numpy(), units


class CPUWeightOnlyLinear(PanelLinear):
    """A quantized weight times float32 activations: each panel is made floats when it is read.

    The multiplication is that of float32, so many rows are no faster than there; memory is that of
    the whole numbers. A row's result has the same bits alone and in any batch.
    """

    def pack(self, weight: QuantizedWeight) -> None:
        self.group_size = weight.group_size
        small = floats.E4M3 if weight.floats else floats.E2M1
        self.form = small if weight.floats or weight.table else weight.bits
        values = pack_pairs(weight).view(torch.int8) if weight.bits == 4 else weight.values
        self.values = _panels(_padded(values))
        self.scales = _panels(_padded(weight.scales))
        self.zeros = torch.empty(0) if weight.zeros is None else _panels(_padded(weight.zeros))
        self._operands: tuple[Any, ...] | None = None  # made at first use, in their last place

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = np.empty((x.shape[0], self.out_features), np.float32)
        operands = self.operands(bias)
        floats.linear_dequantized(x.contiguous().numpy(), *operands, out, num_workers())
        return torch.from_numpy(out)

    def weight_operands(self) -> tuple[Any, ...]:
        """As those of `CPUQuantizedLinear`."""
        values, scales, zeros = (t.numpy() for t in (self.values, self.scales, self.zeros))
        return values, self.form, scales, zeros, self.group_size


def _padded(matrix: torch.Tensor, unit: int = 1) -> torch.Tensor:
    """[N, K] with whole panels of outputs and whole units of inputs."""
    return F.pad(matrix, (0, -matrix.shape[1] % unit, 0, -len(matrix) % PANEL))


def _panels(matrix: torch.Tensor, inputs: int = 1) -> torch.Tensor:
    """[N, K] -> flat [panels, K / inputs, 16 outputs, inputs]."""
    cut = matrix.unflatten(1, (-1, inputs)).unflatten(0, (-1, PANEL))
    return cut.transpose(1, 2).reshape(-1)


def _float16(numbers: torch.Tensor) -> torch.Tensor:
    """The bits of float16."""
    return numbers.half().view(torch.uint16)
