"""fuse_layers: a loaded model's layers as one compiled call each, where a kernel computes them.

Done to a model from outside, once its weights are loaded: `DecoderLayer` is the readable form and
knows nothing of it.
"""

from __future__ import annotations

from nanoengine.layers.cpu_decoder import FusedLayer, LayerParts
from nanoengine.models.attention import SelfAttention
from nanoengine.models.decoder import Decoder, DecoderLayer
from nanoengine.models.mlp import GatedMLP


def fuse_layers(decoder: Decoder) -> None:
    """Replaces each layer that a kernel computes, with the same results, in `decoder.stack`."""
    for index, layer in enumerate(decoder.layers):
        parts = _parts(layer)
        if parts is not None and FusedLayer.takes(parts):
            decoder.stack[index] = FusedLayer(parts)


def _parts(layer: DecoderLayer) -> LayerParts | None:
    """What the layer is made of; None where it is not of the kernel's form."""
    attention, mlp = layer.mixer, layer.mlp
    if layer.is_parallel or type(mlp) is not GatedMLP:
        return None
    if not isinstance(attention, SelfAttention) or attention.needs_torch:
        return None
    return LayerParts(
        norm=layer.input_layernorm,
        qkv=attention.qkv_proj,
        head_norm=None if attention.head_norm is None else attention.head_norm.weights,
        attention=attention.attention,
        o=attention.o_proj,
        attention_output_norm=layer.attention_output_norm,
        mlp_norm=layer.post_attention_layernorm,
        gate_up=mlp.gate_up_proj,
        down=mlp.down_proj,
        mlp_output_norm=layer.mlp_output_norm,
        activation=mlp.activation,
        scale=layer.scale,
    )
