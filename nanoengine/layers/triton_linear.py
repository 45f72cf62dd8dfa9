"""TritonLinear: a GEMM kernel of our own, for `deterministic=True`.

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
        (out_features, in_features), config = self.weight.shape, self.config(x, len(self.weight))
        assert self.weight.is_contiguous(), "the kernel reads whole rows"
        rows = x.reshape(-1, in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty((len(rows), out_features), dtype=x.dtype, device=x.device)
        launch(
            triton_gemm.gemm_kernel,
            (cdiv(len(rows), config.rows), cdiv(out_features, config.columns)),
            gemm_constants(
                rows.stride(0), in_features, out_features, bias is not None, config
            ),
            out, rows, self.weight, self.weight if bias is None else bias, len(rows),
        )  # fmt: skip
        return out.view(*x.shape[:-1], out_features)

    @staticmethod
    def config(x: torch.Tensor, out_features: int) -> GemmConfig:
        """Tile sizes for x times a weight with `out_features` outputs."""
        return gemm_config(arch_of(x.device), out_features, x.dtype)


@functools.cache
def gemm_constants(
    row: int, inputs: int, outputs: int, biased: bool, config: GemmConfig
) -> Constants:  # fmt: skip
    """The constants of `gemm_kernel`."""
    return Constants(
        X_ROW=row, IN=inputs, OUT=outputs,
        M=config.rows, N=config.columns, K=config.inputs,
        BIAS=biased, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
