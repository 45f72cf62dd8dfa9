"""Quantized linear layers: integers and scales, a quarter or an eighth of float32's bytes.

    float rows ───── quantize ──┐
                                ├─ QuantizedWeight ─ pack (once all rows are there) ─ multiply
    stored tensors ─ a format ──┘

`QuantizedLinear` is the readable form in plain torch, which defines what a kernel must compute. A
faster form is a subclass with its own `pack` and `multiply`. Selected by `quantized_linears`; knows
no checkpoint file.

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
    of_groups,
    pack_pairs,
    quantize,
    quantize_rotated,
    rotate,
    unpack_pairs,
)

ACTIVATION_GROUP = 32
"""Inputs of a token that share a scale."""

SMALLEST = 2e-36
"""A group is 0 if its largest magnitude is below this: 127 / largest could overflow."""

ROWS_AT_ONCE = 4096
"""Rows that are quantized together. Why: it makes another float copy of them, which for a head of
150,000 rows would be the peak memory of the whole start."""


NARROW = 1024
"""Hidden size below which int4 uses one more bit for most matrices, unless it is a multiple of a
block: for such models llama.cpp's Q4_K_M takes 5.5 bits per weight."""


def quantized_linears(
    quantization: Quantization,
    exact: Callable[[str], LinearMethod],
    kind: Callable[..., LinearMethod | None] | None = None,
) -> Callable[[str], LinearMethod]:
    """Returns a function that makes the method of a linear layer from its full name.

    Args:
        exact: makes the methods of layers that are never rounded, or that the checkpoint stores as
            floats.
        kind: makes the others: `QuantizedLinear` or a faster one. If it returns None, the stored
            form is dequantized while it loads.
    """
    stored, kind = quantization.stored, kind or QuantizedLinear

    def method(name: str) -> LinearMethod:
        own = None if stored is None else stored.of(name)
        if name.endswith(ROUTERS) or (stored is not None and own is None):
            return exact(name)
        if own is None:
            # Why: the head's errors go straight to the logits, and int8 has a tenth of int4's.
            bits, reader = 8 if name == "lm_head" else quantization.bits, None
            group_size = GROUP_SIZE if bits == 4 else None
        else:
            bits, reader = own.bits, FORMATS[own.format](own)
            group_size = own.group_size if reader.whole_groups else None
        options = {"activations": quantization.activations, "stored": reader}
        made = kind(name, bits=bits, group_size=group_size, **options)
        return expanded(exact(name), reader) if made is None else made

    return method


def dequantize_all(name: str, **options: object) -> None:
    """Returns None, for devices without a kernel for stored forms: these are dequantized."""


def expanded(method: LinearMethod, reader: StoredFormat | GGUF) -> LinearMethod:
    """Returns the method with a weight slot that dequantizes the stored form while it loads, one
    matrix at a time. Why not a class: kernels check the classes of methods with float weights."""
    plain = method.weight_slot

    def weight_slot(name: str, matrix: MatrixPart) -> WeightSlot:
        rows, columns = (*matrix.part, slice(None), slice(None))[:2]

        def load(weight: QuantizedWeight, first: int) -> None:
            # Why columns last: a rank's columns may cut through a group.
            method.load(weight.dequantized()[:, columns], first)

        pieces = reader.matrix_slots(name, matrix._replace(part=(rows,)), load)
        return replace(plain(name, matrix), pieces=pieces, pieces_only=True)

    object.__setattr__(method, "weight_slot", weight_slot)
    return method


def int4_bits(name: str, outputs: int, inputs: int) -> int:
    """Bits of the matrix `name` [outputs, inputs] if int4 weights are made while loading.

    Why more than 4 for some: errors of v_proj and down_proj cost most, and a narrow model is hurt
    more by the same errors. llama.cpp's Q4_K_M does the same, with more bytes per weight.
    """
    kind = name.rpartition(".")[2]
    hidden_size = outputs if kind in ("o_proj", "down_proj") else inputs
    is_narrow = hidden_size < NARROW and hidden_size % BLOCK != 0
    if is_narrow and kind == "v_proj":
        return 8
    is_gate = kind in ("gate_proj", "up_proj", "gate_up_proj")
    return 4 + (kind in ("v_proj", "down_proj")) + (is_narrow and not is_gate)


