"""TritonExperts: all experts of a step in three launches, without waiting for the host.

The readable form is `Experts`, which waits for the number of rows of each expert and calls them one
by one. Put in its place by `TritonKernels.fuse` once the weights are loaded. This file sorts rows
and chooses grids and tiles; the arithmetic is in `kernels/triton_experts.py`.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from nanoengine.kernels import triton_experts as kernels
from nanoengine.layers.kernels import LinearMethod, UnquantizedLinear
from nanoengine.layers.moe import Experts, Router
from nanoengine.layers.triton_linear import DTYPES, arch_of, gemm_config

ADDED_WIDTH = 1024
"""Elements of a token that one program adds up: 8 a thread, 16 bytes of a 16-bit dtype."""


class TritonExperts:
    """Called with hidden states [T, hidden_size]; returns what the experts add to them.

    Attributes:
        graph_safe: nothing here waits for the host.
    """

    graph_safe = True

    @staticmethod
    def takes(experts: Experts) -> bool:
        """Whether the kernels compute them: floats of a dtype that they multiply."""
        methods = [m for each in experts.experts for m in (each.gate_up, each.down)]
        return all(
            isinstance(method, UnquantizedLinear) and method.weight.dtype in DTYPES
            for method in methods
        )

    def __init__(self, router: Router, experts: Experts) -> None:
        all_of_them = list(experts.experts)
        self.router, self.all_reduce = router, experts.all_reduce
        self.activation = all_of_them[0].activation
        self.gate_up = stacked([each.gate_up for each in all_of_them])
        self.down = stacked([each.down for each in all_of_them])
        self.gate_up_bias = experts.gate_up_bias
        self.down_bias = experts.down_bias if experts.shard.rank == 0 else None
        self.edges = torch.arange(len(all_of_them) + 1, device=self.down.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):  # the last layer, in a step that is only a chunk of a prompt
            return torch.empty_like(x)
        weights, ids = self.router(x)
        sorted_ids, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_ids, self.edges, out_int32=True)
        gated = self._multiply(x, self.gate_up, self.gate_up_bias, order, starts, self.activation)
        results = self._multiply(gated, self.down, self.down_bias, order, starts, "")
        out = torch.empty_like(x)
        size, taken = x.shape[1], ids.shape[1]
        width = min(ADDED_WIDTH, triton.next_power_of_2(size))
        kernels.add_experts_kernel[(len(x), triton.cdiv(size, width))](
            out, results, weights.contiguous(), SIZE=size, WIDTH=width, TAKEN=taken, num_warps=4
        )
        return self.all_reduce(out)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        order: torch.Tensor,
        starts: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """Rows of tokens with an activation, else sorted rows; see `expert_gemm_kernel`."""
        experts, rows, in_features = weight.shape
        outputs = rows // 2 if activation else rows
        config = gemm_config(arch_of(x.device), outputs, bool(activation), x.dtype)
        out = torch.empty((len(order), outputs), dtype=x.dtype, device=x.device)
        assert x.stride(1) == 1, "rows must be contiguous"
        grid = (len(order) // config.rows + experts, triton.cdiv(outputs, config.columns))
        kernels.expert_gemm_kernel[grid](
            out, x, weight, weight if bias is None else bias, order, starts,
            X_ROW=x.stride(0), IN=in_features, OUT=outputs,
            EXPERTS=experts, WIDTH=triton.next_power_of_2(experts),
            TAKEN=len(order) // len(x), SORTED=not activation,
            M=config.rows, N=config.columns, K=config.inputs,
            BIAS=bias is not None, ACTIVATION=activation,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        return out


def stacked(methods: Sequence[LinearMethod]) -> torch.Tensor:
    """The weights of all experts as one tensor [E, outputs, inputs], of which each keeps its part:
    none but the one being moved is there twice."""
    first = methods[0].weight
    whole = first.new_empty((len(methods), *first.shape))
    for method, part in zip(methods, whole, strict=True):
        method.weight.data = part.copy_(method.weight)
    return whole
