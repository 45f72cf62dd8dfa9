"""Prefix: what a full block holds, its tokens and all tokens before them. One object each.

    root ◄── Prefix(t0 … t15) ◄── Prefix(t16 … t31) ◄── ...     parent links, and a digest for each

A cache that compared hashes alone would, at a collision, answer one prompt from another's keys and
values. Here equal content is the same object for as long as anybody refers to it, and a hit is an
object found. The digest, chained from parent to child, only finds candidates: tokens are compared,
and parents, each of which is one object too. By induction all ancestors are equal.

A block refers to its prefix, and a prefix to its parent. So no digest is given to other content
while a prefix that has it, or one that descends from it, is in use.

Used by the PrefixCache and the tiers. Source: chained block hashes are vLLM v1's; one object for
each content (hash consing) in place of trust in the chain is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from weakref import ref

import xxhash

DIGEST_BYTES = 16
TOKEN_BYTES = 8

hash_block = xxhash.xxh3_128_digest
"""Digest of a block: of its parent's digest, and after it of its packed tokens."""


class Prefix:
    """A block's tokens, behind those of its parent. Made by `Prefixes`; compared by identity.

    Attributes:
        digest: its name in events and on disk, 16 bytes. That of a root has another length.
        parent: the prefix that ends where this one's block starts; None for a root.
        packed: the block's tokens as `pack` makes them.
    """

    __slots__ = ("__weakref__", "digest", "packed", "parent")

    def __init__(self, digest: bytes, parent: Prefix | None, packed: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.packed = packed

    @property
    def token_ids(self) -> list[int]:
        """The block's own tokens."""
        return list(struct.unpack(f"{len(self.packed) // TOKEN_BYTES}q", self.packed))

    def __repr__(self) -> str:
        return f"Prefix({self.digest.hex()[:8] or 'root'})"


class Prefixes:
    """Makes prefixes, and keeps those that somebody refers to, so that each is made once.

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
        """The parent of first blocks. One for each cache salt, so that tenants share nothing."""
        return self.root_of_name(root_name(salt))

    def root_of_name(self, name: bytes) -> Prefix:
        """The root with a digest that `root_name` made."""
        assert len(name) != DIGEST_BYTES, name
        holder = self._named.get(name)
        root = None if holder is None else holder()
        if root is None:
            root = Prefix(name, None, b"")
            self._named[name] = ref(root)
        return root

    def extend(self, parent: Prefix, token_ids: Sequence[int]) -> Prefix:
        """The prefix of one full block behind `parent`."""
        return self.follow(parent, token_ids, len(token_ids))[0]

    def follow(self, parent: Prefix, token_ids: Sequence[int], block_size: int) -> list[Prefix]:
        """The prefixes of the blocks behind `parent`, one after the other; all blocks are full."""
        # Perf: naming 16 new blocks takes 14 us, 31 us with a WeakValueDictionary, which forgets
        # each name at once (one Zen 3 core).
        if len(self._named) >= self._sweep_at:
            self._named = {n: holder for n, holder in self._named.items() if holder() is not None}
            self._sweep_at = 1024 + 2 * len(self._named)
        named, found = self._named, []
        for (block,) in struct.iter_unpack(f"{block_size * TOKEN_BYTES}s", pack(token_ids)):
            digest = hash_block(parent.digest + block)
            holder = named.get(digest)
            while holder is not None and (known := holder()) is not None:
                if known.parent is parent and known.packed == block:
                    break
                # Why: other content has this digest, so this one takes the next that is free.
                digest = ((int.from_bytes(digest) + 1) % 2**128).to_bytes(DIGEST_BYTES)
                holder = named.get(digest)
            else:
                known = Prefix(digest, parent, block)
                named[digest] = ref(known)
            found.append(known)
            parent = known
        return found


def root_name(salt: str | None) -> bytes:
    """A root's digest; never as long as a block's, so the two can't be confused."""
    return b"" if salt is None else b"nanoengine-cache-salt:" + salt.encode()


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as 64-bit integers, one after the other."""
    return struct.pack(f"{len(token_ids)}q", *token_ids)
