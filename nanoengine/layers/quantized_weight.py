"""QuantizedWeight: a matrix as integers and scales, for all formats; in plain torch.

`quantize` makes one from floats, `quantized_formats.py` reads one from a checkpoint, and
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
"""Inputs that share a scale and a minimum in int4 weights made here. Source: Q4_K of ggml."""

BLOCK = 256
"""Inputs that share factors in weights made here; the last block of a row may be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A matrix [N, K] as integers: weight = (value - zero) * scale - min.

    All readers and `quantize` return it. Groups are contiguous: column k belongs to group k //
    group_size. Some formats have two levels of scales: one integer per group, times one factor per
    block of groups.

    Attributes:
        values: [N, K] int8: 2 ** bits integers from `lowest` on, or values of `table`, or the bits
            of `floats`.
        scales: [N, G] float32, of either sign; int8 if there are `factors`.
        zeros: [N, G] float32 in units of values; None: all 0.
        bits: from 2 to 6, or 8.
        group_size: inputs that share a scale; K: one scale per row.
        order: [K] int64, if columns are stored group by group: column k multiplies input order[k];
            None: inputs in their own order.
        lowest: the least value; None: -(2 ** (bits - 1)).
        table: the values in the order of their codes, if they are not evenly spaced.
        floats: the values are the bits of e4m3 floats, none of them NaN.
        mins: [N, G] float32; or uint8 if there are `min_factors`, then with 6 bits, like the
            scales, or 4 bits in groups of 16; None: all 0.
        factors, min_factors: [N, blocks] float32, for blocks of `BLOCK` inputs (the last may be
            shorter), or for blocks of equal size. If both are set, they have 11 bits relative to
            the row's factor (`short`). None: `scales` and `mins` are floats.
        inputs: K of a weight of rotated inputs, see `quantize_rotated`; its values are padded to
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
        """Whether it is 8-bit integers times one scale per output, and nothing else."""
        plain = self.form == (8, self.values.shape[1], None, (), *[False] * 5)
        return plain and self.zeros is None

    @property
    def form(self) -> tuple[Any, ...]:
        """The properties that matrices must share to be packed together."""
        parts = self.mins, self.factors, self.min_factors, self.inputs
        there = (part is not None for part in parts)
        return self.bits, self.group_size, self.lowest, self.table, self.floats, *there

    def dequantized(self) -> torch.Tensor:
        """The dequantized matrix, [N, K] float32, inputs in their own order."""
        values = self.values.view(torch.float8_e4m3fn) if self.floats else self.values
        grouped = values.float().unflatten(1, (-1, self.group_size))
        if self.zeros is not None:
            grouped = grouped - self.zeros.unsqueeze(2)
        grouped = grouped * of_groups(self.scales, self.factors).unsqueeze(2)
        if self.mins is not None:
            grouped = grouped - of_groups(self.mins, self.min_factors).unsqueeze(2)
        weight = grouped.flatten(1)
        if self.inputs is not None:
            return rotate(weight)[:, : self.inputs]
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def part(self, rows: slice | torch.Tensor, columns: slice = slice(None)) -> QuantizedWeight:
        """The part that one rank holds; `rows` may be row indices, in any order.

        Raises:
            WeightLoadError: the part cuts through a group.
        """
        size, num_columns = self.group_size, self.values.shape[1]
        start, stop, _ = columns.indices(num_columns)
        unit = size if self.factors is None else shared_inputs(num_columns, self.factors)
        if unit >= num_columns:
            unit = 1  # a scale of all inputs applies to any of them
        elif stop - start < num_columns and (
            self.order is not None or start % unit or (stop % unit and stop < num_columns)
        ):
            raise WeightLoadError(
                f"inputs {start} to {stop} cut through the quantized groups of {unit}: use fewer"
                " ranks"
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
                " g_idx), so they can't be multiplied as one"
            )
        if any(part.zeros is not None for part in parts):
            none = [torch.zeros_like(part.scales) for part in parts]
            parts = [replace(p, zeros=p.zeros if p.zeros is not None else z)
                     for p, z in zip(parts, none, strict=True)]  # fmt: skip
        columns = {name: [getattr(part, name) for part in parts] for name in TENSORS}
        whole = {n: None if found[0] is None else torch.cat(found) for n, found in columns.items()}
        return replace(parts[0], **whole)


