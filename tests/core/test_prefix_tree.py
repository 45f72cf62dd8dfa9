"""Prefixes: equal content is one object, and hits are correct even if hashes collide."""

from __future__ import annotations

import gc
import weakref

import pytest

from nanoengine.core import prefix_tree as module
from nanoengine.core.block_pool import BlockPool
from nanoengine.core.prefix_tree import PrefixTree, root_digest
from nanoengine.settings.params import SamplingParams
from tests.support.fake_executor import assert_outputs, make_engine, run

WEAK_HASHES = {
    "all equal": lambda parent_and_tokens: b"\xff" * 16,
    "of the last token only": lambda parent_and_tokens: parent_and_tokens[-8:] * 2,
    "one of three": lambda parent_and_tokens: bytes([sum(parent_and_tokens) % 3]) * 16,
}


@pytest.fixture(params=list(WEAK_HASHES))
def weak_hash(request, monkeypatch):
    monkeypatch.setattr(module, "hash_block", WEAK_HASHES[request.param])


def test_equal_content_is_one_object_and_other_content_another(weak_hash):
    prefixes = PrefixTree()
    root, salted = prefixes.root(None), prefixes.root("salt")
    ones = prefixes.extend(root, [1, 1])
    twos = prefixes.extend(root, [2, 2])
    below = [prefixes.extend(parent, [5, 5]) for parent in (ones, twos, salted, root)]
    assert len({ones, twos, *below}) == 6
    assert len({prefix.digest for prefix in (ones, twos, *below)}) == 6, "each digest is used once"
    assert prefixes.extend(prefixes.extend(root, [2, 2]), [5, 5]) is below[1]
    assert prefixes.extend(prefixes.root("salt"), [5, 5]) is below[2]


def test_a_digest_is_not_reused_while_a_descendant_lives(weak_hash):
    prefixes = PrefixTree()
    child = prefixes.extend(prefixes.extend(prefixes.root(None), [1, 1]), [5, 5])
    gc.collect()
    other = prefixes.extend(prefixes.extend(prefixes.root(None), [2, 2]), [5, 5])
    assert other is not child and other.parent is not child.parent
    assert other.parent.digest != child.parent.digest


def test_a_digest_identifies_the_whole_prefix():
    """Events and files name a block only by its digest, and other processes compute it again."""

    def digests(salt: str | None, *blocks: list[int]) -> list[bytes]:
        prefixes = PrefixTree()
        token_ids = [token_id for block in blocks for token_id in block]
        return [p.digest for p in prefixes.extend_blocks(prefixes.root(salt), token_ids, 2)]

    chain = digests(None, [1, 1], [5, 5], [6, 6])
    assert digests(None, [1, 1], [5, 5], [6, 6]) == chain, "equal content, equal digests"
    for other in (digests(None, [2, 2], [5, 5], [6, 6]), digests("salt", [1, 1], [5, 5], [6, 6])):
        assert not set(chain) & set(other), "prefixes that differ at the start have no equal digest"
    assert digests(None, [5, 5], [1, 1], [6, 6])[2] != chain[2]


def test_unreferenced_prefixes_are_dropped_at_any_length():
    prefixes = PrefixTree()
    prefix = prefixes.root(None)
    for i in range(100_000):
        prefix = prefixes.extend(prefix, (i,))
    assert len(prefixes._by_digest) == 100_001
    root = weakref.ref(prefixes.root(None))
    del prefix
    gc.collect()
    assert root() is None, "a chain of any length is freed at once"
    for i in range(200_000):
        prefixes.extend(prefixes.root(None), (i,))
        assert len(prefixes._by_digest) < 300_000
    assert len(prefixes._by_digest) < 5_000, "digests of dropped prefixes are removed"


def test_a_salted_root_never_equals_a_block():
    for length in range(40):
        assert len(root_digest("s" * length)) != 16
    assert root_digest("") != root_digest(None)


def test_a_hit_compares_tokens_and_parent(weak_hash):
    prefixes, pool = PrefixTree(), BlockPool(8)
    root = prefixes.root(None)
    contents = [(root, (1, 2)), (root, (3, 4)), (prefixes.root("other"), (1, 2))]
    created = [prefixes.extend(parent, token_ids) for parent, token_ids in contents]
    blocks = pool.allocate(3)
    pool.register(blocks, 0, created)
    for block_id, (parent, token_ids) in zip(blocks, contents, strict=True):
        assert pool.lookup(0, prefixes.extend(parent, token_ids)) == block_id
    assert pool.lookup(0, prefixes.extend(prefixes.root("other"), (3, 4))) is None


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
def test_a_hit_compares_every_ancestor(weak_hash, windows):
    """Q differs from P, but their digests are equal. So later blocks have equal digests, parent
    digests and tokens; a hit that compared only these would read P's keys and values."""
    engine = make_engine(64 * len(windows), 4, windows=windows)
    p, q, after = [1, 2, 3, 4], [5, 6, 7, 8], [9] * 4
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for number, prompt in enumerate(
        [p + after + after, [*q, 7], q + after + after + [3], p + after + after + [3]]
    ):
        request = engine.add_request(str(number), prompt, params)
        run(engine)
        assert_outputs(request)
    assert request.num_cached_tokens == 12, "equal blocks are still a hit"
