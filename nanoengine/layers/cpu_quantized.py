"""int8 and int4 weights on the CPU: separate kernels multiply them by int8 and by float
activations.

The readable form is `QuantizedLinear`, which packs and multiplies in plain torch;
`tests/kernels/test_cpu_kernels.py` compares the two. Selected by `CPUKernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.kernels import cpu_groupwise as grouped
from nanoengine.kernels import cpu_quantized as kernels
from nanoengine.kernels import cpu_weight_only as weight_only
from nanoengine.kernels.code_tables import GROUP
from nanoengine.kernels.dequant import E2M1, E4M3
from nanoengine.kernels.int8_gemm import GROUP_INTS, PANEL
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.gguf_blocks import read_scales, stored_codes
from nanoengine.layers.groupwise_panels import GroupedPanels, grouped_bias, layout_of, replace_rows
from nanoengine.layers.kernels import Masks
from nanoengine.layers.packed import NO_MASKS, largest_of
from nanoengine.layers.placement import empty_bytes
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import GGUF
from nanoengine.layers.quantized_weight import QuantizedWeight, of_rotated, pack_pairs


def kind_for(quantization: Quantization) -> Callable[..., QuantizedLinear]:
    """Returns the method for this quantization's activations."""
    stored = quantization.stored
    if quantization.activations == "int8" or (stored is not None and stored.format == "gguf"):
        return CPUQuantizedLinear
    return CPUWeightOnlyLinear if stored is not None else _made_at_load


def _made_at_load(name: str, *, bits: int, **numbers: Any) -> QuantizedLinear:
    """Makes the method for weight-only integers that `quantize` makes. With fewer than 8 bits they
    have minima, which only group-wise panels support."""
    kind = CPUWeightOnlyLinear if bits == 8 else CPUQuantizedLinear
    return kind(name, bits=bits, **numbers)


def kernel_of(weight: QuantizedWeight, activations: Literal["int8", "float"]) -> Any:
    """Returns the kernel that multiplies by a matrix stored like this one; None: there is none, and
    the matrix is computed as in `QuantizedLinear`."""
    if activations == "int8" and (weight.inputs is not None or weight.has_row_scales):
        return kernels.linear8
    if layout_of(weight) is None:
        return None
    return grouped.linear_groupwise if activations == "int8" else grouped.linear_fp32


