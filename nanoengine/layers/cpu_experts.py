"""CPUExperts: a mixture of experts as one compiled call on the CPU, or as part of one.

Why: one call per expert takes 30 us of Python, and a token uses eight experts per layer. The
reference implementation is `SparseMLP`; tests/layers/test_cpu_experts.py compares the two.
`models/cpu.py` installs it after the weights are loaded; `cpu_decoder.py` includes it in the call
of its layer if possible.
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
        arguments: the arguments of `mixture` after x.
    """

    @staticmethod
    def supports(router: Router, experts: Experts) -> bool:
        """Whether the kernel supports router and experts: packed weights, whole panels of
        outputs."""
        gates, downs = zip(*((each.gate_up, each.down) for each in experts.experts), strict=True)
        methods = (*gates, *downs)
        return (
            type(router) is Router
            and experts.activation in GATES
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
        all_experts, inner = list(experts.experts), experts.local
        linears = getattr(shared, "gate_up_proj", None), getattr(shared, "down_proj", None)
        self.adds_shared = experts.shard.world_size == 1 and all(
            linear is not None and linear.method.has_kernel for linear in linears
        )
        shared_expert: tuple[Any, ...] = ()
        if self.adds_shared:
            gate = mlp.shared_expert_gate
            shared_expert = (
                *(linear.method.operands(linear.bias) for linear in linears),
                sum(shared.gate_up_proj.parts.values()) // 2, GATES[shared.activation],
                () if gate is None else gate.method.operands(None),
            )  # fmt: skip
        self.arguments: tuple[Any, ...] = (
            router.method.operands(router.bias),
            no_bias if correction is None else correction.numpy(),
            (
                moe.score == "sigmoid", moe.num_groups, moe.groups_per_token, moe.best_of_group,
                moe.norm_topk_prob, np.float32(moe.norm_min), np.float32(moe.norm_epsilon),
                np.float32(moe.scaling_factor)
            ),
            _stack_operands([e.gate_up for e in all_experts], experts.gate_up_bias, 2 * inner),
            _stack_operands([e.down for e in all_experts], down_bias, experts.shape[2]),
            (
                moe.num_experts, moe.num_experts_per_tok, experts.local,
                GATES[all_experts[0].activation]
            ),
            shared_expert,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = np.empty(x.shape, np.float32)
        mixture(x.contiguous().numpy(), *self.arguments, out, num_workers())
        return self.all_reduce(torch.from_numpy(out))


def _are_alike(methods: Sequence[LinearMethod]) -> bool:
    """Whether their packed weights have the same sizes, and whole panels."""
    operands = (method.weight_operands() for method in methods)
    sizes = {tuple(getattr(array, "size", array) for array in method) for method in operands}
    return len(sizes) == 1 and all(getattr(method, "has_whole_panels", True) for method in methods)


def _stack_operands(
    methods: Sequence[LinearMethod], bias: torch.Tensor | None, outputs: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Combines the operands of one matrix of all experts.

    Returns:
        The operands, biases last: one array over all experts for each array, each scalar once. And
            the number of elements from one expert to the next in each, 0 for scalars.
    """
    columns = zip(*(method.weight_operands() for method in methods), strict=True)
    stacked = [_strided_view(x) if isinstance(x[0], np.ndarray) else (x[0], 0) for x in columns]
    if bias is None:
        stacked.append((np.zeros(outputs, np.float32), 0))
    else:
        stacked.append((bias.numpy().reshape(-1), outputs))
    arrays, steps = zip(*stacked, strict=True)
    return arrays, steps


def _strided_view(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """Views the memory from the first expert's array to the end of the last one's as one array, and
    returns it with the number of elements from one expert to the next.

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
