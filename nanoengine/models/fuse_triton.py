"""fuse_triton: what a loaded model runs by Triton on a GPU: its experts, and layers with states.

Done to a model from outside, once its weights are loaded. Why apart from `fuse.py`: that one brings
numba.
"""

from __future__ import annotations

import functools

from nanoengine.layers import triton_states
from nanoengine.layers.triton_experts import TritonExperts
from nanoengine.models.decoder import Decoder
from nanoengine.models.mlp import SparseMLP
from nanoengine.models.states import GatedDeltaNet, ShortConv


def fuse_triton(decoder: Decoder) -> None:
    """Replaces what runs as `routed` in each mixture of experts that the kernels compute, and the
    rules of layers that keep states."""
    for layer in decoder.layers:
        mlp, mixer = layer.mlp, layer.mixer
        if isinstance(mlp, SparseMLP) and TritonExperts.takes(mlp.experts):
            mlp.routed = TritonExperts(mlp.gate, mlp.experts)
        if isinstance(mixer, GatedDeltaNet):
            mixer.one_token_each = triton_states.TritonDeltaSteps(mixer.plan, mixer.conv1d)
            mixer.through_chunks = triton_states.through_chunks
        elif isinstance(mixer, ShortConv):
            mixer.conv_step = functools.partial(triton_states.conv_step, mixer.conv)
