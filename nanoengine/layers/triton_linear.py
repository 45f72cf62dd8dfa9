"""Matrix multiplication by our own kernel: for gates of few rows, or for all products.

    GatedLinear    the default on a GPU: gate and up projection, activation and product are one
                   kernel for up to 64 rows; everything else is cuBLAS
    TritonLinear   `deterministic=True`: one configuration for every number of tokens

cuBLAS picks its algorithm by the number of rows, and with it the order of a sum, so the same token
may get other bits in another batch. With TritonLinear a row's bits follow from the row.

Both have run in Triton's interpreter and been compiled ahead of time; neither has run on a GPU yet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nanoengine.attention import base
from nanoengine.kernels import triton_gemm
from nanoengine.kernels.launch import Constants, cdiv, launch
from nanoengine.layers.kernels import GATES, Kernels, UnquantizedLinear

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the kernels compute; float64 takes plain torch."""

arch_of = functools.cache(base.arch_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """`rows`, `columns` and `inputs` of a tile, warps, and tiles in flight."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


@functools.cache
def gemm_config(arch: int, out_features: int, gated: bool, dtype: torch.dtype) -> GemmConfig:
    """Tile sizes for a GPU of compute capability `arch` and one layer's shape.

    Why never by the number of rows: that is the point. 64 rows are a compromise between a decode,
    whose time is that of reading the weights, and a prompt, whose time is arithmetic. Narrow tiles
    where there are few outputs: a decode needs as many programs as the GPU has multiprocessors.
    """
    if dtype == torch.float32:
        return GemmConfig(rows=32, columns=32, inputs=32, warps=4, stages=2)
    columns = 128 if out_features >= 16384 else 64
    roomy = arch in (80, 90, 100, 103)
    return GemmConfig(
        rows=64,
        columns=columns // 2 if gated else columns,
        inputs=64,
        warps=4,
        stages=4 if roomy else 3,
    )


def gate_config(arch: int, rows: int, out_features: int, dtype: torch.dtype) -> GemmConfig | None:
    """Tile sizes for a gated product of so many rows; None: cuBLAS and a kernel for the gate.

    Up to 64 rows, one tile, most of the time goes into reading the weights and starting kernels.
    With more rows inputs and weights move between caches as often as they are multiplied, which
    needs tiles as large as those of cuBLAS; so does float32, without tensor cores.
    """
    if rows > 64 or dtype == torch.float32:
        return None
    return gemm_config(arch, out_features, True, dtype)


class GatedLinear(UnquantizedLinear):
    """A weight of the model's dtype, float16 or bfloat16; few rows take one kernel for gates."""

    product = "floats, by torch; gates of up to 64 rows by Triton"

    def apply_gated(self, x: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
        config = gate_config(arch_of(x.device), len(x), len(self.weight) // 2, x.dtype)
        if config is None:
            return super().apply_gated(x, activation, kernels)
        return multiply(x, self.weight, None, activation, config)


class TritonLinear(UnquantizedLinear):
    """A weight of the model's dtype; row-wise products, and gates in the same kernel.

    The attention backend has refused dtypes that the kernel doesn't compute.
    """

    product = "floats, by Triton with one tile"

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        config = gemm_config(arch_of(x.device), len(self.weight), False, x.dtype)
        return multiply(x, self.weight, bias, "", config)

    def apply_gated(self, x: torch.Tensor, activation: str, kernels: Kernels) -> torch.Tensor:
        config = gemm_config(arch_of(x.device), len(self.weight) // 2, True, x.dtype)
        return multiply(x, self.weight, None, activation, config)

    @staticmethod
    def bmm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """out [H, T, O] = x [H, T, I] @ weight [H, I, O], in which an output's inputs are side by
        side."""
        heads, rows, inputs = x.shape
        outputs = weight.shape[2]
        assert weight.stride()[1:] == (1, inputs) and x.stride(2) == out.stride(2) == 1
        config = gemm_config(arch_of(x.device), outputs, False, x.dtype)
        of_heads = out.stride(0), x.stride(0), weight.stride(0)
        launch(
            triton_gemm.gemm_kernel,
            (cdiv(rows, config.rows), cdiv(outputs, config.columns), heads),
            gemm_constants(
                x.stride(1), out.stride(1), inputs, outputs, False, "", config, of_heads
            ),
            out, x, weight, weight, rows,
        )  # fmt: skip
        return out


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    config: GemmConfig,
) -> torch.Tensor:
    """x [..., I] @ weight.T + bias; with an activation act(gate) * up of the outputs' halves."""
    assert not activation or activation in GATES, activation
    assert weight.is_contiguous(), "the kernel reads whole rows"
    in_features = x.shape[-1]
    out_features = len(weight) // 2 if activation else len(weight)
    rows = x.reshape(-1, in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((len(rows), out_features), dtype=x.dtype, device=x.device)
    grid = (cdiv(len(rows), config.rows), cdiv(out_features, config.columns))
    launch(
        triton_gemm.gemm_kernel, grid,
        gemm_constants(
            rows.stride(0), out_features, in_features, out_features, bias is not None,
            activation, config,
        ),
        out, rows, weight, weight if bias is None else bias, len(rows),
    )  # fmt: skip
    return out.view(*x.shape[:-1], out_features)


@functools.cache
def gemm_constants(
    row: int, out_row: int, inputs: int, outputs: int, biased: bool, activation: str,
    config: GemmConfig, heads: tuple[int, ...] | None = None,
) -> Constants:  # fmt: skip
    """Of `gemm_kernel`."""
    return Constants(
        X_ROW=row, OUT_ROW=out_row, HEADS=heads, IN=inputs, OUT=outputs,
        M=config.rows, N=config.columns, K=config.inputs,
        BIAS=biased, ACTIVATION=activation, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
