"""The shim with FlashAttention-3 from a vLLM wheel."""

from __future__ import annotations

import torch
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func


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
    """Over dense keys, or over the cache if there is a block table."""
    lengths = {"cu_seqlens_k": starts_k} if table is None else {"seqused_k": starts_k.diff()}
    return flash_attn_varlen_func(
        q, k, v, max_seqlen_q=longest_q, cu_seqlens_q=starts_q, max_seqlen_k=longest_k,
        softmax_scale=scale, causal=True, block_table=table, fa_version=3, **lengths,
    )  # fmt: skip


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
    return flash_attn_varlen_func(
        q, k_cache, v_cache, max_seqlen_q=1, cu_seqlens_q=starts,
        max_seqlen_k=table.shape[1] * k_cache.shape[1], seqused_k=lengths, softmax_scale=scale,
        causal=True, block_table=table, fa_version=3,
    )  # fmt: skip
