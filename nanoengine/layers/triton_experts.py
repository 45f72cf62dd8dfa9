"""TritonExperts: a mixture of experts in six launches, without waiting for the host.

    the router's product | routing | its order by expert | gate and up | down | their sum

The readable form is `Router` and `Experts`, which waits for the number of rows of each expert and
calls them one by one. Put in its place by `TritonKernels.fuse` once the weights are loaded. This
file chooses grids and tiles; the arithmetic is in `kernels/triton_routing.py` and
`kernels/triton_experts.py`.

It has run in Triton's interpreter; it has not run on a GPU yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from nanoengine.checkpoint.plan import MoEConfig
from nanoengine.kernels import triton_experts, triton_routing
from nanoengine.kernels.launch import cdiv, constants, launch, next_power_of_2
from nanoengine.layers.kernels import LinearMethod, UnquantizedLinear
from nanoengine.layers.moe import Experts, Router
from nanoengine.layers.triton_linear import (
    DTYPES,
    GemmConfig,
    TritonLinear,
    arch_of,
    gemm_config,
)

ADDED_WIDTH = 1024
"""Elements of a token that one program adds up: 8 a thread, 16 bytes of a 16-bit dtype."""
ROUTED_TOKENS = 8
"""A tile of the routing: two rows of scores a warp, so that a warp has whole rows."""
MOST_BLOCKS = 256
"""Programs that route at most: two a multiprocessor. Each of them adds up what all have counted."""

Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""order, starts and tiles of `align_kernel`."""


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
        self.deterministic = isinstance(all_of_them[0].down, TritonLinear)
        self.gate_up = stacked([each.gate_up for each in all_of_them])
        self.down = stacked([each.down for each in all_of_them])
        self.gate_up_bias = experts.gate_up_bias
        self.down_bias = experts.down_bias if experts.shard.rank == 0 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):  # the last layer, in a step that is only a chunk of a prompt
            return torch.empty_like(x)
        moe, arch, inner = self.router.moe, arch_of(x.device), self.down.shape[2]
        rows = 64
        if not self.deterministic:
            rows = tile_rows(len(x) * moe.num_experts_per_tok / moe.num_experts)
        first = expert_config(arch, inner, True, x.dtype, rows)
        second = expert_config(arch, x.shape[1], False, x.dtype, rows)
        assert first.rows == second.rows, "both products have the same tiles of rows"
        correction = self.router.e_score_correction_bias
        weights, _, places = route(self.router.logits(x), correction, moe, first.rows)
        gated = self._multiply(x, self.gate_up, self.gate_up_bias, places, self.activation, first)
        results = self._multiply(gated, self.down, self.down_bias, places, "", second)
        out = torch.empty_like(x)
        size, taken = x.shape[1], weights.shape[1]
        width = min(ADDED_WIDTH, next_power_of_2(size))
        launch(
            triton_experts.add_experts_kernel, (len(x), cdiv(size, width)),
            constants(SIZE=size, WIDTH=width, TAKEN=taken, num_warps=4),
            out, results, weights,
        )  # fmt: skip
        return self.all_reduce(out)

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: Places,
        activation: str,
        config: GemmConfig,
    ) -> torch.Tensor:
        """Rows of tokens with an activation, else sorted rows; see `expert_gemm_kernel`."""
        experts, rows, in_features = weight.shape
        outputs, pairs = rows // 2 if activation else rows, len(places[0])
        out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
        assert x.stride(1) == 1, "rows must be contiguous"
        tiles = min(pairs, pairs // config.rows + experts)
        launch(
            triton_experts.expert_gemm_kernel, (tiles * cdiv(outputs, config.columns),),
            constants(
                X_ROW=x.stride(0), IN=in_features, OUT=outputs,
                EXPERTS=experts, WIDTH=next_power_of_2(experts),
                TAKEN=pairs // len(x), SORTED=not activation,
                M=config.rows, N=config.columns, K=config.inputs,
                BIAS=bias is not None, ACTIVATION=activation,
                num_warps=config.warps, num_stages=config.stages,
            ),
            out, x, weight, weight if bias is None else bias, *places,
        )  # fmt: skip
        return out


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, moe: MoEConfig, rows: int
) -> tuple[torch.Tensor, torch.Tensor, Places]:
    """Weights [T, k] and experts [T, k] of tokens by their logits [T, E], and where their rows are
    in tiles of so many `rows`."""
    tokens, taken, experts = len(logits), moe.num_experts_per_tok, moe.num_experts
    steps = cdiv(tokens, ROUTED_TOKENS * MOST_BLOCKS)
    blocks = cdiv(tokens, ROUTED_TOKENS * steps)
    new = functools.partial(torch.empty, dtype=torch.int32, device=logits.device)
    weights, ids = logits.new_empty((tokens, taken)), new((tokens, taken))
    counts, order = new((blocks, experts)), new(tokens * taken)
    starts, tiles = new(experts + 1), new(experts)
    sizes = {
        "EXPERTS": experts, "WIDTH": next_power_of_2(experts), "TAKEN": taken,
        "ROWS": ROUTED_TOKENS, "num_warps": 4,
    }  # fmt: skip
    launch(
        triton_routing.route_kernel, (blocks,),
        constants(
            CHOICES=next_power_of_2(taken),
            SIGMOID=moe.score == "sigmoid", CORRECTED=correction is not None,
            GROUPS=moe.num_groups, GROUP_WIDTH=next_power_of_2(moe.num_groups),
            KEPT=moe.groups_per_token, NORMALIZED=moe.norm_topk_prob, EPSILON=moe.norm_epsilon,
            LEAST=moe.norm_least, FACTOR=moe.scaling_factor, **sizes,
        ),
        ids, weights, counts, logits, logits if correction is None else correction, tokens, steps,
    )  # fmt: skip
    launch(
        triton_routing.align_kernel, (blocks,), constants(M=rows, **sizes),
        order, starts, tiles, ids, counts, tokens, steps, blocks,
    )  # fmt: skip
    return weights, ids, (order, starts, tiles)


def tile_rows(per_expert: float) -> int:
    """Rows of a tile for so many an expert on average. Why half of them at most where they are
    few: an expert that needs a second tile reads its weights twice."""
    return 16 if per_expert <= 8 else 64 if per_expert <= 64 else 128


@functools.cache
def expert_config(
    arch: int, out_features: int, gated: bool, dtype: torch.dtype, rows: int
) -> GemmConfig:
    """Tiles of so many rows, in 16 bits.

    Few rows are a decode, whose time is that of reading weights: longer pieces of them at a time.
    Many are a prompt, whose time is arithmetic: tiles that read each input for more outputs.
    """
    config = gemm_config(arch, out_features, gated, dtype)
    if rows == config.rows or dtype == torch.float32:
        return config
    if rows == 16:
        return replace(config, rows=16, inputs=128, stages=3)
    columns = 256 if arch in (90, 100, 103) else 128
    return replace(config, rows=128, columns=columns // 2 if gated else columns, warps=8, stages=3)


def stacked(methods: Sequence[LinearMethod]) -> torch.Tensor:
    """The weights of all experts as one tensor [E, outputs, inputs], of which each keeps its part:
    none but the one being moved is there twice."""
    first = methods[0].weight
    whole = first.new_empty((len(methods), *first.shape))
    for method, part in zip(methods, whole, strict=True):
        method.weight.data = part.copy_(method.weight)
    return whole
