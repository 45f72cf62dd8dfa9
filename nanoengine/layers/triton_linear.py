"""TritonLinear: a GEMM kernel of our own, for `deterministic=True`. `triton_quantized.py` uses the
same kernel.

cuBLAS chooses its algorithm, and with it the order of a sum, by the number of rows, so the result
of a token may have other bits in another batch. TritonLinear has one tile size for all numbers of
rows, so a row's result depends only on the row.

It has run in Triton's interpreter and been compiled ahead of time; it has not run on a GPU yet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nanoengine.attention import base
from nanoengine.kernels import triton_gemm
from nanoengine.kernels.launch import Constants, cdiv, launch
from nanoengine.layers.kernels import UnquantizedLinear

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that the Triton kernels support."""

arch_of = functools.cache(base.arch_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """Rows, columns (outputs) and inputs per tile, warps, and pipeline stages."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


@functools.cache
def gemm_config(arch: int, out_features: int, dtype: torch.dtype) -> GemmConfig:
    """Returns tile sizes for a GPU of compute capability `arch` and a layer's shape.

    Why they never depend on the number of rows: results must not. 64 rows are a compromise between
    a decode, which is bound by reading weights, and a prefill, which is bound by arithmetic. Tiles
    are narrow for few outputs, because a decode needs at least one program per multiprocessor.
    """
    if dtype == torch.float32:
        return GemmConfig(rows=32, columns=32, inputs=32, warps=4, stages=2)
    columns = 128 if out_features >= 16384 else 64
    stages = 4 if arch in (80, 90, 100, 103) else 3
    return GemmConfig(rows=64, columns=columns, inputs=64, warps=4, stages=stages)


class TritonLinear(UnquantizedLinear):
    """A weight of the model's dtype, with a GEMM whose rows are independent of each other.

    The attention backend has rejected dtypes that the kernel doesn't support.
    """

    product = "floats, in Triton with one tile size"

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out_features, in_features = self.weight.shape
        assert self.weight.is_contiguous(), "the kernel reads whole rows"
        config = gemm_config(arch_of(x.device), out_features, x.dtype)
        out = gemm(x.reshape(-1, in_features), self.weight, bias, config)
        return out.view(*x.shape[:-1], out_features)


def gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: GemmConfig, *,
    form: str = "", group: int = 1,
    scales: torch.Tensor | None = None, zeros: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, in_features] times a weight, + bias: [T, out_features]. The form of the weight, its
    group size, scales and zeros are as in `triton_gemm.products`."""
    x, outputs = x if x.stride(1) == 1 else x.contiguous(), len(weight)
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    has_zeros, biased = zeros is not None, bias is not None
    launch(
        triton_gemm.gemm_kernel, (cdiv(len(x), config.rows), cdiv(outputs, config.columns)),
        gemm_constants(x.stride(0), x.shape[1], outputs, group, form, has_zeros, biased, config),
        out, x, weight, weight if scales is None else scales, weight if zeros is None else zeros,
        weight if bias is None else bias, len(x),
    )  # fmt: skip
    return out


@functools.cache
def gemm_constants(
    row: int, inputs: int, outputs: int, group: int, form: str, has_zeros: bool, biased: bool,
    config: GemmConfig,
) -> Constants:  # fmt: skip
    """The constants of `gemm_kernel`."""
    return Constants(
        X_ROW=row, IN=inputs, OUT=outputs, GROUP=group,
        M=config.rows, N=config.columns, K=config.inputs,
        FORM=form, ZEROS=has_zeros, BIAS=biased, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
