"""make_block_manager: the blocks of a KV cache, and who hands them out, for a layout.

Where all layers attend to all tokens these are the plain BlockManager and PrefixCache; windows and
states bring those of groups/. Called by whoever puts a core together: an engine, a simulator, a
replay.
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
        prefix_cache: one with tiers; None: one without.
        enable_prefix_caching: of a cache that is made here.
        options: of `BlockManager`.
    """
    manager: Callable[..., BlockManager] = BlockManager
    cache: Callable[..., PrefixCache] = PrefixCache
    if layout.has_groups:
        from nanoengine.core.groups.cache import GroupedPrefixCache as cache
        from nanoengine.core.groups.manager import GroupedBlockManager as manager
    prefix_cache = prefix_cache or cache(layout, enabled=enable_prefix_caching)
    return manager(layout, prefix_cache=prefix_cache, **options)
