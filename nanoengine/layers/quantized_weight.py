"""QuantizedWeight: a matrix as whole numbers and scales, whoever made it; in plain torch.

`quantize` makes one of floats, `quantized_formats.py` reads one from a checkpoint, and
`quantized.py` multiplies by it.

Legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nanoengine.errors import WeightLoadError

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number that each code of 4 bits stands for: a sign, two bits of exponent and one of
fraction. Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3."""

GROUP_SIZE = 32
"""Inputs that share a scale in int4 weights made here. Source: Q4_0 of ggml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [N, K] as whole numbers: weight = (value - zero) * scale.

    What every reader and `quantize` produce. Groups are contiguous: column k belongs to group
    k // group_size.

    Attributes:
        values: [N, K] int8: from -8 to 7 where bits is 4, but of `E2M1` where `e2m1` says so; from
            -127 to 127 where it is 8, and -128 too in a checkpoint's.
        scales: [N, G] float32; of either sign.
        zeros: [N, G] float32 in units of values; None: all 0.
        bits: 4 or 8.
        group_size: inputs that share a scale; K: one scale a row.
        order: [K] int64, where columns are stored group by group: column k multiplies input
            order[k]; None: inputs in their own order.
        e2m1: values are small floats, not whole numbers in even steps.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    order: torch.Tensor | None = None
    e2m1: bool = False

    def dequantized(self) -> torch.Tensor:
        """The matrix that this stands for, [N, K] float32, inputs in their own order."""
        grouped = self.values.float().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            grouped = grouped - self.zeros.unsqueeze(2)
        weight = (grouped * self.scales.unsqueeze(2)).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def part(self, rows: slice | torch.Tensor, columns: slice = slice(None)) -> QuantizedWeight:
        """The part that one rank holds; `rows` may be the numbers of rows, in any order.

        Raises:
            WeightLoadError: the part cuts through a group.
        """
        size, num_columns, groups = self.group_size, self.values.shape[1], slice(None)
        start, stop, _ = columns.indices(num_columns)
        if size == num_columns:
            size = stop - start
        elif stop - start < num_columns:
            if self.order is not None or start % size or stop % size:
                raise WeightLoadError(
                    f"inputs {start} to {stop} cut through the quantized groups of {size}: use"
                    " fewer ranks"
                )
            groups = slice(start // size, stop // size)
        return replace(
            self,
            values=self.values[rows, columns],
            scales=self.scales[rows, groups],
            zeros=None if self.zeros is None else self.zeros[rows, groups],
            group_size=size,
        )

    @staticmethod
    def stacked(parts: Sequence[QuantizedWeight], name: str) -> QuantizedWeight:
        """The rows of all parts as one matrix; `name` is for the message.

        Raises:
            WeightLoadError: the parts differ in bits, group size or order of inputs.
        """
        if len(parts) == 1:
            return parts[0]
        orders = [None if part.order is None else part.order.tolist() for part in parts]
        forms = [(part.bits, part.group_size, part.e2m1) for part in parts]
        if any(form != forms[0] for form in forms) or any(it != orders[0] for it in orders):
            raise WeightLoadError(
                f"the matrices fused in {name} are quantized differently (bits, group size or"
                " g_idx), so they can't be multiplied as one"
            )
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat(
                [torch.zeros_like(p.scales) if p.zeros is None else p.zeros for p in parts]
            )
        return replace(
            parts[0],
            values=torch.cat([part.values for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=zeros,
        )


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """[N, K] of any floating dtype, rounded to the nearest value, without zero points.

    8 bits: the largest magnitude of a group becomes 127. 4 bits: it becomes -8, whatever its sign,
    so the scale may be negative and the range is used whole; scales are `short`.

    Source: Q4_0 of ggml for the signed scale.
    Perf: on normal weights in groups of 32 the squared error is 0.74 % of the weights' square,
    0.94 % with the largest at 7; the best of eight scales for each group gives 0.68 % at eight
    times the time, which is not worth it.
    """
    grouped = weight.detach().float().unflatten(1, (-1, group_size))
    if bits == 8:
        scales = grouped.abs().amax(2) / 127
        low, high = -127, 127
    else:
        most, least = grouped.amax(2), grouped.amin(2)
        scales = short(torch.where(most >= -least, most, least) / -8)
        low, high = -8, 7
    # Why 1: a group of zeros has no scale, and any will do.
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    values = (grouped / divisors).round_().clamp_(low, high).to(torch.int8).flatten(1)
    return QuantizedWeight(
        values=values, scales=scales, zeros=None, bits=bits, group_size=group_size
    )


def row_factors(scales: torch.Tensor) -> torch.Tensor:
    """The power of two at or above every scale of a row, [N, G] -> [N] float32; 1 for zeros.

    Why: a scale divided by it fits into float16, whatever the size of the weights, and float16
    scales of a checkpoint stay what they are.
    """
    most = scales.abs().amax(1).float()
    return torch.where(most == 0, 1.0, torch.exp2(torch.frexp(most).exponent.float()))


def short(scales: torch.Tensor) -> torch.Tensor:
    """[N, G] rounded to float16's 11 bits, relative to the row's factor: what kernels store."""
    factors = row_factors(scales).unsqueeze(1)
    return (scales / factors).half().float() * factors


def pack_pairs(weight: QuantizedWeight) -> torch.Tensor:
    """Values of 4 bits two to a byte, uint8 [N, K / 2]; the first of a pair is the low half. They
    are stored plus 8, or as their places in `E2M1`."""
    codes = (weight.values + 8).to(torch.uint8)
    if weight.e2m1:
        places = [E2M1.index(value) if value in E2M1 else 0 for value in range(-12, 13)]
        codes = torch.tensor(places, dtype=torch.uint8)[weight.values.long() + 12]
    low, high = codes.unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_pairs(pairs: torch.Tensor, *, e2m1: bool) -> torch.Tensor:
    """The values [N, K] of `pack_pairs`."""
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    if e2m1:
        return torch.tensor(E2M1, dtype=torch.int8)[codes.long()]
    return codes.to(torch.int8) - 8
