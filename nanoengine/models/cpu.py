"""CPUKernels: the kernel set of a CPU, built on kernels compiled by numba.

Norms and gates take one pass over memory each. Weights are packed in panels on huge pages. After
loading, adjacent decoder layers are fused into one compiled call. `layers.kernels.Kernels` is the
reference implementation; tests/kernels/test_cpu_kernels.py and tests/layers/test_fused_layers.py
compare the two.

`layers/cpu_quantized.py`, `layers/cpu_experts.py` and `layers/cpu_linear_attention.py` are
imported only for models that have such layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nanoengine.attention.base import AttentionBackend
from nanoengine.checkpoint.config import ModelConfig
from nanoengine.checkpoint.quantization import Quantization
from nanoengine.errors import ConfigError
from nanoengine.kernels import cpu_layers as kernels
from nanoengine.kernels.numpy_views import NumpyViews
from nanoengine.kernels.threads import num_workers, start_workers
from nanoengine.layers.collectives import Shard
from nanoengine.layers.cpu_decoder import FusedLayers, LayerParts
from nanoengine.layers.kernels import ROUTERS, Factory, Kernels, LinearMethod, UnquantizedLinear
from nanoengine.layers.packed import PackedLinear, PrunedArgmaxHead
from nanoengine.layers.placement import place_buffers, place_parameters
from nanoengine.models.decoder import CausalLM


class CPUKernels(Kernels):
    """Fused kernels with the arithmetic of `Kernels`; with a residual, `rms_norm` works in place.

    Weights are packed in the dtype in which they are stored, 32 or 16 bits. With bfloat16, only the
    inputs of matrix products are rounded, and everything else is float32. For float64, only norms
    and gates have kernels.
    """

    def __init__(self, attention: AttentionBackend, *, dtype: torch.dtype) -> None:
        """`dtype` is the model's dtype: float32, float64 or bfloat16."""
        super().__init__(attention)
        self.linear, self.dtype = self.unquantized_linear, dtype
        start_workers()
        self._views = NumpyViews()

    def dtypes(
        self, config: ModelConfig, dtype: torch.dtype, shard: Shard
    ) -> tuple[torch.dtype, torch.dtype]:
        """Keeps 16-bit weights in 16 bits, because the kernels read them directly.

        Raises:
            ConfigError: dtype is bfloat16 and a layer has an odd number of inputs.
        """
        activation_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        # Why even: 16-bit weights are read as pairs of inputs.
        sizes = {
            key: size if key == "hidden_size" else shard.split(size)
            for key, size in config.linear_inputs.items()
        }
        has_odd = any(size % 2 for size in sizes.values())
        if has_odd and dtype == torch.bfloat16:
            inputs = " and ".join(f"{key}={size}" for key, size in sizes.items())
            raise ConfigError(
                f"dtype='bfloat16' on a CPU requires an even number of inputs per linear layer and"
                f" rank, got {inputs}: set dtype='float32'"
            )
        stored = getattr(torch, config.dtype)
        in_16_bits = dtype == torch.float32 and stored.itemsize == 2 and not has_odd
        return activation_dtype, stored if in_16_bits else dtype

    def unquantized_linear(self, name: str) -> LinearMethod:
        """Packs weights in panels; the method of the head also has the pruned argmax."""
        if self.dtype == torch.float64:
            return UnquantizedLinear(name)
        kind = PrunedArgmaxHead if name == "lm_head" else PackedLinear
        rounds_inputs = self.dtype == torch.bfloat16 and not name.endswith(ROUTERS)
        return kind(name, rounds_inputs=rounds_inputs)

    def quantized_linear_factory(self, quantization: Quantization | None = None) -> Factory | None:
        if quantization is None or self.dtype == torch.float64:
            return None
        from nanoengine.layers.cpu_quantized import linear_factory

        return linear_factory(quantization)

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values, factors = x.contiguous().numpy(), self._views(weight)
        eps = values.dtype.type(eps)
        if residual is None:
            out = np.empty(values.shape, values.dtype)
            kernels.rms_norm(values, values, kernels.NO_RESIDUAL, factors, eps, out, num_workers())
            return torch.from_numpy(out), x
        added = residual.numpy()
        kernels.rms_norm(values, added, kernels.ADD_RESIDUAL, factors, eps, values, num_workers())
        return torch.from_numpy(values), residual

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        values = gate_up.numpy()
        rows, width = values.shape
        out = np.empty((rows, width // 2), values.dtype)
        kernels.gate(values, kernels.GATES[activation], out, num_workers())
        return torch.from_numpy(out)

    def place(self, model: CausalLM) -> None:
        if self.linear != self.unquantized_linear:
            from nanoengine.layers.preallocate import preallocate

            preallocate(model)
        place_parameters(model)

    def fuse(self, model: CausalLM) -> None:
        """Fuses adjacent layers that a kernel supports into one call of `Decoder.executed_layers`,
        and each recurrent layer's rule and each mixture of experts into one call."""
        place_buffers(model)
        if model.config.moe is not None:
            from nanoengine.layers.cpu_experts import CPUExperts
            from nanoengine.models.moe import moe_layers

            for mlp in moe_layers(model):
                if CPUExperts.supports(mlp.gate, mlp.experts):
                    mlp.routed = CPUExperts(mlp)
        states = model.config.states
        if states is not None:
            from nanoengine.layers.cpu_linear_attention import CPUDelta, RecurrentParts

            fused = CPUDelta if states.kind == "delta" else None
            if states.kind == "mamba":
                from nanoengine.layers.cpu_mamba import CPUMamba as fused

            for mixer in model.recurrent_layers if fused and self.dtype != torch.float64 else ():
                mixer.mixer_fn = fused(mixer)
        parts_class, fused_class, plan = LayerParts, FusedLayers, model.config.plan
        if plan.mla is not None:
            from nanoengine.layers.cpu_mla import MLAParts

            parts_class = MLAParts
        elif plan.gemma4 is not None:
            from nanoengine.layers.cpu_gemma4 import Gemma4FusedLayers, Gemma4Parts

            parts_class, fused_class = Gemma4Parts, Gemma4FusedLayers
        recurrent = model.recurrent_layers
        for decoder in filter(None, (model.model, getattr(model, "mtp", None))):
            executed: list[Any] = []
            for layer in decoder.layers[: model.config.num_hidden_layers]:
                parts: LayerParts | None = None
                if getattr(layer, "mixer", None) in recurrent and layer.mlp is not None:
                    parts = RecurrentParts(layer, self.attention)
                elif not getattr(layer, "needs_torch", False):
                    parts = parts_class(layer)
                previous = executed[-1] if executed else None
                if parts is None or not FusedLayers.supports(parts):
                    executed.append(layer)
                elif isinstance(previous, FusedLayers) and previous.can_join(parts):
                    previous.append(parts)
                else:
                    executed.append(fused_class(parts))
            decoder.executed_layers = executed
