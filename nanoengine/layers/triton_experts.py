"""TritonExperts: a mixture of experts in eight launches, without synchronizing with the host.

    router logits | routing | sort by expert | gate and up | activation | down | weighted sum

The reference implementation is `Router` and `Experts`, which copies the number of tokens per expert
to the host and calls the experts one by one. `TritonKernels.fuse` installs this class after the
weights are loaded. This file chooses grids and tiles; the arithmetic is in
`kernels/triton_routing.py` and `kernels/triton_experts.py`. The additional operations of
`models/gemma4.py::ScaledRouter` are plain torch, in further launches.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from nanoengine.checkpoint.layer_config import MoEConfig
from nanoengine.kernels import triton_experts, triton_routing
from nanoengine.kernels.launch import Constants, cdiv, launch, next_power_of_2
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.moe import Experts, Router
from nanoengine.layers.triton_linear import (
    DTYPES,
    GemmConfig,
    TritonLinear,
    arch_of,
    gemm_config,
)
from nanoengine.layers.triton_quantized import tile_of

ROUTED_TOKENS = 8
"""Tokens per tile of the routing kernel: each of its 4 warps has the scores of two tokens."""
MAX_BLOCKS = 256
"""Maximum number of routing programs, two per multiprocessor. Each sums the counts of all."""

TileMap = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The arrays order, starts and tiles of `align_kernel`."""


class StackForm(NamedTuple):
    """`TritonQuantizedLinear.form`, inputs per tile, and inputs that share a scale."""

    name: str
    inputs: int
    group: int


FLOATS = StackForm("", 0, 1)


