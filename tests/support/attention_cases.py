"""Paged batches to test attention backends with, and NaiveBackend in float64 as their oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from nanoengine.attention.base import AttentionBackend, AttentionSpec, HeadNormWeights, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.naive import NaiveBackend
from nanoengine.attention.stored import FP8, from_fp8, to_fp8
from tests.support.paged_batches import make_sinks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Greatest absolute error of outputs of size 1: a few roundings of the dtype."""


@dataclass(kw_only=True)
class Case:
    """One layer's arguments of `AttentionBackend.forward`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: Batch
    spec: AttentionSpec

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.k_cache, self.v_cache, self.spec)

    def copied_cache(self) -> LayerCache:
        """A cache of its own, with the same numbers."""
        return LayerCache(self.k_cache.clone(), self.v_cache.clone(), self.spec)

    def expected(self) -> torch.Tensor:
        """What attention must return, [T, H, D] float64; leaves the caches as they are."""
        oracle = NaiveBackend(
            device=DEVICE,
            dtype=torch.float64,
            head_dim=self.spec.head_dim,
            block_size=self.k_cache.shape[1],
        )
        batch = replace(self.batch, attention=oracle.prepare(self.batch))
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        caches = self.k_cache, self.v_cache
        caches = (x.clone() if x.dtype == FP8 else x.double() for x in caches)
        return oracle.forward(q, k, v, LayerCache(*caches, self.spec), batch)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        """One forward of `backend`, [T, H, D]."""
        batch = replace(self.batch, attention=backend.prepare(self.batch))
        return backend.forward(self.q, self.k, self.v, self.cache, batch)

    def check(self, backend: AttentionBackend) -> torch.Tensor:
        """Holds one forward of `backend` against the oracle, and returns it."""
        expected = self.expected()
        out = self.run(backend)
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        error = (out.double() - expected).abs().max().item()
        assert error < TOLERANCE[self.q.dtype], f"greatest error {error}"
        return out


def make_case(
    *lengths: tuple[int, int],
    num_kv_heads: int = 1,
    group_size: int = 1,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shared: dict[int, tuple[int, int]] | None = None,
    spread: float = 1.0,
    fp8: bool = False,
    sinks: float | None = None,
) -> Case:
    """Builds a batch of sequences of (query_len, seq_len), those with one query token first.

    What lies before the query tokens is in the cache already; blocks come in random order, and
    every slot that nobody wrote holds NaN. `shared[i] = (j, n)`: the first n blocks of sequence i
    are those of sequence j, an earlier one. The layer belongs to group 1 of 2: group 0 has slots
    and tables that would give garbage. `spread` scales the queries. A sequence's numbers are the
    same whatever stands beside it. `fp8`: the caches are fp8, and all keys and values are numbers
    that it holds exactly. Why: Triton's interpreter rounds to fp8 otherwise than a GPU. `sinks` is
    how far those of the heads are spread.
    """
    scales = (0.5, 0.125) if fp8 else (1.0, 1.0)
    heads, num_seqs = num_kv_heads * group_size, len(lengths)
    blocks = [-(-seq_len // block_size) for _, seq_len in lengths]
    shuffle = torch.Generator().manual_seed(7)
    free = (1 + torch.randperm(sum(blocks) + 2, generator=shuffle)).tolist()
    tables = torch.zeros(2, num_seqs, max(blocks) + 1, dtype=torch.int32)
    shape = (2, sum(blocks) + 3, block_size, num_kv_heads, head_dim)
    caches = torch.full(shape, float("nan"), dtype=FP8 if fp8 else dtype)
    new, slots, positions = [], [], []
    for i, (query_len, seq_len) in enumerate(lengths):
        generator = torch.Generator().manual_seed(i)
        numbers = torch.randn(seq_len, heads + 2 * num_kv_heads, head_dim, generator=generator).to(
            dtype
        )
        keys_values = numbers[:, heads:].unflatten(1, (2, num_kv_heads)).transpose(0, 1)
        if fp8:
            stored = torch.stack([to_fp8(x, s) for x, s in zip(keys_values, scales, strict=True)])
            for x, codes, s in zip(keys_values, stored, scales, strict=True):
                x.copy_(from_fp8(codes, s, dtype))
        else:
            stored = keys_values
        table = torch.tensor([free.pop() for _ in range(blocks[i])])
        parent, count = (shared or {}).get(i, (0, 0))
        table[:count] = tables[1, parent, :count]
        tables[1, i, : blocks[i]] = table
        position = torch.arange(seq_len)
        slot = table[position // block_size] * block_size + position % block_size
        # Why only its own: what it shares is written by the parent, maybe in this very step.
        written = slice(count * block_size, seq_len - query_len)
        caches.view(2, -1, num_kv_heads, head_dim)[:, slot[written]] = stored[:, written]
        new.append(numbers[seq_len - query_len :])
        slots.append(slot[seq_len - query_len :])
        positions.append(position[seq_len - query_len :])
    starts = torch.tensor([0] + [query_len for query_len, _ in lengths]).cumsum(0)
    slot_mapping = torch.cat(slots)
    batch = Batch(
        token_ids=torch.zeros_like(slot_mapping).to(DEVICE),
        positions=torch.cat(positions).to(DEVICE),
        slot_mapping=torch.stack([torch.zeros_like(slot_mapping), slot_mapping]).to(DEVICE),
        query_start_loc=starts.to(torch.int32).to(DEVICE),
        seq_lens=torch.tensor([s for _, s in lengths], dtype=torch.int32).to(DEVICE),
        block_tables=tables.to(DEVICE),
        logits_indices=(starts[1:] - 1).to(DEVICE),
        num_decodes=sum(q == 1 for q, _ in lengths),
        max_query_len=max(q for q, _ in lengths),
        max_seq_len=max(s for _, s in lengths),
    )
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        softcap=softcap,
        k_scale=scales[0],
        v_scale=scales[1],
        group=1,
        sinks=None if sinks is None else make_sinks(heads, sinks, dtype).to(DEVICE),
    )
    # Why slices of one tensor: a model's q, k and v are cut from one projection and its strides.
    q, k, v = torch.cat(new).to(DEVICE).split([heads, num_kv_heads, num_kv_heads], 1)
    k_cache, v_cache = caches.to(DEVICE)
    q.mul_(spread)
    return Case(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, batch=batch, spec=spec)


def rotation_of(case, dtype):
    """cos and sin as `RotaryEmbedding` gives them: halves of one gathered tensor."""
    half = case.spec.head_dim // 2
    angles = case.batch.positions[:, None].float() * 0.3 ** torch.arange(half, device=DEVICE)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).unsqueeze(1)
    return table.chunk(2, dim=-1)


def heads_of(case, padding=0):
    """The fused projection [T, H + 2 K, D]; with padding a view of something wider."""
    heads = torch.cat([case.q, case.k, case.v], 1)
    wide = torch.full(
        (heads.shape[0], heads.shape[1] * heads.shape[2] + padding), float("nan"), device=DEVICE
    ).to(heads.dtype)
    wide[:, : heads.shape[1] * heads.shape[2]] = heads.flatten(1)
    return wide[:, : heads.shape[1] * heads.shape[2]].unflatten(1, heads.shape[1:])


def norm_of(case, wide):
    shape = (case.spec.num_heads + case.spec.num_kv_heads, case.spec.head_dim)
    weight = 1 + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(3))
    dtype = torch.float32 if wide else case.q.dtype
    return HeadNormWeights(weight=weight.to(DEVICE, dtype), eps=1e-6)
