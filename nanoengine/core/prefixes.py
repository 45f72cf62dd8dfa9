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

import struct
from collections.abc import Sequence
from weakref import ref

import xxhash

DIGEST_BYTES = 16
TOKEN_BYTES = 8

hash_block = xxhash.xxh3_128_digest
"""Digest of a block: of its parent's digest, and after it of its packed tokens."""


class Prefix:
    """A block's tokens after those of `parent`; made by `Prefixes` alone. Compared by identity.

    `digest` names it in events and on disk, in 16 bytes; a root has a name of another length.
    `packed` are its tokens as `pack` makes them: one object to hash, to compare and to free.
    """

    __slots__ = ("__weakref__", "digest", "packed", "parent")

    def __init__(self, digest: bytes, parent: Prefix | None, packed: bytes) -> None:
        self.digest = digest
        self.parent = parent
        self.packed = packed

    @property
    def token_ids(self) -> list[int]:
        """The block's own tokens."""
        return unpack(self.packed)

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
        root = self._holder(name)
        if root is None:
            root = Prefix(name, None, b"")
            self._named[name] = ref(root)
        return root

    def extend(self, parent: Prefix, token_ids: Sequence[int]) -> Prefix:
        """The prefix that goes on from `parent` by one full block."""
        return self.follow(parent, token_ids, len(token_ids))[0]

    def follow(self, parent: Prefix, token_ids: Sequence[int], block_size: int) -> list[Prefix]:
        """The prefixes that go on from `parent` block by block; all blocks are full."""
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
                # Why: other content has this name; it takes the next that is free.
                digest = ((int.from_bytes(digest) + 1) % 2**128).to_bytes(DIGEST_BYTES)
                holder = named.get(digest)
            else:
                known = Prefix(digest, parent, block)
                named[digest] = ref(known)
            found.append(known)
            parent = known
        return found

    def _holder(self, name: bytes) -> Prefix | None:
        holder = self._named.get(name)
        return None if holder is None else holder()


def root_name(salt: str | None) -> bytes:
    """A root's digest, never as long as a block's."""
    return b"" if salt is None else b"nanoengine-cache-salt:" + salt.encode()


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as 64-bit integers, one after the other."""
    return struct.pack(f"{len(token_ids)}q", *token_ids)


def unpack(packed: bytes) -> list[int]:
    """The token ids that `pack` was given."""
    return list(struct.unpack(f"{len(packed) // TOKEN_BYTES}q", packed))
