"""Linear layers with 4-bit or 8-bit weights on a GPU, as the checkpoint stores them or quantized
while they load.

    TritonQuantizedLinear   weights are multiplied by float activations, in Triton
    E4M3Linear              fp8 weights by fp8 activations, on GPUs that support it; activations are
                            quantized per token

`TritonKernels` imports it for a model that has such weights, or such experts (`triton_experts.py`).
Other formats are dequantized, and so are matrices whose groups are not a multiple of the kernel's
tiles.

The kernels have run in Triton's interpreter and been compiled ahead of time; they have not run on a
GPU yet.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from nanoengine.checkpoint.slots import MatrixPart, WeightSlot
from nanoengine.kernels import triton_quantized
from nanoengine.kernels.code_tables import E2M1
from nanoengine.kernels.launch import Constants, launch, next_power_of_2
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import GGUF, StoredFormat
from nanoengine.layers.quantized_weight import QuantizedWeight, codes_of, scales_as_floats
from nanoengine.layers.triton_linear import GemmConfig, arch_of, gemm

TYPES = {"Q4_0", "Q8_0"}
"""Types of GGUF files that the kernel supports."""


def make_triton_linear(
    name: str, *, stored: StoredFormat | GGUF | None = None, **options: Any
) -> LinearMethod | None:
    """The `make_quantized` of a GPU for `quantized_linears`; returns None if the kernel does not
    support the stored format."""
    kind = TritonQuantizedLinear
    if stored is not None:
        scheme = stored.stored
        # Why one type: a layer with several types would need several launches.
        types = {scheme.types.get(matrix, "") for matrix in scheme.matrices(name)}
        if scheme.format == "gguf" and not (len(types) == 1 and types <= TYPES):
            return None
        if scheme.activations == "e4m3" and ".experts." not in name:
            kind = E4M3Linear
    return kind(name, stored=stored, **options)


class TritonQuantizedLinear(QuantizedLinear):
    """A weight in 4 or 8 bits with float32 scales, or in floats if the kernel has no tile size for
    it.

    Attributes:
        cuts_groups: this rank's inputs are a part of the matrix, which may split groups.
    """

    zeros: torch.Tensor | None
    cuts_groups = False

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        if self.stored is not None and shape[1] % (self.group_size or 1):
            self.group_size = None  # Why: a rank's part of stored groups may be of any size.
        super().create(shape, dtype, torch.device("cpu"))  # where the stored form is read
        self.storage, self.tile = (dtype, device), 0
        self.dtype, self.device = self.storage
        self.register_buffer("weight", None)

    @property
    def is_loaded(self) -> bool:
        return self.weight is not None or len(self.pieces) > 0

    def load(self, weight: torch.Tensor, first: int = 0, bits: int | None = None) -> None:
        # Why: a GPU quantizes to 8 bits faster, but `quantize_with_mins` runs on the CPU.
        super().load(weight.to(self.device) if self.bits == 8 else weight, first, bits)

    def weight_slot(self, name: str, matrix: MatrixPart) -> WeightSlot:
        """The slot of this rank's part of a matrix, which may split groups."""
        rows, columns = (*matrix.part, slice(None), slice(None))[:2]
        start, stop, _ = columns.indices(matrix.shape[1])
        if self.stored is None or (start, stop) == (0, matrix.shape[1]):
            return super().weight_slot(name, matrix)
        self.cuts_groups = True

        def load(weight: QuantizedWeight, first: int) -> None:
            self.load_quantized(cut_inputs(weight, start, stop), first)

        pieces = self.stored.matrix_slots(name, matrix._replace(part=(rows,)), load)
        slot = LinearMethod.weight_slot(self, name, matrix)
        return replace(slot, pieces=pieces, pieces_only=True)

    def pack(self, weight: QuantizedWeight) -> None:
        weight = with_zeros(weight)
        table = weight.table and E2M1
        assert weight.form[2:] == (None, table, weight.floats, *[False] * 4), weight.form
        if self.order is not None:
            self.order = self.order.to(self.device)
        self.form = "e4m3" if weight.floats else "e2m1" if table else f"int{weight.bits}"
        self.tile, self.group_size = tile_inputs(weight), weight.group_size
        self.product = f"{self.form}, dequantized within a Triton GEMM" if self.tile else ""
        if not self.tile:
            self.weight = weight.dequantized().to(self.device, self.dtype)
            return
        self.weight = self.codes(weight).to(self.device)
        self.scales = weight.scales.T.contiguous().to(self.device)
        self.zeros = None if weight.zeros is None else weight.zeros.T.contiguous().to(self.device)

    def codes(self, weight: QuantizedWeight) -> torch.Tensor:
        """The values in the layout of the kernel: two 4-bit codes per byte."""
        if weight.bits == 8:
            return weight.values.contiguous()
        low, high = codes_of(weight).chunk(2, 1)
        return low | (high << 4)

    def replace(self, weight: QuantizedWeight, first: int) -> None:
        if self.pieces:
            super().replace(weight, first)
            return
        weight, rows = with_zeros(weight), slice(first, first + len(weight.values))
        if not self.tile:
            self.weight[rows].copy_(weight.dequantized())
            return
        self.weight[rows].copy_(self.codes(weight))
        self.scales[:, rows].copy_(weight.scales.T)
        if self.zeros is not None:
            self.zeros[:, rows].copy_(weight.zeros.T)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.pieces:
            return super().matmul(x, bias)
        if not self.tile:
            return F.linear(x, self.weight, bias)
        tile = tile_of(len(x), self.out_features, x.dtype, self.form, self.tile)
        return gemm(
            x, self.weight, bias, tile, form=self.form, group=self.group_size,
            scales=self.scales, zeros=self.zeros,
        )  # fmt: skip


