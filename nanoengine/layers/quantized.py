"""Quantized linear layers: integers and scales, a quarter or an eighth of float32's bytes.

    float rows ───── quantize ──┐
                                ├─ QuantizedWeight ─ pack (after the last rows) ─ matmul
    stored tensors ─ a format ──┘

`QuantizedLinear` is the reference implementation in plain torch, which defines what kernels
compute. Faster implementations are subclasses with another `pack` and `matmul`. Selected by
`quantized_linears`; does not depend on checkpoint files.

Legend: T rows of activations, K inputs, N outputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.errors import ConfigError, WeightLoadError
from nanoengine.kernels.code_tables import GROUP
from nanoengine.layers.kernels import ROUTERS, LinearMethod
from nanoengine.layers.quantized_formats import FORMATS, GGUF, StoredFormat
from nanoengine.layers.quantized_weight import (
    BLOCK,
    GROUP_SIZE,
    TENSORS,
    QuantizedWeight,
    pack_pairs,
    quantize,
    quantize_rotated,
    rotate,
    scales_as_floats,
    unpack_pairs,
)

ACTIVATION_GROUP = 32
"""Inputs of a token that share an activation scale."""

MIN_MAGNITUDE = 2e-36
"""A group whose largest magnitude is below this becomes 0, because 127 / largest could overflow."""

ROWS_AT_ONCE = 4096
"""Rows that are quantized together. Why: quantization makes a float copy of them, which for a head
of 150,000 rows would be the peak memory of the whole start."""

NARROW_HIDDEN_SIZE = 1024
"""Hidden size below which int4 uses one more bit for most matrices, unless it is a multiple of
`BLOCK`. For such models llama.cpp's Q4_K_M uses 5.5 bits per weight."""


def quantized_linears(
    quantization: Quantization,
    make_float: Callable[[str], LinearMethod],
    make_quantized: Callable[..., LinearMethod | None] | None = None,
) -> Callable[[str], LinearMethod]:
    """Returns a function that makes the method of a linear layer from its full name.

    Args:
        make_float: makes the methods of layers that are never quantized, or that the checkpoint
            stores as floats.
        make_quantized: makes the others; None: `QuantizedLinear`. If it returns None, the stored
            weights are dequantized while they load.
    """
    stored, make_quantized = quantization.stored, make_quantized or QuantizedLinear

    def method(name: str) -> LinearMethod:
        scheme = None if stored is None else stored.of(name)
        if name.endswith(ROUTERS) or (stored is not None and scheme is None):
            return make_float(name)
        if scheme is None:
            # Why int8: the head's errors are errors of logits, and int8 has a tenth of int4's
            # error.
            bits, reader = 8 if name == "lm_head" else quantization.bits, None
            group_size = GROUP_SIZE if bits == 4 else None
        else:
            bits, reader = scheme.bits, FORMATS[scheme.format](scheme)
            group_size = scheme.group_size if reader.whole_groups else None
        options = {"activations": quantization.activations, "stored": reader}
        quantized = make_quantized(name, bits=bits, group_size=group_size, **options)
        return dequantize_on_load(make_float(name), reader) if quantized is None else quantized

    return method


def dequantize_all(name: str, **options: object) -> None:
    """The `make_quantized` of devices without kernels for quantized weights: returns None."""


def dequantize_on_load(method: LinearMethod, reader: StoredFormat | GGUF) -> LinearMethod:
    """Replaces the method's weight slot by one that dequantizes stored weights, one matrix at a
    time.

    Why not a subclass: kernels check the classes of methods with float weights.
    """
    float_slot = method.weight_slot

    def weight_slot(name: str, matrix: MatrixPart) -> WeightSlot:
        rows, columns = (*matrix.part, slice(None), slice(None))[:2]

        def load(weight: QuantizedWeight, first: int) -> None:
            # Why columns are cut afterwards: a rank's columns may split a group.
            method.load(weight.dequantized()[:, columns], first)

        pieces = reader.matrix_slots(name, matrix._replace(part=(rows,)), load)
        return replace(float_slot(name, matrix), pieces=pieces, pieces_only=True)

    object.__setattr__(method, "weight_slot", weight_slot)
    return method


def int4_bits(name: str, outputs: int, inputs: int) -> int:
    """Bits of the matrix `name` [outputs, inputs] if it is quantized to int4 while loading.

    Why more than 4 for some: errors in v_proj and down_proj are the most harmful, and narrow models
    are more sensitive to errors. llama.cpp's Q4_K_M makes the same choices, with more bytes per
    weight.
    """
    kind = name.rpartition(".")[2]
    hidden_size = outputs if kind in ("o_proj", "down_proj") else inputs
    is_narrow = hidden_size < NARROW_HIDDEN_SIZE and hidden_size % BLOCK != 0
    if is_narrow and kind == "v_proj":
        return 8
    is_gate = kind in ("gate_proj", "up_proj", "gate_up_proj")
    return 4 + (kind in ("v_proj", "down_proj")) + (is_narrow and not is_gate)


