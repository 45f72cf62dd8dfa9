"""KV groups of hybrid models, whose layers differ in window, recurrent state or head shape.

Called by `kv_cache.make_groups`, which handles the models with a single group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanoengine.checkpoint.config import ModelConfig
from nanoengine.core.groups.rules import make_kv_groups
from nanoengine.core.layout import KVGroup
from nanoengine.errors import ConfigError
from nanoengine.runner.memory import blocks_between_snapshots


def hybrid_groups(
    config: ModelConfig,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    block_bytes: Callable[..., int],
    state_dtype: torch.dtype,
) -> tuple[KVGroup, ...]:
    """Implements `make_groups` for these models. `block_bytes` is the function of `kv_cache`. The
    snapshot interval is the same on any number of ranks.

    Raises:
        ConfigError: an 8-bit cache for layers whose keys and values share memory.
    """
    windows, states, gemma4 = config.sliding_windows, config.states, config.plan.gemma4
    if kv_dtype.itemsize == 1 and (gemma4 is not None or config.plan.mla is not None):
        raise ConfigError(
            f"an 8-bit kv_cache_dtype is not supported for {config.architecture}, whose keys and"
            " values share memory in the KV cache: set kv_cache_dtype='auto' or 'bfloat16'"
        )
    if gemma4 is not None:
        first_layers = {layers[0] for layers in gemma4.slices(windows)}
        sharing = [i for i in range(config.num_hidden_layers) if i not in first_layers]
        groups = make_kv_groups(windows, sharing)
        return groups[:-1] if sharing else groups
    if states is None:
        return make_kv_groups(windows)
    attending = config.attention_layers
    *groups, _ = make_kv_groups(windows, states.layers, attention_layers=attending)
    snapshot_every = blocks_between_snapshots(
        states.size * len(states.layers) * state_dtype.itemsize,
        block_bytes(
            block_size=block_size,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            num_layers=max(len(group.layers) for group in groups),
            dtype=kv_dtype,
        ),
        block_size,
    )
    return make_kv_groups(windows, states.layers, snapshot_every, attending)
