"""QuantizedWeight: a matrix as integers and scales, for all formats; in plain torch.

`quantize` makes it from floats, `quantized_formats.py` reads it from a checkpoint, and
`quantized.py` multiplies by it.

Legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from nanoengine.errors import WeightLoadError
from nanoengine.kernels.code_tables import GROUP, ROTATED

GROUP_SIZE = 32
"""Inputs that share a scale and a minimum in weights that `quantize` makes. Source: Q4_K of
ggml."""

BLOCK = 256
"""Inputs that share factors in these weights; the last block of a row may be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [N, K] as integers: weight = (value - zero) * scale - min.

    Groups are contiguous: column k belongs to group k // group_size. Some formats have two levels
    of scales: one integer per group, times one factor per block of groups.

    Attributes:
        values: [N, K] int8: integers from `lowest` to `lowest` + 2 ** bits - 1, or elements of
            `table`, or the bits of `floats`.
        scales: [N, G] float32, of either sign; int8 if there are two levels.
        zeros: [N, G] float32 in units of values; None: all 0.
        bits: from 2 to 6, or 8.
        group_size: inputs that share a scale; K: one scale per output.
        order: [K] int64, if columns are reordered: column k is multiplied by input order[k]; None:
            inputs are in their original order.
        lowest: the smallest value; None: -(2 ** (bits - 1)).
        table: code -> value, if values are not evenly spaced.
        floats: the values are the bits of e4m3 floats, none of them NaN.
        mins: [N, G] float32; uint8 if there are `min_factors`; None: all 0. Integer scales and
            mins have 6 bits, or 4 bits in groups of 16.
        factors, min_factors: [N, blocks] float32, for blocks of `BLOCK` inputs (the last may be
            shorter), or for blocks of equal size; with float `scales`, [N, 1]. If both are set,
            they are exact in float16 up to a power of two per row (`round_to_float16`).
        inputs: K of a weight for rotated inputs, see `quantize_rotated`; its values are padded to
            whole groups. None: it is not rotated.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    bits: int
    group_size: int
    order: torch.Tensor | None = None
    lowest: int | None = None
    table: tuple[int, ...] = ()
    floats: bool = False
    mins: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    min_factors: torch.Tensor | None = None
    inputs: int | None = None

    @property
    def has_row_scales(self) -> bool:
        """Whether it has 8-bit integers and one scale per output, and nothing else."""
        plain = self.form == (8, self.values.shape[1], None, (), *[False] * 5)
        return plain and self.zeros is None

    @property
    def has_two_levels(self) -> bool:
        """Whether scales are integers times factors."""
        return self.factors is not None and self.scales.dtype == torch.int8

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that matrices must have in common to be packed together."""
        parts = self.mins, self.factors, self.min_factors, self.inputs
        present = (part is not None for part in parts)
        return self.bits, self.group_size, self.lowest, self.table, self.floats, *present

    def dequantized(self) -> torch.Tensor:
        """Dequantizes the matrix: [N, K] float32, inputs in their original order."""
        values = self.values.view(torch.float8_e4m3fn) if self.floats else self.values
        grouped = values.float().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            grouped = grouped - self.zeros.unsqueeze(2)
        grouped = grouped * scales_as_floats(self.scales, self.factors).unsqueeze(2)
        if self.mins is not None:
            grouped = grouped - scales_as_floats(self.mins, self.min_factors).unsqueeze(2)
        weight = grouped.flatten(1)
        if self.inputs is not None:
            return rotate(weight)[:, : self.inputs]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def part(self, rows: slice | torch.Tensor, columns: slice = slice(None)) -> QuantizedWeight:
        """Selects rows and columns; `rows` may be row indices in any order.

        Raises:
            WeightLoadError: the columns split a group.
        """
        size, num_columns = self.group_size, self.values.shape[1]
        start, stop, _ = columns.indices(num_columns)
        scales = self.factors if self.has_two_levels else None
        unit = size if scales is None else shared_inputs(num_columns, scales)
        if unit >= num_columns:
            unit = 1  # one scale for all inputs
        elif stop - start < num_columns and (
            self.order is not None or start % unit or (stop % unit and stop < num_columns)
        ):
            raise WeightLoadError(
                f"inputs {start} to {stop} cut through the quantized groups of {unit}: use fewer"
                " ranks (tensor_parallel_size)"
            )

        def cut(numbers: torch.Tensor | None) -> torch.Tensor | None:
            if numbers is None:
                return None
            shared = shared_inputs(num_columns, numbers)
            return numbers[rows, start // shared : -(-stop // shared)]

        parts = {name: cut(getattr(self, name)) for name in TENSORS}
        return replace(self, **parts, group_size=min(size, stop - start))

    @staticmethod
    def stacked(parts: Sequence[QuantizedWeight], name: str) -> QuantizedWeight:
        """Concatenates the rows of all parts; `name` is for the message.

        Raises:
            WeightLoadError: the parts differ in bits, group size or order of inputs.
        """
        if len(parts) == 1:
            return parts[0]
        orders = [None if part.order is None else part.order.tolist() for part in parts]
        forms = [part.form for part in parts]
        if any(form != forms[0] for form in forms) or any(it != orders[0] for it in orders):
            raise WeightLoadError(
                f"the matrices fused in {name} are quantized differently (bits, group size or"
                " g_idx), which is not supported"
            )
        if any(part.zeros is not None for part in parts):
            zeros = [torch.zeros_like(part.scales) for part in parts]
            parts = [replace(p, zeros=p.zeros if p.zeros is not None else z)
                     for p, z in zip(parts, zeros, strict=True)]  # fmt: skip
        columns = {name: [getattr(part, name) for part in parts] for name in TENSORS}
        whole = {n: None if found[0] is None else torch.cat(found) for n, found in columns.items()}
        return replace(parts[0], **whole)


TENSORS = ("values", "scales", "zeros", "mins", "factors", "min_factors")
"""Fields of a `QuantizedWeight` with one row per output."""


def shared_inputs(num_inputs: int, numbers: torch.Tensor) -> int:
    """Inputs that share a scale, for scales or factors [N, G] of `num_inputs` inputs."""
    count = numbers.shape[1]
    return BLOCK if -(-num_inputs // BLOCK) == count else num_inputs // count


def scales_as_floats(numbers: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Scales or mins times their factors: [N, G] float32; see `QuantizedWeight`."""
    if factors is None:
        return numbers
    groups, blocks = numbers.shape[1], factors.shape[1]
    each = next((n for n in (8, 16) if -(-groups // n) == blocks), groups // blocks)
    return numbers.float() * factors.repeat_interleave(each, 1)[:, :groups]


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Quantizes [N, K] of any floating dtype to 8 bits, or to fewer in groups of `GROUP_SIZE`.

    8 bits: the largest magnitude of a group becomes 127. Fewer: see `quantize_with_mins`.
    """
    weight = weight.detach().float()
    if bits != 8:
        assert group_size == GROUP_SIZE, group_size
        return quantize_with_mins(weight, bits)
    grouped = weight.unflatten(1, (-1, group_size))
    scales = grouped.abs().amax(2) / 127
    if group_size < weight.shape[1]:
        scales = round_to_float16(scales)
    # Why 1: any divisor works for a group of zeros.
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    values = (grouped / divisors).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
    return QuantizedWeight(values=values, scales=scales, bits=bits, group_size=group_size)


def quantize_with_mins(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Quantizes [N, K] float32 to values from 0 to 2 ** bits - 1: weight = value * scale - min.

    Scale and min of a group minimize the squared error: for each of several candidate scales, the
    weights are rounded to codes, and least squares fits scale and min to these codes, twice. Scales
    and mins are then rounded to 6-bit integers times one factor per block, and the codes are
    computed again.

    Source: Q4_K and Q5_K of ggml for the format.

    Perf: on normally distributed weights the relative squared error is 0.50 % with 4 bits, 0.13 %
    with 5.
    """
    # Why here: it imports numba, which quantized checkpoints don't need.
    from nanoengine.kernels.search_groupwise import STRETCHES, round_groups, search_groups
    from nanoengine.kernels.threads import num_workers

    outputs, device, max_code = len(weight), weight.device, 2**bits - 1
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK)).cpu()
    groups, blocks = padded.reshape(-1, GROUP_SIZE), padded.shape[1] // BLOCK
    fitted, integers = torch.zeros(len(groups), 2), torch.empty(len(groups), 2, dtype=torch.uint8)
    search_groups(groups.numpy(), max_code, STRETCHES, fitted.numpy(), num_workers())
    factors = round_to_float16(fitted.view(outputs, blocks, -1, 2).amax(2).flatten(1) / 63)
    factors = factors.view(outputs, blocks, 2)
    group_factors = factors.repeat_interleave(BLOCK // GROUP_SIZE, 1).view(-1, 2)
    codes = torch.empty(groups.shape, dtype=torch.int8)
    arrays = (tensor.numpy() for tensor in (fitted, group_factors, integers, codes))
    round_groups(groups.numpy(), max_code, *arrays, num_workers())
    row_scales = integers.view(outputs, -1, 2)[:, : weight.shape[1] // GROUP_SIZE].to(device)
    factors = factors.to(device)
    return QuantizedWeight(
        values=codes.view(outputs, -1)[:, : weight.shape[1]].to(device), bits=bits, lowest=0,
        group_size=GROUP_SIZE,
        scales=row_scales[:, :, 0].to(torch.int8), mins=row_scales[:, :, 1].contiguous(),
        factors=factors[:, :, 0].contiguous(), min_factors=factors[:, :, 1].contiguous(),
    )  # fmt: skip


def quantize_rotated(weight: torch.Tensor) -> QuantizedWeight:
    """Quantizes [N, K] of any floating dtype to int8 weights for rotated inputs: rows are rotated
    and divided by ROTATED, and `matmul_int8` rotates activations. GROUP inputs share one scale,
    which is rounded to bfloat16 and so takes 2 bytes.

    Why: in trained models, a few inputs are much larger than all others. The rotation spreads such
    an input over its block, so that the other inputs keep most of their precision.

    Source: rotation before rounding, Ashkboos et al., QuaRot (arXiv 2404.00456).
    """
    grouped = rotate(weight.detach().float()).unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(2) / 127
    # Why not divided by the scale: kernels multiply too, and integer weights have many ties, which
    # the two operations may round differently.
    factors = torch.where(scales == 0, 0.0, 1 / scales).unsqueeze(2)
    values = (grouped * factors).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
    return rotated_weight(values, scales, weight.shape[1])


def rotated_weight(values: torch.Tensor, scales: torch.Tensor, inputs: int) -> QuantizedWeight:
    """Makes the result of `quantize_rotated` from int8 values of rotated rows, and their scales."""
    rounded = scales.bfloat16().float() / ROTATED
    return QuantizedWeight(values=values, scales=rounded, bits=8, group_size=GROUP, inputs=inputs)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Pads [T, K] with zeros to whole groups, and multiplies blocks of ROTATED inputs by the
    Hadamard matrix of 1 and -1: elements at distance 1, then 2, 4 and 8 are replaced by their sum
    and their difference.

    Applied twice, it returns ROTATED times the input. Additions have the same order as in the
    kernels.
    """
    grouped = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, ROTATED))
    # Why separate lanes: adding adjacent elements in memory takes ten times as long.
    lanes, step = list(grouped.movedim(2, 0).contiguous()), 1
    while step < ROTATED:
        pairs = ((lane, lanes[i ^ step], i & step) for i, lane in enumerate(lanes))
        lanes = [other - lane if second else lane + other for lane, other, second in pairs]
        step *= 2
    return torch.stack(lanes, 2).flatten(1)


def row_factors(scales: torch.Tensor) -> torch.Tensor:
    """Per row, a power of two that no scale exceeds: [N, G] -> [N] float32; 1 if all scales are 0.

    Why: a scale divided by it fits into float16, whatever the magnitude of the weights, and a
    checkpoint's float16 scales stay exact.
    """
    largest = scales.abs().amax(1).float()
    return torch.where(largest == 0, 1.0, torch.exp2(torch.frexp(largest).exponent.float()))


def round_to_float16(scales: torch.Tensor) -> torch.Tensor:
    """Rounds scales [N, G], divided by their `row_factors`, to float16, as kernels store them."""
    factors = row_factors(scales).unsqueeze(1)
    return (scales / factors).half().float() * factors


def pack_pairs(weight: QuantizedWeight) -> torch.Tensor:
    """Packs the codes of 4-bit values, two per byte, the first in the low half: uint8 [N, K /
    2]."""
    low, high = codes_of(weight).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_pairs(pairs: torch.Tensor, table: Sequence[int] = range(-8, 8)) -> torch.Tensor:
    """Inverse of `pack_pairs`: returns the values, [N, K]."""
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return torch.tensor(table, dtype=torch.int8)[codes.long()]


def codes_of(weight: QuantizedWeight) -> torch.Tensor:
    """Values as unsigned codes, offsets from `lowest` or indices into `table`: [N, K] uint8."""
    if not weight.table:
        lowest = -(1 << weight.bits - 1) if weight.lowest is None else weight.lowest
        return (weight.values.int() - lowest).to(torch.uint8)
    codes = [weight.table.index(v) if v in weight.table else 0 for v in range(-128, 128)]
    return torch.tensor(codes, dtype=torch.uint8)[weight.values.long() + 128]
