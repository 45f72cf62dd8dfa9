"""How checkpoints store quantized matrices: GPTQ, AWQ, compressed-tensors and MXFP4.

A format says which tensors stand for one matrix [N, K] and reads them as a `QuantizedWeight`. All
but MXFP4 pack unsigned values of 4 or 8 bits into int32 words, the first in the lowest bits; they
differ in what lies side by side in a word, in the zero points, and in names:

    GPTQ                     AWQ                      compressed-tensors, pack-quantized
    qweight  [K / p, N]      qweight  [K, N / p]      weight_packed      [N, K / p]
    qzeros   [G, N / p]      qzeros   [G, N / p]      weight_zero_point  [N / p, G]
    scales   [G, N]          scales   [G, N]          weight_scale       [N, G]
    g_idx    [K]                                      weight_g_idx       [K]
                                                      weight_shape       [2]

Legend: N outputs, K inputs, G groups of inputs that share a scale, p = 32 / bits values a word.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.slots import WeightSlot
from nanoengine.errors import WeightLoadError
from nanoengine.layers.quantized_weight import E2M1, QuantizedWeight

INT32 = (torch.int32,)
INTEGERS = (torch.int32, torch.int64)
BYTES = (torch.uint8,)
MXFP4_GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within a block of eight, that each place of an AWQ word holds."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a quantized matrix. dtypes: the allowed ones; () is any floating one."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = ()
    optional: bool = False


class StoredFormat(ABC):
    """The base of all formats; a subclass says which tensors there are and reads them."""

    def __init__(self, stored: StoredQuantization) -> None:
        self.bits, self.group_size = stored.bits, stored.group_size
        self.values_a_word = 32 // stored.bits
        self.symmetric, self.zero_offset = stored.symmetric, stored.zero_offset
        self.scattered = stored.scattered

    @abstractmethod
    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        """The tensors of a matrix [num_rows, num_columns], by the last part of their names."""

    @abstractmethod
    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        """The matrix that these tensors stand for."""

    def slots(
        self, name: str, shape: tuple[int, int], store: Callable[[QuantizedWeight], object]
    ) -> dict[str, WeightSlot]:
        """Slots of all tensors of the matrix `name` [N, K]. When the last of them is filled, the
        matrix is read and stored, so no more than one waits for its tensors."""
        wanted = self.tensors(*shape)
        waiting, found = set(wanted), {}

        def take(part: str, tensor: torch.Tensor | None = None) -> None:
            waiting.remove(part)
            if tensor is not None:
                found[part] = tensor
            if not waiting:
                try:
                    weight = self.read(found, *shape)
                except WeightLoadError as error:
                    raise WeightLoadError(f"{name}: {error}") from error
                found.clear()
                store(weight)

        return {
            f"{name}.{part}": WeightSlot(
                shape=tensor.shape,
                dtypes=tensor.dtypes,
                store=partial(take, part),
                absent=partial(take, part) if tensor.optional else None,
            )
            for part, tensor in wanted.items()
        }

    def _groups(self, num_columns: int) -> int:
        return num_columns // (self.group_size or num_columns)

    def _words(self, size: int) -> int:
        return -(-size // self.values_a_word)

    def _weight(
        self, unsigned: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> QuantizedWeight:
        """From values [N, K] and zeros [N, G] counted from 0 to those counted from the middle."""
        middle = 1 << (self.bits - 1)
        centered = None if zeros is None else (zeros - middle).float().contiguous()
        if centered is not None and not centered.any():
            centered = None
        return QuantizedWeight(
            values=(unsigned - middle).to(torch.int8).contiguous(),
            scales=scales.to(torch.float32, copy=True).contiguous(),
            zeros=centered,
            bits=self.bits,
            group_size=self.group_size or unsigned.shape[1],
        )


class GPTQ(StoredFormat):
    """A word holds neighbours along the inputs.

    Zero points are stored less one (format "gptq") or as they are ("gptq_v2"). `g_idx` gives each
    input's group; where calibration went by activation order (desc_act), groups are scattered, and
    columns are gathered group by group here. Writers add a bias of zeros to layers without one.

    Source: AutoGPTQ, `QuantLinear.pack` of nn_modules/qlinear/qlinear_cuda.py; GPTQModel for v2.
    """

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        groups, words = self._groups(num_columns), self._words(num_rows)
        return {
            "qweight": StoredTensor(shape=(self._words(num_columns), num_rows), dtypes=INT32),
            "qzeros": StoredTensor(shape=(groups, words), dtypes=INT32),
            "scales": StoredTensor(shape=(groups, num_rows)),
            "g_idx": StoredTensor(
                shape=(num_columns,), dtypes=INTEGERS, optional=not self.scattered
            ),
            "bias": StoredTensor(shape=(num_rows,), optional=True),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        if "bias" in tensors and tensors["bias"].any():
            raise WeightLoadError("the checkpoint has a bias that is not 0, the model has none")
        unsigned = unpack_words(tensors["qweight"].T, self.bits)[:, :num_columns]
        zeros = unpack_words(tensors["qzeros"], self.bits)[:, :num_rows].T + self.zero_offset
        weight = self._weight(unsigned, tensors["scales"].T, zeros)
        return in_groups(weight, tensors.get("g_idx"))


class AWQ(StoredFormat):
    """A word holds eight neighbours along the outputs, in the order of `AWQ_ORDER`.

    Source: Lin et al., AWQ (arXiv 2306.00978); AutoAWQ, `WQLinear_GEMM.from_linear`.
    """

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        groups, words = self._groups(num_columns), self._words(num_rows)
        return {
            "qweight": StoredTensor(shape=(num_columns, words), dtypes=INT32),
            "qzeros": StoredTensor(shape=(groups, words), dtypes=INT32),
            "scales": StoredTensor(shape=(groups, num_rows)),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        places = torch.argsort(torch.tensor(AWQ_ORDER))  # the place of each column

        def rows(name: str) -> torch.Tensor:
            words = unpack_words(tensors[name], self.bits).unflatten(1, (-1, len(places)))
            return words[:, :, places].flatten(1)[:, :num_rows].T

        return self._weight(rows("qweight"), tensors["scales"].T, rows("qzeros"))


class PackQuantized(StoredFormat):
    """compressed-tensors, format "pack-quantized": a word holds neighbours along the inputs, and of
    zero points along the outputs. Both are stored plus 2^(bits - 1).

    Source: compressed-tensors, `PackedQuantizationCompressor` and `pack_to_int32`.
    """

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        groups = self._groups(num_columns)
        found = {
            "weight_packed": StoredTensor(shape=(num_rows, self._words(num_columns)), dtypes=INT32),
            "weight_scale": StoredTensor(shape=(num_rows, groups)),
            "weight_shape": StoredTensor(shape=(2,), dtypes=INTEGERS),
            "weight_g_idx": StoredTensor(shape=(num_columns,), dtypes=INTEGERS, optional=True),
        }
        if not self.symmetric:
            words = self._words(num_rows)
            found["weight_zero_point"] = StoredTensor(shape=(words, groups), dtypes=INT32)
        return found

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        if (shape := tensors["weight_shape"].tolist()) != [num_rows, num_columns]:
            raise WeightLoadError(f"weight_shape is {shape}, expected [{num_rows}, {num_columns}]")
        unsigned = unpack_words(tensors["weight_packed"], self.bits)[:, :num_columns]
        zeros = None
        if not self.symmetric:
            zeros = unpack_words(tensors["weight_zero_point"].T, self.bits)[:, :num_rows].T
            zeros = zeros.contiguous()
        weight = self._weight(unsigned, tensors["weight_scale"], zeros)
        return in_groups(weight, tensors.get("weight_g_idx"))


class IntQuantized(StoredFormat):
    """compressed-tensors, format "int-quantized": int8 values as they are, a scale for each row.

    Source: compressed-tensors, `IntQuantizationCompressor`.
    """

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor(shape=(num_rows, num_columns), dtypes=(torch.int8,)),
            "weight_scale": StoredTensor(shape=(num_rows, 1)),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        # Why copies: what is read may still be the mapped file.
        return QuantizedWeight(
            values=tensors["weight"].clone(),
            scales=tensors["weight_scale"].to(torch.float32, copy=True),
            zeros=None,
            bits=8,
            group_size=num_columns,
        )


class MXFP4(StoredFormat):
    """Microscaling 4-bit floats: blocks of 32 inputs share a power of two.

    Here a stack of matrices is one pair of tensors, `mxfp4_slots`. A byte holds two inputs, the
    first in its low half; a scale s stands for 2 ** (s - 127).

    Source: OCP Microscaling Formats (MX) v1.0, section 5; the checkpoints of gpt-oss.
    """

    def tensors(self, num_rows: int, num_columns: int) -> dict[str, StoredTensor]:
        groups = num_columns // MXFP4_GROUP
        return {
            "blocks": StoredTensor(shape=(num_rows, groups, MXFP4_GROUP // 2), dtypes=BYTES),
            "scales": StoredTensor(shape=(num_rows, groups), dtypes=BYTES),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        blocks, scales = tensors["blocks"].flatten(1), tensors["scales"]
        if (scales == 255).any():
            raise WeightLoadError("a scale is 255, which stands for no number")
        codes = torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)
        return QuantizedWeight(
            values=torch.tensor(E2M1, dtype=torch.int8)[codes.long()],
            # Why 128: values are twice the numbers.
            scales=torch.tensor([2.0 ** (s - 128) for s in range(256)])[scales.long()],
            zeros=None,
            bits=4,
            group_size=MXFP4_GROUP,
            e2m1=True,
        )


def mxfp4_slots(
    name: str, shape: tuple[int, int, int], store: Callable[[int, QuantizedWeight], object]
) -> dict[str, WeightSlot]:
    """Slots of the two tensors of a stack `name` [E, N, K]; with the second of them each matrix is
    read and stored, one after the other."""
    (count, *matrix), found = shape, {}
    reader = MXFP4(StoredQuantization(format="mxfp4", bits=4, group_size=MXFP4_GROUP))
    wanted = reader.tensors(*matrix)

    def take(part: str, stack: torch.Tensor) -> None:
        found[part] = stack
        if len(found) == len(wanted):
            for index in range(count):
                one = {part: tensor[index] for part, tensor in found.items()}
                try:
                    weight = reader.read(one, *matrix)
                except WeightLoadError as error:
                    raise WeightLoadError(f"{name}: {error}") from error
                store(index, weight)
            found.clear()

    return {
        f"{name}_{part}": WeightSlot(
            shape=(count, *tensor.shape), dtypes=tensor.dtypes, store=partial(take, part)
        )
        for part, tensor in wanted.items()
    }


FORMATS: dict[str, type[StoredFormat]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "pack-quantized": PackQuantized,
    "int-quantized": IntQuantized,
    "mxfp4": MXFP4,
}
"""`StoredQuantization.format` -> its reader."""


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> its unsigned values, [R, C * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)


def in_groups(weight: QuantizedWeight, groups: torch.Tensor | None) -> QuantizedWeight:
    """The weight with its columns gathered group by group, where `groups` [K] scatters them.

    Raises:
        WeightLoadError: the groups are not of equal size.
    """
    size, num_columns = weight.group_size, weight.values.shape[1]
    contiguous = torch.arange(num_columns) // size
    if groups is None or torch.equal(groups.long(), contiguous):
        return weight
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], contiguous):
        raise WeightLoadError(f"g_idx does not make {num_columns // size} groups of {size} inputs")
    return replace(weight, values=weight.values[:, order].contiguous(), order=order)
