"""How checkpoints store quantized matrices: GPTQ, AWQ, compressed-tensors, fp8, MXFP4 and GGUF.

A format lists the tensors of one matrix [N, K] and reads them as a `QuantizedWeight`. These formats
pack unsigned values of 4 or 8 bits into int32 words, the first value in the lowest bits. They
differ in which values share a word, in zero points, and in names:

    GPTQ                     AWQ                      compressed-tensors, pack-quantized
    qweight  [K / p, N]      qweight  [K, N / p]      weight_packed      [N, K / p]
    qzeros   [G, N / p]      qzeros   [G, N / p]      weight_zero_point  [N / p, G]
    scales   [G, N]          scales   [G, N]          weight_scale       [N, G]
    g_idx    [K]                                      weight_g_idx       [K]
                                                      weight_shape       [2]

The others store one or two values per byte, and fp8 one scale per block of outputs and inputs.

Legend: N outputs, K inputs, G groups of inputs that share a scale, p = 32 / bits values per word.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from nanoengine.checkpoint.files import TensorInfo
from nanoengine.checkpoint.gguf import FLOATS
from nanoengine.checkpoint.quantization import StoredQuantization
from nanoengine.checkpoint.slots import MatrixPart, WeightSlot, ordered
from nanoengine.errors import WeightLoadError
from nanoengine.kernels.code_tables import E2M1
from nanoengine.layers.gguf_blocks import read_blocks
from nanoengine.layers.quantized_weight import QuantizedWeight, unpack_pairs

INT32 = (torch.int32,)
INTEGERS = (torch.int32, torch.int64)
BYTES = (torch.uint8,)
E4M3 = (torch.float8_e4m3fn,)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Position in an AWQ word, from the low bits -> column within a block of eight."""

ROWS_AT_ONCE = 4096
"""Rows that are unpacked together. Why: unpacked rows take several times the memory."""

Tensors = dict[str, torch.Tensor]
Load = Callable[[QuantizedWeight, int], object]
LoadBlocks = Callable[[str, torch.Tensor, int], bool]
"""Loads rows of a GGUF file: a type of `LAYOUTS`, rows [N, bytes], and the index of the first row.
Returns False if the rows must be unpacked first."""


class StoredTensor(NamedTuple):
    """One tensor of a quantized matrix.

    Attributes:
        dims: one letter per dimension, or a number: N, K and G of the legend; n and k: N and K
            counted in words; B and C: blocks of outputs and of inputs; h: half of K.
        dtypes: the allowed dtypes; (): any floating dtype.
    """

    dims: str
    dtypes: tuple[torch.dtype, ...] = ()
    optional: bool = False


