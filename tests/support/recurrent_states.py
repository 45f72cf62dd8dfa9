"""Random layers with the gated delta rule, and their inputs."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanoengine.checkpoint.config import load_model_config
from nanoengine.checkpoint.layer_config import LinearAttentionConfig
from nanoengine.layers.delta_rule import DeltaInputs
from nanoengine.models.linear_attention import GatedDeltaNet
from tests.support.engines import checkpoint
from tests.support.model_helpers import make_context


def random_inputs(count: int, heads: int = 3, key: int = 8, value: int = 6) -> DeltaInputs:
    """Inputs of `count` tokens for the delta rule, in float64."""
    torch.manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k = normal(count, heads, key), normal(count, heads, key)
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(count, heads, dtype=torch.float64)
    return DeltaInputs(q, k, normal(count, heads, value), decay, normal(count, heads).sigmoid())


def delta_plan(
    key_heads: int, value_heads: int, *, kernel: int = 4, key_dim: int = 8, value_dim: int = 24
) -> LinearAttentionConfig:
    """Sizes of a GatedDeltaNet."""
    return LinearAttentionConfig(
        kind="delta",
        layers=(0,),
        kernel=kernel,
        channels=2 * key_heads * key_dim + value_heads * value_dim,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )


def delta_layer(
    plan: LinearAttentionConfig, dtype: torch.dtype, states: torch.Tensor
) -> GatedDeltaNet:
    """A layer bound to these states, with a random convolution."""
    config = replace(load_model_config(checkpoint("qwen3_5")), states=plan)
    layer = GatedDeltaNet("layer", config, make_context(dtype))
    layer.conv1d.weight.copy_(torch.randn(plan.kernel, plan.channels))
    layer.bind(states)
    return layer
