"""fuse_layers: a loaded model's layers as few compiled calls each, where kernels compute them.

Done to a model from outside, once its weights are loaded: `DecoderLayer` and `SparseMLP` are the
readable forms and know nothing of it.
"""

from __future__ import annotations

from nanoengine.layers.cpu_decoder import FusedLayer, LayerParts
from nanoengine.layers.cpu_delta import DTYPES, CPUDeltaSteps
from nanoengine.layers.cpu_experts import CPUExperts
from nanoengine.models.attention import SelfAttention
from nanoengine.models.decoder import Decoder, DecoderLayer
from nanoengine.models.mlp import GatedMLP, SparseMLP
from nanoengine.models.states import GatedDeltaNet


def fuse_layers(decoder: Decoder) -> None:
    """Replaces each layer that a kernel computes, with the same results, in `decoder.stack`, and
    each mixture of experts in its `routed`."""
    for index, layer in enumerate(decoder.layers):
        mlp = layer.mlp
        if isinstance(mlp, SparseMLP) and CPUExperts.takes(mlp.gate, mlp.experts):
            mlp.routed = CPUExperts(mlp.gate, mlp.experts)
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaNet) and mixer.conv1d.weight.dtype in DTYPES:
            mixer.one_token_each = CPUDeltaSteps(mixer.plan, mixer.conv1d.weight)
        parts = _parts(layer)
        if parts is not None and FusedLayer.takes(parts):
            decoder.stack[index] = FusedLayer(parts)


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