class StoredFormat(ABC):
    """The base class of all formats; a subclass lists its tensors and reads them.

    Attributes:
        whole_groups: a matrix must have a multiple of the group size as inputs.
    """

    whole_groups = True

    def __init__(self, stored: StoredQuantization) -> None:
        self.stored, self.bits = stored, stored.bits

    @abstractmethod
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of a matrix by the last component of their names."""

    @abstractmethod
    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        """Reads the matrix [num_rows, num_columns] from its tensors."""

    def matrix_slots(self, name: str, matrix: MatrixPart, load: Load) -> dict[str, WeightSlot]:
        """Slots of all tensors of the matrix `name`; `load` gets this rank's part of the matrix and
        the index of its first row in the layer."""
        rows, columns = (*matrix.part, slice(None), slice(None))[:2]

        def store(weight: QuantizedWeight) -> None:
            cut = weight.part(rows, columns)
            load(cut if matrix.order is None else cut.part(matrix.order), matrix.first)

        return self.slots(name, matrix.shape, store)

    def slots(
        self,
        name: str,
        shape: tuple[int, int],
        store: Callable[[QuantizedWeight], object],
        count: int | None = None,
    ) -> dict[str, WeightSlot]:
        """Slots of all tensors of the matrix `name` [N, K]. When the last one is filled, the matrix
        is read and passed to `store`, so the tensors of few matrices are in memory at a time.

        Args:
            count: the tensors are stacks of `count` matrices, which are stored one after the other.
        """
        parts = self.tensors()
        missing, found = set(parts), Tensors()

        def fill(part: str, tensor: torch.Tensor | None = None) -> None:
            missing.remove(part)
            if tensor is not None:
                found[part] = tensor if count else tensor.unsqueeze(0)
            if missing:
                return
            for tensors in zip(*found.values(), strict=True):
                try:
                    weight = self.read(dict(zip(found, tensors, strict=True)), *shape)
                except WeightLoadError as error:
                    raise WeightLoadError(f"{name}: {error}") from error
                store(weight)
            found.clear()

        return {
            f"{name}{'_' if count else '.'}{part}": WeightSlot(
                shape=((count,) if count else ()) + self._shape(tensor.dims, *shape),
                dtypes=tensor.dtypes,
                store=partial(fill, part),
                on_missing=partial(fill, part) if tensor.optional else None,
            )
            for part, tensor in parts.items()
        }

    def _shape(self, dims: str, num_rows: int, num_columns: int) -> tuple[int, ...]:
        words, group_size = 32 // self.bits, self.stored.group_size or num_columns
        sizes = {
            "N": num_rows,
            "K": num_columns,
            "G": num_columns // group_size,
            "B": -(-num_rows // (self.stored.group_rows or num_rows)),
            "C": -(-num_columns // group_size),
            "h": num_columns // 2,
            "n": -(-num_rows // words),
            "k": -(-num_columns // words),
        }
        return tuple(sizes[dim] if dim in sizes else int(dim) for dim in dims.split())

    def _weight(
        self, unsigned: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
    ) -> QuantizedWeight:
        """Converts unsigned values [N, K] and zeros [N, G] to signed ones."""
        middle = 1 << (self.bits - 1)
        centered = None if zeros is None else (zeros - middle).float().contiguous()
        if centered is not None and not centered.any():
            centered = None
        return QuantizedWeight(
            values=(unsigned - middle).to(torch.int8).contiguous(),
            scales=scales.to(torch.float32, copy=True).contiguous(),
            zeros=centered,
            bits=self.bits,
            group_size=self.stored.group_size or unsigned.shape[1],
        )


class GPTQ(StoredFormat):
    """A word has adjacent inputs of one output.

    Zero points are stored minus one (format "gptq") or unchanged ("gptq_v2"). `g_idx` has each
    input's group. With activation order (desc_act), the inputs of a group are not adjacent, and
    columns are reordered by group here. Writers add biases of zeros to layers without biases.

    Source: AutoGPTQ, `QuantLinear.pack` of nn_modules/qlinear/qlinear_cuda.py; GPTQModel for v2.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "qweight": StoredTensor("k N", INT32),
            "qzeros": StoredTensor("G n", INT32),
            "scales": StoredTensor("G N"),
            "g_idx": StoredTensor("K", INTEGERS, optional=not self.stored.desc_act),
            "bias": StoredTensor("N", optional=True),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        if "bias" in tensors and tensors["bias"].any():
            raise WeightLoadError("the checkpoint has a nonzero bias, the model has no bias here")
        unsigned = unpack_words(tensors["qweight"].T, self.bits)[:, :num_columns]
        zeros = unpack_words(tensors["qzeros"], self.bits)[:, :num_rows].T
        weight = self._weight(unsigned, tensors["scales"].T, zeros + self.stored.zero_offset)
        return order_by_group(weight, tensors.get("g_idx"))


