"""Which LinearMethod stores a layer's weight, and which LayerOps stand between the products.

Called by the runner. Methods with kernels are imported where they are chosen, so that an engine on
a GPU starts without numba, and one on a CPU without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from nanoengine.checkpoint.quantization import Quantization
from nanoengine.layers.linear_method import LinearMethod, UnquantizedLinear
from nanoengine.layers.ops import LayerOps, TorchOps
from nanoengine.layers.quantized import QuantizedLinear
from nanoengine.layers.quantized_formats import FORMATS
from nanoengine.layers.quantized_weight import GROUP_SIZE

ROUTERS = (".mlp.gate", ".mlp.shared_expert_gate")
"""Ends of the names of small layers that are never rounded. Why: they choose among experts, and
another choice is another result, not one that is a little off."""


def linear_method_for(
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    *,
    rounds_inputs: bool = False,
) -> Callable[[str], LinearMethod]:
    """A factory that makes the method of a linear layer, given its full name.

    Without quantization it makes the fastest method that stores weights exactly. With quantization
    it makes the quantized one, except for layers that the checkpoint stores as floats.

    Args:
        dtype: of activations.
        rounds_inputs: on a CPU, multiply float32 activations as bfloat16.
    """
    exact = _exact_method(device, dtype, rounds_inputs)
    if quantization is None:
        return partial(_chosen, exact, _exact_method(device, dtype, rounds_inputs=False))
    kind = QuantizedLinear
    if device.type == "cpu" and dtype == torch.float32:
        from nanoengine.layers.cpu_quantized import CPUQuantizedLinear, CPUWeightOnlyLinear

        floats = quantization.activations == "float"
        kind = CPUWeightOnlyLinear if floats else CPUQuantizedLinear
    quantized = partial(_quantized, quantization, exact, kind)
    return partial(_chosen, quantized, _exact_method(device, dtype, rounds_inputs=False))


def _chosen(
    usual: Callable[[str], LinearMethod], exact: Callable[[str], LinearMethod], name: str
) -> LinearMethod:
    return (exact if name.endswith(ROUTERS) else usual)(name)


def _quantized(
    quantization: Quantization,
    exact: Callable[[str], LinearMethod],
    kind: type[QuantizedLinear],
    name: str,
) -> LinearMethod:
    stored, activations = quantization.stored, quantization.activations
    if stored is not None:
        if not stored.holds(name):
            return exact(name)
        return kind(
            name,
            bits=stored.bits,
            group_size=stored.group_size,
            activations=activations,
            stored=FORMATS[stored.format](stored),
        )
    # Why: the head's errors go straight to the logits, and int8 has a tenth of int4's.
    bits = 8 if name == "lm_head" else quantization.bits
    group_size = GROUP_SIZE if bits == 4 else None
    return kind(name, bits=bits, group_size=group_size, activations=activations)


def _exact_method(
    device: torch.device, dtype: torch.dtype, rounds_inputs: bool
) -> Callable[[str], LinearMethod]:
    """The fastest method that stores weights exactly.

    On a CPU in float32 weights are packed in panels, and the head has a screen. On a GPU in 16 bits
    one kernel computes the products of a gated MLP and the gate.
    """
    if device.type == "cpu" and dtype == torch.float32:
        from nanoengine.layers.packed import PackedLinear, ScreenedHead

        return lambda name: (ScreenedHead if name == "lm_head" else PackedLinear)(
            name, rounds_inputs=rounds_inputs
        )
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        from nanoengine.layers.triton_linear import GatedLinear

        return GatedLinear
    return UnquantizedLinear


def make_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """The fastest ops for a device: kernels by numba on a CPU, by Triton on CUDA; plain torch for
    dtypes that these don't compute.

    Raises:
        MissingDependencyError: a CUDA device without the package triton.
    """
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        from nanoengine.layers.cpu_ops import CPUOps

        return CPUOps()
    if device.type == "cuda" and dtype != torch.float64:
        from nanoengine.layers.triton_ops import TritonOps

        return TritonOps(dtype)
    return TorchOps()