class TritonExperts:
    """Called with hidden states [T, hidden_size]; returns what the experts add to them.

    Attributes:
        graph_safe: nothing here synchronizes with the host.
        activate: the activation between an expert's two matrices.
    """

    graph_safe = True

    @staticmethod
    def supports(experts: Experts) -> bool:
        """Whether the kernels support the experts: all have floats of a supported dtype, or all the
        same 4-bit or 8-bit form, with inputs in their original order."""
        gates, downs = zip(*((each.gate_up, each.down) for each in experts.experts), strict=True)
        forms = [{form_of(method) for method in methods} for methods in (gates, downs)]
        return all(len(found) == 1 and None not in found for found in forms)

    def __init__(self, router: Router, experts: Experts) -> None:
        all_experts: Sequence[Any] = list(experts.experts)
        self.router, self.all_reduce = router, experts.all_reduce
        self.activate = all_experts[0].activate
        self.deterministic = isinstance(all_experts[0].down, TritonLinear)
        self.gate_up = stack_weights([each.gate_up for each in all_experts])
        self.down = stack_weights([each.down for each in all_experts])
        self.gate_up_bias = experts.gate_up_bias
        self.down_bias = experts.down_bias if experts.shard.rank == 0 else None

    def __call__(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """`router_input`: the router's input, if it is not x."""
        if not len(x):  # the last layer of a step in which no token needs logits
            return torch.empty_like(x)
        moe, arch = self.router.moe, arch_of(x.device)
        rows = 64
        if not self.deterministic:
            rows = tile_rows(len(x) * moe.num_experts_per_tok / moe.num_experts)
        stacks = self.gate_up, self.down
        first, second = (
            expert_config(arch, stack.shape[1], x.dtype, rows, stack.form) for stack in stacks
        )
        assert first.rows == second.rows, "both GEMMs must have the same tiles of rows"
        router, router_input = self.router, x if router_input is None else router_input
        correction = router.e_score_correction_bias
        weights, ids, tile_map = route(router.logits(router_input), correction, moe, first.rows)
        weights = router.scale_weights(weights, ids)
        gate_up = self._grouped_gemm(x, self.gate_up, self.gate_up_bias, tile_map, first)
        activated = self.activate(gate_up)
        results = self._grouped_gemm(activated, self.down, self.down_bias, tile_map, second)
        weighted = results.view(*weights.shape, -1).mul_(weights.unsqueeze(-1))
        return self.all_reduce(weighted.sum(1))

    def _grouped_gemm(
        self,
        x: torch.Tensor,
        stack: Stack,
        bias: torch.Tensor | None,
        tile_map: TileMap,
        config: GemmConfig,
    ) -> torch.Tensor:
        """Multiplies one row per token, or for `down` one per token and expert, sorted by expert;
        see `expert_gemm_kernel`."""
        (experts, outputs, in_features), weight, form = stack.shape, stack.weight, stack.form
        pairs = len(tile_map[0])
        out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
        assert x.stride(1) == 1, "rows must be contiguous"
        tiles = min(pairs, pairs // config.rows + experts)
        launch(
            triton_experts.expert_gemm_kernel, (tiles * cdiv(outputs, config.columns),),
            Constants(
                X_ROW=x.stride(0), IN=in_features, OUT=outputs,
                EXPERTS=experts, WIDTH=next_power_of_2(experts),
                TOP_K=pairs // len(x), SORTED=stack is self.down,
                M=config.rows, N=config.columns, K=config.inputs,
                BIAS=bias is not None, GROUP=form.group, FORM=form.name,
                ZEROS=stack.zeros is not None, num_warps=config.warps, num_stages=config.stages,
            ),
            out, x, weight, weight if stack.scales is None else stack.scales,
            weight if stack.zeros is None else stack.zeros, weight if bias is None else bias,
            *tile_map,
        )  # fmt: skip
        return out


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, moe: MoEConfig, rows: int
) -> tuple[torch.Tensor, torch.Tensor, TileMap]:
    """Routes tokens by their logits [T, E].

    Returns:
        Weights [T, k], expert ids [T, k], and the map of these T * k rows to tiles of `rows` rows.
    """
    tokens, top_k, experts = len(logits), moe.num_experts_per_tok, moe.num_experts
    steps = cdiv(tokens, ROUTED_TOKENS * MAX_BLOCKS)
    blocks = cdiv(tokens, ROUTED_TOKENS * steps)
    new = partial(torch.empty, dtype=torch.int32, device=logits.device)
    weights, ids = logits.new_empty((tokens, top_k)), new((tokens, top_k))
    counts, order = new((blocks, experts)), new(tokens * top_k)
    starts, tiles = new(experts + 1), new(experts)
    sizes = {
        "EXPERTS": experts, "WIDTH": next_power_of_2(experts), "TOP_K": top_k,
        "ROWS": ROUTED_TOKENS, "num_warps": 4,
    }  # fmt: skip
    launch(
        triton_routing.route_kernel, (blocks,),
        Constants(
            CHOICES=next_power_of_2(top_k),
            SIGMOID=moe.score == "sigmoid", CORRECTED=correction is not None,
            GROUPS=moe.num_groups, GROUP_WIDTH=next_power_of_2(moe.num_groups),
            TOP_GROUPS=moe.groups_per_token, BEST=moe.best_of_group,
            NORMALIZED=moe.norm_topk_prob, EPSILON=moe.norm_epsilon,
            MIN_TOTAL=moe.norm_min, FACTOR=moe.scaling_factor, **sizes
        ),
        ids, weights, counts, logits, logits if correction is None else correction, tokens, steps,
    )  # fmt: skip
    launch(
        triton_routing.align_kernel, (blocks,), Constants(M=rows, **sizes),
        order, starts, tiles, ids, counts, tokens, steps, blocks,
    )  # fmt: skip
    return weights, ids, (order, starts, tiles)


def tile_rows(per_expert: float) -> int:
    """Rows per tile, from the average number of rows per expert. Why at least twice a small
    average: an expert that needs a second tile reads its weights twice."""
    return 16 if per_expert <= 8 else 64 if per_expert <= 64 else 128


@cache
def expert_config(
    arch: int, out_features: int, dtype: torch.dtype, rows: int, form: StackForm
) -> GemmConfig:
    """Returns tile sizes for weights in this form, with `rows` rows unless the dtype is float32.

    Few rows are a decode, which is bound by reading weights, so a tile reads more inputs at a time.
    Many rows are a prefill, which is bound by arithmetic, so a tile uses each input for more
    outputs.
    """
    config = gemm_config(arch, out_features, dtype)
    if form.name:
        tile = tile_of(rows, out_features, dtype, form.name, form.inputs)
        return replace(tile, rows=config.rows if dtype == torch.float32 else rows)
    if rows == config.rows or dtype == torch.float32:
        return config
    if rows == 16:
        return replace(config, rows=16, inputs=128, stages=3)
    columns = 256 if arch in (90, 100, 103) else 128
    return replace(config, rows=128, columns=columns, warps=8, stages=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One matrix of all experts: [E, outputs, inputs], two inputs per byte if they have 4 bits;
    with scales and zeros [E, groups, outputs] float32."""

    weight: torch.Tensor
    form: StackForm = FLOATS
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        experts, outputs, width = self.weight.shape
        groups = 0 if self.scales is None else self.scales.shape[1]
        return experts, outputs, groups * self.form.group or width


def form_of(method: LinearMethod) -> StackForm | None:
    """The form of a method's weight; None: the kernels do not support it."""
    if getattr(method, "order", None) is not None or method.weight is None:
        return None
    if getattr(method, "tile", 0):
        return StackForm(method.form, method.tile, method.group_size)
    return FLOATS if method.weight.dtype in DTYPES else None


def stack_weights(methods: Sequence[LinearMethod]) -> Stack:
    """Stacks one matrix of all experts; each expert keeps a view of its part."""
    form = form_of(methods[0])
    for method in methods:
        method.product = f"{form.name or 'floats'}, grouped GEMM of experts in Triton"
    if form == FLOATS:
        return Stack(weight=stack_tensors([method.weight for method in methods]))
    if any(method.zeros is not None for method in methods):
        for method in methods:
            method.zeros = torch.zeros_like(method.scales) if method.zeros is None else method.zeros
    parts = {
        name: stack_tensors([getattr(method, name) for method in methods])
        for name in ("weight", "scales", "zeros")
        if getattr(methods[0], name) is not None
    }
    return Stack(form=form, **parts)


def stack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stacks tensors to one [E, ...]; they become views of it, and their memory is freed one by
    one."""
    whole = tensors[0].new_empty((len(tensors), *tensors[0].shape))
    for tensor, part in zip(tensors, whole, strict=True):
        tensor.data = part.copy_(tensor)
    return whole