class AWQ(StoredFormat):
    """A word has eight adjacent outputs of one input, in the order `AWQ_ORDER`.

    Source: Lin et al., AWQ (arXiv 2306.00978); AutoAWQ, `WQLinear_GEMM.from_linear`.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "qweight": StoredTensor("K n", INT32),
            "qzeros": StoredTensor("G n", INT32),
            "scales": StoredTensor("G N"),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        positions = torch.argsort(torch.tensor(AWQ_ORDER))  # column -> position

        def rows(name: str) -> torch.Tensor:
            words = unpack_words(tensors[name], self.bits).unflatten(1, (-1, len(positions)))
            return words[:, :, positions].flatten(1)[:, :num_rows].T

        return self._weight(rows("qweight"), tensors["scales"].T, rows("qzeros"))


class PackQuantized(StoredFormat):
    """compressed-tensors, format "pack-quantized": a word has adjacent inputs; of zero points,
    adjacent outputs. Both are stored plus 2^(bits - 1).

    Source: compressed-tensors, `PackedQuantizationCompressor` and `pack_to_int32`.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        zeros = {} if self.stored.symmetric else {"weight_zero_point": StoredTensor("n G", INT32)}
        return {
            "weight_packed": StoredTensor("N k", INT32),
            "weight_scale": StoredTensor("N G"),
            "weight_shape": StoredTensor("2", INTEGERS),
            "weight_g_idx": StoredTensor("K", INTEGERS, optional=True),
            **zeros,
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        if (shape := tensors["weight_shape"].tolist()) != [num_rows, num_columns]:
            raise WeightLoadError(f"weight_shape is {shape}, expected [{num_rows}, {num_columns}]")
        unsigned = unpack_words(tensors["weight_packed"], self.bits)[:, :num_columns]
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = unpack_words(zeros.T, self.bits)[:, :num_rows].T
        weight = self._weight(unsigned, tensors["weight_scale"], zeros)
        return order_by_group(weight, tensors.get("weight_g_idx"))


class IntQuantized(StoredFormat):
    """compressed-tensors, format "int-quantized": unpacked int8 values, one scale per output.

    Source: compressed-tensors, `IntQuantizationCompressor`.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor("N K", (torch.int8,)),
            "weight_scale": StoredTensor("N 1"),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        # Why copies: the tensors may be views of the mapped file.
        return QuantizedWeight(
            values=tensors["weight"].clone(),
            scales=tensors["weight_scale"].to(torch.float32, copy=True),
            bits=8,
            group_size=num_columns,
        )


class FP8(StoredFormat):
    """e4m3 floats with one scale per block (blocks at the ends may be smaller), or with one scale
    per matrix, which older writers call `weight_scale`. Activation scales are ignored.

    Source: transformers' `FP8Linear`; AutoFP8's `FP8StaticLinear` for the older names.
    """

    whole_groups = False

    def tensors(self) -> dict[str, StoredTensor]:
        tensors = {"weight": StoredTensor("N K", E4M3)}
        if self.stored.group_rows is not None:
            return tensors | {
                "weight_scale_inv": StoredTensor("B C"),
                "activation_scale": StoredTensor("", optional=True),
            }
        names = "weight_scale_inv", "weight_scale", "activation_scale", "input_scale"
        return tensors | dict.fromkeys(names, StoredTensor("", optional=True))

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        found = [tensors[name] for name in SCALES if name in tensors]
        if len(found) != 1:
            raise WeightLoadError(f"expected one of {' and '.join(SCALES)}, got {len(found)}")
        # Why a copy: the tensor may be a view of the mapped file.
        values, scales = tensors["weight"].clone().view(torch.int8), to_finite_float32(found[0])
        if ((values & 127) == 127).any():
            raise WeightLoadError("a weight is 0x7f or 0xff, which is NaN")
        rows = self.stored.group_rows or num_rows
        size = min(self.stored.group_size or num_columns, num_columns)
        # Why smaller groups: all groups of a `QuantizedWeight` have the same size.
        group_size = math.gcd(size, num_columns)
        scales = scales.reshape(-(-num_rows // rows), -1).repeat_interleave(rows, 0)[:num_rows]
        scales = scales.repeat_interleave(size // group_size, 1)[:, : num_columns // group_size]
        return QuantizedWeight(
            values=values,
            scales=scales.contiguous(),
            bits=8,
            group_size=group_size,
            floats=True,
        )


class FloatQuantized(FP8):
    """compressed-tensors, format "float-quantized": one scale per block, output or matrix.

    Source: compressed-tensors, `FloatQuantizationCompressor`.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor("N K", E4M3),
            "weight_scale": StoredTensor("1" if self.stored.group_rows is None else "B C"),
            "input_scale": StoredTensor("1", optional=True),
        }