TENSORS = ("values", "scales", "zeros", "mins", "factors", "min_factors")
"""Fields of a `QuantizedWeight` with one row per output."""


def shared_inputs(num_inputs: int, numbers: torch.Tensor) -> int:
    """Inputs that share one of the scales [N, G] of a row."""
    count = numbers.shape[1]
    return BLOCK if -(-num_inputs // BLOCK) == count else num_inputs // count


def of_groups(numbers: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Scales or mins as floats, [N, G] float32; see `QuantizedWeight`."""
    if factors is None:
        return numbers
    groups, blocks = numbers.shape[1], factors.shape[1]
    each = next((n for n in (8, 16) if -(-groups // n) == blocks), groups // blocks)
    return numbers.float() * factors.repeat_interleave(each, 1)[:, :groups]


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Rounds [N, K] of any floating dtype to 8 bits, or to fewer in groups of `GROUP_SIZE`.

    8 bits: the largest magnitude of a group becomes 127. Fewer: `quantize_with_mins`.
    """
    weight = weight.detach().float()
    if bits != 8:
        assert group_size == GROUP_SIZE, group_size
        return quantize_with_mins(weight, bits)
    grouped = weight.unflatten(1, (-1, group_size))
    scales = grouped.abs().amax(2) / 127
    if group_size < weight.shape[1]:
        scales = short(scales)
    # Why 1: a group of zeros has no scale, and any will do.
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    values = (grouped / divisors).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
    return QuantizedWeight(values=values, scales=scales, bits=bits, group_size=group_size)


def quantize_with_mins(weight: torch.Tensor, bits: int) -> QuantizedWeight:
    """Rounds [N, K] float32 to values from 0 to 2 ** bits - 1: weight = value * scale - min.

    Scale and min of a group minimize the squared error: each candidate step gives codes, and least
    squares fits scale and min to these codes, twice. Both then become 6-bit integers times a factor
    of a block, and the codes are rounded again.

    Source: Q4_K and Q5_K of ggml for the form.

    Perf: on normal weights the squared error is 0.50 % of the weights' square with 4 bits, 0.13 %
    with 5.
    """
    # Why here: it imports numba, which checkpoints with quantized weights don't need.
    from nanoengine.kernels.search_groupwise import STRETCHES, round_groups, search_groups
    from nanoengine.kernels.threads import num_workers

    outputs, device, most = len(weight), weight.device, 2**bits - 1
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK)).cpu()
    groups, blocks = padded.reshape(-1, GROUP_SIZE), padded.shape[1] // BLOCK
    wanted, numbers = torch.zeros(len(groups), 2), torch.empty(len(groups), 2, dtype=torch.uint8)
    search_groups(groups.numpy(), most, STRETCHES, wanted.numpy(), num_workers())
    factors = short(wanted.view(outputs, blocks, -1, 2).amax(2).flatten(1) / 63)
    factors = factors.view(outputs, blocks, 2)
    of_groups = factors.repeat_interleave(BLOCK // GROUP_SIZE, 1).view(-1, 2)
    codes = torch.empty(groups.shape, dtype=torch.int8)
    arrays = (tensor.numpy() for tensor in (wanted, of_groups, numbers, codes))
    round_groups(groups.numpy(), most, *arrays, num_workers())
    of_rows = numbers.view(outputs, -1, 2)[:, : weight.shape[1] // GROUP_SIZE].to(device)
    factors = factors.to(device)
    return QuantizedWeight(
        values=codes.view(outputs, -1)[:, : weight.shape[1]].to(device), bits=bits, lowest=0,
        group_size=GROUP_SIZE,
        scales=of_rows[:, :, 0].to(torch.int8), mins=of_rows[:, :, 1].contiguous(),
        factors=factors[:, :, 0].contiguous(), min_factors=factors[:, :, 1].contiguous(),
    )  # fmt: skip


def quantize_rotated(weight: torch.Tensor) -> QuantizedWeight:
    """Quantizes [N, K] of any floating dtype to int8 weights of rotated inputs: rows are rotated
    and divided by ROTATED, and `multiply_int8` rotates activations. Each GROUP inputs share one
    scale, rounded to bfloat16 so that it takes 2 bytes.

    Why: trained models have a few inputs that are much larger than all others. A rotation spreads
    such an input over its block, so that the other inputs keep most of their bits.

    Source: rotation before rounding, Ashkboos et al., QuaRot (arXiv 2404.00456).
    """
    grouped = rotate(weight.detach().float()).unflatten(1, (-1, GROUP))
    scales = grouped.abs().amax(2) / 127
    # Why no division by the scale: kernels multiply, and stored integers have many ties.
    factors = torch.where(scales == 0, 0.0, 1 / scales).unsqueeze(2)
    values = (grouped * factors).round_().clamp_(-127, 127).to(torch.int8).flatten(1)
    return of_rotated(values, scales, weight.shape[1])


def of_rotated(values: torch.Tensor, scales: torch.Tensor, inputs: int) -> QuantizedWeight:
    """The result of `quantize_rotated` from int8 values [N, K] of rotated rows and their scales."""
    short = scales.bfloat16().float() / ROTATED
    return QuantizedWeight(values=values, scales=short, bits=8, group_size=GROUP, inputs=inputs)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Pads [T, K] with zeros to whole groups and multiplies each ROTATED inputs by the Hadamard
    matrix of 1 and -1: neighbours at distance 1, 2, 4 and 8 are replaced by their sum and their
    difference.

    Applied twice it gives ROTATED times the input. Additions have the same order as in the kernels.
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
    """The power of two at or above every scale of a row, [N, G] -> [N] float32; 1 for zeros.

    Why: a scale divided by it fits into float16, whatever the size of the weights, and a
    checkpoint's float16 scales stay exact.
    """
    most = scales.abs().amax(1).float()
    return torch.where(most == 0, 1.0, torch.exp2(torch.frexp(most).exponent.float()))


def short(scales: torch.Tensor) -> torch.Tensor:
    """[N, G] rounded to float16's 11 bits, relative to the row's factor, as kernels store them."""
    factors = row_factors(scales).unsqueeze(1)
    return (scales / factors).half().float() * factors


def pack_pairs(weight: QuantizedWeight) -> torch.Tensor:
    """Packs 4-bit values two to a byte, uint8 [N, K / 2]; the first of a pair is the low half. They
    are stored as offsets from the lowest, or as indices into the table."""
    low, high = codes_of(weight).unflatten(1, (-1, 2)).unbind(2)
    return low | (high << 4)


def unpack_pairs(pairs: torch.Tensor, table: Sequence[int] = range(-8, 8)) -> torch.Tensor:
    """The values [N, K] of `pack_pairs`."""
    codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
    return torch.tensor(table, dtype=torch.int8)[codes.long()]


def codes_of(weight: QuantizedWeight) -> torch.Tensor:
    """Values as unsigned codes: [N, K] uint8."""
    if not weight.table:
        lowest = -(1 << weight.bits - 1) if weight.lowest is None else weight.lowest
        return (weight.values.int() - lowest).to(torch.uint8)
    places = [weight.table.index(v) if v in weight.table else 0 for v in range(-128, 128)]
    return torch.tensor(places, dtype=torch.uint8)[weight.values.long() + 128]
