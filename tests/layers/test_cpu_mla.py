"""MLA on the CPU, against the naive backend."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from nanoengine.attention.base import LayerCache
from tests.attention.test_attention_cpu import LENGTHS, TOLERANCE
from tests.support.attention_cases import Paged


class Latents(Paged):
    """A batch with one KV head whose values are the first `value_dim` elements of its keys."""

    def __init__(self, heads: int, value_dim: int, **options: object) -> None:
        super().__init__(num_kv_heads=1, group_size=heads, **options)
        self.spec = replace(self.spec, value_dim=value_dim)

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, _ = super().qkv()
        return q, k, k[..., : self.spec.value_dim]

    def layer(self, layout: str) -> LayerCache:
        keys = self.cache("PKD")[0]  # with one head, both layouts are equal
        keys = keys.transpose(1, 2) if layout == "KPD" else keys
        keys = keys.contiguous()
        return LayerCache(keys, keys[..., : self.spec.value_dim], self.spec)


@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim", "options"),
    [
        (16, 72, 64, {}),
        (1, 24, 20, {"block_size": 8}),
        (3, 40, 8, {"block_size": 64}),
        (40, 16, 12, {"block_size": 128}),
        (16, 72, 64, {"kv_dtype": torch.bfloat16, "dtype": torch.float32}),
        (5, 72, 64, {"dtype": torch.float32, "block_size": 32}),
        (128, 24, 16, {"dtype": torch.float32}),
    ],
)
def test_attention_over_latents_matches_the_naive_backend(heads, head_dim, value_dim, options):
    paged = Latents(heads, value_dim, head_dim=head_dim, lengths=LENGTHS, **options)
    expected = paged.run("naive")
    assert expected.shape == (*expected.shape[:2], value_dim)
    assert not expected.isnan().any()
    torch.testing.assert_close(paged.run("cpu"), expected, rtol=0, atol=TOLERANCE[paged.dtype])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_alone_and_nan_stays_in_its_sequence(kv_dtype):
    lengths, sizes = [(1, 20), (1, 300), (5, 70)], {"head_dim": 40, "kv_dtype": kv_dtype}
    paged = Latents(16, 32, lengths=lengths, dtype=torch.float32, **sizes)
    clean = paged.run("cpu")
    for i, (start, stop) in enumerate(pairwise((0, 1, 2, 7))):
        single = Latents(
            16, 32, lengths=lengths[i : i + 1], seeds=[i], dtype=torch.float32, **sizes
        )
        assert torch.equal(single.run("cpu"), clean[start:stop])
    paged.dense[1][7] = torch.nan
    out = paged.run("cpu")
    assert out[1].isnan().all()
    assert torch.equal(out[0], clean[0])
    assert torch.equal(out[2:], clean[2:])