class NVFP4(StoredFormat):
    """compressed-tensors, format "nvfp4-pack-quantized": 4-bit floats, two per byte, the first in
    the low half. 16 inputs share an e4m3 scale, which is divided by one scale per matrix.

    Source: compressed-tensors, `NVFP4PackedCompressor`.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "weight_packed": StoredTensor("N h", BYTES),
            "weight_scale": StoredTensor("N G", E4M3),
            "weight_global_scale": StoredTensor("1"),
            "input_global_scale": StoredTensor("1", optional=True),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        scales = tensors["weight_scale"].float() / tensors["weight_global_scale"].float()
        return QuantizedWeight(
            values=unpack_pairs(tensors["weight_packed"], E2M1),
            scales=to_finite_float32(scales) / 2,  # Why 2: the table's values are doubled.
            bits=4,
            group_size=16,
            table=E2M1,
        )


class MXFP4(StoredFormat):
    """Microscaling 4-bit floats: blocks of 32 inputs share a power of two.

    Stacks of matrices are one pair of tensors. A byte has two inputs, the first in its low half;
    the stored scale s means 2 ** (s - 127).

    Source: OCP Microscaling Formats (MX) v1.0, section 5; the checkpoints of gpt-oss.
    """

    def tensors(self) -> dict[str, StoredTensor]:
        return {
            "blocks": StoredTensor("N G 16", BYTES),
            "scales": StoredTensor("N G", BYTES),
        }

    def read(self, tensors: Tensors, num_rows: int, num_columns: int) -> QuantizedWeight:
        blocks, scales = tensors["blocks"].flatten(1), tensors["scales"]
        if (scales == 255).any():
            raise WeightLoadError("a scale is 255, which is NaN")
        return QuantizedWeight(
            values=unpack_pairs(blocks, E2M1),
            # Why 128: the table's values are doubled.
            scales=torch.tensor([2.0 ** (s - 128) for s in range(256)])[scales.long()],
            bits=4,
            group_size=32,
            table=E2M1,
        )


class GGUF:
    """Blocks of ggml's types: a matrix is one tensor of rows of bytes, with its own type. It
    depends on no other tensor, so a few rows are read at a time."""

    whole_groups = True

    def __init__(self, stored: StoredQuantization) -> None:
        self.stored, self.types = stored, stored.types

    def matrix_slots(
        self, name: str, matrix: MatrixPart, load: Load, load_blocks: LoadBlocks | None = None
    ) -> dict[str, WeightSlot]:
        """The slot of the matrix `name`; see `StoredFormat.matrix_slots`. Rows are passed to
        `load_blocks` as they are stored, and to `load` if it returns False."""
        rows, columns = (*matrix.part, slice(None), slice(None))[:2]
        is_whole = columns.indices(matrix.shape[1]) == (0, matrix.shape[1], 1)

        def store(stored: torch.Tensor) -> None:
            stored = ordered(stored, matrix.order)
            for start in range(0, len(stored), ROWS_AT_ONCE):
                blocks = self.types[name], stored[start : start + ROWS_AT_ONCE]
                first = matrix.first + start
                if not (is_whole and load_blocks and load_blocks(*blocks, first)):
                    load(read_blocks(*blocks).part(slice(None), columns), first)

        slot = WeightSlot(shape=matrix.shape, part=(rows,), dtypes=BYTES, store=store)
        return {f"{name}.weight": slot}


def accept_blocks(
    slots: Mapping[str, WeightSlot], stored: Mapping[str, TensorInfo]
) -> dict[str, WeightSlot]:
    """Returns the slots; slots for floats also accept quantized blocks if the file has blocks."""
    found: dict[str, WeightSlot] = {}
    for name, slot in slots.items():
        kind = stored[name].dtype if name in stored else "F32"
        if kind not in FLOATS and not slot.dtypes and not slot.pieces_only:
            slot = as_floats(slot, kind)
        found[name] = replace(slot, pieces=accept_blocks(slot.pieces, stored))
    return found


def as_floats(slot: WeightSlot, type: str) -> WeightSlot:
    """Adapts the slot of a float tensor to a GGUF file that stores it in this quantized type."""
    rows, *columns = slot.part or (slice(None),)
    is_matrix = len(slot.shape) == 2

    def store(stored: torch.Tensor) -> None:
        floats = torch.empty(len(stored), slot.shape[-1])
        for start in range(0, len(stored), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            floats[part] = read_blocks(type, stored[part]).dequantized()
        slot.store(floats[:, *columns] if is_matrix else floats.view(slot.shape)[slot.part])

    return replace(slot, part=(rows,) if is_matrix else (), dtypes=BYTES, store=store)


FORMATS: dict[str, type[StoredFormat] | type[GGUF]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "pack-quantized": PackQuantized,
    "int-quantized": IntQuantized,
    "float-quantized": FloatQuantized,
    "nvfp4-pack-quantized": NVFP4,
    "fp8": FP8,
    "mxfp4": MXFP4,
    "gguf": GGUF,
}
"""`StoredQuantization.format` -> the class."""


SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales of fp8 weights."""


def to_finite_float32(scales: torch.Tensor) -> torch.Tensor:
    """Converts scales to float32.

    Raises:
        WeightLoadError: one is NaN or infinite.
    """
    wide = scales.float()
    if not wide.isfinite().all():
        raise WeightLoadError("a scale is NaN or infinite")
    return wide


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks int32 [R, C] to unsigned values, [R, C * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)


def order_by_group(weight: QuantizedWeight, groups: torch.Tensor | None) -> QuantizedWeight:
    """Reorders the weight's columns by their groups [K], unless they are in this order already.

    Raises:
        WeightLoadError: the groups do not have equal sizes.
    """
    size, num_columns = weight.group_size, weight.values.shape[1]
    contiguous = torch.arange(num_columns) // size
    if groups is None or torch.equal(groups.long(), contiguous):
        return weight
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], contiguous):
        raise WeightLoadError(f"g_idx does not have {num_columns // size} groups of {size} inputs")
    return replace(weight, values=weight.values[:, order].contiguous(), order=order)