class E4M3Linear(TritonQuantizedLinear):
    """An e4m3 weight with one scale per output, times e4m3 activations with one scale per token.

    Only for bfloat16 on GPUs with fp8 GEMMs, sm_89 and later, and only for matrices whose inputs
    are not split over ranks, because with one activation scale per rank, results would depend on
    the number of ranks. Other layers use float activations.

    Source: torch's ScaledBlas.cpp: sizes must be multiples of 16, and all of these GPUs support
    row-wise scales. It supports block scales only on sm_90, in a layout that differs between its
    two functions.
    """

    def pack(self, weight: QuantizedWeight) -> None:
        super().pack(weight)
        outputs, inputs = weight.values.shape
        by_row = weight.floats and weight.group_size == inputs and not self.cuts_groups
        is_supported = self.dtype == torch.bfloat16 and arch_of(self.device) >= 89
        if by_row and is_supported and not (outputs % 16 or inputs % 16):
            self.form, self.weight = "e4m3 by e4m3", self.weight.view(torch.float8_e4m3fn)
            self.product = "e4m3 by e4m3, torch._scaled_mm"

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.form != "e4m3 by e4m3":
            return super().matmul(x, bias)
        codes, scales = e4m3_rows(x)
        return torch._scaled_mm(
            codes, self.weight.t(), scales, self.scales, bias=bias, out_dtype=x.dtype
        )


def e4m3_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [T, K] -> (codes e4m3 [T, K], scales float32 [T, 1]), with x about codes *
    scales.

    Each token has its own scale, its largest magnitude / 448, so a token's result does not depend
    on the rest of the batch.
    """
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    width = next_power_of_2(size)
    launch(
        triton_quantized.e4m3_rows_kernel, (num_rows,),
        Constants(
            X_ROW=x.stride(0), SIZE=size, WIDTH=width, num_warps=min(max(width // 512, 1), 16)
        ),
        codes, scales, x,
    )  # fmt: skip
    return codes, scales


def cut_inputs(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """Selects a rank's inputs of a weight. If a group is split, all groups become smaller. If
    inputs are reordered, each gets its own scale, for which the kernel has no tile size."""
    size, order = weight.group_size, weight.order
    if size < weight.values.shape[1]:
        unit = 1 if order is not None else math.gcd(size, start, stop)
        columns = slice(None) if order is None else torch.argsort(order)
        scales, zeros = (
            None if tensor is None else tensor.repeat_interleave(size // unit, 1)[:, columns]
            for tensor in (weight.scales, weight.zeros)
        )
        weight = replace(
            weight, values=weight.values[:, columns], scales=scales, zeros=zeros, group_size=unit,
            order=None,
        )  # fmt: skip
    return weight.part(slice(None), slice(start, stop))


def with_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """Converts a weight of `quantize_with_mins` for the kernel: float zero points instead of mins,
    and values of 5 or 6 bits in one byte each. Returns other weights unchanged."""
    if weight.mins is None or weight.factors is None:
        return weight
    scales = scales_as_floats(weight.scales, weight.factors)
    mins = scales_as_floats(weight.mins, weight.min_factors)
    # Why: in a group with the scale 0 all values are 0, and all weights are -min.
    no_scale, lowest = scales == 0, 8 if weight.bits == 4 else 0
    return replace(
        weight, values=weight.values - lowest, scales=torch.where(no_scale, mins, scales),
        zeros=torch.where(no_scale, 1.0, mins / scales) - lowest, lowest=None,
        bits=4 if lowest else 8, mins=None, factors=None, min_factors=None,
    )  # fmt: skip


def tile_inputs(weight: QuantizedWeight) -> int:
    """Inputs per tile; 0: no supported number divides both the group size and the number of
    inputs."""
    width = weight.values.shape[1] // (2 if weight.bits == 4 else 1)
    sizes = [k for k in (64, 32, 16) if not (width % k or weight.group_size % k)]
    return sizes[0] if sizes else 0


def tile_of(
    num_rows: int, num_outputs: int, dtype: torch.dtype, form: str, inputs: int
) -> GemmConfig:
    """Returns tile sizes for a weight in this form, with `inputs` inputs per tile.

    A decode is bound by reading weights: tiles have few rows, and few enough outputs that all
    multiprocessors have a program. Each has 14 KiB of 8-bit weights in flight, which a memory of
    3 TB/s delivers to one of 132 multiprocessors within 0.6 us. A prefill is bound by arithmetic:
    the larger a tile, the less often a weight is dequantized. 4-bit weights are read as two tiles
    of inputs at a time, and 128 outputs would spill registers.
    """
    columns = 64 if num_outputs >= 16384 else 32
    if dtype == torch.float32:
        return GemmConfig(rows=16, columns=32, inputs=inputs, warps=4, stages=3)
    if num_rows <= 16:
        return GemmConfig(rows=16, columns=columns, inputs=inputs, warps=4, stages=8)
    if num_rows <= 64:
        return GemmConfig(rows=64, columns=columns, inputs=inputs, warps=8, stages=3)
    columns = 128 if form in ("int8", "e4m3") else 64
    return GemmConfig(rows=128, columns=columns, inputs=inputs, warps=8, stages=3)
