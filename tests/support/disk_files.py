"""Blocks by number, and synchronous copies to and from disk."""

from __future__ import annotations

from nanoengine.core.prefix_tree import PrefixTree
from nanoengine.core.tiers.disk import DiskCopy
from nanoengine.core.tiers.lookup import Content
from nanoengine.features.kv_tiers import DiskFiles

PREFIXES = PrefixTree()


def content(number: int, group: int = 0) -> Content:
    return Content(group, PREFIXES.extend(PREFIXES.root(None), [number, 5]))


def carry_out(files: DiskFiles, *copies: DiskCopy) -> list[bool]:
    for copy in copies:
        files.submit(copy)
    ended = []
    while found := files.collect(float("inf")):
        ended += [one.ok for one in found]
    return ended