def quantize_activations(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> (values int8 [T, K], scales float32 [T, K / size, rounded up]).

    Each `size` inputs of a token share one scale, their largest magnitude / 127, so values * scales
    approximates x. A token's result does not depend on the batch, and an outlier reduces the
    precision of its group only, not of the whole token. values = x / scale, rounded half to even.
    The scale of a group with NaN or infinity is NaN or infinite, and so is the token's result.

    Source: Yao et al., ZeroQuant (arXiv 2206.01861), section 3.1, token-wise quantization; groups
    of 32, ggml's Q8_0.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = F.pad(wide, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(2)
    scales = torch.where(largest < MIN_MAGNITUDE, 0.0, largest / 127).float()
    divisors = torch.where(scales == 0, torch.inf, scales).unsqueeze(2)
    values = (groups / divisors).round_().clamp_(-127, 127).nan_to_num_(0).to(torch.int8)
    return values.flatten(1)[:, : x.shape[1]], scales


class QuantizedLinear(LinearMethod):
    """A quantized weight, multiplied in plain torch on the CPU.

    A tied weight is quantized as a copy; the embedding still looks up rows of the float weight.

    Args:
        bits, group_size: of the weights that `load` quantizes; group_size None: one scale per
            output, or per rotated group if activations are int8.
        activations: "int8" quantizes them per token and group of inputs, see
            `quantize_activations`; "float" does not.
        stored: the format in which the checkpoint stores this layer, if it is quantized.

    Raises:
        ConfigError: from `create`: the inputs are not a multiple of the group size, or the device
            is a GPU.
    """

    rotated = staticmethod(quantize_rotated)
    _operands: tuple[Any, ...] | None = None  # of a kernel, if a subclass has one

    def __init__(
        self,
        name: str,
        *,
        bits: int,
        group_size: int | None,
        activations: Literal["int8", "float"],
        stored: StoredFormat | GGUF | None = None,
    ) -> None:
        super().__init__(name)
        self.name, self.bits, self.group_size = name, bits, group_size
        self.activations, self.stored = activations, stored
        self.tied: torch.Tensor | None = None
        self.pieces = nn.ModuleList()
        for buffer in (*TENSORS, "order"):
            self.register_buffer(buffer, None)

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"int{self.bits} weights on device {device.type!r} require the Triton kernels:"
                " remove attention_backend='naive', dtype='float64', or quantization"
            )
        self.storage = dtype, device
        self.out_features, self.in_features = shape
        self.group_size = self.group_size or self.in_features
        if self.in_features % self.group_size:
            raise ConfigError(
                f"int{self.bits} weights require a multiple of {self.group_size} inputs, and"
                f" {self.name} has {self.in_features}: set another quantization"
            )
        if self.bits == 4 and self.stored is None:
            self.bits = int4_bits(self.name, *shape)
        self._parts: dict[int, QuantizedWeight] = {}

    def set_activations(self, activations: Literal["int8", "float"]) -> None:
        """Changes whether activations are quantized."""
        self.activations, self._operands = activations, None

    def set_weight(self, weight: torch.Tensor) -> None:
        self.tied, (rows, columns) = weight, weight.shape
        self.create((rows, columns), weight.dtype, weight.device)

    def load(self, weight: torch.Tensor, first: int = 0, bits: int | None = None) -> None:
        """Quantizes rows to `bits`; None: `self.bits`."""
        if self.tied is not None:
            weight = self.tied[first : first + len(weight)].copy_(weight)
        store = self.replace if self.is_loaded else self.load_quantized
        rounded = partial(quantize, bits=bits or self.bits, group_size=self.group_size)
        if self.activations == "int8" and self.bits == 8:
            rounded = self.rotated
        for start in range(0, len(weight), ROWS_AT_ONCE):
            store(rounded(weight[start : start + ROWS_AT_ONCE]), first + start)

    @property
    def is_loaded(self) -> bool:
        """Whether all rows are loaded; rows may then be replaced."""
        return self.values is not None or len(self.pieces) > 0

    def load_quantized(self, weight: QuantizedWeight, first: int = 0) -> None:
        """Adds rows from `first` on, and packs the matrix after the last rows. Runs of rows with
        different forms become separate methods (`pieces`). If activations are int8, stored rows
        with one scale per output are rotated and quantized again, because one activation scale per
        token would lose more accuracy than the second rounding.

        Raises:
            WeightLoadError: the rows have another order of inputs than earlier rows.
        """
        if self.activations == "int8" and weight.has_row_scales:
            weight = self.rotated(weight.dequantized())
        if not self._parts:
            self.order = weight.order
        self.check_order(weight)
        self._parts[first] = replace(weight, order=None)
        if sum(len(part.values) for part in self._parts.values()) < self.out_features:
            return
        parts = [self._parts[start] for start in sorted(self._parts)]
        self._parts.clear()
        runs = [
            QuantizedWeight.stacked(list(alike), self.name)
            for _, alike in groupby(parts, lambda part: part.form)
        ]
        if len(runs) == 1:
            self.pack(runs[0])
            return
        for run in runs:
            method = type(self)(
                self.name, bits=run.bits, group_size=run.group_size, activations=self.activations
            )
            method.create(tuple(run.values.shape), *self.storage)
            method.load_quantized(run)
            self.pieces.append(method)

    def check_order(self, weight: QuantizedWeight) -> None:
        """Raises WeightLoadError if the rows have another order of inputs than earlier rows."""
        orders = [None if order is None else order.tolist() for order in (self.order, weight.order)]
        if orders[0] != orders[1]:
            raise WeightLoadError(
                f"the matrices fused in {self.name} are quantized differently (g_idx), which is"
                " not supported"
            )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() != 2:
            return self.apply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)
        return self.matmul(x if self.order is None else x.index_select(1, self.order), bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tied is not None:
            return F.embedding(ids, self.tied)
        return self.unpacked(ids).dequantized()

    def pack(self, weight: QuantizedWeight) -> None:
        """Stores all rows in the layout that `matmul` reads: two int4 values per byte."""
        self.values = packed_values(weight)
        for name in TENSORS[1:]:
            setattr(self, name, getattr(weight, name))
        self.properties: Any = replace(weight, **dict.fromkeys(TENSORS, None))

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        """Overwrites rows from `first` on, after the matrix is packed."""
        for piece in self.pieces:
            if 0 <= first < piece.out_features:
                piece.replace(weight, first)
            first -= piece.out_features
        if self.pieces:
            return
        rows = slice(first, first + len(weight.values))
        for name, kept in ((name, getattr(self, name)) for name in TENSORS):
            if kept is not None:
                kept[rows] = packed_values(weight) if name == "values" else getattr(weight, name)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Floats [T, K], inputs in the weight's order -> [T, N] of the same dtype."""
        if self.pieces:
            out = torch.cat([piece.matmul(x, None) for piece in self.pieces], 1)
            return out if bias is None else out + bias
        weight = self.unpacked()
        if self.activations == "float":
            return F.linear(x, weight.dequantized().to(x.dtype), bias)
        out = matmul_int8(x, weight)
        return out if bias is None else out + bias

    def unpacked(self, rows: slice | torch.Tensor = slice(None)) -> QuantizedWeight:
        """Unpacks these rows."""
        kept = {name: getattr(self, name) for name in TENSORS}
        parts = {name: None if part is None else part[rows] for name, part in kept.items()}
        if self.values.dtype == torch.uint8:
            lowest = -8 if self.properties.lowest is None else self.properties.lowest
            table = self.properties.table or range(lowest, lowest + 16)
            parts["values"] = unpack_pairs(parts["values"], table)
        weight: QuantizedWeight = replace(self.properties, **parts)
        return weight

    @property
    def num_weights(self) -> int:
        """Number of weights; a tied weight is counted in the embedding, pieces count their own."""
        counted_elsewhere = self.tied is not None or len(self.pieces) > 0
        return 0 if counted_elsewhere else self.in_features * self.out_features

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        slot = super().weight_slot(name, matrix)
        if self.stored is None:
            bits = int4_bits(name, *matrix.shape) if self.bits != 8 else 8

            def store(weight: torch.Tensor) -> None:
                self.load(ordered(weight, matrix.order), matrix.first, bits)

            return replace(slot, store=store)
        pieces = self.stored.matrix_slots(name, matrix, self.load_quantized)
        return replace(slot, pieces=pieces, pieces_only=True)


def packed_values(weight: QuantizedWeight) -> torch.Tensor:
    """The values as `QuantizedLinear` stores them: two 4-bit values per byte."""
    return pack_pairs(weight) if weight.bits == 4 else weight.values


def matmul_int8(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Quantizes x [T, K] (`quantize_activations`) and multiplies it by the weight: [T, N] of x's
    dtype. For a rotated weight, inputs are rotated first.

    Inputs that share both a weight scale and an activation scale have an integer dot product, which
    is exact in any order of addition. Dot products are multiplied by both scales and added in the
    order of inputs, so a token's result has the same bits in any batch.
    """
    dtype, wide, size = x.dtype, torch.promote_types(x.dtype, torch.float32), ACTIVATION_GROUP
    if weight.inputs is not None:
        x, size = rotate(x.to(wide)), GROUP
    inputs, (values, row_scales) = x.shape[1], quantize_activations(x, size)
    scales = scales_as_floats(weight.scales, weight.factors)
    mins = None if weight.mins is None else scales_as_floats(weight.mins, weight.min_factors)
    total = torch.zeros(len(x), len(weight.values), dtype=wide)
    edges = sorted({inputs, *range(0, inputs, weight.group_size), *range(0, inputs, size)})
    for start, stop in pairwise(edges):
        # Why float64: it is exact for every sum of these integers, and torch multiplies it fast.
        part, group = values[:, start:stop].double(), start // weight.group_size
        dots, sums = part @ weight.values[:, start:stop].double().T, part.sum(1, keepdim=True)
        if weight.zeros is not None:
            dots -= sums * weight.zeros[:, group]
        dots *= scales[:, group]
        if mins is not None:
            dots -= sums * mins[:, group]
        total += (dots * row_scales[:, start // size].unsqueeze(1)).to(wide)
    return total.to(dtype)