class PanelLinear(QuantizedLinear):
    """A quantized weight in panels, with the operands of its kernel."""

    is_packed = True
    _operands: tuple[Any, ...] | None = None  # made at first use, when the tensors no longer move

    @property
    def has_kernel(self) -> bool:
        return self.is_packed and self.order is None and not self.pieces

    def operands(self, bias: torch.Tensor | None) -> tuple[Any, ...]:
        """The kernel's operands: the weight, and the bias, zeros if there is none."""
        if self._operands is None or self._bias is not bias:
            padded = self.padded_bias(bias).numpy()
            self._bias, self._operands = bias, (*self.weight_operands(), padded)
        return self._operands

    def finish(self) -> None:
        if self._operands is not None and self._bias is not None:  # The bias may be a new one.
            self._operands[-1][:] = self.padded_bias(self._bias).numpy()

    def padded_bias(self, bias: torch.Tensor | None) -> torch.Tensor:
        """A bias, zeros if there is none, padded to whole panels."""
        padded = torch.zeros(self.out_features + -self.out_features % PANEL)
        if bias is not None:
            padded[: self.out_features] = bias
        return padded

    def argmax(
        self, x: torch.Tensor, softcap: float | None = None, masks: Masks | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if softcap is not None:
            return None
        return largest_of(self.apply(x, None), NO_MASKS if masks is None else masks())


class CPUQuantizedLinear(PanelLinear):
    """A quantized weight in panels. Activations are quantized per token, so that a row's result has
    the same bits alone and in any batch; or they stay floats.

    int8 weights of rotated inputs have a separate kernel; all others are packed by `GroupedPanels`.
    Forms that it does not support are computed as in `QuantizedLinear`.
    """

    panels: GroupedPanels | None = None
    allocate = staticmethod(empty_bytes)

    @staticmethod
    def rotated(weight: torch.Tensor) -> QuantizedWeight:
        """`quantize_rotated` by the kernel that quantizes activations. Why: plain torch takes four
        times as long."""
        rows = weight.detach().float().contiguous().numpy()
        values, groups = map(torch.from_numpy, kernels.quantize_groups(rows, GROUP, num_workers()))
        scales = groups.unflatten(1, (-1, GROUP_INTS))[:, :, -1].contiguous().view(torch.float32)
        return of_rotated(values, scales, weight.shape[1])

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().create(shape, dtype, device)
        self.form: Literal["rows", "grouped"] | None = None
        self._types: set[str | None] = set()

    def load_quantized(self, weight: QuantizedWeight, first: int = 0) -> None:
        panels = self._panels_for(weight)
        if panels is None:
            super().load_quantized(weight, first)
            return
        self.check_order(weight)
        panels.add(weight, first)
        self._keep_whole(panels)

    def _panels_for(self, weight: QuantizedWeight) -> GroupedPanels | None:
        """Returns what packs these rows and all others; None: their form has no kernel."""
        is_first = self.panels is None and not self._parts
        if is_first and kernel_of(weight, self.activations) not in (kernels.linear8, None):
            self.panels = GroupedPanels(
                self.out_features, self.in_features, self.allocate, one_form=len(self._types) < 2
            )
            self.order = weight.order
        return self.panels

    def _keep_whole(self, panels: GroupedPanels) -> None:
        """Keeps the packed weight after the last rows are added."""
        if not panels.rows_left:
            self.form, self.values, self.panels = "grouped", panels.finish(), None

    def load_blocks(self, type: str, rows: torch.Tensor, first: int) -> bool:
        """Packs rows of a GGUF file's type without decoding them. Returns False if they must be
        decoded."""
        weight = read_scales(type, rows)
        panels = self._panels_for(weight)
        if panels is None or not panels.fills_panels(first, len(rows)) or layout_of(weight) is None:
            return False
        panels.add(weight, first, stored_codes(type, rows))
        self._keep_whole(panels)
        return True

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        slot = super().weight_slot(name, matrix)
        if not isinstance(self.stored, GGUF):
            return slot
        self._types.add(self.stored.types.get(name))
        loads = self.load_quantized, self.load_blocks
        return replace(slot, pieces=self.stored.matrix_slots(name, matrix, *loads))

    def pack(self, weight: QuantizedWeight) -> None:
        self.is_packed = kernel_of(weight, self.activations) is kernels.linear8
        if not self.is_packed:
            super().pack(weight)
            return
        self.form = "rows"
        self.values = _panels(_padded(weight.values), 4)
        self.scales = _panels(_padded(_short(weight.scales)))

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        if self.form == "grouped":
            replace_rows(self.values, weight, first)
        elif self.form == "rows":
            _replace(self.values, weight.values, first, 4)
            _replace(self.scales, _short(weight.scales), first)
        else:
            super().replace(weight, first)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.is_packed or self.pieces:
            return super().multiply(x, bias)
        out = np.empty((x.shape[0], self.out_features), np.float32)
        kernel = kernels.linear8
        if self.form == "grouped":
            kernel = grouped.linear_groupwise if self.activations == "int8" else grouped.linear_fp32
        kernel(x.contiguous().numpy(), *self.operands(bias), out, num_workers())
        return torch.from_numpy(out)

    def weight_operands(self) -> tuple[Any, ...]:
        """The kernel's operands for this weight."""
        if self.form == "rows":
            return self.values.numpy(), self.scales.numpy()
        # Why the sign: kernels are selected by type, and the sign encodes the activations' type.
        return (self.values.numpy().view(np.uint8 if self.activations == "int8" else np.int8),)

    @property
    def is_whole(self) -> bool:
        """Whether no panel but the last is padded."""
        return self.form == "rows" or bool(self.values.view(torch.int64)[grouped.IS_UNPADDED])

    def padded_bias(self, bias: torch.Tensor | None) -> torch.Tensor:
        if self.form != "grouped":
            return super().padded_bias(bias)
        return grouped_bias(self.values, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.form != "grouped" or self.tied is not None:
            return super().rows(ids)
        out = np.empty((len(ids), self.in_features), np.float32)
        grouped.groupwise_rows(self.values.numpy(), ids.numpy(), out, num_workers())
        return torch.from_numpy(out)


class CPUWeightOnlyLinear(PanelLinear):
    """A quantized weight times float32 activations: each panel is dequantized when it is read.

    The multiplication is float32, so many rows are no faster than with float32 weights; only memory
    is saved. A row's result has the same bits alone and in any batch.
    """

    def pack(self, weight: QuantizedWeight) -> None:
        self.group_size = weight.group_size
        small = E4M3 if weight.floats else E2M1
        self.form = small if weight.floats or weight.table else weight.bits
        self.values = _panels(_padded(_in_bytes(weight)))
        self.scales = _panels(_padded(weight.scales))
        self.zeros = torch.empty(0) if weight.zeros is None else _panels(_padded(weight.zeros))

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        _replace(self.values, _in_bytes(weight), first)
        _replace(self.scales, weight.scales, first)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = np.empty((x.shape[0], self.out_features), np.float32)
        operands = self.operands(bias)
        weight_only.linear_dequantized(x.contiguous().numpy(), *operands, out, num_workers())
        return torch.from_numpy(out)

    def weight_operands(self) -> tuple[Any, ...]:
        """As `CPUQuantizedLinear.weight_operands`."""
        values, scales, zeros = (t.numpy() for t in (self.values, self.scales, self.zeros))
        return values, self.form, scales, zeros, self.group_size


def _in_bytes(weight: QuantizedWeight) -> torch.Tensor:
    """Values as int8, [N, K], or [N, K / 2] if they have 4 bits."""
    return pack_pairs(weight).view(torch.int8) if weight.bits == 4 else weight.values


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    """Pads [N, K] to whole panels of outputs."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))


def _short(scales: torch.Tensor) -> torch.Tensor:
    """The bits of scales that are exact in bfloat16, as int16."""
    return scales.bfloat16().view(torch.int16)


def _panels(matrix: torch.Tensor, inputs: int = 1) -> torch.Tensor:
    """[N, K] -> flat [panels, K / inputs, 16 outputs, inputs]."""
    cut = matrix.unflatten(1, (-1, inputs)).unflatten(0, (-1, PANEL))
    return cut.transpose(1, 2).reshape(-1)


def _replace(panels: torch.Tensor, matrix: torch.Tensor, first: int, inputs: int = 1) -> None:
    """Overwrites the rows from `first` on with rows [N, K], in the result of `_panels`."""
    rows = torch.arange(first, first + len(matrix))
    cut = panels.view(-1, matrix.shape[1] // inputs, PANEL, inputs)
    cut[rows // PANEL, :, rows % PANEL] = matrix.unflatten(1, (-1, inputs))
