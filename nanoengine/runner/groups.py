"""KV groups of models whose layers cache different things: windows, states, head shapes.

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


def other_groups(
    config: ModelConfig,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    block_bytes: Callable[..., int],
    state_dtype: torch.dtype,
) -> tuple[KVGroup, ...]:
    """See `make_groups`, also for `block_bytes`. The snapshot interval is the same on any number of
    ranks.

    Raises:
        ConfigError: an 8-bit cache for layers whose keys and values share memory.
    """
    windows, states, varied = config.sliding_windows, config.states, config.plan.gemma4
    if kv_dtype.itemsize == 1 and (varied is not None or config.plan.latent is not None):
        raise ConfigError(
            f"kv_cache_dtype of 8 bits is not implemented for {config.architecture}, whose keys and"
            " values share their place in the KV cache: set kv_cache_dtype='auto' or 'bfloat16'"
        )
    if varied is not None:
        firsts = {numbers[0] for numbers in varied.slices(windows)}
        others = [n for n in range(config.num_hidden_layers) if n not in firsts]
        groups = make_kv_groups(windows, others)
        return groups[:-1] if others else groups
    if states is None:
        return make_kv_groups(windows)
    attending = config.attending
    *groups, _ = make_kv_groups(windows, states.layers, attention_layers=attending)
    every = blocks_between_snapshots(
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
    return make_kv_groups(windows, states.layers, every, attending)
