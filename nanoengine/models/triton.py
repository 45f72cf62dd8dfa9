"""TritonKernels: the kernel set of a GPU, in Triton; matrix products use cuBLAS.

In plain torch every operation launches a kernel that reads and writes whole tensors. Here a norm or
a gate is one kernel, which saves that memory traffic. This file chooses grids, widths and warps;
the arithmetic is in `kernels/triton_layers.py`. `layers.kernels.Kernels` is the reference
implementation; tests/layers/test_triton_ops.py compares the two.

The kernels have run in Triton's interpreter and been compiled ahead of time for sm_80, sm_89 and
sm_90. They have not run on a GPU yet.

`triton_experts.py`, `triton_linear_attention.py` and `triton_mamba.py` in `layers/` are imported
only for models that have such layers.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.errors import ConfigError
from nanoengine.kernels import triton_layers as kernels
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2
from nanoengine.layers.kernels import GATES, Factory, Kernels, LinearMethod
from nanoengine.layers.triton_linear import DTYPES, TritonLinear
from nanoengine.models.decoder import CausalLM


class TritonKernels(Kernels):
    """Norms and gates that read and write each element once.

    Results differ from `Kernels` only in the order of the sums of norms and in the last bit of
    exponentials. With a deterministic backend all linear layers use one GEMM kernel with a fixed
    tile.

    Raises:
        ConfigError: the kernels don't support the dtype.
    """

    def __init__(self, attention: AttentionBackend, *, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ConfigError(
                f"the Triton kernels support float16, bfloat16 and float32, got {dtype}: set dtype,"
                " or attention_backend='naive'"
            )
        super().__init__(attention)
        self.deterministic = getattr(attention, "deterministic", False)
        if self.deterministic:
            self.linear = TritonLinear

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """With a residual, in place."""
        num_tokens, size = x.shape
        out, added, add = x, residual, True
        if added is None:
            out, added, add = x.new_empty(num_tokens, size), x, False
        assert x.stride(1) == added.stride(1) == 1, "rows must be contiguous"
        launch(
            kernels.rms_norm_kernel, (num_tokens,),
            Constants(
                X_ROW=x.stride(0), RESIDUAL_ROW=added.stride(0), OUT_ROW=out.stride(0), SIZE=size,
                WIDTH=next_power_of_2(size), EPS=eps, ADD=add, num_warps=norm_warps(size),
            ),
            out, x, added, weight,
        )  # fmt: skip
        return out, added

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        assert activation in GATES, activation
        assert gate_up.stride(1) == 1, "rows must be contiguous"
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(num_tokens, size)
        width = min(GATE_WIDTH, next_power_of_2(size))
        row = gate_up.stride(0)
        launch(
            kernels.gate_kernel, (num_tokens, cdiv(size, width)),
            Constants(ROW=row, SIZE=size, WIDTH=width, ACTIVATION=activation, num_warps=4),
            out, gate_up,
        )  # fmt: skip
        return out

    def quantized_linear_factory(self, quantization: Quantization | None = None) -> Factory | None:
        if self.deterministic:
            return None
        from nanoengine.layers.triton_quantized import make_triton_linear

        return make_triton_linear

    def fuse(self, model: CausalLM) -> None:
        """Replaces mixtures of experts by grouped GEMMs, and the rules of recurrent layers by their
        kernels."""
        if model.config.moe is not None:
            from nanoengine.layers.triton_experts import TritonExperts
            from nanoengine.models.moe import moe_layers

            for mlp in moe_layers(model):
                if TritonExperts.supports(mlp.experts):
                    mlp.routed = TritonExperts(mlp.gate, mlp.experts)
        if model.config.states is not None:
            from nanoengine.layers import triton_linear_attention
            from nanoengine.models.linear_attention import GatedDeltaNet

            for mixer in model.recurrent_layers:
                if isinstance(mixer, GatedDeltaNet):
                    kernel = triton_linear_attention.TritonDelta(mixer)
                    decays = mixer.decay.a_log, mixer.decay.dt_bias
                    mixer.gates_fn = functools.partial(triton_linear_attention.delta_gates, *decays)
                    mixer.norm_fn = functools.partial(
                        triton_linear_attention.gated_rms_norm, mixer.norm.weight
                    )
                elif mixer.plan.kind == "mamba":
                    from nanoengine.layers.triton_mamba import TritonMamba

                    kernel = TritonMamba(mixer)
                    mixer.gates_fn, mixer.gated_norm_fn = kernel.gates, kernel.gate_and_norm
                else:
                    kernel = triton_linear_attention.TritonConv(mixer.conv)
                mixer.decode_fn, mixer.prefill_fn = kernel.step, kernel.scan
                mixer.graph_safe = True
        methods = [module for module in model.modules() if isinstance(module, LinearMethod)]
        kinds = Counter(method.product or "floats, in torch" for method in methods)
        self.products = tuple(f"{count} matrices: {kind}" for kind, count in kinds.items())


GATE_WIDTH = 1024
"""Elements per program of `gate_kernel`: 8 per thread, 16 bytes of a 16-bit dtype."""


def norm_warps(size: int) -> int:
    """Warps that share a row of `size` elements.

    Why 256 elements per warp: 8 per thread are one load of 16 bytes. More than 16 warps would spend
    more time on synchronization than on reading.
    """
    return min(max(next_power_of_2(size) // 256, 1), 16)
