"""Prefix: what a full block holds, its tokens and all those before them, as one object a content.

    root ◄── Prefix(t0 … t15) ◄── Prefix(t16 … t31) ◄── ...        parent links; a digest names each

Equal content is the same object as long as anybody refers to it, so that pools compare nothing: a
hit is an object found. The chained digest only finds candidates. Parent and tokens are compared,
and the parent is itself one object a content; by induction all ancestors are equal, and no hit
rests on the hash. A block keeps its prefix, a prefix its parents: no name is given a second time
while it, or one that descends from it, is in use.

Used by the BlockManager and the tiers. Source: chained block hashes are vLLM v1's; giving each
content one object (hash consing) in place of trusting the chain is ours.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import ref

import xxhash

DIGEST_BYTES = 16


class Prefix:
    """A block's tokens after those of `parent`; made by `Prefixes` alone. Compared by identity.

    `digest` names it in events and on disk, in 16 bytes; a root has a name of another length.
    """

    __slots__ = ("__weakref__", "digest", "parent", "token_ids")

    def __init__(self, digest: bytes, parent: Prefix | None, token_ids: Sequence[int]) -> None:
        self.digest = digest
        self.parent = parent
        self.token_ids = token_ids

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8] or 'root'})"


class Prefixes:
    """All prefixes that somebody refers to.

    >>> prefixes = Prefixes()
    >>> first = prefixes.extend(prefixes.root(None), [5, 6])
    >>> prefixes.extend(prefixes.root(None), [5, 6]) is first
    True
    >>> prefixes.extend(prefixes.root("tenant"), [5, 6]) is first
    False
    """

    def __init__(self) -> None:
        self._named: dict[bytes, ref[Prefix]] = {}
        self._sweep_at = 1024

    def root(self, salt: str | None) -> Prefix:
        """What stands before a first block: the cache salt keeps tenants apart."""
        return self.root_of_name(root_name(salt))

    def root_of_name(self, name: bytes) -> Prefix:
        """The root with a digest that `root_name` made."""
        assert len(name) != DIGEST_BYTES, name
        return self._holder(name) or self._make(name, None, ())

    def extend(self, parent: Prefix, token_ids: Sequence[int]) -> Prefix:
        """The prefix that goes on from `parent` by one full block."""
        digest = hash_block(parent.digest, token_ids)
        while (known := self._holder(digest)) is not None:
            if known.parent is parent and known.token_ids == token_ids:
                return known
            # Why: other content has this name; it takes the next that is free.
            digest = ((int.from_bytes(digest) + 1) % 2**128).to_bytes(DIGEST_BYTES)
        return self._make(digest, parent, token_ids)

    def _holder(self, name: bytes) -> Prefix | None:
        holder = self._named.get(name)
        return None if holder is None else holder()

    def _make(self, name: bytes, parent: Prefix | None, token_ids: Sequence[int]) -> Prefix:
        # Perf: admitting 16 new blocks takes 110 us; 132 us with a WeakValueDictionary, which
        # forgets each name at once (one Zen 3 core, shared).
        if len(self._named) >= self._sweep_at:
            self._named = {n: holder for n, holder in self._named.items() if holder() is not None}
            self._sweep_at = 1024 + 2 * len(self._named)
        prefix = Prefix(name, parent, token_ids)
        self._named[name] = ref(prefix)
        return prefix


def root_name(salt: str | None) -> bytes:
    """A root's digest, never as long as a block's."""
    return b"" if salt is None else b"nanoengine-cache-salt:" + salt.encode()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit digest of a block's tokens, chained over its parent's digest."""
    return xxhash.xxh3_128_digest(parent + array("q", token_ids).tobytes())
