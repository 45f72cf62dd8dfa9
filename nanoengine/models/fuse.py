"""fuse_layers: a loaded model's layers as few compiled calls, where kernels compute them.

Done to a model from outside, once its weights are loaded: `DecoderLayer` and `SparseMLP` are the
readable forms and know nothing of it.
"""

from __future__ import annotations

from nanoengine.layers.cpu_decoder import FusedLayers, LayerParts
from nanoengine.layers.cpu_delta import DTYPES, CPUDeltaSteps
from nanoengine.layers.cpu_experts import CPUExperts
from nanoengine.models.attention import SelfAttention
from nanoengine.models.decoder import Decoder, DecoderLayer, Layers
from nanoengine.models.mlp import GatedMLP, SparseMLP
from nanoengine.models.states import GatedDeltaNet


def fuse_layers(decoder: Decoder) -> None:
    """Replaces layers that a kernel computes, with the same results, in `decoder.stack`, neighbours
    by one call, and each mixture of experts in its `routed`."""
    stack: list[tuple[int, Layers]] = []
    for kind, layer in decoder.plain_stack():
        assert isinstance(layer, DecoderLayer)
        mlp, mixer, parts = layer.mlp, layer.mixer, _parts(layer)
        if isinstance(mlp, SparseMLP) and CPUExperts.takes(mlp.gate, mlp.experts):
            mlp.routed = CPUExperts(mlp.gate, mlp.experts)
        if isinstance(mixer, GatedDeltaNet) and mixer.conv1d.weight.dtype in DTYPES:
            mixer.one_token_each = CPUDeltaSteps(mixer.plan, mixer.conv1d.weight)
        if parts is None or not FusedLayers.takes(parts):
            stack.append((kind, layer))
            continue
        before_kind, before = stack[-1] if stack else (kind, None)
        if kind == before_kind and isinstance(before, FusedLayers) and before.rest is None:
            before.append(parts)
        else:
            stack.append((kind, FusedLayers(parts)))
    decoder.stack = stack


def _parts(layer: DecoderLayer) -> LayerParts | None:
    """What the layer is made of; None where it is not of the kernel's form."""
    attention, mlp = layer.mixer, layer.mlp
    if layer.is_parallel:
        return None
    if not isinstance(attention, SelfAttention) or attention.needs_torch:
        return None
    gated = mlp if type(mlp) is GatedMLP else None
    return LayerParts(
        norm=layer.input_layernorm,
        qkv=attention.qkv_proj,
        head_norm=attention.backend_norm,
        attention=attention.attention,
        o=attention.o_proj,
        attention_output_norm=layer.attention_output_norm,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=None if gated is None else gated.gate_up_proj,
        down=None if gated is None else gated.down_proj,
        mlp_output_norm=layer.mlp_output_norm,
        activation="" if gated is None else gated.activation,
        scale=layer.scale,
        rest=layer.mlp_part if gated is None else None,
    )
