"""The Triton MLA kernels compared with plain torch: decodes, chunks, splits, head counts that don't
fill a tile, and the kernel that stores latents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanoengine.attention import make_backend, triton_mla
from nanoengine.attention.base import LayerCache, rotate
from nanoengine.errors import ConfigError
from tests.support.attention_cases import DEVICE, TOLERANCE, Case, backend_of, make_case

pytestmark = pytest.mark.guards("nanoengine/attention/*.py", "tests/support/attention_cases.py")
LENGTHS = (1, 1), (1, 40), (1, 700), (3, 3), (20, 90), (33, 40)
SIZES = {"float32": torch.float32, "float16": torch.float16}


def case(
    heads: int, rank: int, rope: int, *lengths: tuple[int, int], block_size: int = 16, **options
) -> Case:
    """A layer with one KV head whose values are the first `rank` elements of its keys."""
    sizes = {"group_size": heads, "head_dim": rank + rope, "block_size": block_size}
    mla = make_case(*lengths, **sizes, **options)
    mla.v, mla.v_cache = mla.k[..., :rank], mla.k_cache[..., :rank]
    mla.spec = replace(mla.spec, value_dim=rank)
    return mla


def expected(mla: Case) -> torch.Tensor:
    """The naive backend's output, with values that are views of the keys."""
    wide = replace(mla, q=mla.q.double())
    oracle = backend(wide, "naive")
    batch = replace(mla.batch, attention=oracle.prepare(mla.batch))
    keys, rank = mla.k_cache.double(), mla.spec.value_dim
    cache = LayerCache(keys, keys[..., :rank], mla.spec)
    k = mla.k.double()
    return oracle.forward(wide.q, k, k[..., :rank], cache, batch)


def backend(mla: Case, name: str = "triton", **options):
    return backend_of(mla, name, is_mla=True, **options)


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "dtype"),
    [(16, 64, 16, "float32"), (1, 8, 4, "float32"), (5, 40, 6, "float32"), (40, 32, 8, "float16"),
     (20, 72, 16, "float32")],
)  # fmt: skip
def test_equals_the_naive_backend(heads, rank, rope, dtype):
    mla = case(heads, rank, rope, *LENGTHS, dtype=SIZES[dtype])
    reference, found = expected(mla), mla.run(backend(mla))
    assert found.shape == (*mla.q.shape[:2], rank)
    assert (found.double() - reference).abs().max() < TOLERANCE[mla.q.dtype]


@pytest.mark.parametrize("programs", [1, 3])
def test_merged_splits_are_independent_of_their_programs(programs, monkeypatch):
    """More splits than a program merges at a time, and a prompt in the same batch."""
    config = triton_mla.mla_config(90, 20, torch.float32)
    small = replace(config, split_tokens=16, max_splits=20)
    monkeypatch.setattr(triton_mla, "mla_config", lambda *_: small)
    mla = case(20, 24, 8, (1, 5), (1, 500), (1, 16), (1, 17), (4, 20))
    attention = backend(mla)
    splits = attention._splits
    monkeypatch.setattr(
        attention, "_splits", lambda *of: splits(*of)._replace(grid=(2, 4, programs))
    )
    found = mla.run(attention)
    assert (found.double() - expected(mla)).abs().max() < TOLERANCE[torch.float32]


def test_a_row_has_the_same_bits_in_any_batch():
    mla = case(16, 24, 8, (1, 300), (1, 20), (6, 70))
    all_rows = mla.run(backend(mla))
    alone = case(16, 24, 8, (1, 300))
    assert torch.equal(alone.run(backend(alone)), all_rows[:1])


@pytest.mark.parametrize(
    ("heads", "seqs", "min_splits", "max_splits"),
    [(16, 1, 32, 32), (16, 256, 4, 5), (128, 256, 4, 4)],
)
def test_the_number_of_splits_is_limited_to_what_fills_the_gpu(heads, seqs, min_splits, max_splits):
    """On an H100, the results of 32 splits of 256 sequences took 268 MB with 16 heads, and more
    than 2 GB with 128."""
    mla = case(heads, 512, 64, (1, 40), block_size=64)
    attention = backend(mla)
    attention.num_sms = 132
    tiles = -(-heads // attention._config(mla.spec).decode.rows)
    batch = replace(mla.batch, num_decodes=seqs, max_seq_len=100_000)
    spec = replace(mla.spec, num_kv_heads=tiles, head_dim=512)
    splits = attention._splits(batch, spec)
    assert min_splits <= splits.max_splits == splits.grid[1] <= max_splits
    assert splits.part_out.shape == (seqs, heads, splits.max_splits, 512)


def test_fewer_splits_are_longer():
    """With many short sequences, a long one has only the minimum number of splits."""
    mla = case(3, 24, 8, (1, 2500), *[(1, 3)] * 9)
    found = mla.run(backend(mla))
    assert (found.double() - expected(mla)).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "nope", "rank", "rope"), [(3, 6, 40, 12), (20, 16, 64, 16)])
def test_queries_are_rotated_and_normed_latents_are_stored(heads, nope, rank, rope, dtype):
    mla = case(heads, rank, rope, (1, 40), (9, 20), dtype=dtype)
    tokens, draw = len(mla.q), torch.Generator().manual_seed(1)
    new = lambda *shape: torch.randn(*shape, generator=draw).to(DEVICE, dtype)  # noqa: E731
    inputs, vectors, weight = new(tokens, heads, nope + rope), new(tokens, rank + rope), new(rank)
    rotation = new(tokens, 1, rope).chunk(2, -1)
    normed = F.rms_norm(vectors[:, :rank].float(), (rank,), None, 1e-6).to(dtype) * weight
    turned = rotate(torch.cat((inputs[..., nope:], vectors[:, None, rank:]), 1), rotation, None)
    cache, before = mla.copied_cache(), mla.k_cache.clone()
    q = backend(mla).rotate_and_store_latents(
        inputs, vectors, rotation, weight, 1e-6, cache, mla.batch
    )
    close = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else 8e-3}
    torch.testing.assert_close(q[..., rank:], turned[:, :-1], **close)
    slots = mla.batch.slot_mapping[mla.spec.group]
    stored = cache.k_cache.flatten(0, 1)[slots, 0]
    torch.testing.assert_close(stored, torch.cat((normed, turned[:, -1]), 1), **close)
    cache.k_cache.flatten(0, 1)[slots] = before.flatten(0, 1)[slots]
    torch.testing.assert_close(cache.k_cache, before, rtol=0, atol=0, equal_nan=True)


def test_unsupported_options_raise():
    options = {"device": DEVICE, "dtype": torch.float32, "block_size": 16}
    with pytest.raises(ConfigError, match="flash_attn does not support MLA"):
        make_backend("flash_attn", **options, head_dim=96, is_mla=True)
    with pytest.raises(ConfigError, match="head dims from 2 to 640 in steps of 1, got 1000"):
        make_backend("triton", **options, head_dim=1000, is_mla=True)
