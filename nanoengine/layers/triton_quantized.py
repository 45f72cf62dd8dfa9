"""Linear layers whose weights stay in 4 or 8 bits on a GPU, multiplied by float activations.

Loaded by `TritonKernels` for a checkpoint that is stored quantized. Not held so are experts, layers
of other formats, and matrices whose groups the kernel's tiles don't divide: they are floats.

The product has run in Triton's interpreter and been compiled ahead of time; it has not run on a GPU
yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from nanoengine.checkpoint.quantization import Quantization, StoredQuantization
from nanoengine.kernels import triton_quantized
from nanoengine.kernels.launch import cdiv, constants, launch
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.quantized import QuantizedLinear, quantized_linears
from nanoengine.layers.quantized_weight import QuantizedWeight, codes_of

HELD = ("gptq", "awq", "pack-quantized", "int-quantized", "fp8", "float-quantized")
"""Formats whose weights the kernel multiplies."""


def held_linears(
    stored: StoredQuantization, other: Callable[[str], LinearMethod]
) -> Callable[[str], LinearMethod]:
    """What makes the method of a linear layer, given its full name: `other` does for layers that
    are floats, or become floats."""
    quantization = Quantization(bits=stored.bits, activations="float", stored=stored)
    held = quantized_linears(quantization, other, TritonQuantizedLinear)

    def method(name: str) -> LinearMethod:
        own = stored.of(name)
        is_held = own is not None and own.format in HELD and ".experts." not in name
        return (held if is_held else other)(name)

    return method


class TritonQuantizedLinear(QuantizedLinear):
    """A weight in 4 or 8 bits and float32 scales, or in floats if the kernel has no tile for it."""

    def create(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        super().create(shape, dtype, torch.device("cpu"))  # where the stored form is read
        self.dtype, self.device, self.tile = dtype, device, 0
        self.register_buffer("weight", None)

    def pack(self, weight: QuantizedWeight) -> None:
        assert weight.form[2:] == (None, (), weight.floats, False, False, False), weight.form
        device, num_inputs = self.device, weight.values.shape[1]
        if self.order is not None:
            self.order = self.order.to(device)
        self.form = "e4m3" if weight.floats else f"int{weight.bits}"
        width = num_inputs // 2 if weight.bits == 4 else num_inputs
        sizes = (64, 32, 16)
        fits = [k for k in sizes if not (width % k or weight.group_size % k)]
        if not fits:
            self.weight = weight.dequantized().to(device, self.dtype)
            return
        self.tile, self.group_size, codes = fits[0], weight.group_size, weight.values
        if weight.bits == 4:
            low, high = codes_of(weight).chunk(2, 1)
            codes = low | (high << 4)
        self.weight = codes.contiguous().to(device)
        self.scales = weight.scales.T.contiguous().to(device)
        self.zeros = None if weight.zeros is None else weight.zeros.T.contiguous().to(device)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.tile:
            return F.linear(x, self.weight, bias)
        num_rows, num_outputs, num_inputs = len(x), self.out_features, self.in_features
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
        rows, columns, warps = tile_of(num_rows, num_outputs, x.dtype, self.form)
        grid = cdiv(num_rows, rows), cdiv(num_outputs, columns)
        launch(
            triton_quantized.quantized_gemm_kernel, grid,
            constants(
                X_ROW=x.stride(0), IN=num_inputs, OUT=num_outputs, GROUP=self.group_size,
                M=rows, N=columns, K=self.tile,
                FORM=self.form, ZEROS=self.zeros is not None, BIAS=bias is not None,
                num_warps=warps, num_stages=3,
            ),
            out, x, self.weight, self.scales, self.scales if self.zeros is None else self.zeros,
            self.scales if bias is None else bias, num_rows,
        )  # fmt: skip
        return out


def tile_of(num_rows: int, num_outputs: int, dtype: torch.dtype, form: str) -> tuple[int, int, int]:
    """Rows and outputs of a program, and its warps.

    A decode's time is that of reading the weights: few rows, and outputs so few that all of the
    GPU's multiprocessors have a program. A prompt's is arithmetic: the larger a tile, the less
    often a weight is widened. int4 has two tiles of inputs at a time: 128 outputs would spill.
    """
    if dtype == torch.float32:
        return 16, 32, 4
    if num_rows <= 64:
        rows, columns = 16 if num_rows <= 16 else 64, 64 if num_outputs >= 16384 else 32
        return rows, columns, 4 if rows == 16 else 8
    return 128, (64 if form == "int4" else 128), 8
