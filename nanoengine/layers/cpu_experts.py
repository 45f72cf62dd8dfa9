"""CPUExperts: a mixture of experts as one compiled call on the CPU, or as part of one.

Why: one call per expert costs Python 30 us, and a token uses eight per layer. The readable form is
`SparseMLP`; tests/layers/test_cpu_experts.py compares the two. `models/cpu.py` makes it after the
weights are loaded; `cpu_decoder.py` includes it in its layer's call if it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nanoengine.kernels.cpu_experts import mixture
from nanoengine.kernels.cpu_layers import GATES
from nanoengine.kernels.gemm import PANEL
from nanoengine.kernels.threads import num_workers
from nanoengine.layers.kernels import LinearMethod
from nanoengine.layers.moe import Experts, Router
from nanoengine.layers.packed import PackedLinear


class CPUExperts:
    """Called with hidden states [T, hidden_size]; returns what the experts add to them.

    Attributes:
        adds_shared: the call includes the shared expert.
        first: the arguments of `mixture` after x.
    """

    @staticmethod
    def takes(router: Router, experts: Experts) -> bool:
        """Whether a kernel supports each part: packed weights, whole panels of outputs."""
        gates, downs = zip(*((each.gate_up, each.down) for each in experts.experts), strict=True)
        methods = (*gates, *downs)
        return (
            type(router) is Router
            and router.moe.gated
            and type(router.method) is PackedLinear
            and all(method.has_kernel for method in methods)
            and _are_alike(gates)
            and _are_alike(downs)
            and 2 * experts.local % PANEL == experts.shape[2] % PANEL == 0
        )

    def __init__(self, mlp: Any) -> None:
        """`mlp` is a `SparseMLP`."""
        router, experts, shared = mlp.gate, mlp.experts, mlp.shared_experts
        moe, self.all_reduce = router.moe, experts.all_reduce
        correction, no_bias = router.e_score_correction_bias, np.zeros(0, np.float32)
        down_bias = experts.down_bias if experts.shard.rank == 0 else None
        all_of_them, inner = list(experts.experts), experts.local
        self.first: tuple[Any, ...] = (
            router.method.operands(router.bias),
            no_bias if correction is None else correction.numpy(),
            (
                moe.score == "sigmoid", moe.num_groups, moe.groups_per_token, moe.best_of_group,
                moe.norm_topk_prob, np.float32(moe.norm_min), np.float32(moe.norm_epsilon),
                np.float32(moe.scaling_factor),
            ),
            _over_all([each.gate_up for each in all_of_them], experts.gate_up_bias, 2 * inner),
            _over_all([each.down for each in all_of_them], down_bias, experts.shape[2]),
            (
                moe.num_experts, moe.num_experts_per_tok, experts.local,
                GATES[all_of_them[0].activation],
            ),
        )  # fmt: skip
        linears = getattr(shared, "gate_up_proj", None), getattr(shared, "down_proj", None)
        self.adds_shared = experts.shard.world_size == 1 and all(
            linear is not None and linear.method.has_kernel for linear in linears
        )
        if self.adds_shared:
            gate = mlp.shared_expert_gate
            self.first += (
                (
                    *(linear.method.operands(linear.bias) for linear in linears),
                    sum(shared.gate_up_proj.parts.values()) // 2, GATES[shared.activation],
                    () if gate is None else gate.method.operands(None),
                ),
            )  # fmt: skip
        else:
            self.first += ((),)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = np.empty(x.shape, np.float32)
        mixture(x.contiguous().numpy(), *self.first, out, num_workers())
        return self.all_reduce(torch.from_numpy(out))


def _are_alike(methods: Sequence[LinearMethod]) -> bool:
    """Whether their packed weights have the same sizes, and whole panels."""
    operands = (method.weight_operands() for method in methods)
    sizes = {tuple(getattr(one, "size", one) for one in of_method) for of_method in operands}
    return len(sizes) == 1 and all(getattr(method, "is_whole", True) for method in methods)


def _over_all(
    methods: Sequence[LinearMethod], bias: torch.Tensor | None, outputs: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The operands of one weight for all experts.

    Returns:
        The operands: an array over all experts for each array, each scalar once, the biases last.
            And the distance between experts in each.
    """
    columns = zip(*(method.weight_operands() for method in methods), strict=True)
    found = [_reaching(of) if isinstance(of[0], np.ndarray) else (of[0], 0) for of in columns]
    if bias is None:
        found.append((np.zeros(outputs, np.float32), 0))
    else:
        found.append((bias.numpy().reshape(-1), outputs))
    arrays, steps = zip(*found, strict=True)
    return arrays, steps


def _reaching(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Makes one array from the first expert's to the last one's, and returns the distance between
    experts in it.

    Why this works: `placement.py` allocates tensors contiguously in the order of modules, and all
    experts have the same sizes.
    """
    first, size = arrays[0], arrays[0].size
    if len(arrays) == 1 or size == 0:
        return first, 0
    starts = [array.ctypes.data for array in arrays]
    (distance,) = set(np.diff(starts).tolist())
    assert distance > 0 == distance % first.itemsize, distance
    step = distance // first.itemsize
    whole = np.lib.stride_tricks.as_strided(first, (step * (len(arrays) - 1) + size,))
    return whole, step
