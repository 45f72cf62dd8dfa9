"""make_block_manager: creates the BlockManager and the PrefixCache for a layout.

If all layers attend to all tokens, these are the plain BlockManager and PrefixCache; windows and
recurrent states use the classes in groups/. Called by the engine, the simulator and the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanoengine.core.block_manager import BlockManager
from nanoengine.core.layout import KVLayout
from nanoengine.core.prefix_cache import PrefixCache


def make_block_manager(
    layout: KVLayout,
    *,
    prefix_cache: PrefixCache | None = None,
    enable_prefix_caching: bool = True,
    **options: Any,
) -> BlockManager:
    """The BlockManager for a layout.

    Args:
        prefix_cache: a cache with tiers; None creates one without.
        enable_prefix_caching: for a cache that is created here.
        options: arguments of `BlockManager`.
    """
    manager: Callable[..., BlockManager] = BlockManager
    cache: Callable[..., PrefixCache] = PrefixCache
    if layout.has_groups:
        from nanoengine.core.groups.cache import GroupedPrefixCache as cache
        from nanoengine.core.groups.manager import GroupedBlockManager as manager
    prefix_cache = prefix_cache or cache(layout, enabled=enable_prefix_caching)
    return manager(layout, prefix_cache=prefix_cache, **options)
