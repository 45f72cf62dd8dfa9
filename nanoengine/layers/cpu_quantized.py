"""int8 and int4 weights on the CPU: separate kernels multiply them by int8 and by float
activations.

The reference implementation is `QuantizedLinear`, which packs and multiplies in plain torch;
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
from nanoengine.layers.groupwise_panels import GroupedPanels, layout_of, pad_bias, replace_rows
from nanoengine.layers.kernels import Masks
from nanoengine.layers.packed import NO_MASKS, full_argmax
from nanoengine.layers.placement import empty_bytes
from nanoengine.layers.quantized import QuantizedLinear, packed_values
from nanoengine.layers.quantized_formats import GGUF
from nanoengine.layers.quantized_weight import QuantizedWeight, rotated_weight


def linear_factory(quantization: Quantization) -> Callable[..., QuantizedLinear]:
    """Returns the function that makes a layer's method, for this quantization's activations."""
    stored = quantization.stored
    if quantization.activations == "int8" or (stored is not None and stored.format == "gguf"):
        return CPUQuantizedLinear
    return CPUWeightOnlyLinear if stored is not None else _make_quantized_on_load


def _make_quantized_on_load(name: str, *, bits: int, **options: Any) -> QuantizedLinear:
    """Makes a weight-only method whose weights `quantize` quantizes. With fewer than 8 bits they
    have minima, which only group-wise panels support."""
    kind = CPUWeightOnlyLinear if bits == 8 else CPUQuantizedLinear
    return kind(name, bits=bits, **options)


def form_of(
    weight: QuantizedWeight, activations: Literal["int8", "float"]
) -> Literal["rows", "grouped"] | None:
    """How a weight is packed: "rows" of int8 for rotated inputs, or "grouped" by `GroupedPanels`.
    None: no kernel supports it, and `QuantizedLinear` multiplies by it in plain torch."""
    if activations == "int8" and (weight.inputs is not None or weight.has_row_scales):
        return "rows"
    return None if layout_of(weight) is None else "grouped"


class PanelLinear(QuantizedLinear):
    """A quantized weight in panels, with the operands of its kernel."""

    is_packed = True

    @property
    def has_kernel(self) -> bool:
        return self.is_packed and self.order is None and not self.pieces

    def operands(self, bias: torch.Tensor | None) -> tuple[Any, ...]:
        """The kernel's operands: the weight, and the bias, zeros if there is none."""
        if self._operands is None or self._bias is not bias:  # At first use, tensors move no more.
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
        return full_argmax(self.apply(x, None), NO_MASKS if masks is None else masks())


class CPUQuantizedLinear(PanelLinear):
    """A quantized weight in panels. Activations are quantized per token, so that a token's result
    has the same bits in any batch; or they stay floats.

    int8 weights of rotated inputs have their own kernel; all others are packed by `GroupedPanels`.
    `QuantizedLinear` multiplies by forms that it does not support.
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
        return rotated_weight(values, scales, weight.shape[1])

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
        self._finish_panels(panels)

    def _panels_for(self, weight: QuantizedWeight) -> GroupedPanels | None:
        """Returns the packer of these rows and of all others; None: their form has no kernel."""
        is_first = self.panels is None and not self._parts
        if is_first and form_of(weight, self.activations) == "grouped":
            self.panels = GroupedPanels(
                self.out_features, self.in_features, self.allocate, one_form=len(self._types) < 2
            )
            self.order = weight.order
        return self.panels

    def _finish_panels(self, panels: GroupedPanels) -> None:
        """Stores the packed weight after the last rows are added."""
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
        self._finish_panels(panels)
        return True

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        slot = super().weight_slot(name, matrix)
        if not isinstance(self.stored, GGUF):
            return slot
        self._types.add(self.stored.types.get(name))
        loads = self.load_quantized, self.load_blocks
        return replace(slot, pieces=self.stored.matrix_slots(name, matrix, *loads))

    def pack(self, weight: QuantizedWeight) -> None:
        self.is_packed = form_of(weight, self.activations) == "rows"
        if not self.is_packed:
            super().pack(weight)
            return
        self.form = "rows"
        self.values = _to_panels(weight.values, 4)
        self.scales = _to_panels(_bfloat16_bits(weight.scales))

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        if self.form == "grouped":
            replace_rows(self.values, weight, first)
        elif self.form == "rows":
            _replace_rows(self.values, weight.values, first, 4)
            _replace_rows(self.scales, _bfloat16_bits(weight.scales), first)
        else:
            super().replace(weight, first)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.is_packed or self.pieces:
            return super().matmul(x, bias)
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
    def has_whole_panels(self) -> bool:
        """Whether no panel except the last is padded."""
        return self.form == "rows" or bool(self.values.view(torch.int64)[grouped.IS_UNPADDED])

    def padded_bias(self, bias: torch.Tensor | None) -> torch.Tensor:
        if self.form != "grouped":
            return super().padded_bias(bias)
        return pad_bias(self.values, bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.form != "grouped" or self.tied is not None:
            return super().rows(ids)
        out = np.empty((len(ids), self.in_features), np.float32)
        grouped.groupwise_rows(self.values.numpy(), ids.numpy(), out, num_workers())
        return torch.from_numpy(out)


class CPUWeightOnlyLinear(PanelLinear):
    """A quantized weight times float32 activations: each panel is dequantized when it is read.

    The GEMM is float32, so for many rows it is no faster than with float32 weights, and only saves
    memory. A token's result has the same bits in any batch.
    """

    def pack(self, weight: QuantizedWeight) -> None:
        self.group_size = weight.group_size
        float_form = E4M3 if weight.floats else E2M1
        self.form = float_form if weight.floats or weight.table else weight.bits
        self.values = _to_panels(packed_values(weight).view(torch.int8))
        self.scales = _to_panels(weight.scales)
        self.zeros = torch.empty(0) if weight.zeros is None else _to_panels(weight.zeros)

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        _replace_rows(self.values, packed_values(weight).view(torch.int8), first)
        _replace_rows(self.scales, weight.scales, first)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = np.empty((x.shape[0], self.out_features), np.float32)
        operands = self.operands(bias)
        weight_only.linear_dequantized(x.contiguous().numpy(), *operands, out, num_workers())
        return torch.from_numpy(out)

    def weight_operands(self) -> tuple[Any, ...]:
        """As `CPUQuantizedLinear.weight_operands`."""
        values, scales, zeros = (t.numpy() for t in (self.values, self.scales, self.zeros))
        return values, self.form, scales, zeros, self.group_size


def _bfloat16_bits(scales: torch.Tensor) -> torch.Tensor:
    """The bits of scales that are exact in bfloat16, as int16."""
    return scales.bfloat16().view(torch.int16)


def _to_panels(matrix: torch.Tensor, inputs: int = 1) -> torch.Tensor:
    """[N, K] -> flat [panels, K / inputs, 16 outputs, inputs]; outputs are padded with zeros."""
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % PANEL))
    split = padded.unflatten(1, (-1, inputs)).unflatten(0, (-1, PANEL))
    return split.transpose(1, 2).reshape(-1)


def _replace_rows(panels: torch.Tensor, matrix: torch.Tensor, first: int, inputs: int = 1) -> None:
    """Overwrites the rows from `first` on with rows [N, K], in the result of `_to_panels`."""
    rows = torch.arange(first, first + len(matrix))
    split = panels.view(-1, matrix.shape[1] // inputs, PANEL, inputs)
    split[rows // PANEL, :, rows % PANEL] = matrix.unflatten(1, (-1, inputs))
