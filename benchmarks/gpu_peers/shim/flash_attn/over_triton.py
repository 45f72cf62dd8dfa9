"""The shim with nanoengine's Triton kernels."""

from __future__ import annotations

import functools

import torch

from nanoengine.attention.base import AttentionSpec, LayerCache
from nanoengine.attention.batch import Batch
from nanoengine.attention.triton import TritonBackend

BLOCK = 64
"""Block size for dense keys [tokens]."""


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    table: torch.Tensor | None,
) -> torch.Tensor:
    """Over the cache; dense keys and values are first copied into blocks, because no kernel reads
    them directly."""
    lengths = starts_k.diff()
    if table is None:
        k, v, table = to_blocks(k, v, starts_k, longest_k)
    return attend(q, k, v, starts_q, lengths, table, longest_q, longest_k, 0, scale)


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q [S, H, D], one token per sequence."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    longest = table.shape[1] * k_cache.shape[1]
    return attend(q, k_cache, v_cache, starts, lengths, table, 1, longest, len(q), scale)


def to_blocks(
    k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense keys and values [T, K, D] as caches [S * M, BLOCK, K, D] with a table [S, M]."""
    num_seqs, width = len(starts) - 1, -(-longest // BLOCK)
    table = torch.arange(num_seqs * width, dtype=torch.int32, device=k.device).view(num_seqs, width)
    token = torch.arange(len(k), device=k.device)
    seq = torch.searchsorted(starts.long(), token, right=True) - 1
    slots = seq * (width * BLOCK) + token - starts.long()[seq]
    caches = k.new_zeros(2, num_seqs * width * BLOCK, *k.shape[1:])
    caches[0].index_copy_(0, slots, k)
    caches[1].index_copy_(0, slots, v)
    return *caches.unflatten(1, (-1, BLOCK)), table


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    longest_q: int,
    longest_k: int,
    num_decodes: int,
    scale: float,
) -> torch.Tensor:
    """One call of the backend; keys and values are already in the caches."""
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    batch = Batch(
        token_ids=torch.empty(len(q), dtype=torch.int64, device=q.device),
        positions=none,
        slot_mapping=none,
        query_start_loc=starts.int(),
        seq_lens=lengths.int(),
        block_tables=table.int()[None],
        logits_indices=none,
        num_decodes=num_decodes,
        max_query_len=longest_q,
        max_seq_len=longest_k,
    )
    spec = AttentionSpec(
        num_heads=q.shape[1], num_kv_heads=k_cache.shape[2], head_dim=q.shape[2], scale=scale
    )
    kernels = backend(q.device, q.dtype, q.shape[2], k_cache.shape[1])
    batch.attention = kernels.prepare(batch)
    return kernels.attend(q, LayerCache(k_cache, v_cache, spec), batch)


@functools.cache
def backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> TritonBackend:
    """One backend per shape."""
    return TritonBackend(device=device, dtype=dtype, head_dim=head_dim, block_size=block_size)