def quantize_activations(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> (values int8 [T, K], scales float32 [T, K / size, rounded up]).

    Each `size` inputs of a token share one scale, their largest magnitude / 127, so values * scales
    approximates x. A token's result does not depend on the batch, and an outlier reduces the
    precision of its own group, not of the whole token. values = x / scale, rounded half to even. A
    group with NaN or infinity gets such a scale, and the token such a result.

    Source: Yao et al., ZeroQuant (arXiv 2206.01861), section 3.1, token-wise quantization; groups
    of 32, ggml's Q8_0.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = F.pad(wide, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    largest = groups.abs().amax(2)
    scales = torch.where(largest < SMALLEST, 0.0, largest / 127).float()
    divisors = torch.where(scales == 0, torch.inf, scales).unsqueeze(2)
    values = (groups / divisors).round_().clamp_(-127, 127).nan_to_num_(0).to(torch.int8)
    return values.flatten(1)[:, : x.shape[1]], scales


class QuantizedLinear(LinearMethod):
    """A quantized weight, multiplied by plain torch on the CPU.

    A tied weight is quantized as a copy: the embedding still looks up rows of the float weight.

    Args:
        bits, group_size: of the weights that `load` quantizes; group_size None: one scale per
            output, or per rotated group if activations are int8.
        activations: "int8" quantizes them in groups of a token's inputs, see
            `quantize_activations`; "float" leaves them as they are.
        stored: the format of a checkpoint that stores this layer quantized.

    Raises:
        ConfigError: from `create`: the inputs are not a multiple of the group size, or on a GPU.
    """

    rotated = staticmethod(quantize_rotated)

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
                f"int{self.bits} weights on device {device.type!r} need kernels in Triton: leave"
                " out attention_backend='naive', dtype='float64', or quantization"
            )
        self.where = dtype, device
        self.out_features, self.in_features = shape
        self.group_size = self.group_size or self.in_features
        if self.in_features % self.group_size:
            raise ConfigError(
                f"int{self.bits} weights share a scale in groups of {self.group_size} inputs, and"
                f" {self.name} has {self.in_features}, no multiple of that"
            )
        if self.bits == 4 and self.stored is None:
            self.bits = int4_bits(self.name, *shape)
        self._parts: dict[int, QuantizedWeight] = {}

    def hold(self, weight: torch.Tensor) -> None:
        self.tied, (rows, columns) = weight, weight.shape
        self.create((rows, columns), weight.dtype, weight.device)

    def load(self, weight: torch.Tensor, first: int = 0, bits: int | None = None) -> None:
        """Quantizes rows, to `bits` if these differ from other rows'."""
        if self.tied is not None:
            weight = self.tied[first : first + len(weight)].copy_(weight)
        take = self.replace if self.is_loaded else self.load_quantized
        rounded = partial(quantize, bits=bits or self.bits, group_size=self.group_size)
        if self.activations == "int8" and self.bits == 8:
            rounded = self.rotated
        for start in range(0, len(weight), ROWS_AT_ONCE):
            take(rounded(weight[start : start + ROWS_AT_ONCE]), first + start)

    @property
    def is_loaded(self) -> bool:
        """Whether all rows are loaded; rows may then be replaced."""
        return self.values is not None or len(self.pieces) > 0

    def load_quantized(self, weight: QuantizedWeight, first: int = 0) -> None:
        """Takes rows from `first` on, and packs the whole after the last rows. Runs of rows with
        different forms become separate methods (`pieces`). If activations are int8, stored rows
        with one scale per output are rotated and rounded again: one activation scale per token
        would cost more accuracy than the second rounding.

        Raises:
            WeightLoadError: they have another order of inputs.
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
            one = type(self)(
                self.name, bits=run.bits, group_size=run.group_size, activations=self.activations
            )
            one.create(tuple(run.values.shape), *self.where)
            one.load_quantized(run)
            self.pieces.append(one)

    def check_order(self, weight: QuantizedWeight) -> None:
        """Raises WeightLoadError if rows have another order of inputs than earlier rows."""
        orders = [None if order is None else order.tolist() for order in (self.order, weight.order)]
        if orders[0] != orders[1]:
            raise WeightLoadError(
                f"the matrices fused in {self.name} are quantized differently (g_idx), so they"
                " can't be multiplied as one"
            )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.dim() != 2:
            return self.apply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)
        return self.multiply(x if self.order is None else x.index_select(1, self.order), bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tied is not None:
            return F.embedding(ids, self.tied)
        return self.unpacked(ids).dequantized()

    def pack(self, weight: QuantizedWeight) -> None:
        """Keeps all rows in the form that `multiply` reads: int4 values two to a byte."""
        self.values = kept_values(weight)
        for name in TENSORS[1:]:
            setattr(self, name, getattr(weight, name))
        self.rest: Any = replace(weight, **dict.fromkeys(TENSORS, None))

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        """Replaces the rows from `first` on by rows that `load` has quantized."""
        for piece in self.pieces:
            if 0 <= first < piece.out_features:
                piece.replace(weight, first)
            first -= piece.out_features
        if self.pieces:
            return
        rows = slice(first, first + len(weight.values))
        for name, kept in ((name, getattr(self, name)) for name in TENSORS):
            if kept is not None:
                kept[rows] = kept_values(weight) if name == "values" else getattr(weight, name)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, K] floats, inputs in the weight's order -> [T, N] of the same dtype."""
        if self.pieces:
            out = torch.cat([piece.multiply(x, None) for piece in self.pieces], 1)
            return out if bias is None else out + bias
        weight = self.unpacked()
        if self.activations == "float":
            return F.linear(x, weight.dequantized().to(x.dtype), bias)
        out = multiply_int8(x, weight)
        return out if bias is None else out + bias

    def unpacked(self, rows: slice | torch.Tensor = slice(None)) -> QuantizedWeight:
        """Returns these rows, unpacked."""
        kept = {name: getattr(self, name) for name in TENSORS}
        parts = {name: None if part is None else part[rows] for name, part in kept.items()}
        if self.values.dtype == torch.uint8:
            lowest = -8 if self.rest.lowest is None else self.rest.lowest
            table = self.rest.table or range(lowest, lowest + 16)
            parts["values"] = unpack_pairs(parts["values"], table)
        weight: QuantizedWeight = replace(self.rest, **parts)
        return weight

    @property
    def num_weights(self) -> int:
        """The model's weights in this layer; a tied weight is counted in its embedding."""
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


def kept_values(weight: QuantizedWeight) -> torch.Tensor:
    """The values in the form of a plain layer: 4-bit values two to a byte."""
    return pack_pairs(weight) if weight.bits == 4 else weight.values


def multiply_int8(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """[T, K] floats, quantized by `quantize_activations`, times the weight: [T, N] of x's dtype.
    For a rotated weight the inputs are rotated first.

    Inputs that share both a weight scale and an activation scale have integer dot products, exact
    in any order of addition. They are multiplied by both scales and added in the order of inputs.
    So a row's result has the same bits in any batch.
    """
    dtype, wide, size = x.dtype, torch.promote_types(x.dtype, torch.float32), ACTIVATION_GROUP
    if weight.inputs is not None:
        x, size = rotate(x.to(wide)), GROUP
    inputs, (values, row_scales) = x.shape[1], quantize_activations(x, size)
    scales = of_groups(weight.scales, weight.factors)
    mins = None if weight.mins is None else of_groups(weight.mins, weight.min_factors)
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
