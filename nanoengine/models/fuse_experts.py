"""fuse_experts: a loaded model's mixtures of experts without a wait for the host, on a GPU.

Done to a model from outside, once its weights are loaded. Why apart from `fuse.py`: that one brings
numba, and this one Triton.
"""

from __future__ import annotations

from nanoengine.layers.triton_experts import TritonExperts
from nanoengine.models.decoder import Decoder
from nanoengine.models.mlp import SparseMLP


def fuse_experts(decoder: Decoder) -> None:
    """Replaces what runs as `routed` in each mixture of experts that the kernels compute."""
    for layer in decoder.layers:
        mlp = layer.mlp
        if isinstance(mlp, SparseMLP) and TritonExperts.takes(mlp.experts):
            mlp.routed = TritonExperts(mlp.gate, mlp.experts)
